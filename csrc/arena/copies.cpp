// Copies of blocks: in files, in the swap file, and packed in memory.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "arena/arena.hpp"

namespace penstock {

namespace {

// Whether the segments lie inside the block and hold all that was asked for, or all of the packed bytes.
bool cover(std::vector<Segment> segments, const Block& block, const Packing& packing) {
  if (packing.packed_bytes > used_bytes(block)) return false;
  if (packing.packed_bytes != 0 && packing.elements * packing.itemsize != block.requested_bytes) return false;
  std::ranges::sort(segments, {}, &Segment::begin);
  std::size_t held = packing.packed_bytes == 0 ? 0 : used_bytes(block) - packing.packed_bytes;
  for (const auto& segment : segments) {
    if (segment.begin > block.capacity_bytes || segment.size_bytes > block.capacity_bytes - segment.begin)
      return false;
    if (segment.begin > held) return false;
    held = std::max(held, segment.begin + segment.size_bytes);
  }
  return held >= (packing.packed_bytes == 0 ? block.requested_bytes : used_bytes(block));
}

}  // namespace

// Whoever lets go of the last reference holds the lock. What it is of, and where, is filled in by who made it.
std::shared_ptr<Copy> Arena::new_copy(const Block& block) {
  std::unique_ptr<Copy> made(new Copy);
  made->serial = block.serial;
  made->version = block.version;
  made->forks = forks_;
  auto end = [this](const Copy* copy) { end_copy(copy); };
  std::unique_ptr<Copy, decltype(end)> owned(made.release(), end);
  return owned;
}

void Arena::end_copy(const Copy* copy) {
  if (copy->memory.address != nullptr) {  // a child has one of its own
    drop_memory(*copy);
  } else if (copy->forks < forks_ && !in_child_) {
    const auto i = copy->serial % kGivenUpCounts;
    ++given_up_here_[i];
    ++given_up_now_[i];  // before anything else can be written there
  }
  if (copy->in_swap_file) swap_.give(copy->segments[0].file_offset, copy->segments[0].size_bytes);
  delete copy;
}

bool Arena::given_up(std::uint64_t serial) const {
  return given_up_now_[serial % kGivenUpCounts] != given_up_here_[serial % kGivenUpCounts];
}

// Null where the swap file has no room.
std::shared_ptr<Copy> Arena::new_swap_copy(const Block& block, std::size_t size_bytes) {
  auto copy = new_copy(block);
  copy->segments.resize(1);
  const auto extent = swap_.take(size_bytes);
  if (!extent) return nullptr;
  copy->segments[0] = {swap_.buffered(), *extent, 0, size_bytes};
  copy->in_swap_file = true;
  return copy;
}

void Arena::drop_memory(const Copy& copy) {
  if (!copy.memory.emptied) in_memory_bytes_ -= round_up(copy.packing.packed_bytes, kPageBytes);
  drop_landing(copy.memory);
  changed_.notify();
}

// A block that was not written since guard leaves for a copy of what it held then.
Arena::Answer Arena::leave_for(Block& block, std::shared_ptr<const Copy> copy, int* error) {
  if (block.written() || block.is_dropped() || block.holds > 0 || in_child_) return Answer::kNo;
  std::swap(block.copy, copy);
  if (!block.is_in()) {  // the arena was faster
    block.moved_natively = false;
    drop_event(block);
    return Answer::kYes;
  }
  if (put_out(block, false)) return Answer::kYes;
  *error = errno;
  std::swap(block.copy, copy);
  return Answer::kError;
}

Arena::Answer Arena::leave(void* address, std::vector<Segment> segments, int* error, const Packing& packing) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (!cover(segments, *block, packing)) {
    *error = EINVAL;
    return Answer::kError;
  }
  if (!paging_problem_.empty()) {
    *error = ENOSYS;
    return Answer::kError;
  }
  const auto copy = new_copy(*block);
  copy->segments = std::move(segments);
  copy->packing = packing;
  return leave_for(*block, copy, error);
}

std::shared_ptr<const Copy> Arena::pack(void* address, Codec codec, std::size_t itemsize) {
  Lock lock(mutex_);
  require_reserve();
  auto* block = start(address);
  // What is writable may change between two bytes.
  if (block == nullptr || !block->guarded || itemsize == 0 || block->requested_bytes % itemsize != 0) return nullptr;
  const auto elements = block->requested_bytes / itemsize, used = used_bytes(*block);
  const auto copy = new_copy(*block);
  // What another thread writes or lets leave meanwhile is served by a fault, or noticed by leave_packed. What it
  // releases stays readable.
  const Visit visit(*this, *block);
  std::size_t packed_bytes = 0;
  {
    const Unlocked unlocked(lock);
    io_step("measure");
    packed_bytes = packed_size(codec, address, elements, itemsize);
  }
  const auto size_bytes = round_up(packed_bytes, kPageBytes);
  if (packed_bytes == 0 || size_bytes >= used || (pages() && !fits(size_bytes, size_bytes)) ||
      !take_memory(size_bytes, &copy->memory))
    return nullptr;
  copy->packing = {packed_bytes, elements, itemsize, codec};
  count_in(size_bytes);
  auto* const end = copy->memory.address + size_bytes;
  bool whole = false;
  {
    const Unlocked unlocked(lock);
    io_step("pack");
    whole = penstock::pack(copy->packing, address, end - packed_bytes);
  }
  if (!whole) return nullptr;
  return copy;
}

Arena::Answer Arena::leave_packed(void* address, std::shared_ptr<const Copy> packed, int* error) {
  const Lock lock(mutex_);
  const auto copy = std::move(packed);  // let go with the lock held
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (block->serial != copy->serial || block->version != copy->version) return Answer::kNo;
  return leave_for(*block, copy, error);
}

Arena::Answer Arena::packed_written(void* address, const std::shared_ptr<const Copy>& packed,
                                    std::vector<Segment> segments, bool keeps) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (!cover(segments, *block, packed->packing)) return Answer::kError;
  const auto copy = new_copy(*block);
  copy->segments = std::move(segments);
  copy->packing = packed->packing;
  if (block->is_in()) {
    if (block->serial != packed->serial || block->version != packed->version || !block->guarded) return Answer::kNo;
    block->copy = copy;
    return Answer::kYes;
  }
  if (block->copy != packed) return Answer::kNo;
  packed->below = copy;
  if (keeps || block->moving == Block::Moving::kReading) return Answer::kYes;
  block->copy = copy;
  drop_memory(*packed);
  return Answer::kYes;
}

Arena::Answer Arena::drop_packed(void* address) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (!block->is_out() || block->moving == Block::Moving::kReading || !block->copy->in_memory() || !block->copy->below)
    return Answer::kNo;
  const auto packed = std::exchange(block->copy, std::shared_ptr(block->copy->below));
  drop_memory(*packed);
  return Answer::kYes;
}

void Arena::let_go(std::shared_ptr<const Copy> copy) {
  const Lock lock(mutex_);
  copy.reset();
}

char* Arena::packed_address(const Copy& packed) const {
  const Lock lock(mutex_);
  return packed.in_memory() ? packed.memory.address : nullptr;
}

}  // namespace penstock
