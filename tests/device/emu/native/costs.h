// What operators ask of a machine, by the shapes of their tensors.
#pragma once

#include "schema.h"
#include "virtual.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

namespace emu {

double bytes_of(const at::Tensor& tensor);

// Each tensor is read and written once. Products of matrices and convolutions have operations, others none. Nothing
// where no machine is configured.
Cost cost_of(const Operator& what, const torch::jit::Stack& arguments, const torch::jit::Stack& made);

}  // namespace emu
