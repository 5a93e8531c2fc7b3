// XXH64, from its public specification (xxHash fast digest algorithm, version 0.1.1), and the key of a name.
#pragma once

#include <cstdint>
#include <string_view>

#include "samples/layout.hpp"

namespace penstock::samples {

std::uint64_t xxh64(std::string_view bytes, std::uint64_t seed = 0);

// What directory entries hold of a name.
inline std::uint64_t key_of(std::string_view name) {
  return xxh64(name) & ((std::uint64_t{1} << kKeyBits) - 1);
}

}  // namespace penstock::samples
