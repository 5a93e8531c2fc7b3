// Any operator, by the CPU's kernel for it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace emu {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace emu
