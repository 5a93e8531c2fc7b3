// The address range an arena lives in, in chunks of one huge page each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock {

inline constexpr std::size_t kPageBytes = 4096;
inline constexpr std::size_t kChunkBytes = std::size_t{2} << 20;

// Owns reserved addresses and knows, chunk by chunk, what of them is committed (writable, counted
// by RLIMIT_DATA), touched (in memory) and live (overlapped by a block). Offsets and sizes are bytes
// from base(). Not thread safe.
//
// A chunk counts as touched once a block overlaps it: with huge pages its first byte brings in all
// of it.
class Chunks {
 public:
  // Reserves `size_bytes`, or half of it as often as the system refuses. base() is null if it refuses all.
  explicit Chunks(std::size_t size_bytes);
  ~Chunks();
  Chunks(const Chunks&) = delete;
  Chunks& operator=(const Chunks&) = delete;

  char* base() const { return base_; }
  std::size_t size_bytes() const { return size_bytes_; }
  std::size_t touched_bytes() const { return touched_ * kChunkBytes; }

  bool touched(std::size_t chunk) const { return chunks_[chunk].touched; }
  bool live(std::size_t chunk) const { return chunks_[chunk].live_pages != 0; }

  // Bytes by which touched_bytes() grows when [offset, offset + size) is occupied.
  std::size_t untouched_bytes(std::size_t offset, std::size_t size_bytes) const;

  // Makes the range writable and counts it as touched and live. False if the system refuses.
  bool occupy(std::size_t offset, std::size_t size_bytes);
  // Counts the range as no longer live; its memory stays.
  void vacate(std::size_t offset, std::size_t size_bytes);
  // Returns to the system the touched chunks that lie wholly in the range and are not live, from
  // the highest down, until `wanted_bytes` are returned. Gives the bytes returned.
  std::size_t purge(std::size_t offset, std::size_t size_bytes, std::size_t wanted_bytes);
  // Takes back write access to every chunk in the range that is not live. Gives the bytes purged.
  std::size_t decommit(std::size_t offset, std::size_t size_bytes);

 private:
  struct Chunk {
    std::uint16_t live_pages = 0;
    bool committed = false;
    bool touched = false;
  };

  bool commit(std::size_t first, std::size_t last);
  void add_live(std::size_t offset, std::size_t size_bytes, int sign);

  char* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  char* base_ = nullptr;
  std::size_t size_bytes_ = 0;
  std::size_t touched_ = 0;
  std::vector<Chunk> chunks_;
};

}  // namespace penstock
