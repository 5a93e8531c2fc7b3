// Blocks that leave memory and come back to their address.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "arena/arena.hpp"
#include "nvme/namespaces.hpp"

namespace penstock {

namespace {

// Expands a packed copy that is in memory, whole pages from `memory` on. 0, or an errno.
int expand(const Packing& packing, const char* memory, char* data) {
  io_step("expand");
  const auto* const packed = memory + round_up(packing.packed_bytes, kPageBytes) - packing.packed_bytes;
  return unpack(packing, packed, data) ? 0 : EBADMSG;
}

// Expands what was read to the end of these bytes. 0, or an errno.
int expand(char* data, std::size_t size_bytes, const Packing& packing) {
  const auto scratch_bytes = head_bytes(packing) + 1;
  char* const head = map_scratch(scratch_bytes);
  if (head == nullptr) return ENOMEM;
  const bool whole = unpack_in_place(packing, data, size_bytes, head);
  unmap_scratch(head, scratch_bytes);
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

// The bytes may change from here on: whoever is copying them, or has, has others.
void Arena::change_bytes(Block& block) {
  ++block.version;
  ++block.snapshot;
  if (!in_child_) block.copy.reset();  // a child's handler frees nothing, and in a child no block leaves
}

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
  change_bytes(block);
  return true;
}

Arena::Answer Arena::guard(void* address, std::uint64_t* loan) {
  const Lock lock(mutex_);
  if (loan != nullptr) require_reserve();
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (!block->is_in()) return Answer::kNo;  // even if it is on its way: then it comes with the copy that it has
  if (!block->guarded &&
      !protect_or_undo(address_of(*block), block->memory_bytes, PROT_READ, PROT_READ | PROT_WRITE))
    return Answer::kError;
  block->guarded = true;
  block->watched = block->version;
  // Whoever guards it is about to write a copy, often to the place of the last one: that one counts for nothing while
  // it is written over. Should the block leave meanwhile, what is written may be anything.
  block->copy.reset();
  if (loan != nullptr) *loan = lend_block(*block);
  return Answer::kYes;
}

Arena::Answer Arena::unguard(void* address, int* error) {
  Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  const auto offset = block->offset;
  const auto serial = block->serial;
  while (!block->is_in()) {
    if ((*error = bring_in(lock, offset, serial, Need::kAccess, nullptr, 0)) != 0) return Answer::kError;
    if ((block = again(offset, serial)) == nullptr) return Answer::kUnknown;
  }
  if (!block->guarded || make_writable(*block)) return Answer::kYes;
  *error = errno;
  return Answer::kError;
}

Arena::Answer Arena::written(void* address) const {
  const Lock lock(mutex_);
  const auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  return block->written() ? Answer::kYes : Answer::kNo;
}

std::uint64_t Arena::lend(void* address) {
  const Lock lock(mutex_);
  require_reserve();
  auto* block = start(address);
  return block == nullptr ? 0 : lend_block(*block);
}

std::uint64_t Arena::lend_block(Block& block) {
  loans_[++last_loan_] = {block.serial, block.snapshot};
  ++block.lends;
  return last_loan_;
}

bool Arena::lent_back(std::uint64_t number) {
  const Lock lock(mutex_);
  const auto found = loans_.find(number);
  if (found == loans_.end()) return false;
  const auto loan = found->second;
  loans_.erase(found);
  return end_visit(loan.serial, loan.snapshot);
}

// Whether the block has that snapshot still.
bool Arena::end_visit(std::uint64_t serial, std::uint64_t snapshot) {
  auto* const block = of_serial(serial);
  const bool same = block->snapshot == snapshot;
  if (--block->lends == 0 && block->place == Block::Place::kReleased) end(*block, false);
  return same;
}

// Releases the lock while it reads. 0 if the block is in memory then, or was released; else an errno: ENODATA where it
// was dropped.
int Arena::bring_in(Lock& lock, std::size_t offset, std::uint64_t serial, Need need, char* problem,
                    std::size_t problem_bytes) {
  const auto explain = [&](const char* format, auto... values) {
    if (problem != nullptr) std::snprintf(problem, problem_bytes, format, values...);
  };
  for (;;) {
    auto* block = again(offset, serial);
    if (block == nullptr || block->is_in()) return 0;
    auto* const address = static_cast<void*>(address_of(*block));
    const auto requested = block->requested_bytes, used = used_bytes(*block);
    if (block->is_dropped()) {
      explain("%zu bytes at %p were dropped, and are computed in no other process", requested, address);
      return ENODATA;
    }
    if (block->moving != Block::Moving::kNot) {
      changed_.wait(lock);
      continue;
    }
    const Motion reading(*this, *block, Block::Moving::kReading);
    const bool room = make_room(lock, requested, block->memory_bytes, need);
    block = again(offset, serial);
    if (block == nullptr || !block->is_out()) continue;  // somebody else was faster
    Landing landing;
    const bool refused = !room && !is_fault(need);
    if (refused || !take_landing(*block, &landing)) {
      (refused ? stats_.refused_bytes : stats_.system_refused_bytes) = requested;
      explain("there is no memory for %zu bytes at %p", requested, address);
      return ENOMEM;
    }
    count_in(requested);
    ++reads_;
    const auto copy = block->copy;  // let go with the lock held
    const auto direct = copy->in_swap_file ? swap_.direct() : Handle{-1}, buffered = swap_.buffered();
    const bool from_memory = copy->in_memory();
    const char* const packed = from_memory ? copy->memory.address : nullptr;
    const Segment* failed = nullptr;
    int error = ENOMEM;
    bool abandoned = false;
    {
      const Unlocked unlocked(lock);
      try {
        error = from_memory ? expand(copy->packing, packed, landing.address)
                            : read_segments(copy->segments, direct, buffered, landing.address, &failed, &abandoned);
        if (error == 0 && !from_memory && copy->packing.packed_bytes != 0)
          error = expand(landing.address, used, copy->packing);
      } catch (const std::bad_alloc&) {
      } catch (...) {
        error = EIO;
      }
    }
    const bool stale = error == 0 && in_child_ && !from_memory && given_up(serial);
    if (stale) error = ESTALE;
    --reads_;
    block = again(offset, serial);
    const bool wanted = block != nullptr && block->is_out() && block->copy == copy;
    if (wanted && error == 0) error = land(*block, landing, true);
    if (landing.address != nullptr) {
      if (abandoned) leave_behind(landing);
      drop_landing(landing);
      in_memory_bytes_ -= requested;
    } else if (!from_memory) {
      stats_.swapped_in_bytes += requested;
    }
    if (!wanted || error == 0) continue;  // it is in, or released, or its copy is another one now
    if (stale)
      explain("%zu bytes at %p were out of memory at fork(), and the parent has written others in their place since: "
              "touch them in the parent before it forks",
              requested, address);
    else if (failed != nullptr && problem != nullptr)
      describe(*block, static_cast<char*>(address), *failed, error, problem, problem_bytes);
    else
      explain("%zu bytes at %p cannot be mapped: %s", requested, address, std::strerror(error));
    return error;
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
  constexpr int kMostRounds = 100;
  Lock lock(mutex_);
  for (int round = 0; round < kMostRounds; ++round) {
    std::vector<std::pair<std::size_t, std::uint64_t>> all;
    for (const auto& [serial, block] : blocks_)
      if (block->is_out() || (block->is_in() && (block->guarded || block->copy))) all.emplace_back(block->offset, serial);
    for (const auto& [offset, serial] : all) {
      const int error = bring_in(lock, offset, serial, Need::kAccess, nullptr, 0);
      if (error != 0 && error != ENODATA) return error;
      auto* block = again(offset, serial);
      if (block == nullptr || !block->is_in()) continue;
      if ((block->guarded || block->copy) && !make_writable(*block)) return errno;
    }
    // What another thread was writing has left now, unless it noticed.
    while (writes_ > 0) changed_.wait(lock);
    if (std::ranges::none_of(blocks_, [](const auto& entry) { return entry.second->is_out(); })) return 0;
  }
  return EBUSY;
}

Arena::Answer Arena::state(void* address, State* state) const {
  const Lock lock(mutex_);
  const auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (block->is_in())
    *state = block->guarded ? State::kGuarded : State::kIn;
  else if (block->is_dropped())
    *state = State::kDropped;
  else
    *state = block->staging != nullptr ? State::kStaged : State::kOut;
  return Answer::kYes;
}

Arena::Answer Arena::drop(void* address) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (!block->is_in() || block->holds > 0 || in_child_ || !paging_problem_.empty()) return Answer::kNo;
  if (!put_out(*block, false)) return Answer::kError;
  block->place = Block::Place::kDropped;
  change_bytes(*block);
  return Answer::kYes;
}

Arena::Answer Arena::take(void* address, void* from, int* error) {
  Lock lock(mutex_);
  auto* block = start(address);
  auto* other = start(from);
  if (block == nullptr || other == nullptr) return Answer::kUnknown;
  if (!block->is_dropped() || block == other || block->requested_bytes != other->requested_bytes) return Answer::kNo;
  const auto offset = block->offset, other_offset = other->offset;
  const auto serial = block->serial, other_serial = other->serial;
  while (!other->is_in()) {  // the arena needed its memory just now
    *error = bring_in(lock, other_offset, other_serial, Need::kAccess, nullptr, 0);
    if (*error != 0) return *error == ENODATA ? Answer::kNo : Answer::kError;
    block = again(offset, serial);
    other = again(other_offset, other_serial);
    if (block == nullptr || other == nullptr) return Answer::kUnknown;
    if (!block->is_dropped() || other->is_dropped()) return Answer::kNo;
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
  drop_event(*other);
  use_.remove(*other);
  own(*other);
  other->place = Block::Place::kDropped;
  other->guarded = false;
  change_bytes(*other);
  if (!moved) {
    in_memory_bytes_ -= requested;
    stats_.out_bytes += requested;
    return Answer::kError;
  }
  drop_event(*block);
  use_.add(*block);
  block->place = Block::Place::kIn;
  block->guarded = guarded;
  change_bytes(*block);
  changed_.notify();
  return Answer::kYes;
}

Arena::Answer Arena::keep_for(void* address, int change, int* error) {
  const Lock lock(mutex_);
  auto* block = start(address);
  if (block == nullptr) return Answer::kUnknown;
  if (change > 0 && block->is_in() && !block->guarded) {
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
  auto* block = find_any(address);
  if (block == nullptr) return Answer::kUnknown;
  if (block->place == Block::Place::kReleased) return Answer::kNo;  // it can be read since
  const auto offset = block->offset;
  const auto serial = block->serial;
  bool served = false;
  if (!block->is_in()) {
    const auto need = need_of(history, *block);
    const int error = bring_in(lock, offset, serial, need, problem, problem_bytes);
    if (error == ENODATA && !in_child_) return Answer::kAsk;
    if (error != 0) return Answer::kError;
    block = again(offset, serial);
    if (block == nullptr) return Answer::kNo;
    block->faulted_ns = now_ns();
    if (block->is_in() && !in_child_) record_event(*block, Block::Event::kIn);
    served = true;
  }
  if (is_write && block->is_in() && block->guarded) {
    if (is_recipe(*block)) return Answer::kAsk;
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
