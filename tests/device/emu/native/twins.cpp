#include "twins.h"

#include "memory.h"

#include <ATen/EmptyTensor.h>

namespace emu {
namespace {

// The same sizes, strides and bits over another storage.
at::Tensor over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), impl->dtype());
  c10::TensorImpl* to = made.unsafeGetTensorImpl();
  to->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
  if (impl->is_wrapped_number()) to->set_wrapped_number(true);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

}  // namespace

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

at::Tensor make_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

at::Tensor Twins::of(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  for (auto& [known, twin] : tensors_)
    if (known == impl) return twin;
  if (impl->numel()) {
    size_t needed_bytes = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), impl->itemsize(),
                                                           impl->storage_offset());
    TORCH_CHECK(needed_bytes <= impl->storage().nbytes(), "emu: illegal memory access: a tensor of sizes ",
                impl->sizes(), " takes ", needed_bytes, " bytes, and its storage has ", impl->storage().nbytes());
  }
  auto key = device_ == c10::DeviceType::Meta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
  return tensors_.emplace_back(impl, over(storage_of(impl->storage()), key, tensor)).second;
}

c10::Storage Twins::storage_of(const c10::Storage& storage) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  for (auto& [known, twin] : storages_)
    if (known == impl) return twin;
  bool is_meta = device_ == c10::DeviceType::Meta;
  void* address = is_meta ? nullptr : alias_of(storage.data());
  c10::Storage twin(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(address, device_),
                    c10::GetAllocator(device_), /*resizable=*/is_meta);
  return storages_.emplace_back(impl, twin).second;
}

at::Tensor same_bytes(const at::Tensor& host) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), host.storage().nbytes(),
                       c10::DataPtr(const_cast<void*>(host.storage().data()), c10::DeviceType::CPU), nullptr, false);
  return over(std::move(storage), c10::DispatchKey::CPU, host);
}

}  // namespace emu
