// The parts of a sample store's files that C++ reads and writes: see docs/formats.md.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace penstock::samples {

inline constexpr std::uint64_t kLargeLength = (1U << 23) - 1;  // the true length is in large.bin
inline constexpr std::uint64_t kDataFileBytes = std::uint64_t{1} << 40;
inline constexpr unsigned kKeyBits = 48, kAnchorNames = 16, kIndexBits = 40;
inline constexpr std::uint64_t kBlockBytes = 4096, kLargestChunkBytes = std::uint64_t{1} << 30;

// DLFS, figure 3(b), little-endian: data file (DLFS: node) and key; offset, length and presence.
struct Entry {
  std::uint64_t place = 0, extent = 0;

  static Entry of(std::uint64_t data_file, std::uint64_t key, std::uint64_t offset, std::uint64_t length) {
    return {data_file << kKeyBits | key, offset << 24 | std::min(length, kLargeLength) << 1};
  }
  std::uint64_t data_file() const { return place >> kKeyBits; }
  std::uint64_t key() const { return place & ((std::uint64_t{1} << kKeyBits) - 1); }
  std::uint64_t offset() const { return extent >> 24; }
  std::uint64_t length() const { return extent >> 1 & kLargeLength; }
};
static_assert(sizeof(Entry) == 16);

struct ChunkRecord {
  std::uint64_t first = 0;  // sample that begins in the chunk, or after it where none does
  std::uint32_t crc32c = 0;  // of the chunk's body
  std::uint32_t reserved = 0;
};
static_assert(sizeof(ChunkRecord) == 16);

// Of large.bin.
struct Large {
  std::uint64_t index, size_bytes;
};
static_assert(sizeof(Large) == 16);

// A sample that crosses its chunk's end and is at least so long is a long edge.
inline std::uint64_t long_edge_bytes(std::uint64_t chunk_bytes) { return chunk_bytes / 4; }

// Memory for the body of any chunk, read in whole blocks.
inline std::uint64_t buffer_bytes(std::uint64_t chunk_bytes) {
  return chunk_bytes + long_edge_bytes(chunk_bytes) + 2 * kBlockBytes;
}

// XXH64, from its public specification (xxHash fast digest algorithm, version 0.1.1).
std::uint64_t xxh64(std::string_view bytes, std::uint64_t seed = 0);

// What directory entries hold of a name.
inline std::uint64_t key_of(std::string_view name) {
  return xxh64(name) & ((std::uint64_t{1} << kKeyBits) - 1);
}

}  // namespace penstock::samples
