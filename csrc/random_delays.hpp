// Delays at every lock, wait and I/O, drawn from a seed: other schedules of the same program.
#pragma once

#include <cstdint>

namespace penstock {

// From now on a `share` of all steps takes up to `longest_us` more, or yields. Seed 0: none does. Threads number
// themselves as they come, so that a seed gives much the same delays again.
void delay_at_random(std::uint64_t seed, double share, std::uint32_t longest_us);

std::uint64_t delays_so_far();

}  // namespace penstock
