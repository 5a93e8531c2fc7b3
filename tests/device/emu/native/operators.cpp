// Operators of the device: a few by hand, all others by the fallback.
#include "allocator.h"
#include "costs.h"
#include "fallback.h"
#include "memory.h"
#include "streams.h"
#include "twins.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace emu {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// -- memory and views --------------------------------------------------------------------------------

at::Tensor empty_memory_format(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<at::Device>, std::optional<bool>,
                               std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &allocator(), DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return make_tensor(sizes, strides, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

void ensure_bytes(const at::Tensor& self) {
  if (!self.numel()) return;
  size_t needed_bytes =
      at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  if (needed_bytes > self.storage().nbytes())
    at::native::resize_bytes_nocuda(self.storage(), c10::SymInt(static_cast<int64_t>(needed_bytes)));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  TORCH_CHECK(source.device().type() == kType, "set_: the storage is on ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (strides.data() && strides.size() == sizes.size())
    impl->set_sizes_and_strides(sizes, strides);
  else
    impl->set_sizes_contiguous(sizes);
  ensure_bytes(self);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  int64_t size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {size}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, &allocator(), true);
  return set_storage(self, none, 0, {0}, {});
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) impl->set_sizes_contiguous(sizes);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  ensure_bytes(self);
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

// -- copies ------------------------------------------------------------------------------------------

std::shared_ptr<void> hold(const at::Tensor& host) {
  return hold_page_locked(host.storage().data(), host.storage().nbytes());
}

// As cudaMemcpyAsync: page-locked host memory is read and written when the copy is carried out. Of other memory the
// source is read now, and for the target the host waits.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (!target.numel()) return target;
  at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor source = self.sizes() == target.sizes() ? self : self.expand(target.sizes());
  int stream = current_stream();
  if (is_ours(source) && is_ours(target)) {
    Twins twins;
    launch(stream, "copy", {Cost::Kernel, bytes_of(source) + bytes_of(target)}, [from = twins.of(source), to = twins.of(target)] { to.copy_(from); });
    return target;
  }
  TORCH_CHECK(source.is_cpu() || target.is_cpu(), "emu copies to and from the CPU, not from ", source.device(), " to ",
              target.device());
  if (is_ours(target)) {
    auto held = non_blocking ? hold(source) : nullptr;
    at::Tensor host = held ? same_bytes(source) : same_bytes(source).clone();
    launch(stream, "copy to the device", {Cost::ToDevice, bytes_of(target)}, [host, held, to = twin_of(target)] { to.copy_(host); });
    if (!non_blocking) synchronize_stream(stream);
  } else {
    auto held = non_blocking ? hold(target) : nullptr;
    launch(stream, "copy to the host", {Cost::ToHost, bytes_of(target)},
           [from = twin_of(source), held, host = same_bytes(target)] { host.copy_(from); });
    if (!held) synchronize_stream(stream);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  at::native::resize_output(target, self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor twin = twin_of(self);
  at::Tensor value = at::detail::empty_cpu({}, self.scalar_type());
  value.zero_();  // where nothing is computed
  int stream = current_stream();
  launch(stream, "item", {Cost::ToHost, bytes_of(self)}, [twin, value] { value.copy_(twin.reshape(at::IntArrayRef())); });
  synchronize_stream(stream);
  return value.item();
}

// -- what has no kernel on the CPU, or one that is not for others --------------------------------------

// The CPU's draws from the default generator of the CPU.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor mask = at::empty_like(input, at::TensorOptions().dtype(at::kBool));
  if (train.has_value() && !*train) {
    mask.fill_(true);
    return {input.clone(), mask};
  }
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

// torch takes fused cells on every accelerator.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input, const at::Tensor& hidden,
                                                         const at::Tensor& cx,
                                                         const std::optional<at::Tensor>& input_bias,
                                                         const std::optional<at::Tensor>& hidden_bias) {
  at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor gates = input + hidden;
  if (input_bias.has_value() && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  auto part = gates.chunk(4, 1);
  at::Tensor i = part[0].sigmoid(), f = part[1].sigmoid(), g = part[2].tanh(), o = part[3].sigmoid();
  at::Tensor cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const std::optional<at::Tensor>& grad_hy,
                                                                  const std::optional<at::Tensor>& grad_cy,
                                                                  const at::Tensor& cx, const at::Tensor& cy,
                                                                  const at::Tensor& workspace, bool has_bias) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto part = workspace.chunk(4, 1);
  const at::Tensor &i = part[0], &f = part[1], &g = part[2], &o = part[3];
  at::Tensor t = cy.tanh(), to_c = at::zeros_like(cy), to_o = at::zeros_like(o);
  if (grad_hy.has_value() && grad_hy->defined()) {
    to_o = *grad_hy * t * o * (1 - o);
    to_c = *grad_hy * o * (1 - t * t);
  }
  if (grad_cy.has_value() && grad_cy->defined()) to_c = to_c + *grad_cy;
  at::Tensor gates = at::cat({to_c * g * i * (1 - i), to_c * cx * f * (1 - f), to_c * i * (1 - g * g), to_o}, 1);
  return {gates, to_c * f, has_bias ? gates.sum(0) : at::Tensor()};
}

// GPUs count integers, too.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", "");
  at::AutoDispatchBelowADInplaceOrView guard;
  torch::jit::Stack stack{at::isFloatingType(self.scalar_type()) ? self : self.to(at::kFloat), bins, low, high};
  fallback(op, &stack);
  return stack.back().toTensor().to(self.scalar_type());
}

// -- the table ---------------------------------------------------------------------------------------

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("histc", &histc);
  m.impl("native_dropout", &native_dropout);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  // torch has an error for these on backends that do not have them.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution.out", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Copies resolve these bits themselves. torch's fallbacks for them would copy, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// Operators on lists: the composite kernel, which is the CPU's, calls an operator for each tensor.
void on_lists(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  OnLists scope;
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
}

// Operators that have a composite kernel beside the CPU's own would take that one: other sums, other bits. Those on
// lists have the composite kernel alone.
const bool registered = [] {
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0)) continue;
    auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(DispatchKey::PrivateUse1))
      continue;
    c10::KernelFunction kernel;
    if (op->hasKernelForDispatchKey(DispatchKey::CPU))
      kernel = c10::KernelFunction::makeFromBoxedFunction<&fallback>();
    else if (name.name.rfind("aten::_foreach_", 0) == 0)
      kernel = c10::KernelFunction::makeFromBoxedFunction<&on_lists>();
    else
      continue;
    registrations->push_back(
        dispatcher.registerImpl(name, DispatchKey::PrivateUse1, kernel, std::nullopt, nullptr, "emu"));
  }
  return true;
}();

}  // namespace
}  // namespace emu
