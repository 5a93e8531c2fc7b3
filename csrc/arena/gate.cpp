// The budget: what leaves so that something else fits.
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "arena/arena.hpp"

namespace penstock {

namespace {

// What a fault brought in makes room for another fault as the last but what a kernel has pinned, and not
// before the thread that waited for it could run its instruction. An instruction that needs more than fits,
// or threads that take turns at it, would go on like that for good. So a thread is stuck once this many
// faults in a row were for its few last blocks, and it ran for less than kFaultedLatelyNs before each. Only
// then what was faulted in lately stays, and the budget is exceeded. No time of the disk's counts in this.
constexpr std::int64_t kFaultedLatelyNs = 50'000'000;
constexpr std::int64_t kInstructionNs = 1'000'000;
constexpr std::uint32_t kStuckRepeats = 64;
// Where nothing else can leave, what others changed while it was written is tried again so often.
constexpr int kMostRounds = 8;
// Smaller blocks leave last: they free little, and nobody announces who uses them.
constexpr std::size_t kReluctantBytes = std::size_t{64} << 10;

}  // namespace

bool Arena::fits(std::size_t requested_bytes, std::size_t memory_bytes) const {
  const auto used = held_bytes() - free_bytes();
  return in_memory_bytes_ + requested_bytes <= stats_.budget_bytes && used + memory_bytes <= limit_bytes();
}

// What the block may displace that the thread needs now.
Arena::Need Arena::need_of(FaultHistory& history, const Block& block) {
  auto& serials = history.serials;
  const auto known = std::ranges::find(serials, block.serial);
  const bool soon = known != serials.end() && history.asked_ns - history.answered_ns < kFaultedLatelyNs;
  history.repeats = soon ? history.repeats + 1 : 0;
  const auto place = known != serials.end() ? known : serials.end() - 1;
  *place = block.serial;
  std::rotate(serials.begin(), place, place + 1);
  if (history.repeats <= kStuckRepeats) return Need::kFault;
  for (const auto serial : serials) {  // as if all of them had come just now
    const auto found = blocks_.find(serial);
    if (found == blocks_.end() || !found->second->is_in()) continue;
    found->second->faulted_ns = now_ns();
    use_.renew(*found->second);
  }
  return Need::kStuckFault;
}

// The least recently used block of the cheapest kind: what has a copy, what must be written, what
// somebody else is writing just now. For a fault, also what was faulted in lately, and last what is pinned.
Block* Arena::victim(Need need, bool memory_wanted, std::int64_t now,
                     const std::vector<std::uint64_t>& tried) const {
  Block* best = nullptr;
  int lowest = 0;
  for (auto* block = use_.oldest(); block != nullptr; block = block->newer) {
    const bool pinned = block->pinned_tick == tick_;
    if (block->moving != Block::Moving::kNot || block->foreign || block->holds > 0 || (memory_wanted && !block->large())) continue;
    if (pinned && (memory_wanted || !is_fault(need))) continue;
    int rank = block->copy ? 0 : block->guarded ? 2 : 1;
    if (rank > 0 && !swap_.usable()) continue;
    if (block->requested_bytes < kReluctantBytes) rank += 6;
    if (is_fault(need) && now - block->faulted_ns < kFaultedLatelyNs) {
      if (need == Need::kStuckFault) continue;
      rank = 12;
    }
    if (pinned) rank += 24;
    if (best != nullptr && rank >= lowest) continue;
    if (std::ranges::find(tried, block->serial) != tried.end()) continue;
    best = block, lowest = rank;
    if (rank == 0) break;
  }
  return best;
}

// May release the lock meanwhile. False if the budget does not allow it; the limit on memory is met as
// far as blocks can leave.
bool Arena::make_room(Lock& lock, std::size_t requested_bytes, std::size_t memory_bytes, Need need) {
  std::vector<std::uint64_t> tried;
  std::vector<std::uint64_t> changed;  // of these
  int rounds = 0;
  const auto began = now_ns();
  bool possible = is_fault(need);
  while (pages() && !fits(requested_bytes, memory_bytes)) {
    const bool over = in_memory_bytes_ + requested_bytes > stats_.budget_bytes;
    if (over && !possible && reads_ == 0) {  // let nothing leave for a block that cannot fit
      std::uint64_t may_leave = 0;
      for (auto* block = use_.oldest(); block != nullptr; block = block->newer)
        if (block->pinned_tick != tick_ && block->holds == 0 && !block->foreign) may_leave += block->requested_bytes;
      for (const auto& [serial, block] : blocks_)
        if (block->is_out() && block->copy->in_memory())
          may_leave += round_up(block->copy->packing.packed_bytes, kPageBytes);
      for (const auto& [address, staging] : stagings_) may_leave += staging.counted_bytes;
      stats_.refused_at_bytes = in_memory_bytes_ - may_leave + requested_bytes;
      if (stats_.refused_at_bytes > stats_.budget_bytes) return false;
      possible = true;
    }
    // Who is stuck keeps what was young when it began, however long it waits for a disk.
    const auto now = now_ns();
    auto* found = victim(need, !over, need == Need::kStuckFault ? began : now, tried);
    const auto wait_ns = found != nullptr ? found->faulted_ns + kInstructionNs - now : 0;
    if (found != nullptr && is_fault(need) && wait_ns > 0) {
      changed_.wait(lock, wait_ns);
    } else if (found != nullptr) {
      const auto serial = found->serial;
      const auto evicted = evict(lock, *found, need);
      if (evicted != Evicted::kYes) tried.push_back(serial);
      if (evicted == Evicted::kChanged) changed.push_back(serial);
    } else if (!changed.empty() && rounds++ < kMostRounds) {
      std::erase_if(tried, [&](auto serial) { return std::ranges::find(changed, serial) != changed.end(); });
      changed.clear();
    } else if (over && (evict_packed(lock) || take_staging())) {
      continue;
    } else if (over && writes_ + reads_ > 0) {
      changed_.wait(lock);  // what others move may leave afterwards, or make the room
    } else {
      stats_.refused_at_bytes = in_memory_bytes_ + requested_bytes;
      return !over;
    }
  }
  return true;
}

// Releases the lock while it writes. kNo if the block stayed for a reason that may last, kChanged if somebody used it
// meanwhile.
Arena::Evicted Arena::evict(Lock& lock, Block& block, Need need) {
  const auto leave = [this](Block& left) { return put_out(left, true) ? Evicted::kYes : Evicted::kNo; };
  if (block.copy) return leave(block);
  const auto offset = block.offset, capacity = block.capacity_bytes;
  const auto serial = block.serial;
  const bool pinned = block.pinned_tick == tick_;
  std::shared_ptr<const Copy> copy = new_swap_copy(block, capacity);
  if (!copy) return Evicted::kNo;
  if (!block.guarded &&
      !protect_or_undo(address_of(block), block.memory_bytes, PROT_READ, PROT_READ | PROT_WRITE))
    return Evicted::kNo;
  block.guarded = true;
  const auto snapshot = block.snapshot;
  const int error = write_unlocked(lock, block, address_of(block), *copy);
  auto* found = again(offset, serial);
  if (found == nullptr || !found->is_in()) return Evicted::kYes;  // released, or left, meanwhile: there is its room
  if (error != 0) {
    // Whoever called guard relies on it; nobody else does.
    if (found->written() && found->guarded && !found->copy) make_writable(*found);
    return Evicted::kNo;
  }
  stats_.swapped_out_bytes += found->requested_bytes;
  if (found->snapshot != snapshot) return Evicted::kChanged;
  if (!found->copy) found->copy = std::move(copy);
  if (found->holds > 0 || found->foreign) return Evicted::kNo;
  if (found->pinned_tick != tick_ || (pinned && is_fault(need))) return leave(*found);
  return is_fault(need) ? Evicted::kYes : Evicted::kNo;  // pinned meanwhile: only if nothing else can leave
}

// Writes memory to the copy's place in the swap file. 0, or an errno. Releases the lock meanwhile.
int Arena::write_unlocked(Lock& lock, Block& block, const char* data, const Copy& copy) {
  const Motion writing(*this, block, Block::Moving::kWriting);
  const auto& segment = copy.segments[0];
  const auto direct = swap_.direct(), buffered = swap_.buffered();
  int error = ENOMEM;
  double may_land_s = 0;
  ++writes_;
  {
    const Unlocked unlocked(lock);
    try {
      error = write_fully(direct, buffered, data, segment.size_bytes, segment.file_offset, &may_land_s);
    } catch (const std::bad_alloc&) {
    } catch (...) {
      error = EIO;
    }
  }
  --writes_;
  stats_.write_error = error;  // what is refused once this works again is not for this
  if (may_land_s > 0) swap_.quarantine(segment.file_offset, segment.size_bytes, may_land_s);
  return error;
}

// A block that is out and has its packed bytes in memory gives them up; they are written to the swap file first where
// no file has them. What is written elsewhere meanwhile may be anything. May release the lock. False if none can.
bool Arena::evict_packed(Lock& lock) {
  for (const auto& [serial, block] : blocks_) {
    if (!block->is_out() || block->moving != Block::Moving::kNot || !block->copy->in_memory()) continue;
    const auto packed = block->copy;
    if (packed->below) {
      block->copy = std::shared_ptr(packed->below);
      drop_memory(*packed);
      return true;
    }
    const auto size_bytes = round_up(packed->packing.packed_bytes, kPageBytes);
    const auto copy = new_swap_copy(*block, size_bytes);
    if (!copy) continue;
    copy->segments[0].begin = round_up(block->requested_bytes, kPageBytes) - size_bytes;
    copy->packing = packed->packing;
    const auto offset = block->offset;
    const auto wanted = serial;
    const int error = write_unlocked(lock, *block, packed->memory.address, *copy);
    auto* found = again(offset, wanted);
    if (found == nullptr || found->copy != packed) return true;
    if (error != 0) return false;
    stats_.swapped_out_bytes += size_bytes;
    found->copy = copy;
    if (packed->in_memory()) {  // who writes it elsewhere may still read it
      in_memory_bytes_ -= size_bytes;
      empty_landing(packed->memory);
      changed_.notify();
    }
    return true;
  }
  return false;
}

// What Python reads ahead of its use gives up its memory: it stays out, and is read again. False if there is none.
bool Arena::take_staging() {
  for (auto& [address, staging] : stagings_) {
    if (staging.counted_bytes == 0) continue;
    drop_staging(staging);
    return true;
  }
  return false;
}

// The block has a valid copy. False if the system refuses; then nothing has changed.
bool Arena::put_out(Block& block, bool natively) {
  if (block.large()) {
    const int before = block.guarded ? PROT_READ : PROT_READ | PROT_WRITE;
    if (!protect_or_undo(address_of(block), block.memory_bytes, PROT_NONE, before)) return false;
    const auto body = block.memory_bytes / kChunkBytes * kChunkBytes;
    frames_.withdraw_block(block.offset, block.memory_bytes, room_without_frames(body));
  } else if (!frames_.drop_pages(block.offset, block.owned_bytes)) {
    return false;
  }
  own(block);
  use_.remove(block);
  block.place = Block::Place::kOut;
  block.guarded = false;
  ++block.snapshot;
  block.moved_natively = natively;
  in_memory_bytes_ -= block.requested_bytes;
  stats_.out_bytes += block.requested_bytes;
  if (natively)
    record_event(block, Block::Event::kOut);
  else
    drop_event(block);
  return true;
}

void Arena::record_event(Block& block, Block::Event event) {
  if (block.event == Block::Event::kNone) {
    block.event_before = last_event_;
    (last_event_ != nullptr ? last_event_->event_after : first_event_) = &block;
    last_event_ = &block;
    ++events_pending_;
  }
  block.event = event;
}

void Arena::drop_event(Block& block) {
  if (block.event == Block::Event::kNone) return;
  (block.event_before != nullptr ? block.event_before->event_after : first_event_) = block.event_after;
  (block.event_after != nullptr ? block.event_after->event_before : last_event_) = block.event_before;
  block.event_before = block.event_after = nullptr;
  block.event = Block::Event::kNone;
  --events_pending_;
}

std::size_t Arena::events_pending() const {
  const Lock lock(mutex_);
  return events_pending_;
}

std::vector<std::pair<std::uintptr_t, Block::Event>> Arena::events() {
  const Lock lock(mutex_);
  std::vector<std::pair<std::uintptr_t, Block::Event>> found;
  found.reserve(events_pending_);
  while (first_event_ != nullptr) {
    auto& block = *first_event_;
    found.emplace_back(reinterpret_cast<std::uintptr_t>(address_of(block)), block.event);
    drop_event(block);
  }
  return found;
}

// What was pinned is so no longer.
void Arena::begin_tick() {
  ++tick_;
  pinned_bytes_ = peak_pinned_bytes_ = 0;
}

void Arena::pin(Block& block) {
  if (block.pinned_tick == tick_) return;
  block.pinned_tick = tick_;
  pinned_bytes_ += block.requested_bytes;
  peak_pinned_bytes_ = std::max(peak_pinned_bytes_, pinned_bytes_);
}

std::size_t Arena::touch(std::span<const std::uintptr_t> addresses, std::size_t* blocks_out) {
  const Lock lock(mutex_);
  begin_tick();
  kernel_thread_ = this_thread();
  *blocks_out = 0;
  for (const auto address : addresses) {
    auto* block = find(reinterpret_cast<const void*>(address));
    if (block == nullptr) continue;
    pin(*block);
    if (block->is_in())
      use_.renew(*block);
    else
      *blocks_out += block->moved_natively;
  }
  return events_pending_;
}

bool Arena::make_room(std::size_t size_bytes, std::span<const std::uintptr_t> pinned) {
  Lock lock(mutex_);
  for (const auto address : pinned)
    if (auto* block = find(reinterpret_cast<const void*>(address))) pin(*block);
  return make_room(lock, size_bytes, size_bytes, Need::kBlock);
}

bool Arena::hold(void* address, int change, bool writable, int* error) {
  Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return false;
  block->holds = std::max(block->holds + change, 0);
  if (!writable) return true;
  const auto offset = block->offset;
  const auto serial = block->serial;
  *error = bring_in(lock, offset, serial, Need::kAccess, nullptr, 0);
  block = again(offset, serial);
  if (block == nullptr) return false;
  if (*error == 0 && block->guarded && !make_writable(*block)) *error = errno;
  if (*error != 0) block->holds = std::max(block->holds - change, 0);
  return true;
}

void Arena::hold_new(bool holds) {
  const Lock lock(mutex_);
  holds_new_ = holds;
}

std::uint64_t Arena::kernel_over() {
  const Lock lock(mutex_);
  const auto most_bytes = peak_pinned_bytes_;
  begin_tick();
  holds_new_ = false;
  kernel_thread_ = {};
  return most_bytes;
}

int Arena::bring_in_moved(std::span<const std::uintptr_t> addresses) {
  Lock lock(mutex_);
  for (const auto address : addresses) {
    auto* block = find(reinterpret_cast<const void*>(address));
    if (block == nullptr || !block->is_out() || !block->moved_natively) continue;
    const auto offset = block->offset;
    const auto serial = block->serial;
    const int error = bring_in(lock, offset, serial, Need::kAccess, nullptr, 0);
    if (error != 0 && error != ENODATA) return error;  // what was dropped is computed at its first use
    if (auto* found = again(offset, serial); found != nullptr && found->is_in()) record_event(*found, Block::Event::kIn);
  }
  return 0;
}

void Arena::unlock_in_parent() {
  ++forks_;
  mutex_.unlock();
}

void Arena::unlock_in_child() {
  in_child_ = true;
  stats_.budget_bytes = kUnlimited;
  reads_ = writes_ = 0;
  for (auto& [serial, block] : blocks_) block->moving = Block::Moving::kNot;
  mutex_.unlock();
}

}  // namespace penstock
