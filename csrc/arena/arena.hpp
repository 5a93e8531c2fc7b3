// Memory for torch's CPU tensors inside a byte budget: blocks leave memory and come back at the address
// they had.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena/block.hpp"
#include "arena/bookkeeping.hpp"
#include "arena/event.hpp"
#include "arena/frames.hpp"
#include "arena/swap.hpp"
#include "sync.hpp"

namespace penstock {

// Blocks of this size and more have chunks of addresses of their own, and memory for what they need of
// them. Smaller ones share chunks, in a region of their own, so that long-lived ones do not pin big chunks.
inline constexpr std::size_t kLargeBytes = std::size_t{256} << 10;
inline constexpr std::size_t kGivenUpCounts = 65'536;
inline constexpr std::uint64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

struct ArenaStats {
  std::uint64_t in_use_bytes = 0;          // as requested, of the blocks alive
  std::uint64_t new_bytes = 0;             // of these, of blocks allocated since reset_peak
  std::uint64_t peak_new_bytes = 0;        // since reset_peak
  std::uint64_t resident_bytes = 0;        // memory held
  std::uint64_t peak_resident_bytes = 0;   // since reset_peak
  std::uint64_t limit_bytes = kUnlimited;  // what resident_bytes is kept below, where blocks allow it
  std::uint64_t serial = 0;                // of the newest block; the first has 1
  std::uint64_t purged_bytes = 0;          // returned to the system so far
  std::uint64_t over_limit_bytes = 0;      // by which peak_resident_bytes exceeded the limit
  std::uint64_t budget_bytes = kUnlimited;  // what in_memory_bytes is kept within
  std::uint64_t in_memory_bytes = 0;       // as requested, of blocks in memory and of staging areas; not foreign ones
  std::uint64_t foreign_bytes = 0;         // as requested, of blocks that are in memory beside budget and limit
  std::uint64_t peak_in_memory_bytes = 0;  // since reset_peak
  std::uint64_t out_bytes = 0;             // as requested, of the blocks that are out
  std::uint64_t swap_used_bytes = 0;
  std::uint64_t faults = 0;  // accesses served that nobody planned
  std::uint64_t swapped_out_bytes = 0;  // written to the swap file
  std::uint64_t swapped_in_bytes = 0;   // read back by the arena itself
  std::uint64_t refused_bytes = 0;      // of the last allocation that the budget refused
  std::uint64_t refused_at_bytes = 0;   // the budget that it would have taken
  int write_error = 0;                  // the errno of the last write to the swap file that failed
  std::uint64_t system_refused_bytes = 0;  // of the last allocation that fitted, but the system refused
  std::uint64_t over_budget_bytes = 0;  // by which peak_in_memory_bytes exceeded the budget
};

struct ArenaBlock {
  std::uintptr_t start = 0;
  std::size_t capacity_bytes = 0;
  std::uint64_t serial = 0;
};

// Blocks start at a multiple of 4096 bytes and hold a multiple of 4096 bytes, so that direct I/O can
// read and write them in place. Thread safe; no call needs another thread to make progress in Python.
//
// The limit on physical memory is soft: it decides what is kept for reuse and, where a budget is set,
// what leaves. The budget is hard: an allocation first writes blocks to the swap file, the least
// recently used first, and is refused where that does not make enough room.
//
// A block is in memory and writable, or in memory and guarded (write-protected: a copy exists, or is
// being written, or a dropped block is computed from it), or out (neither readable nor writable; its copy
// says where it is, or it was dropped, and its owner computes it again).
//
// What is copied while the lock is free is of use only if the block's `snapshot` is afterwards what it was before; the
// copy of a block always has its `version`. Whoever changes bytes or takes memory away needs to know nothing of
// who is copying: it gives the block another number.
class Arena {
 public:
  explicit Arena(std::size_t reserve_bytes);

  bool usable() const { return usable_; }
  // Empty if blocks can leave on this system.
  const std::string& paging_problem() const { return paging_problem_; }
  bool contains(const void* address) const {
    return reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(frames_.base()) <
           frames_.size_bytes();
  }

  enum class Outcome { kDone, kNoAddresses, kNoMemory };
  // With `held`, it does not leave before it is released.
  Outcome allocate(std::size_t size_bytes, void** address, bool held = false);
  // False if no block starts at `address`. All parts of a divided block are released with the first.
  bool release(void* address);
  // Makes a block into adjacent ones that leave and come back one by one, until it is released: of `part_bytes` each,
  // whole chunks, but for the last, which takes what is left. One that is not in memory and writable, or that anybody
  // copies or holds, stays whole, as does one of less than two parts. Gives where the parts begin that it has then.
  std::vector<std::uintptr_t> divide(void* address, std::size_t part_bytes);
  std::vector<std::uintptr_t> parts(const void* address) const;

  void set_limits(std::uint64_t limit_bytes, std::uint64_t budget_bytes);
  // What is in memory now is beside the budget and the limit, and stays; until it is released, or counts after all. A
  // budget is of what comes after.
  void disown_all();
  bool own(void* address);  // false if no block starts there
  void own_all();
  // False if the present file is in use. See SwapFile.
  bool set_swap_file(Handle direct, Handle buffered, std::size_t capacity_bytes, std::size_t begin = 0);
  void trim();
  void reset_peak();
  ArenaStats stats() const;
  // Of stats(), without waiting for anyone.
  std::uint64_t in_memory_bytes() const { return in_memory_bytes_.load(std::memory_order_relaxed); }
  std::optional<ArenaBlock> block(const void* address) const;
  // Every block is in memory and writable.
  bool is_at_rest() const;

  // Of the calls below, those on a block give kUnknown where none starts at the address.
  // kAsk: of serve_fault and arrive.
  enum class Answer { kYes, kNo, kUnknown, kError, kAsk };

  // A kernel begins on this thread: pins the blocks that hold these addresses, and those that it will
  // allocate, until it is over or the next one begins. Gives the number of events pending. With
  // `blocks_out`, counts those that the arena has moved out: see bring_in_moved.
  std::size_t touch(std::span<const std::uintptr_t> addresses, std::size_t* blocks_out);
  // Gives the most bytes that it had at once, of what it used and what it allocated: no budget below serves it.
  std::uint64_t kernel_over();
  // What a kernel uses is used for longer: it does not leave before as many holds have ended. False where no block
  // starts there. With `writable`, it is in memory and writable from here on, whoever was about to evict it: for who
  // has the system write to it, which finds a protected page and fails. Then 0 or an errno is in `error`.
  bool hold(void* address, int change, bool writable = false, int* error = nullptr);
  // What the kernel that runs allocates has a hold from now on, or not.
  void hold_new(bool holds);
  // Lets blocks leave until so many bytes fit, and none of these. False if they cannot.
  bool make_room(std::size_t size_bytes, std::span<const std::uintptr_t> pinned);
  // Brings in those of the blocks that the arena moved out. 0 or an errno.
  int bring_in_moved(std::span<const std::uintptr_t> addresses);

  // Writes are noticed from now on. The caller is about to make a copy: no other one is kept. kNo if the block is not in
  // memory; then there is nothing to copy, even if it comes a moment later.
  // With `loan` it is lent from the same moment on, see `lend`.
  Answer guard(void* address, std::uint64_t* loan = nullptr);
  // Brings it in first if it is out.
  Answer unguard(void* address, int* error);
  Answer written(void* address) const;
  // kNo if it was written since guard, or is held; kError if the system refuses or the segments do not hold it.
  Answer leave(void* address, std::vector<Segment> segments, int* error, const Packing& packing = {});
  // Somebody else reads the block at its addresses, until lent_back: they stay readable as long, even if the block is
  // released. 0 where no block starts there.
  std::uint64_t lend(void* address);
  // Whether the block was neither written, nor away, nor released meanwhile: what was read is what it held.
  bool lent_back(std::uint64_t loan);
  // A packed copy of a block that is guarded, to be given to leave_packed. Null where that saves no page, or there is
  // no room for it. Encodes without the lock.
  std::shared_ptr<const Copy> pack(void* address, Codec codec, std::size_t itemsize);
  // The block leaves for its packed copy. kNo if it was written since guard, or is held.
  Answer leave_packed(void* address, std::shared_ptr<const Copy> packed, int* error);
  // The packed copy is in files, too; without `keeps`, only there. kNo if it is not what the block holds any more.
  Answer packed_written(void* address, const std::shared_ptr<const Copy>& packed, std::vector<Segment> segments,
                        bool keeps);
  // A packed copy in memory is given up where it is in files too. kNo if it is not.
  Answer drop_packed(void* address);
  // Gives up a copy that is held outside of the arena.
  void let_go(std::shared_ptr<const Copy> copy);
  // Where its packed bytes are; null once they were given up.
  char* packed_address(const Copy& packed) const;

  // A place to read the block's copy to, until arrive, unstage or abandon, even if the block is released. Null if there
  // is no room, the block is not out, or its copy is one that the arena made: what the caller would read is older. With
  // `packed`, the place is for its copy's packed bytes as they are: then `arrive` makes them its copy, it stays out,
  // and kNo is that it has another one.
  Answer stage(void* address, bool packed, char** staging);
  // With `guard` it is as after guard, and its copy stays valid; else it is writable. kNo if the block is out
  // afterwards, or released: what was read is not what it holds now. kAsk if the place gave its memory up for
  // something else: the block is out as before. kUnknown if nothing is staged there.
  Answer arrive(char* staging, bool guard, int* error);
  Answer unstage(char* staging);
  // Who reads may do so for ever: nobody else gets these addresses.
  Answer abandon(char* staging);
  Answer bring_in(void* address, int* error);
  // Everything that is out comes back, and no copy is kept; what was about to leave as well. 0, or an errno; then
  // some may still be out. EBUSY: others let blocks leave as fast. What was dropped is its owner's.
  int bring_in_all();
  // Its memory goes, and nothing is kept of what it holds. kNo if it is out, or held.
  Answer drop(void* address);
  // A dropped block gets the memory of another of the same size, which is dropped in turn. kNo if one of them
  // is not what it should be; kError if the system refuses, and then both are out.
  Answer take(void* address, void* from, int* error);
  // A dropped block can be computed for as long as this one is not written: its owner is asked first. A
  // negative change ends that.
  Answer keep_for(void* address, int change, int* error);
  enum class State { kIn, kGuarded, kOut, kStaged, kDropped };
  Answer state(void* address, State* state) const;
  std::size_t events_pending() const;
  std::vector<std::pair<std::uintptr_t, Block::Event>> events();

  // An access to `address` failed. kYes if it can be repeated after what was done, kNo if nothing was
  // to be done, kUnknown if it is in no block, kError if the bytes cannot be had: `problem` says why. kAsk if
  // the block's owner has to compute something first.
  // `history` is of the thread that faulted, which keeps its times.
  Answer serve_fault(const void* address, bool is_write, FaultHistory& history, char* problem,
                     std::size_t problem_bytes);

  // Around fork(), so that the child finds the arena whole. In the child no block leaves, and one whose
  // copy the parent has given up since is refused (ESTALE): other bytes may be in its place.
  void lock() { mutex_.lock(); }
  void unlock_in_parent();
  void unlock_in_child();

#ifdef PENSTOCK_SEAMS
  friend struct ArenaProbe;  // looks, and changes nothing
#endif

 private:
  using Lock = std::unique_lock<Mutex>;
  class Unlocked;
  class Motion;
  class Visit;
  // For a read that Python drives.
  struct Staging {
    Landing landing;
    std::uint64_t serial = 0;  // of the block
    std::shared_ptr<const Copy> copy;  // what is read
    std::size_t counted_bytes = 0;  // none once it is forgotten
    bool packed = false;
  };
  struct Loan {
    std::uint64_t serial, snapshot;
  };
  template <class Key, class Value>
  using Map = std::map<Key, Value, std::less<>, Bookkeeping<std::pair<const Key, Value>>>;
  enum class Need { kBlock, kAccess, kFault, kStuckFault };
  static bool is_fault(Need need) { return need == Need::kFault || need == Need::kStuckFault; }

  // Blocks by address.
  Block* find(const void* address) const;      // that holds it
  Block* find_any(const void* address) const;  // also one that was released, but is lent
  Block* start(const void* address) const;  // that starts there
  Block* again(std::size_t offset, std::uint64_t serial) const;
  Block* of_serial(std::uint64_t serial) const;  // also one that was released
  void enter(Block& block, Block* value);
  std::vector<std::uintptr_t> parts_of(const Block& block) const;
  Block* part_after(const Block& block) const { return large_chunks_[(block.offset + block.owned_bytes) / kChunkBytes]; }
  void release(Block& block);
  void own(Block& block);
  void begin_tick();
  void pin(Block& block);
  std::uint64_t limit_bytes() const { return std::min(stats_.limit_bytes + foreign_memory_bytes_, kUnlimited); }
  char* address_of(const Block& block) const { return frames_.base() + block.offset; }

  // Addresses.
  Ranges& region(std::size_t offset) { return offset < large_begin_ ? small_ : large_; }
  std::optional<std::size_t> place(std::size_t owned_bytes) const;
  std::optional<std::size_t> place_large(std::size_t owned_bytes) const;
  std::optional<std::size_t> room_without_frames(std::size_t size_bytes) const;
  std::optional<std::size_t> occupy(std::size_t owned_bytes, std::size_t memory_bytes, bool* no_addresses);
  void recycle(std::size_t offset, std::size_t owned_bytes, std::size_t memory_bytes);
  bool cool_one();
  std::size_t held_bytes() const { return frames_.held_bytes() + scratch_bytes_; }
  std::size_t free_bytes() const { return frames_.free_bytes() + warm_bytes_; }
  void hold_at_most(std::uint64_t size_bytes);

  // What is in memory.
  void count_in(std::size_t requested_bytes);
  void update_peaks();
  bool pages() const { return stats_.budget_bytes != kUnlimited && paging_problem_.empty() && !in_child_; }
  bool fits(std::size_t requested_bytes, std::size_t memory_bytes) const;
  bool make_room(Lock& lock, std::size_t requested_bytes, std::size_t memory_bytes, Need need);
  Need need_of(FaultHistory& history, const Block& block);
  Block* victim(Need need, bool memory_wanted, std::int64_t now, const std::vector<std::uint64_t>& tried) const;
  enum class Evicted { kYes, kNo, kChanged };
  Evicted evict(Lock& lock, Block& block, Need need);
  int write_unlocked(Lock& lock, Block& block, const char* data, const Copy& copy);
  std::shared_ptr<Copy> new_copy(const Block& block);
  void end_copy(const Copy* copy);
  bool given_up(std::uint64_t serial) const;
  std::shared_ptr<Copy> new_swap_copy(const Block& block, std::size_t size_bytes);
  void drop_memory(const Copy& copy);
  bool evict_packed(Lock& lock);
  bool put_out(Block& block, bool natively);
  Answer leave_for(Block& block, std::shared_ptr<const Copy> copy, int* error);
  bool make_writable(Block& block);
  void change_bytes(Block& block);
  bool is_recipe(const Block& block) const { return block.recipes != 0 && !in_child_; }
  void record_event(Block& block, Block::Event event);
  void drop_event(Block& block);

  // The end.
  void put_aside(Block& block);
  void end(Block& block, bool has_memory);
  std::uint64_t lend_block(Block& block);
  bool end_visit(std::uint64_t serial, std::uint64_t snapshot);

  // The way back.
  bool take_landing(const Block& block, Landing* landing);
  bool take_memory(std::size_t size_bytes, Landing* landing);
  bool take_place(std::size_t owned_bytes, Landing* landing);
  void drop_landing(Landing& landing);
  void empty_landing(Landing& landing);
  void leave_behind(Landing& landing);
  void drop_staging(Staging& staging);
  bool take_staging();
  void end_staging(char* staging);
  void require_reserve() const;
  int land(Block& block, Landing& landing, bool guard);
  int bring_in(Lock& lock, std::size_t offset, std::uint64_t serial, Need need, char* problem,
               std::size_t problem_bytes);

  const std::string paging_problem_;
  bool usable_ = false;
  mutable Mutex mutex_;
  Event changed_;  // a read or write of a block ended, or room was made
  Frames frames_;
  std::size_t large_begin_ = 0;  // offsets below it hold blocks under kLargeBytes
  Ranges small_, large_;         // free addresses
  // Copies from before a fork that were given up since, counted by serial number of their block. A child
  // sees what the parent counts, and compares it with what was counted when it was forked.
  SparseTable<std::atomic<std::uint32_t>> given_up_now_;
  SparseTable<std::uint32_t> given_up_here_;
  std::uint64_t forks_ = 0;
  // Released blocks that end in a tail, which still have their memory: a block of the same size takes both.
  Ranges::BySize warm_;  // memory, offset
  std::size_t warm_bytes_ = 0;
  SparseTable<Block*> small_pages_, large_chunks_;  // whose they are
  SwapFile swap_;  // outlives the copies in it
  std::unordered_map<std::uint64_t, std::unique_ptr<Block>> blocks_;  // by serial
  UseOrder use_;
  std::uint64_t tick_ = 1;
  std::uint64_t pinned_bytes_ = 0, peak_pinned_bytes_ = 0;  // of this tick
  pthread_t kernel_thread_ = {};  // of the kernel that runs, if one does
  bool holds_new_ = false;
  Block *first_event_ = nullptr, *last_event_ = nullptr;
  std::size_t events_pending_ = 0;
  Map<char*, Staging> stagings_;  // by address
  Map<std::uint64_t, Loan> loans_;
  std::uint64_t last_loan_ = 0;
  std::size_t writes_ = 0;  // to the swap file, under way
  std::size_t reads_ = 0;   // into landings, under way
  std::uint64_t foreign_memory_bytes_ = 0;
  std::size_t scratch_bytes_ = 0;  // of landings outside of the arena's addresses
  bool in_child_ = false;
  std::atomic<std::uint64_t> in_memory_bytes_{0};  // changed with the lock held
  ArenaStats stats_;  // but for what is counted elsewhere
  std::uint64_t resets_ = 0;  // calls of reset_peak
};

// The lock is free in its scope.
class Arena::Unlocked {
 public:
  explicit Unlocked(Lock& lock) : lock_(lock) { lock_.unlock(); }
  Unlocked(const Unlocked&) = delete;
  ~Unlocked() { lock_.lock(); }

 private:
  Lock& lock_;
};

// The arena's own I/O on a block, from its beginning to its end, both with the lock. However that comes, who waits
// for it goes on.
class Arena::Motion {
 public:
  Motion(Arena& arena, Block& block, Block::Moving moving) : arena_(arena), serial_(block.serial) {
    block.moving = moving;
  }
  Motion(const Motion&) = delete;
  ~Motion() {
    if (auto* block = arena_.of_serial(serial_)) block->moving = Block::Moving::kNot;
    arena_.changed_.notify();
  }

 private:
  Arena& arena_;
  const std::uint64_t serial_;
};

// Somebody reads the block at its addresses.
class Arena::Visit {
 public:
  Visit(Arena& arena, Block& block) : arena_(arena), serial_(block.serial) { ++block.lends; }
  Visit(const Visit&) = delete;
  ~Visit() { arena_.end_visit(serial_, 0); }

 private:
  Arena& arena_;
  const std::uint64_t serial_;
};

}  // namespace penstock
