// CRC-32C (Castagnoli), as in iSCSI and ext4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock {

// The checksum of the bytes that `crc` is the checksum of (0: none), followed by these.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size_bytes);

// The same, and the bytes are copied on the way. The memory must not overlap.
std::uint32_t copy_crc32c(void* destination, const void* source, std::size_t size_bytes, std::uint32_t crc);

// The checksum of bytes that checksum to `first`, followed by `second_bytes` that checksum to `second`.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes);

// One way to compute it, and to compute it while copying.
struct Crc32cKernel {
  const char* name;
  std::uint32_t (*checksum)(std::uint32_t crc, const void* data, std::size_t size_bytes);
  std::uint32_t (*copy)(void* destination, const void* source, std::size_t size_bytes, std::uint32_t crc);
};

// Those this machine can run, the fastest first. It is the one that the functions above use.
const std::vector<Crc32cKernel>& crc32c_kernels();

}  // namespace penstock
