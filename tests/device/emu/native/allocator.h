// The caching allocator of device memory, with the policy of CUDA's.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace emu {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::DeviceAllocator& allocator();

// Of the device. Raises where more is in use; what is merely cached is given back first.
void set_total_bytes(size_t bytes);
size_t total_bytes();

// Of what is reserved, below the device's total.
void set_limit_bytes(size_t bytes);

// Most bytes reserved since the first. torch reaches neither.
void reset_high_water();
size_t high_water_bytes();

}  // namespace emu
