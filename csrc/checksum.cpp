#include "checksum.hpp"

#include "checksum_kernels.hpp"

namespace penstock {

namespace {

// Slicing by 8: slice n has what a byte of the state is after n more bytes than itself.
constexpr auto kSlices = [] {
  std::array<std::array<std::uint32_t, 256>, 8> table{};
  for (std::size_t n = 0; n < 8; ++n) {
    const auto factor = power_of_x(8 * (n + 1));
    for (std::uint32_t byte = 0; byte < 256; ++byte) table[n][byte] = multiply(byte, factor);
  }
  return table;
}();

std::uint32_t portable_checksum(std::uint32_t crc, const void* data, std::size_t size_bytes) {
  auto state = ~crc;
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (; size_bytes >= 8; size_bytes -= 8, bytes += 8) {
    const auto low = state ^ (std::uint32_t{bytes[0]} | std::uint32_t{bytes[1]} << 8 |
                              std::uint32_t{bytes[2]} << 16 | std::uint32_t{bytes[3]} << 24);
    state = kSlices[7][low & 255] ^ kSlices[6][low >> 8 & 255] ^ kSlices[5][low >> 16 & 255] ^
            kSlices[4][low >> 24] ^ kSlices[3][bytes[4]] ^ kSlices[2][bytes[5]] ^ kSlices[1][bytes[6]] ^
            kSlices[0][bytes[7]];
  }
  for (; size_bytes > 0; --size_bytes) state = state >> 8 ^ kSlices[0][(state ^ *bytes++) & 255];
  return ~state;
}

}  // namespace

Crc32cKernel portable_kernel() {
  return {"slicing by 8", portable_checksum, copy_in_blocks<portable_checksum>};
}

const std::vector<Crc32cKernel>& crc32c_kernels() {
  static const auto kernels = [] {
    std::vector<Crc32cKernel> usable;
    for (const auto& kernel : {avx512_kernel(), sse42_kernel(), arm_kernel()})
      if (kernel) usable.push_back(*kernel);
    usable.push_back(portable_kernel());
    return usable;
  }();
  return kernels;
}

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size_bytes) {
  static const auto checksum = crc32c_kernels().front().checksum;
  return checksum(crc, data, size_bytes);
}

std::uint32_t copy_crc32c(void* destination, const void* source, std::size_t size_bytes, std::uint32_t crc) {
  if (size_bytes == 0) return crc;  // memcpy takes no null, not even for nothing
  static const auto copy = crc32c_kernels().front().copy;
  return copy(destination, source, size_bytes, crc);
}

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes) {
  constexpr std::uint64_t kOrder = 0x7FFFFFFF;  // of x modulo P: no exponent overflows
  static_assert(power_of_x(kOrder) == power_of_x(0));
  return multiply(first, power_of_x(second_bytes % kOrder * 8)) ^ second;
}

}  // namespace penstock
