// One large segment of a device's memory, as torch's caching allocator divides it: that allocator takes the smallest
// free block that is large enough, the first of equal ones, and cannot be asked which there are. So they are followed
// here, and found by which moves a kernel gets memory in one piece. All calls hold the GIL.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace penstock {

struct ManagedStorage;

// What lies where a free block is wanted, in the order of addresses.
struct Obstacles {
  std::vector<ManagedStorage*> move;    // fit elsewhere in the segment, one after the other
  std::vector<ManagedStorage*> leave;   // do not
  std::vector<std::pair<std::uintptr_t, std::int64_t>> free;  // between them: address and bytes
};

// What may leave the device for a block, besides moving within it: nothing; for a large block, which then goes where
// it leaves most room for another one, what is leaving; whatever can.
enum class Leaves { kNone, kLeaving, kAny };

class DeviceSegment {
 public:
  // Rounded as the allocator rounds them, and the largest rest of a block that it does not divide.
  static constexpr std::int64_t kRound = 512, kUndivided = 1 << 20;

  DeviceSegment(std::uintptr_t address, std::int64_t size_bytes);
  ~DeviceSegment() { let_go(); }
  DeviceSegment(const DeviceSegment&) = delete;
  DeviceSegment& operator=(const DeviceSegment&) = delete;

  // No storage is in it any more: it is followed no longer.
  void clear();
  // The storage has memory there. Nothing, where that is not in the segment.
  void put(ManagedStorage& managed, std::uintptr_t address);
  // It has none any more, or is not there.
  void take(ManagedStorage& managed);
  // Memory that the caller holds, and that no storage has; and gives up.
  void hold(std::uintptr_t address, std::int64_t size_bytes) { occupy(address, size_bytes, nullptr); }
  void give_up(std::uintptr_t address);

  // Of the free block that begins there; 0: none does.
  std::int64_t free_at(std::uintptr_t address) const;
  // Whether the allocator has blocks for pieces of these sizes, together.
  bool fits(const std::vector<std::int64_t>& sizes) const;
  // Where it costs least to make one free block of so many bytes; where moves cannot, one that is larger than all
  // that are free.
  // None: what cannot move is everywhere.
  std::optional<Obstacles> obstacles(std::int64_t size_bytes, Leaves leaves) const;

  std::int64_t free_bytes() const { return free_bytes_; }
  std::int64_t largest_free_bytes() const { return free_.empty() ? 0 : free_.rbegin()->first; }

 private:
  struct Block {
    std::int64_t size_bytes = 0;
    ManagedStorage* managed = nullptr;
    bool is_free = true;
  };
  using Blocks = std::map<std::uintptr_t, Block>;
  using BySize = std::set<std::pair<std::int64_t, std::uintptr_t>>;

  void let_go() noexcept;  // of all storages
  void occupy(std::uintptr_t address, std::int64_t size_bytes, ManagedStorage* managed);
  void enter_free(std::uintptr_t address, std::int64_t size_bytes);
  Blocks::iterator remove_free(Blocks::iterator block);
  void vacate(Blocks::iterator block);
  std::optional<Obstacles> place_for(std::int64_t size_bytes, Leaves leaves) const;
  std::int64_t span_beside(std::uintptr_t address, std::int64_t size_bytes) const;
  bool is_large(std::int64_t size_bytes) const;
  Obstacles sorted(Blocks::const_iterator first, Blocks::const_iterator last) const;

  const std::uintptr_t begin_, end_;
  Blocks blocks_;  // all of the segment
  BySize free_;
  std::int64_t free_bytes_ = 0;
};

}  // namespace penstock
