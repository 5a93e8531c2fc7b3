// Blocks that leave memory and come back to their address.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "arena/arena.hpp"
#include "nvme/namespaces.hpp"

namespace penstock {

namespace {

// The pages of what was asked for.
std::size_t used_bytes(const Block& block) { return round_up(block.requested_bytes, kPageBytes); }

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

// Expands a packed copy that is in memory. 0, or an errno.
int expand(const Copy& copy, char* data) {
  const auto packed_bytes = copy.packing.packed_bytes;
  const auto* const packed = copy.memory.address + round_up(packed_bytes, kPageBytes) - packed_bytes;
  return unpack(copy.packing, packed, data) ? 0 : EBADMSG;
}

// Expands what was read to the end of these bytes. 0, or an errno.
int expand(char* data, std::size_t size_bytes, const Packing& packing) {
  const auto scratch_bytes = head_bytes(packing) + 1;
  char* const head = map_scratch(scratch_bytes);
  if (head == nullptr) return ENOMEM;
  const bool whole = unpack_in_place(packing, data, size_bytes, head);
  munmap(head, scratch_bytes);
  return whole ? 0 : EBADMSG;
}

void describe(const Block& block, const char* address, const Segment& segment, int error, char* text,
              std::size_t text_bytes) {
  if (is_namespace(segment.file)) {
    const auto found = error == ESTALE ? nullptr : nvme::find_namespace(segment.file);
    const auto why = found ? found->error() : std::string();
    std::snprintf(text, text_bytes, "%zu bytes at %p cannot be read back from offset %llu of a namespace: %s",
                  block.requested_bytes, static_cast<const void*>(address),
                  static_cast<unsigned long long>(segment.file_offset),
                  error == ESTALE ? "the process that opened it has ended; touch tensors in the parent before it forks"
                  : why.empty() ? std::strerror(error)
                                : why.c_str());
    return;
  }
  char path[256];
  char link[32];
  std::snprintf(link, sizeof(link), "/proc/self/fd/%d", static_cast<int>(segment.file));
  const auto length = readlink(link, path, sizeof(path) - 1);
  path[std::max<ssize_t>(length, 0)] = 0;
  std::snprintf(text, text_bytes, "%zu bytes at %p cannot be read back from offset %llu of %s: %s",
                block.requested_bytes, static_cast<const void*>(address),
                static_cast<unsigned long long>(segment.file_offset), length > 0 ? path : "a file that is closed",
                std::strerror(error));
}

}  // namespace

// A block that a recipe needs stays guarded.
bool Arena::make_writable(Block& block) {
  const auto unprotect = [&] {
    return protect_or_undo(address_of(block), block.memory_bytes, PROT_READ | PROT_WRITE, PROT_READ);
  };
  if (!is_recipe(block)) {
    if (!unprotect()) {
      if (in_child_) return false;
      hold_at_most(0);  // where the process's data is limited, free memory counts as well
      if (!unprotect()) return false;
    }
    block.guarded = false;
  }
  block.written = block.dirtied = true;
  if (!in_child_) block.copy.reset();  // a child's handler frees nothing, and in a child no block leaves
  return true;
}

Arena::Answer Arena::guard(void* address) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (block->in_memory && !block->guarded &&
      !protect_or_undo(address_of(*block), block->memory_bytes, PROT_READ, PROT_READ | PROT_WRITE))
    return Answer::kError;
  block->guarded = block->in_memory;
  block->written = false;
  // Whoever guards it is about to write a copy, often to the place of the last one: that one counts for nothing while
  // it is written over. Should the block leave meanwhile, what is written may be anything.
  if (block->in_memory) block->copy.reset();
  return Answer::kYes;
}

Arena::Answer Arena::unguard(void* address, int* error) {
  Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  const auto offset = block->offset;
  const auto serial = block->serial;
  while (!block->in_memory) {
    if ((*error = bring_in(lock, offset, serial, Need::kAccess, nullptr, 0)) != 0) return Answer::kError;
    if ((block = again(offset, serial)) == nullptr) return Answer::kUnknown;
  }
  block->written = true;
  if (!block->guarded || make_writable(*block)) return Answer::kYes;
  *error = errno;
  return Answer::kError;
}

Arena::Answer Arena::written(void* address) const {
  const Lock lock(mutex_);
  const auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  return block->written ? Answer::kYes : Answer::kNo;
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
  if (block->written || block->dropped || in_child_) return Answer::kNo;
  auto copy = hold({.segments = std::move(segments), .packing = packing, .serial = block->serial});
  std::swap(block->copy, copy);
  if (!block->in_memory) {  // the arena was faster, and nothing was written since guard
    block->moved_natively = false;
    return Answer::kYes;
  }
  if (put_out(*block, false)) return Answer::kYes;
  *error = errno;
  std::swap(block->copy, copy);
  return Answer::kError;
}

std::shared_ptr<const Copy> Arena::pack(void* address, Codec codec, std::size_t itemsize) {
  Lock lock(mutex_);
  const auto* block = start(address);
  if (block == nullptr || !block->in_memory || itemsize == 0 || block->requested_bytes % itemsize != 0) return nullptr;
  const auto elements = block->requested_bytes / itemsize, used = used_bytes(*block);
  const auto serial = block->serial;
  // What another thread writes or lets leave meanwhile is served by a fault, or noticed by leave_packed.
  lock.unlock();
  const auto packed_bytes = packed_size(codec, address, elements, itemsize);
  lock.lock();
  const auto size_bytes = round_up(packed_bytes, kPageBytes);
  Landing memory;
  if (packed_bytes == 0 || size_bytes >= used || (pages() && !fits(size_bytes, size_bytes)) || !take_memory(size_bytes, &memory))
    return nullptr;
  count_in(size_bytes);
  auto copy = hold({.packing = {packed_bytes, elements, itemsize, codec}, .memory = memory, .serial = serial});
  lock.unlock();
  const bool whole = penstock::pack(copy->packing, address, memory.address + size_bytes - packed_bytes);
  lock.lock();
  if (!whole) copy.reset();
  return copy;
}

Arena::Answer Arena::leave_packed(void* address, std::shared_ptr<const Copy> packed, int* error) {
  const Lock lock(mutex_);
  const auto copy = std::move(packed);  // let go with the lock held
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (block->written || in_child_ || block->serial != copy->serial) return Answer::kNo;
  auto before = std::exchange(block->copy, copy);
  if (!block->in_memory) {  // the arena was faster, and nothing was written since guard
    block->moved_natively = false;
    return Answer::kYes;
  }
  if (put_out(*block, false)) return Answer::kYes;
  *error = errno;
  std::swap(block->copy, before);
  return Answer::kError;
}

Arena::Answer Arena::packed_written(void* address, const std::shared_ptr<const Copy>& packed,
                                    std::vector<Segment> segments, bool keeps) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (!cover(segments, *block, packed->packing)) return Answer::kError;
  auto copy = hold({.segments = std::move(segments), .packing = packed->packing, .serial = block->serial});
  if (block->in_memory) {
    if (block->written) return Answer::kNo;
    block->copy = copy;
    return Answer::kYes;
  }
  if (block->copy != packed) return Answer::kNo;
  packed->below = copy;
  if (keeps || block->reading) return Answer::kYes;
  block->copy = copy;
  drop_memory(*packed);
  return Answer::kYes;
}

Arena::Answer Arena::drop_packed(void* address) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (block->in_memory || block->dropped || block->reading || !block->copy->in_memory() || !block->copy->below)
    return Answer::kNo;
  const auto packed = std::exchange(block->copy, std::shared_ptr(block->copy->below));
  drop_memory(*packed);
  return Answer::kYes;
}

void Arena::let_go(std::shared_ptr<const Copy> copy) {
  const Lock lock(mutex_);
  copy.reset();
}

bool Arena::take_memory(std::size_t size_bytes, Landing* landing) {
  landing->in_arena = size_bytes >= kLargeBytes && !in_child_;
  landing->size_bytes = landing->in_arena ? round_up(size_bytes, kGrainBytes) : size_bytes;
  if (landing->in_arena) {
    bool no_addresses = false;
    const auto offset = occupy(round_up(size_bytes, kChunkBytes), landing->size_bytes, &no_addresses);
    if (offset) landing->address = frames_.base() + *offset;
  } else {
    landing->address = map_scratch(size_bytes);
    if (landing->address != nullptr) scratch_bytes_ += size_bytes;
  }
  return landing->address != nullptr;
}

bool Arena::take_landing(const Block& block, Landing* landing) {
  landing->size_bytes = block.memory_bytes;
  // A child's handler may bring this in: it takes no memory of its own for it.
  landing->in_arena = block.large() && !in_child_;
  if (!landing->in_arena) {
    landing->address = map_scratch(landing->size_bytes);
    if (landing->address == nullptr) return false;
    scratch_bytes_ += landing->size_bytes;
    return true;
  }
  bool no_addresses = false;
  const auto offset = occupy(block.owned_bytes, block.memory_bytes, &no_addresses);
  if (offset) landing->address = frames_.base() + *offset;
  return offset.has_value();
}

void Arena::drop_landing(Landing& landing) {
  if (landing.size_bytes == 0) {
    // Its memory was lost on the way.
  } else if (landing.in_arena) {
    const auto offset = static_cast<std::size_t>(landing.address - frames_.base());
    recycle(offset, round_up(landing.size_bytes, kChunkBytes), landing.size_bytes);
  } else {
    munmap(landing.address, landing.size_bytes);
    scratch_bytes_ -= landing.size_bytes;
  }
  landing = {};
}

void Arena::drop_staging(Block& block) {
  if (block.staging.address == nullptr) return;
  drop_landing(block.staging);
  block.staged_copy.reset();
  in_memory_bytes_ -= block.staged_bytes;
  changed_.notify();
}

// The bytes appear at the block's address, all at once for each run of frames, and right from the first.
// Without `guard`, its copy is given up. 0, or an errno; then the block is still out.
int Arena::land(Block& block, Landing& landing, bool guard) {
  const bool guarded = guard || is_recipe(block);
  if (guarded && !protect_or_undo(landing.address, landing.size_bytes, PROT_READ, PROT_READ | PROT_WRITE)) return errno;
  if (landing.in_arena) {
    const auto from = static_cast<std::size_t>(landing.address - frames_.base());
    const bool moved = frames_.transfer_block(from, block.offset, block.memory_bytes);
    const int error = errno;
    frames_.vacate_block(from, block.memory_bytes);  // only its addresses are left
    region(from).give(from, block.owned_bytes);
    if (!moved) {
      landing.size_bytes = 0;
      return error;
    }
    landing = {};
  } else {
    if (block.large() ? !frames_.adopt_block(block.offset, block.memory_bytes, landing.address)
                      : !frames_.take_pages(block.offset, block.memory_bytes, landing.address))
      return errno;
    scratch_bytes_ -= landing.size_bytes;
    landing = {};
  }
  block.in_memory = true;
  block.guarded = guarded;
  block.moved_natively = false;
  if (!guard) {
    block.written = block.dirtied = true;
    block.copy.reset();
  } else if (block.copy->in_memory()) {
    block.copy = std::shared_ptr(block.copy->below);
  }
  use_.add(block);
  stats_.out_bytes -= block.requested_bytes;
  return 0;
}

// Releases the lock while it reads. 0 if the block is in memory then, or was released; else an errno.
int Arena::bring_in(Lock& lock, std::size_t offset, std::uint64_t serial, Need need, char* problem,
                    std::size_t problem_bytes) {
  for (;;) {
    auto* block = again(offset, serial);
    if (block == nullptr || block->in_memory) return 0;
    if (block->dropped) {
      if (problem != nullptr)
        std::snprintf(problem, problem_bytes, "%zu bytes at %p were dropped, and are computed in no other process",
                      block->requested_bytes, static_cast<void*>(address_of(*block)));
      return ENODATA;
    }
    if (block->reading) {
      changed_.wait(lock);
      continue;
    }
    block->reading = true;
    const auto requested = block->requested_bytes, used = used_bytes(*block);
    const bool room = make_room(lock, requested, block->memory_bytes, need);
    block = again(offset, serial);
    if (block == nullptr) return 0;
    const auto stop = [&](int error) {
      block->reading = false;
      changed_.notify();
      return error;
    };
    if (block->in_memory) return stop(0);
    Landing landing;
    const bool refused = !room && !is_fault(need);
    if (refused || !take_landing(*block, &landing)) {
      (refused ? stats_.refused_bytes : stats_.system_refused_bytes) = requested;
      if (problem != nullptr)
        std::snprintf(problem, problem_bytes, "there is no memory for %zu bytes at %p", requested,
                      static_cast<void*>(address_of(*block)));
      return stop(ENOMEM);
    }
    count_in(requested);
    ++reads_;
    auto copy = block->copy;  // let go with the lock held
    const auto direct = copy->in_swap_file ? swap_.direct() : Handle{-1}, buffered = swap_.buffered();
    lock.unlock();
    const Segment* failed = nullptr;
    const bool from_memory = copy->in_memory();
    int error = from_memory ? expand(*copy, landing.address)
                            : read_segments(copy->segments, direct, buffered, landing.address, &failed);
    if (error == 0 && !from_memory && copy->packing.packed_bytes != 0)
      error = expand(landing.address, used, copy->packing);
    lock.lock();
    const bool stale = error == 0 && in_child_ && !from_memory && given_up(serial);
    if (stale) error = ESTALE;
    --reads_;
    block = again(offset, serial);
    const bool wanted = block != nullptr && !block->in_memory && block->copy == copy;
    if (wanted && error == 0) error = land(*block, landing, true);
    if (landing.address != nullptr) {
      drop_landing(landing);
      in_memory_bytes_ -= requested;
    } else {
      if (!from_memory) stats_.swapped_in_bytes += requested;
    }
    if (block == nullptr) {
      changed_.notify();
      return 0;
    }
    if (wanted && error != 0) {
      if (problem != nullptr && stale)
        std::snprintf(problem, problem_bytes,
                      "%zu bytes at %p were out of memory at fork(), and the parent has written others in their place "
                      "since: touch them in the parent before it forks",
                      requested, static_cast<void*>(address_of(*block)));
      else if (problem != nullptr && failed != nullptr)
        describe(*block, address_of(*block), *failed, error, problem, problem_bytes);
      else if (problem != nullptr)
        std::snprintf(problem, problem_bytes, "%zu bytes at %p cannot be mapped: %s", requested,
                      static_cast<void*>(address_of(*block)), std::strerror(error));
      return stop(error);
    }
    stop(0);  // in memory, or its copy is another one now
  }
}

Arena::Answer Arena::bring_in(void* address, int* error) {
  Lock lock(mutex_);
  const auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  *error = bring_in(lock, block->offset, block->serial, Need::kAccess, nullptr, 0);
  return *error == 0 ? Answer::kYes : Answer::kError;
}

int Arena::bring_in_all() {
  Lock lock(mutex_);
  std::vector<std::pair<std::size_t, std::uint64_t>> all;
  for (const auto& [serial, block] : blocks_)
    if (!block->dropped) all.emplace_back(block->offset, serial);
  for (const auto& [offset, serial] : all) {
    const int error = bring_in(lock, offset, serial, Need::kAccess, nullptr, 0);
    if (error != 0) return error;
    auto* block = again(offset, serial);
    if (block == nullptr || !block->in_memory) continue;
    if ((block->guarded || block->copy) && !make_writable(*block)) return errno;
  }
  return 0;
}

Arena::Answer Arena::stage(void* address, bool packed, char** staging) {
  const Lock lock(mutex_);
  auto* block = start(address);
  *staging = nullptr;
  if (block == nullptr) return Answer::kUnknown;
  if (block->in_memory || block->dropped || block->copy->in_swap_file) return Answer::kNo;
  if (packed && (block->copy->in_memory() || block->copy->packing.packed_bytes == 0)) return Answer::kNo;
  if (block->staging.address == nullptr) {
    const auto packed_bytes = round_up(block->copy->packing.packed_bytes, kPageBytes);
    const auto size_bytes = packed ? packed_bytes : block->requested_bytes;
    if (pages() && !fits(size_bytes, packed ? size_bytes : block->memory_bytes)) return Answer::kNo;
    if (!(packed ? take_memory(size_bytes, &block->staging) : take_landing(*block, &block->staging))) {
      block->staging = {};
      return Answer::kNo;
    }
    block->staged_copy = block->copy;
    block->staged_bytes = size_bytes;
    block->staged_packed = packed;
    count_in(size_bytes);
  }
  *staging = block->staging.address;
  return Answer::kYes;
}

Arena::Answer Arena::arrive(void* address, bool guard, int* error) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  *error = block->staging.address == nullptr ? EINVAL : 0;
  if (*error == 0 && block->staged_packed) {
    if (!block->in_memory && block->copy == block->staged_copy) {
      const auto& packing = block->copy->packing;
      auto copy = hold({.packing = packing, .memory = block->staging, .below = block->copy, .serial = block->serial});
      block->staging = {};
      block->copy = std::move(copy);
      block->staged_copy.reset();
    }
    drop_staging(*block);
    return !block->in_memory && block->copy->in_memory() ? Answer::kYes : Answer::kNo;
  }
  if (*error == 0 && !block->in_memory && block->copy == block->staged_copy) {
    *error = land(*block, block->staging, guard || in_child_);
    if (*error == 0) block->staged_copy.reset();
  }
  drop_staging(*block);
  if (!guard && block->in_memory && block->guarded) make_writable(*block);  // a fault was faster
  if (*error != 0) return Answer::kError;
  return block->in_memory ? Answer::kYes : Answer::kNo;
}

Arena::Answer Arena::unstage(void* address) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  drop_staging(*block);
  return Answer::kYes;
}

Arena::Answer Arena::state(void* address, State* state) const {
  const Lock lock(mutex_);
  const auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (block->in_memory)
    *state = block->guarded ? State::kGuarded : State::kIn;
  else if (block->dropped)
    *state = State::kDropped;
  else
    *state = block->staging.address != nullptr ? State::kStaged : State::kOut;
  return Answer::kYes;
}

Arena::Answer Arena::forget_copy(void* address, int* error) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (!block->in_memory) return Answer::kNo;
  if (make_writable(*block)) return Answer::kYes;
  *error = errno;
  return Answer::kError;
}

Arena::Answer Arena::drop(void* address) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (!block->in_memory || in_child_ || !paging_problem_.empty()) return Answer::kNo;
  if (!put_out(*block, false)) return Answer::kError;
  block->copy.reset();
  block->written = block->dropped = true;
  return Answer::kYes;
}

Arena::Answer Arena::take(void* address, void* from, int* error) {
  Lock lock(mutex_);
  auto* block = start(address);
  auto* other = start(from);
  if (block == nullptr || other == nullptr) return Answer::kUnknown;
  if (!block->dropped || block == other || block->requested_bytes != other->requested_bytes) return Answer::kNo;
  const auto offset = block->offset, other_offset = other->offset;
  const auto serial = block->serial, other_serial = other->serial;
  while (!other->in_memory || other->writing) {  // the arena needed its memory just now
    if (other->in_memory)
      changed_.wait(lock);
    else if ((*error = bring_in(lock, other_offset, other_serial, Need::kAccess, nullptr, 0)) != 0)
      return Answer::kError;
    block = again(offset, serial);
    other = again(other_offset, other_serial);
    if (block == nullptr || other == nullptr) return Answer::kUnknown;
    if (!block->dropped || other->dropped) return Answer::kNo;
  }
  const auto requested = block->requested_bytes;
  const bool guarded = is_recipe(*block);
  if (!protect(address_of(*other), other->memory_bytes, guarded ? PROT_READ : PROT_READ | PROT_WRITE)) {
    *error = errno;
    return Answer::kError;
  }
  const bool moved = block->large() ? frames_.transfer_block(other_offset, offset, other->memory_bytes)
                                    : frames_.transfer_pages(other_offset, offset, other->owned_bytes);
  *error = errno;
  use_.remove(*other);
  other->copy.reset();
  other->in_memory = other->guarded = false;
  other->written = other->dropped = true;
  if (!moved) {
    in_memory_bytes_ -= requested;
    stats_.out_bytes += requested;
    return Answer::kError;
  }
  use_.add(*block);
  block->in_memory = true;
  block->guarded = guarded;
  block->written = true;
  block->dropped = false;
  changed_.notify();
  return Answer::kYes;
}

Arena::Answer Arena::keep_for(void* address, int change, int* error) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (change > 0 && block->in_memory && !block->guarded) {
    if (!protect_or_undo(address_of(*block), block->memory_bytes, PROT_READ, PROT_READ | PROT_WRITE)) {
      *error = errno;
      return Answer::kError;
    }
    block->guarded = true;
  }
  block->recipes += static_cast<std::uint32_t>(change);
  return Answer::kYes;
}

Arena::Answer Arena::serve_fault(const void* address, bool is_write, FaultHistory& history, char* problem,
                                 std::size_t problem_bytes) {
  Lock lock(mutex_);
  auto* block = find(address);
  if (block == nullptr) return Answer::kUnknown;
  const auto offset = block->offset;
  const auto serial = block->serial;
  bool served = false;
  if (!in_child_ && (block->dropped || (is_write && block->in_memory && block->recipes != 0))) return Answer::kAsk;
  if (!block->in_memory) {
    const auto need = need_of(history, *block);
    if (bring_in(lock, offset, serial, need, problem, problem_bytes) != 0) return Answer::kError;
    block = again(offset, serial);
    if (block == nullptr) return Answer::kNo;
    block->faulted_ns = now_ns();
    if (block->in_memory && !in_child_) note_event(*block, Block::Event::kIn);
    served = true;
  }
  if (is_write && block->in_memory && block->guarded) {
    if (!make_writable(*block)) {
      std::snprintf(problem, problem_bytes, "%zu bytes at %p cannot be made writable: %s", block->requested_bytes,
                    static_cast<void*>(address_of(*block)), std::strerror(errno));
      return Answer::kError;
    }
    served = true;
  }
  stats_.faults += served;
  return served ? Answer::kYes : Answer::kNo;
}

}  // namespace penstock
