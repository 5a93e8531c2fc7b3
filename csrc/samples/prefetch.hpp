#pragma once

namespace penstock::samples {

// Asks for a cache line without waiting for it. Any address may be given.
inline void prefetch(const void* address) {
#ifdef __GNUC__  // clang defines it too
  __builtin_prefetch(address);
  asm volatile("" : : "r"(address));  // GCC leaves out calls of functions that do nothing else
#else
  (void)address;
#endif
}

}  // namespace penstock::samples
