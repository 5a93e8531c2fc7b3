#include "arena/arena.hpp"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

namespace penstock {

Arena::Arena(std::size_t reserve_bytes)
    : paging_problem_(penstock::paging_problem()),
      frames_(reserve_bytes, paging_problem_.empty()),
      large_begin_(frames_.size_bytes() / 8 / kChunkBytes * kChunkBytes),
      given_up_now_(SparseTable<std::atomic<std::uint32_t>>::shared(kGivenUpCounts)),
      given_up_here_(kGivenUpCounts),
      small_pages_(large_begin_ / kPageBytes),
      large_chunks_(frames_.size_bytes() / kChunkBytes) {
  usable_ = frames_.base() != nullptr && given_up_now_.usable() && given_up_here_.usable() &&
            given_up_here_.open(0, kGivenUpCounts) && small_pages_.usable() && large_chunks_.usable();
  if (!usable_) return;
  // One chunk between the regions is never used, so that no run of free frames is part of both.
  if (large_begin_ > kChunkBytes) small_.give(0, large_begin_ - kChunkBytes);
  large_.give(large_begin_, frames_.size_bytes() - large_begin_);
}

Block* Arena::find_any(const void* address) const {
  if (!contains(address)) return nullptr;
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - frames_.base());
  return offset < large_begin_ ? small_pages_[offset / kPageBytes] : large_chunks_[offset / kChunkBytes];
}

Block* Arena::find(const void* address) const {
  auto* block = find_any(address);
  return block != nullptr && block->place != Block::Place::kReleased ? block : nullptr;
}

Block* Arena::start(const void* address) const {
  auto* block = find(address);
  return block != nullptr && address_of(*block) == address ? block : nullptr;
}

Block* Arena::again(std::size_t offset, std::uint64_t serial) const {
  auto* block = find(frames_.base() + offset);
  return block != nullptr && block->serial == serial ? block : nullptr;
}

Block* Arena::of_serial(std::uint64_t serial) const {
  const auto found = blocks_.find(serial);
  return found != blocks_.end() ? found->second.get() : nullptr;
}

// Of calls that may be refused: those that may not find enough then.
void Arena::require_reserve() const {
  if (!in_child_ && !reserve().is_ready()) throw std::bad_alloc();
}

void Arena::enter(Block& block, Block* value) {
  auto& table = block.large() ? large_chunks_ : small_pages_;
  const auto unit = block.large() ? kChunkBytes : kPageBytes;
  for (auto i = block.offset / unit; i < (block.offset + block.owned_bytes) / unit; ++i) table[i] = value;
}

std::optional<std::size_t> Arena::place(std::size_t owned_bytes) const {
  if (owned_bytes % kChunkBytes == 0) return place_large(owned_bytes);
  const auto best = small_.by_size().lower_bound({owned_bytes, 0});
  if (best == small_.by_size().end()) return std::nullopt;
  return best->second;
}

// Where all of it has free frames, in the smallest such run; else around the longest run; else in the
// smallest free range.
std::optional<std::size_t> Arena::place_large(std::size_t owned_bytes) const {
  const auto& runs = frames_.free().by_size();
  for (auto run = runs.lower_bound({owned_bytes, 0}); run != runs.end(); ++run)
    if (run->second >= large_begin_) return run->second;
  if (!runs.empty() && runs.rbegin()->second >= large_begin_) {
    const auto begin = runs.rbegin()->second;
    const auto around = std::prev(large_.by_offset().upper_bound(begin));
    if (around->second >= owned_bytes) return std::min(begin, around->first + around->second - owned_bytes);
  }
  const auto best = large_.by_size().lower_bound({owned_bytes, 0});
  if (best == large_.by_size().end()) return std::nullopt;
  return best->second;
}

// Free addresses without frames, at the lowest place of the largest range: runs of free frames grow there.
std::optional<std::size_t> Arena::room_without_frames(std::size_t size_bytes) const {
  if (large_.by_size().empty()) return std::nullopt;
  const auto [range_bytes, begin] = *large_.by_size().rbegin();
  auto at = begin;
  const auto& runs = frames_.free().by_offset();
  for (auto run = runs.lower_bound(begin); run != runs.end() && run->first < begin + range_bytes; ++run) {
    if (run->first - at >= size_bytes) return at;
    at = run->first + run->second;
  }
  if (begin + range_bytes - at >= size_bytes) return at;
  return std::nullopt;
}

// Addresses with memory. Nothing if there are none; errno says whether memory is what lacks (ENOMEM).
std::optional<std::size_t> Arena::occupy(std::size_t owned_bytes, std::size_t memory_bytes, bool* no_addresses) {
  *no_addresses = false;
  const bool large = owned_bytes % kChunkBytes == 0;
  if (large && memory_bytes % kChunkBytes != 0) {
    const auto same = warm_.lower_bound({memory_bytes, 0});
    if (same != warm_.end() && same->first == memory_bytes) {
      const auto offset = same->second;
      warm_.erase(same);
      warm_bytes_ -= memory_bytes;
      return offset;
    }
  }
  auto offset = place(owned_bytes);
  while (!offset && cool_one()) offset = place(owned_bytes);
  *no_addresses = !offset;
  if (!offset) return std::nullopt;
  auto& owners = large ? large_chunks_ : small_pages_;
  const auto unit = large ? kChunkBytes : kPageBytes;
  if (!owners.open(*offset / unit, (*offset + owned_bytes) / unit)) return std::nullopt;
  region(*offset).take(*offset, owned_bytes);
  const auto growth = [&] {
    return large ? frames_.block_growth_bytes(*offset, memory_bytes) : frames_.growth_bytes(*offset, owned_bytes);
  };
  while (growth() > 0 && cool_one()) {
  }
  // All that is free is not enough, or lies in parts where whole frames are needed.
  while (growth() > 0 && held_bytes() + growth() > limit_bytes()) {
    const auto purged = frames_.purge_grains(held_bytes() + growth() - limit_bytes());
    if (purged == 0) break;
    stats_.purged_bytes += purged;
  }
  const bool roomy = held_bytes() + round_up(growth(), kChunkBytes) <= limit_bytes();
  const auto give = [&] {
    return large ? frames_.occupy_block(*offset, memory_bytes, roomy) : frames_.occupy(*offset, owned_bytes);
  };
  if (give()) return offset;
  hold_at_most(0);
  if (give()) return offset;
  region(*offset).give(*offset, owned_bytes);
  return std::nullopt;
}

// What occupy gave is free, and writable.
void Arena::recycle(std::size_t offset, std::size_t owned_bytes, std::size_t memory_bytes) {
  if (owned_bytes % kChunkBytes != 0) {
    frames_.vacate(offset, owned_bytes);
  } else if (memory_bytes % kChunkBytes != 0) {
    warm_.emplace(memory_bytes, offset);
    warm_bytes_ += memory_bytes;
    return;
  } else {
    frames_.vacate_block(offset, memory_bytes);
  }
  region(offset).give(offset, owned_bytes);
}

// The largest block kept warm gives its memory and its addresses to any. False if there is none.
bool Arena::cool_one() {
  if (warm_.empty()) return false;
  const auto [memory, offset] = *warm_.rbegin();
  warm_.erase(std::prev(warm_.end()));
  warm_bytes_ -= memory;
  frames_.vacate_block(offset, memory);
  region(offset).give(offset, round_up(memory, kChunkBytes));
  return true;
}

// As far as it is free.
void Arena::hold_at_most(std::uint64_t size_bytes) {
  if (held_bytes() <= size_bytes) return;
  while (cool_one()) {
  }
  stats_.purged_bytes += frames_.purge(held_bytes() - size_bytes);
}

Arena::Outcome Arena::allocate(std::size_t size_bytes, void** address, bool held) {
  if (size_bytes > frames_.size_bytes()) return Outcome::kNoAddresses;
  const auto capacity = round_up(std::max<std::size_t>(size_bytes, 1), kPageBytes);
  const bool large = capacity >= kLargeBytes;
  const auto owned = large ? round_up(capacity, kChunkBytes) : capacity;
  const auto memory = large ? round_up(capacity, kGrainBytes) : capacity;
  Lock lock(mutex_);
  require_reserve();
  if (!make_room(lock, size_bytes, memory, Need::kBlock)) {
    stats_.refused_bytes = size_bytes;
    return Outcome::kNoMemory;
  }
  // Before its addresses are taken: what may throw comes first.
  const auto serial = stats_.serial + 1;
  auto& block = *blocks_.emplace(serial, std::make_unique<Block>()).first->second;
  bool no_addresses = false;
  const auto offset = occupy(owned, memory, &no_addresses);
  if (!offset) blocks_.erase(serial);
  if (!offset) {
    if (no_addresses && !pages()) return Outcome::kNoAddresses;
    stats_.system_refused_bytes = size_bytes;  // memory from elsewhere would be outside of the budget
    return Outcome::kNoMemory;
  }
  block.offset = *offset;
  block.requested_bytes = size_bytes;
  block.capacity_bytes = capacity;
  block.owned_bytes = owned;
  block.memory_bytes = memory;
  block.serial = stats_.serial = serial;
  block.resets = resets_;
  const bool of_kernel = pthread_equal(kernel_thread_, this_thread()) != 0;
  if (of_kernel) pin(block);
  block.holds = held || (of_kernel && holds_new_) ? 1 : 0;
  enter(block, &block);
  use_.add(block);
  stats_.in_use_bytes += size_bytes;
  stats_.new_bytes += size_bytes;
  count_in(size_bytes);
  *address = frames_.base() + *offset;
  return Outcome::kDone;
}

std::vector<std::uintptr_t> Arena::parts_of(const Block& block) const {
  std::vector<std::uintptr_t> found;
  const auto* part = &block;
  for (auto left = block.parts; left > 0; --left) {
    found.push_back(reinterpret_cast<std::uintptr_t>(address_of(*part)));
    if (left > 1) part = part_after(*part);
  }
  return found;
}

std::vector<std::uintptr_t> Arena::parts(const void* address) const {
  const Lock lock(mutex_);
  const auto* block = start(address);
  return block == nullptr ? std::vector<std::uintptr_t>() : parts_of(*block);
}

std::vector<std::uintptr_t> Arena::divide(void* address, std::size_t part_bytes) {
  const Lock lock(mutex_);
  require_reserve();
  auto* const block = start(address);
  if (block == nullptr) return {};
  const bool at_rest = block->is_in() && !block->guarded && block->moving == Block::Moving::kNot && !block->copy &&
                       block->lends == 0 && block->holds == 0 && block->recipes == 0;
  const auto count = block->requested_bytes / part_bytes;
  if (!at_rest || block->parts != 1 || !block->large() || count < 2 || in_child_) return parts_of(*block);
  std::vector<Block*> others;  // before anything changes: what may throw comes first
  try {
    for (auto serial = stats_.serial; others.size() < count - 1;) {
      others.reserve(count - 1);
      auto& part = *blocks_.emplace(++serial, std::make_unique<Block>()).first->second;
      part.serial = serial;
      others.push_back(&part);
    }
  } catch (...) {
    for (const auto* part : others) blocks_.erase(part->serial);
    throw;
  }
  const auto shrink = [](Block& part, std::size_t requested_bytes) {
    part.requested_bytes = requested_bytes;
    part.capacity_bytes = round_up(requested_bytes, kPageBytes);
    part.owned_bytes = round_up(part.capacity_bytes, kChunkBytes);
    part.memory_bytes = round_up(part.capacity_bytes, kGrainBytes);
  };
  auto left = block->requested_bytes - part_bytes;
  auto offset = block->offset + part_bytes;
  block->parts = count;
  shrink(*block, part_bytes);
  for (auto* part : others) {
    part->offset = offset;
    part->parts = 0;
    part->foreign = block->foreign;
    part->resets = block->resets;
    part->pinned_tick = block->pinned_tick;
    shrink(*part, part == others.back() ? left : part_bytes);
    enter(*part, part);
    use_.add(*part);
    stats_.serial = part->serial;
    offset += part_bytes;
    left -= part_bytes;
  }
  return parts_of(*block);
}

bool Arena::release(void* address) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr || block->parts == 0) return false;
  for (auto left = block->parts; left > 0; --left) {
    auto* const next = left > 1 ? part_after(*block) : nullptr;
    release(*block);
    block = next;
  }
  changed_.notify();
  return true;
}

void Arena::release(Block& block) {
  stats_.in_use_bytes -= block.requested_bytes;
  if (block.resets == resets_) stats_.new_bytes -= block.requested_bytes;
  if (block.pinned_tick == tick_) pinned_bytes_ -= block.requested_bytes;
  if (block.staging != nullptr) {
    auto& staging = stagings_.find(block.staging)->second;  // which somebody reads to
    drop_staging(staging);
    staging.copy.reset();
  }
  const bool was_in = block.is_in();
  if (was_in) {
    use_.remove(block);
    own(block);
    in_memory_bytes_ -= block.requested_bytes;
  } else {
    stats_.out_bytes -= block.requested_bytes;
  }
  drop_event(block);
  block.copy.reset();
  if (block.lends > 0)
    put_aside(block);
  else
    end(block, was_in);
}

// Its memory goes, and who reads at its addresses finds zeros until it ends.
void Arena::put_aside(Block& block) {
  auto* const address = address_of(block);
  const bool was_in = block.is_in();
  block.place = Block::Place::kReleased;
  ++block.snapshot;
  if (was_in && block.large())
    frames_.empty_block(block.offset, block.memory_bytes);
  else if (!was_in || frames_.drop_pages(block.offset, block.owned_bytes))
    protect(address, block.memory_bytes, PROT_READ);
  else
    ++block.lends;  // the system refuses to take these few pages: they stay for ever
}

// Of a block that torch has given back, and that nobody reads: its addresses are free, and its memory if it has any.
void Arena::end(Block& block, bool has_memory) {
  const auto offset = block.offset, owned = block.owned_bytes, memory = block.memory_bytes;
  const bool large = block.large(), guarded = block.guarded;
  enter(block, nullptr);
  blocks_.erase(block.serial);
  bool reusable = true;
  if (has_memory && guarded && !protect(frames_.base() + offset, memory, PROT_READ | PROT_WRITE)) {
    has_memory = false;
    if (large)
      frames_.discard_block(offset, memory);
    else
      reusable = false;
  } else if (!has_memory && !large) {
    reusable = has_memory = frames_.renew_pages(offset, owned);
  }
  // Where the system refuses to make them writable again, these few addresses are not used any more.
  if (has_memory) {
    recycle(offset, owned, memory);
  } else if (reusable) {
    frames_.vacate_absent_block(offset, memory);
    region(offset).give(offset, owned);
  }
}

void Arena::update_peaks() {
  stats_.peak_new_bytes = std::max(stats_.peak_new_bytes, stats_.new_bytes);
  stats_.peak_in_memory_bytes = std::max(stats_.peak_in_memory_bytes, in_memory_bytes());
  if (stats_.peak_in_memory_bytes > stats_.budget_bytes)
    stats_.over_budget_bytes =
        std::max(stats_.over_budget_bytes, stats_.peak_in_memory_bytes - stats_.budget_bytes);
  const std::uint64_t resident = held_bytes();
  stats_.peak_resident_bytes = std::max(stats_.peak_resident_bytes, resident);
  if (resident > limit_bytes())
    stats_.over_limit_bytes = std::max(stats_.over_limit_bytes, resident - limit_bytes());
}

void Arena::count_in(std::size_t requested_bytes) {
  in_memory_bytes_ += requested_bytes;
  update_peaks();
}

void Arena::set_limits(std::uint64_t limit_bytes, std::uint64_t budget_bytes) {
  const Lock lock(mutex_);
  stats_.limit_bytes = std::min(limit_bytes, kUnlimited);
  stats_.budget_bytes = in_child_ ? kUnlimited : std::min(budget_bytes, kUnlimited);
  hold_at_most(this->limit_bytes());
}

void Arena::disown_all() {
  const Lock lock(mutex_);
  for (auto* block = use_.oldest(); block != nullptr; block = block->newer) {
    if (block->foreign) continue;
    block->foreign = true;
    in_memory_bytes_ -= block->requested_bytes;
    stats_.foreign_bytes += block->requested_bytes;
    foreign_memory_bytes_ += block->memory_bytes;
  }
}

void Arena::own(Block& block) {
  if (!block.foreign) return;
  block.foreign = false;
  in_memory_bytes_ += block.requested_bytes;
  stats_.foreign_bytes -= block.requested_bytes;
  foreign_memory_bytes_ -= block.memory_bytes;
}

bool Arena::own(void* address) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return false;
  own(*block);
  update_peaks();
  return true;
}

void Arena::own_all() {
  const Lock lock(mutex_);
  for (auto* block = use_.oldest(); block != nullptr; block = block->newer) own(*block);
}

bool Arena::set_swap_file(Handle direct, Handle buffered, std::size_t capacity_bytes, std::size_t begin) {
  const Lock lock(mutex_);
  return swap_.set(direct, buffered, capacity_bytes, begin);
}

void Arena::trim() {
  const Lock lock(mutex_);
  hold_at_most(0);
}

void Arena::reset_peak() {
  const Lock lock(mutex_);
  ++resets_;
  stats_.new_bytes = stats_.peak_new_bytes = 0;
  stats_.peak_in_memory_bytes = in_memory_bytes();
  stats_.peak_resident_bytes = held_bytes();
  stats_.over_limit_bytes = stats_.over_budget_bytes = 0;
  stats_.refused_bytes = stats_.system_refused_bytes = 0;
  stats_.write_error = 0;
}

ArenaStats Arena::stats() const {
  const Lock lock(mutex_);
  auto stats = stats_;
  stats.in_memory_bytes = in_memory_bytes();
  stats.resident_bytes = held_bytes();
  stats.swap_used_bytes = swap_.used_bytes();
  return stats;
}

bool Arena::is_at_rest() const {
  const Lock lock(mutex_);
  return stats_.out_bytes == 0 && std::ranges::none_of(blocks_, [](const auto& entry) {
    return entry.second->guarded || !entry.second->is_in();
  });
}

std::optional<ArenaBlock> Arena::block(const void* address) const {
  const Lock lock(mutex_);
  const auto* found = find(address);
  if (found == nullptr) return std::nullopt;
  const auto begin = reinterpret_cast<std::uintptr_t>(address_of(*found));
  if (reinterpret_cast<std::uintptr_t>(address) >= begin + found->capacity_bytes) return std::nullopt;
  return ArenaBlock{begin, found->capacity_bytes, found->serial};
}

}  // namespace penstock
