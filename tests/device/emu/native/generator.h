// Random numbers: kernels draw from generators of their own, whose seeds are drawn when they are launched.
#pragma once

#include <ATen/core/Generator.h>

namespace emu {

at::Generator& default_generator();  // Python sets one that it knows, too
at::Generator new_generator();

// The next seed of a generator of the device: what a kernel draws does not depend on when it runs.
uint64_t draw_seed(const at::Generator& generator);

}  // namespace emu
