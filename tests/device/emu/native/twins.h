// Tensors of the CPU over the memory of the device's: what kernels of the CPU get in the executor.
#pragma once

#include "allocator.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace emu {

bool is_ours(const at::Tensor& tensor);
at::Tensor make_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// Of the tensors of one call. Those with one storage, or that are one, have twins with one storage, or that are
// one. A twin holds an address and no memory: who launches work on it must have it live until then, in the
// stream's order.
class Twins {
 public:
  // On meta they hold no address.
  explicit Twins(c10::DeviceType device = c10::DeviceType::CPU) : device_(device) {}

  // Raises where the tensor lies outside its storage: on a GPU, an illegal memory access.
  at::Tensor of(const at::Tensor& tensor);

 private:
  c10::Storage storage_of(const c10::Storage& storage);

  c10::DeviceType device_;
  c10::SmallVector<std::pair<c10::TensorImpl*, at::Tensor>, 6> tensors_;
  c10::SmallVector<std::pair<c10::StorageImpl*, c10::Storage>, 6> storages_;
};

inline at::Tensor twin_of(const at::Tensor& tensor) { return Twins().of(tensor); }

// A tensor of the CPU with the same bytes and nothing else in common: no object of Python's.
at::Tensor same_bytes(const at::Tensor& host);

}  // namespace emu
