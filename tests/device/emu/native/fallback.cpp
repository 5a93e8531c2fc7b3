// What results look like is found at launch: the CPU's kernel is tried on zeros once, and remembered by the
// metadata of the arguments. (Its meta kernel says something else at times: the types of layer_norm's statistics,
// strides.) Then memory for the results is allocated, and the kernel is queued on twins of all tensors. Where shapes
// depend on data, the host waits, as it does on a GPU.
#include "fallback.h"

#include "costs.h"
#include "generator.h"
#include "schema.h"
#include "streams.h"
#include "twins.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <c10/core/DefaultDtype.h>

#include <cstring>
#include <exception>
#include <mutex>
#include <unordered_map>

namespace emu {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

const c10::Device kDevice(kType, 0);

// -- arguments ---------------------------------------------------------------------------------------

// The value with each tensor, and our device, replaced.
template <typename Replace>
IValue replaced(const IValue& value, c10::DeviceType device, Replace replace) {
  auto tensor = [&](const at::Tensor& t) { return t.defined() ? replace(t) : t; };
  if (value.isTensor()) return tensor(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& t : value.toTensorVector()) made.push_back(tensor(t));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& t : value.toOptionalTensorVector())
      made.push_back(t.has_value() ? std::optional<at::Tensor>(tensor(*t)) : std::nullopt);
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(device);
  return value;
}

// A tensor of the host's is passed by value where it has no dimensions. Others are an error, as on a GPU.
at::Tensor by_value(const at::Tensor& tensor, const Operator& what) {
  TORCH_CHECK(tensor.is_cpu() && (!tensor.dim() || what.takes_indices), what.name,
              ": expected all tensors on one device, found one on ", tensor.device(), " and others on emu:0");
  at::Tensor made = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

IValue for_cpu(const IValue& value, Twins& twins, const Operator& what) {
  return replaced(value, c10::DeviceType::CPU,
                  [&](const at::Tensor& t) { return is_ours(t) ? twins.of(t) : by_value(t, what); });
}

// A seed for the kernel, drawn now.
void pass_generator(const Operator& what, Stack& arguments) {
  if (!what.is_random) return;
  TORCH_CHECK(what.generator >= 0, what.name, " draws random numbers and takes no generator: not on emu");
  IValue& given = arguments[what.generator];
  bool is_given = given.isGenerator() && given.toGenerator().device().type() == kType;
  given = at::detail::createCPUGenerator(draw_seed(is_given ? given.toGenerator() : default_generator()));
}

bool has_mask(const Stack& arguments) {
  auto is_mask = [](const std::optional<at::Tensor>& t) {
    return t.has_value() && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte);
  };
  for (const auto& value : arguments) {
    if (!value.isOptionalTensorList()) continue;
    for (const auto& t : value.toOptionalTensorVector())
      if (is_mask(t)) return true;
  }
  return false;
}

// -- kernels of the CPU ------------------------------------------------------------------------------

// With as many threads as the one that launches would use: some sums depend on that.
void call_cpu(const c10::OperatorHandle& op, Stack* stack, int threads) {
  static thread_local int latest = 0;
  if (threads != latest) at::set_num_threads(latest = threads);
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
}

template <typename See>
void each_tensor(const IValue& value, See see) {
  if (value.isTensor()) {
    see(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) see(t);
  }
}

// Twins that the kernel writes keep their shapes: resizing one would leave the tensor of the device as it was.
class Written {
 public:
  Written(const Operator& what, const Stack& twins) {
    for (size_t i = 0; i < twins.size(); i++)
      if (what.is_written[i])
        each_tensor(twins[i], [&](const at::Tensor& t) {
          if (t.defined()) before_.push_back({t, t.sizes().vec(), t.strides().vec(), t.storage().data()});
        });
  }

  void check(const Operator& what) const {
    for (const auto& [twin, sizes, strides, data] : before_)
      TORCH_CHECK(twin.sizes() == sizes && twin.strides() == strides && twin.storage().data() == data, what.name,
                  " resizes what it writes: not on emu");
  }

 private:
  struct Before {
    at::Tensor twin;
    std::vector<int64_t> sizes, strides;
    const void* data;
  };
  std::vector<Before> before_;
};

// -- what results look like --------------------------------------------------------------------------

struct Shape {
  at::DimVector sizes, strides;
  at::ScalarType dtype;
};
struct Result {
  bool is_list = false;
  std::vector<std::optional<Shape>> shapes;  // one, if it is no list
};
using Results = std::vector<Result>;
using ResultsPtr = std::shared_ptr<const Results>;

// All that results can depend on, as text.
class Key {
 public:
  explicit Key(const c10::OperatorHandle& op) {
    add(reinterpret_cast<int64_t>(&op.schema()));
    add(static_cast<int64_t>(c10::get_default_dtype_as_scalartype()));
  }

  bool add_all(const Stack& arguments) {
    for (const auto& value : arguments)
      if (!add_value(value)) return false;
    return true;
  }

  std::string text;

 private:
  template <typename Number>
  void add(Number value) {
    text.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  template <typename List>
  void add_list(const List& list) {
    add(list.size());
    for (auto value : list) add(value);
  }

  void add_tensor(const at::Tensor& t) {
    if (!t.defined()) return add(-1);
    const auto* impl = t.unsafeGetTensorImpl();
    add((is_ours(t) ? 1 : 2) | int(t.scalar_type()) << 4 | int(impl->is_wrapped_number()) << 12 | int(t.dim()) << 16);
    for (int64_t size : t.sizes()) add(size);
    for (int64_t stride : t.strides()) add(stride);
  }

  bool add_value(const IValue& value) {
    add(static_cast<char>(value.tagKind()[0]));
    if (value.isTensor()) {
      add_tensor(value.toTensor());
    } else if (value.isInt()) {
      add(value.toInt());
    } else if (value.isBool()) {
      add(value.toBool());
    } else if (value.isDouble()) {
      add(value.toDouble());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      add(list.size());
      for (const auto& t : list) add_tensor(t);
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorVector();
      add(list.size());
      for (const auto& t : list) add_tensor(t.value_or(at::Tensor()));
    } else if (value.isIntList()) {
      add_list(value.toIntVector());
    } else if (value.isBoolList()) {
      auto list = value.toBoolList();
      add(list.size());
      for (bool one : list) add(one);
    } else if (value.isDoubleList()) {
      add_list(value.toDoubleVector());
    } else if (value.isString()) {
      add(value.toStringRef().size());
      text += value.toStringRef();
    } else {
      return value.isNone() || value.isDevice() || value.isGenerator();
    }
    return true;
  }
};

Shape shape_of(const at::Tensor& t) {
  return {at::DimVector(t.sizes()), at::DimVector(t.strides()), t.scalar_type()};
}

// nullptr where zeros are no input for the kernel.
ResultsPtr try_on(c10::DispatchKey key, const c10::OperatorHandle& op, const Operator& what, const Stack& arguments) {
  const bool is_meta = key == DispatchKey::Meta;
  const auto device = is_meta ? c10::DeviceType::Meta : c10::DeviceType::CPU;
  std::unordered_map<c10::TensorImpl*, at::Tensor> zeros;
  Twins twins(device);
  auto zeros_like = [&](const at::Tensor& t) {
    if (!is_ours(t)) return by_value(t, what);
    if (is_meta) return twins.of(t);
    at::Tensor& made = zeros[t.unsafeGetTensorImpl()];
    if (!made.defined()) {
      made = at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type());
      memset(made.storage().mutable_data(), 0, made.storage().nbytes());
      if (t.is_conj()) made._set_conj(true);
      if (t.is_neg()) made._set_neg(true);
      if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return made;
  };
  Stack cpu;
  for (const auto& value : arguments) cpu.push_back(replaced(value, device, zeros_like));
  if (what.is_random && what.generator >= 0)
    cpu[what.generator] = is_meta ? IValue() : IValue(at::detail::createCPUGenerator(0));
  try {
    op.redispatchBoxed(DispatchKeySet(key), &cpu);
  } catch (const std::exception&) {
    return nullptr;
  }
  auto results = std::make_shared<Results>();
  for (size_t i = 0; i < what.returned.size(); i++) {
    Result result;
    if (what.returned[i] < 0) {
      result.is_list = !cpu[i].isTensor();
      each_tensor(cpu[i], [&](const at::Tensor& t) {
        result.shapes.push_back(t.defined() ? std::optional<Shape>(shape_of(t)) : std::nullopt);
      });
    }
    results->push_back(std::move(result));
  }
  return results;
}

// The meta kernel of an operator that only writes: it raises what is wrong with the shapes, and resizes. Whether
// something was resized.
bool resize_written(const c10::OperatorHandle& op, const Operator& what, const Stack& arguments) {
  Twins twins(c10::DeviceType::Meta);
  Stack meta;
  for (const auto& value : arguments)
    meta.push_back(replaced(value, c10::DeviceType::Meta, [&](const at::Tensor& t) {
      return is_ours(t) || t.dim() ? twins.of(t) : by_value(t, what);
    }));
  if (what.generator >= 0) meta[what.generator] = IValue();
  op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &meta);
  bool resized = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!what.is_written[i] || !arguments[i].isTensor() || !is_ours(arguments[i].toTensor())) continue;
    at::Tensor ours = arguments[i].toTensor();
    at::Tensor twin = twins.of(ours);
    if (twin.sizes() == ours.sizes() && twin.strides() == ours.strides()) continue;
    at::native::resize_output(ours, twin.sizes());
    ours.unsafeGetTensorImpl()->set_sizes_and_strides(twin.sizes(), twin.strides());
    resized = true;
  }
  return resized;
}

// nullptr: it takes a run to know.
ResultsPtr results_of(const c10::OperatorHandle& op, const Operator& what, const Stack& arguments) {
  constexpr size_t kMost = 100'000;  // numbers that change with every step make keys, too
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, ResultsPtr>;
  Key key(op);
  bool has_key = key.add_all(arguments);
  if (has_key) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = known->find(key.text);
    if (found != known->end()) return found->second;
  }
  ResultsPtr results;
  if (!what.makes_nothing) {
    // Where nothing is computed tensors may be larger than the host's memory.
    if (!computes() && what.has_meta) results = try_on(DispatchKey::Meta, op, what, arguments);
    if (!results) results = try_on(DispatchKey::CPU, op, what, arguments);
    if (!results) return nullptr;
  } else {
    results = std::make_shared<Results>(what.returned.size());
    if (what.has_meta && resize_written(op, what, arguments)) return results;  // the key was of other sizes
  }
  if (has_key) {
    std::lock_guard<std::mutex> lock(mutex);
    if (known->size() >= kMost) known->clear();
    known->emplace(std::move(key.text), results);
  }
  return results;
}

// -- running -----------------------------------------------------------------------------------------

void push_results(const Operator& what, const Stack& arguments, const Stack& made, Stack* stack) {
  for (size_t i = 0; i < what.returned.size(); i++)
    stack->push_back(what.returned[i] >= 0 ? arguments[what.returned[i]] : made[i]);
}

void store(const at::Tensor& target, const at::Tensor& made, const Operator& what) {
  TORCH_CHECK(made.sizes() == target.sizes() && made.scalar_type() == target.scalar_type(), what.name, " made ",
              made.scalar_type(), made.sizes(), ", and ", target.scalar_type(), target.sizes(), " was expected");
  target.copy_(made);
}

// A view touches no data: the CPU's kernel makes it of twins, here and now.
void run_view(const c10::OperatorHandle& op, const Operator& what, const Stack& arguments, Stack* stack) {
  Twins twins;
  Stack cpu;
  for (const auto& value : arguments) cpu.push_back(for_cpu(value, twins, what));
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &cpu);
  auto view = [&](const at::Tensor& made) {
    for (const auto& value : arguments) {
      if (!value.isTensor() || !is_ours(value.toTensor())) continue;
      const at::Tensor& base = value.toTensor();
      if (twins.of(base).storage().unsafeGetStorageImpl() != made.storage().unsafeGetStorageImpl()) continue;
      at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), made.dtype());
      result.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
      result._set_conj(made.is_conj());
      result._set_neg(made.is_neg());
      return result;
    }
    TORCH_CHECK(false, what.name, " gives no view of its arguments: not on emu");
  };
  for (const IValue& result : cpu) {
    if (result.isTensor()) {
      stack->push_back(view(result.toTensor()));
    } else {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : result.toTensorVector()) list.push_back(view(t));
      stack->push_back(list);
    }
  }
}

// In the stream's order, and the host waits.
void run_waiting(const c10::OperatorHandle& op, const Operator& what, const Stack& arguments, Stack* stack) {
  int stream = current_stream();
  Twins twins;
  Stack cpu;
  std::vector<std::pair<at::Tensor, at::Tensor>> outs;  // ours, and what the kernel resizes as it likes
  for (size_t i = 0; i < arguments.size(); i++) {
    if (what.is_out[i] && arguments[i].isTensor()) {
      const at::Tensor& out = arguments[i].toTensor();
      outs.emplace_back(out, at::detail::empty_cpu({0}, out.scalar_type()));
      cpu.push_back(outs.back().second);
    } else {
      cpu.push_back(for_cpu(arguments[i], twins, what));
    }
  }
  pass_generator(what, cpu);
  Written written(what, outs.empty() ? cpu : Stack(cpu.size()));
  std::exception_ptr error;
  delay_host();
  launch(stream, what.name.c_str(), cost_of(what, arguments, {}), [&, threads = at::get_num_threads()] {
    try {
      call_cpu(op, &cpu, threads);
      written.check(what);
    } catch (...) {
      error = std::current_exception();
    }
  }, true);
  synchronize_stream(stream);
  if (error) std::rethrow_exception(error);
  auto fill = [&](const at::Tensor& target, const at::Tensor& made) {
    launch(stream, what.name.c_str(), {}, [to = twin_of(target), made] { to.copy_(made); }, true);
    return target;
  };
  auto adopt = [&](const at::Tensor& made) {
    return made.defined() ? fill(make_tensor(made.sizes(), made.strides(), made.scalar_type()), made) : made;
  };
  for (auto& [out, made] : outs) {
    at::native::resize_output(out, made.sizes());
    fill(out, made);
  }
  Stack made;
  for (size_t i = 0; i < what.returned.size(); i++) {
    if (what.returned[i] >= 0) {
      made.emplace_back();
    } else if (cpu[i].isTensor()) {
      made.push_back(adopt(cpu[i].toTensor()));
    } else if (cpu[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : cpu[i].toTensorVector()) list.push_back(adopt(t));
      made.push_back(list);
    } else {
      made.push_back(cpu[i]);
    }
  }
  push_results(what, arguments, made, stack);
}

void run_later(const c10::OperatorHandle& op, const Operator& what, const Results& results, const Stack& arguments,
               Stack* stack) {
  Twins twins;
  Stack made;
  std::vector<at::Tensor> targets;
  auto allocate = [&](const std::optional<Shape>& shape) -> at::Tensor {
    if (!shape.has_value()) return {};
    at::Tensor target = make_tensor(shape->sizes, shape->strides, shape->dtype);
    targets.push_back(twins.of(target));
    return target;
  };
  for (const Result& result : results) {
    if (result.is_list) {
      c10::List<at::Tensor> list;
      for (const auto& shape : result.shapes) list.push_back(allocate(shape));
      made.push_back(list);
    } else {
      made.push_back(result.shapes.empty() ? IValue() : IValue(allocate(result.shapes[0])));
    }
  }
  Stack cpu;
  cpu.reserve(arguments.size());
  for (const auto& value : arguments) cpu.push_back(for_cpu(value, twins, what));
  pass_generator(what, cpu);
  Written written(what, cpu);
  delay_host();
  launch(current_stream(), what.name.c_str(), cost_of(what, arguments, made),
         [op, &what, written = std::move(written), threads = at::get_num_threads(), cpu = std::move(cpu),
          targets = std::move(targets)]() mutable {
           call_cpu(op, &cpu, threads);
           written.check(what);
           auto target = targets.begin();
           for (size_t i = 0; i < what.returned.size(); i++)
             if (what.returned[i] < 0)
               each_tensor(cpu[i], [&](const at::Tensor& t) {
                 if (t.defined()) store(*target++, t, what);
               });
         });
  push_results(what, arguments, made, stack);
}

}  // namespace

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const Operator& what = describe(op);
  const auto count = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  Stack arguments(std::make_move_iterator(stack->end() - count), std::make_move_iterator(stack->end()));
  stack->erase(stack->end() - count, stack->end());
  at::AutoDispatchBelowADInplaceOrView guard;
  if (what.is_view) return run_view(op, what, arguments, stack);
  ResultsPtr results;
  if (!what.needs_values && !(what.takes_indices && has_mask(arguments))) results = results_of(op, what, arguments);
  if (!results) return run_waiting(op, what, arguments, stack);
  run_later(op, what, *results, arguments, stack);
}

}  // namespace emu
