// Memory for torch's CPU tensors that goes back to the system when a limit asks for it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "chunks.hpp"
#include "ranges.hpp"

namespace penstock {

// Blocks below this size have a region of their own, so that long-lived ones do not pin big chunks.
inline constexpr std::size_t kSmallBytes = std::size_t{256} << 10;

struct ArenaStats {
  std::uint64_t in_use_bytes = 0;         // as requested, of the blocks alive
  std::uint64_t peak_in_use_bytes = 0;    // since reset_peak
  std::uint64_t resident_bytes = 0;       // of the chunks touched
  std::uint64_t peak_resident_bytes = 0;  // since reset_peak
  std::uint64_t limit_bytes = 0;          // what resident_bytes is kept below, where blocks allow it
  std::uint64_t serial = 0;               // of the newest block; the first has 1
  std::uint64_t purged_bytes = 0;         // returned to the system so far
  std::uint64_t over_limit_bytes = 0;     // by which peak_resident_bytes exceeded the limit
};

struct ArenaBlock {
  std::uintptr_t start = 0;
  std::size_t capacity_bytes = 0;
  std::uint64_t serial = 0;
};

// Blocks start at a multiple of 4096 bytes and hold a multiple of 4096 bytes, so that direct I/O can
// read and write them in place. Thread safe. The limit is soft: it decides what is purged, never
// whether an allocation succeeds.
class Arena {
 public:
  explicit Arena(std::size_t reserve_bytes);

  bool usable() const { return chunks_.base() != nullptr; }
  bool contains(const void* address) const {
    return reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(chunks_.base()) <
           chunks_.size_bytes();
  }

  enum class Outcome { kDone, kNoAddresses, kNoMemory };
  Outcome allocate(std::size_t size_bytes, void** address);
  // False if no block starts at `address`.
  bool release(void* address);

  void set_limit(std::size_t limit_bytes);
  void trim();
  void reset_peak();
  ArenaStats stats() const;
  std::optional<ArenaBlock> block(const void* address) const;

  // Around fork(), so that the child finds the arena whole.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  struct Entry {
    std::size_t requested_bytes;
    std::size_t capacity_bytes;
    std::uint64_t serial;
  };

  Ranges& region(std::size_t offset) { return offset < large_begin_ ? small_ : large_; }
  std::optional<std::size_t> place(std::size_t capacity_bytes) const;
  std::size_t purge(Ranges& ranges, std::size_t wanted_bytes);
  void purge_down_to(std::size_t resident_bytes);
  void note_peaks();

  mutable std::mutex mutex_;
  Chunks chunks_;
  std::size_t large_begin_ = 0;  // offsets below it hold blocks under kSmallBytes
  Ranges small_, large_;
  std::map<std::size_t, Entry> blocks_;  // by offset
  ArenaStats stats_;
};

}  // namespace penstock
