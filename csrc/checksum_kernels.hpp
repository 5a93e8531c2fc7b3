// What the kernels of CRC-32C share.
//
// Bytes are a polynomial over GF(2), the first bit of the first byte its highest coefficient. Their
// checksum is, up to two inversions, that polynomial times x^32 modulo P. The kernels compute without
// the inversions: `state` is ~crc. Bits are reflected, as in the instructions of x86 and ARM: in a
// register of n bits, bit i is the coefficient of x^(n-1-i).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "checksum.hpp"

namespace penstock {

inline constexpr std::uint32_t kPolynomial = 0x82F63B78;  // P less x^32, reflected

// The product modulo P.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (auto bit = std::uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ (b & 1 ? kPolynomial : 0);  // times x
  }
  return product;
}

// x to the power of `exponent`, modulo P.
constexpr std::uint32_t power_of_x(std::uint64_t exponent) {
  auto power = std::uint32_t{1} << 31, square = std::uint32_t{1} << 30;
  for (; exponent != 0; exponent >>= 1, square = multiply(square, square)) {
    if (exponent & 1) power = multiply(power, square);
  }
  return power;
}

// Multiplies by a constant, one table look-up for each byte: what as many zero bytes do to a state.
class Advance {
 public:
  constexpr explicit Advance(std::uint64_t size_bytes) {
    const auto factor = power_of_x(8 * size_bytes);
    for (unsigned byte = 0; byte < 4; ++byte) {
      for (std::uint32_t bit = 1, i = 0; i < 8; bit <<= 1, ++i) {
        const auto product = multiply(bit << 8 * byte, factor);
        for (std::uint32_t value = 0; value < bit; ++value)
          table_[byte][bit + value] = table_[byte][value] ^ product;
      }
    }
  }
  constexpr std::uint32_t operator()(std::uint32_t state) const {
    return table_[0][state & 255] ^ table_[1][state >> 8 & 255] ^ table_[2][state >> 16 & 255] ^
           table_[3][state >> 24];
  }

 private:
  std::array<std::array<std::uint32_t, 256>, 4> table_{};
};

inline std::uint64_t load_word(const char* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

// Copies from this size on bypass the cache where a kernel can: so much is not read again soon, and
// memory is not read before it is overwritten.
inline constexpr std::size_t kStreamedCopyBytes = std::size_t{256} << 10;

// Copies what a kernel has just read, while it is in the nearest cache.
template <std::uint32_t (*kChecksum)(std::uint32_t, const void*, std::size_t)>
std::uint32_t copy_in_blocks(void* destination, const void* source, std::size_t size_bytes,
                             std::uint32_t crc) {
  constexpr std::size_t kBlockBytes = 6144;
  auto* to = static_cast<char*>(destination);
  auto* from = static_cast<const char*>(source);
  while (size_bytes > 0) {
    const auto block = std::min(size_bytes, kBlockBytes);
    crc = kChecksum(crc, from, block);
    std::memcpy(to, from, block);
    to += block, from += block, size_bytes -= block;
  }
  return crc;
}

// Nothing where the processor, or the compiler, lacks the instructions.
std::optional<Crc32cKernel> avx512_kernel();
std::optional<Crc32cKernel> sse42_kernel();
std::optional<Crc32cKernel> arm_kernel();
Crc32cKernel portable_kernel();

}  // namespace penstock
