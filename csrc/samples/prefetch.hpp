#pragma once

namespace penstock::samples {

// Asks for a cache line without waiting for it. Any address may be given.
inline void prefetch(const void* address) {
#ifdef __GNUC__  // clang defines it too
  __builtin_prefetch(address);
#else
  (void)address;
#endif
}

}  // namespace penstock::samples
