// A block of an arena: what torch asked for, where its bytes are, and when it was used.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "codecs/packing.hpp"
#include "io/io.hpp"

namespace penstock {

// Part of a block as it lies in a file, or on a namespace.
struct Segment {
  Handle file = -1;
  std::uint64_t file_offset = 0;
  std::size_t begin = 0;  // in the block
  std::size_t size_bytes = 0;
};

// Memory at other addresses than the block's: its bytes are read into it, until they move to the block's, or its
// packed bytes are there.
struct Landing {
  char* address = nullptr;
  std::size_t size_bytes = 0;
  bool in_arena = false;  // like a block's; else a mapping of its own
  bool emptied = false;   // its memory was given back, and its addresses not: somebody may still use them
};

// A copy of a block at another place: in files, or packed in memory, where it ends with the page. Told apart by its
// address. Immutable, but that memory may be given up; with the lock held, as is done with all that is mutable.
struct Copy {
  std::vector<Segment> segments;
  Packing packing{};
  mutable Landing memory{};
  mutable std::shared_ptr<const Copy> below;  // of one in memory: the same bytes in files, if they are there
  bool in_swap_file = false;  // its one segment is the arena's own
  std::uint64_t serial = 0;   // of the block
  std::uint64_t version = 0;  // of the block's bytes
  std::uint64_t forks = 0;    // of the process before it was made

  bool in_memory() const { return memory.address != nullptr && !memory.emptied; }
};

struct Block {
  // kDropped: away, with no copy: its owner computes it again. kReleased: torch has given it back, but somebody still
  // reads at its addresses.
  enum class Place : std::uint8_t { kIn, kOut, kDropped, kReleased };
  // The arena's own I/O on it: one at a time.
  enum class Moving : std::uint8_t { kNot, kReading, kWriting };

  std::size_t offset = 0;
  std::size_t requested_bytes = 0;
  std::size_t capacity_bytes = 0;  // in whole pages
  std::size_t owned_bytes = 0;     // of addresses: in whole chunks if it has chunks of its own
  std::size_t memory_bytes = 0;    // while it is in memory: in whole grains if it has chunks of its own
  std::uint64_t serial = 0;
  std::uint64_t resets = 0;  // of peaks, before it was allocated
  std::size_t parts = 1;  // of a divided block, all of which end together: so many from this one on; 0: another starts it

  Place place = Place::kIn;
  Moving moving = Moving::kNot;
  bool guarded = false;         // in memory and write-protected
  bool moved_natively = false;  // out, and nobody but the arena asked for it
  bool foreign = false;         // in memory since before the budget was set, and beside it
  // Of its bytes: another one from the moment on at which they may change. While it is writable it has the one that
  // its bytes will have when it is guarded. Never equal to one before.
  std::uint64_t version = 1;
  // Another one with each version, and with each departure: what was read at its addresses from one moment to
  // another is its bytes as they were if this is the same at both.
  std::uint64_t snapshot = 1;
  std::uint64_t watched = 0;  // the version at the last guard
  std::uint32_t recipes = 0;  // ways to compute dropped blocks that hold only while this one is not written
  std::shared_ptr<const Copy> copy;  // of this version; none while it is writable

  char* staging = nullptr;  // for a read that Python drives: see Arena::Staging
  int lends = 0;            // outside readers of its addresses
  std::uint64_t pinned_tick = 0;  // pinned while this is the arena's tick
  int holds = 0;                  // it stays while there are any
  std::int64_t faulted_ns = 0;    // when a fault brought it in
  enum class Event : std::uint8_t { kNone, kOut, kIn } event = Event::kNone;

  Block *older = nullptr, *newer = nullptr;  // of the blocks in memory, by use
  Block *event_before = nullptr, *event_after = nullptr;  // of those that have one

  bool is_in() const { return place == Place::kIn; }
  bool is_out() const { return place == Place::kOut; }
  bool is_dropped() const { return place == Place::kDropped; }
  bool written() const { return watched != version; }  // or writable, since guard was called
  bool large() const { return owned_bytes % (std::size_t{2} << 20) == 0; }
};

// The pages of what was asked for.
inline std::size_t used_bytes(const Block& block) { return (block.requested_bytes + 4095) / 4096 * 4096; }

// The blocks that the last faults of one thread were for, and how many of these faults in a row were for
// a block that the thread had shortly before.
struct FaultHistory {
  std::array<std::uint64_t, 4> serials{};  // the newest first
  std::uint32_t repeats = 0;
  std::int64_t asked_ns = 0;     // when the thread faulted
  std::int64_t answered_ns = 0;  // when it went on after the fault before
};

// The blocks in memory, the least recently used first.
class UseOrder {
 public:
  Block* oldest() const { return oldest_; }
  void add(Block& block) {
    block.older = newest_;
    block.newer = nullptr;
    (newest_ != nullptr ? newest_->newer : oldest_) = &block;
    newest_ = &block;
  }
  void remove(Block& block) {
    (block.older != nullptr ? block.older->newer : oldest_) = block.newer;
    (block.newer != nullptr ? block.newer->older : newest_) = block.older;
    block.older = block.newer = nullptr;
  }
  void renew(Block& block) {
    if (&block == newest_) return;
    remove(block);
    add(block);
  }

 private:
  Block *oldest_ = nullptr, *newest_ = nullptr;
};

}  // namespace penstock
