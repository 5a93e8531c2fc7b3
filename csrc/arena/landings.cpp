// Memory that bytes are read into before they appear in their block.
#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "arena/arena.hpp"

namespace penstock {

bool Arena::take_memory(std::size_t size_bytes, Landing* landing) {
  landing->in_arena = size_bytes >= kLargeBytes && !in_child_;
  landing->size_bytes = landing->in_arena ? round_up(size_bytes, kGrainBytes) : size_bytes;
  return take_place(round_up(size_bytes, kChunkBytes), landing);
}

bool Arena::take_landing(const Block& block, Landing* landing) {
  landing->size_bytes = block.memory_bytes;
  // A child's handler may bring this in: it takes no memory of its own for it.
  landing->in_arena = block.large() && !in_child_;
  return take_place(block.owned_bytes, landing);
}

bool Arena::take_place(std::size_t owned_bytes, Landing* landing) {
  if (landing->in_arena) {
    bool no_addresses = false;
    const auto offset = occupy(owned_bytes, landing->size_bytes, &no_addresses);
    if (offset) landing->address = frames_.base() + *offset;
  } else {
    landing->address = map_scratch(landing->size_bytes);
    if (landing->address != nullptr) scratch_bytes_ += landing->size_bytes;
  }
  return landing->address != nullptr;
}

void Arena::drop_landing(Landing& landing) {
  const auto [address, size_bytes, in_arena, emptied] = std::exchange(landing, {});
  if (address == nullptr || size_bytes == 0) return;  // its memory was lost on the way
  if (!in_arena) {
    unmap_scratch(address, size_bytes);
    if (!emptied) scratch_bytes_ -= size_bytes;
    return;
  }
  const auto offset = static_cast<std::size_t>(address - frames_.base()), owned = round_up(size_bytes, kChunkBytes);
  if (!emptied) return recycle(offset, owned, size_bytes);
  frames_.vacate_absent_block(offset, size_bytes);
  region(offset).give(offset, owned);
}

// Who reads or writes it meanwhile finds zeros, and harms nobody, until it is dropped.
void Arena::empty_landing(Landing& landing) {
  landing.emptied = true;
  if (landing.in_arena) {
    frames_.empty_block(static_cast<std::size_t>(landing.address - frames_.base()), landing.size_bytes);
  } else {
    give_pages(landing.address, landing.size_bytes);
    scratch_bytes_ -= landing.size_bytes;
  }
}

// Who reads or writes it may do so for ever: its memory goes, and nobody gets its addresses.
void Arena::leave_behind(Landing& landing) {
  if (!landing.emptied) empty_landing(landing);
  landing = {};
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
  } else {
    if (block.large() ? !frames_.adopt_block(block.offset, block.memory_bytes, landing.address)
                      : !frames_.take_pages(block.offset, block.memory_bytes, landing.address))
      return errno;
    scratch_bytes_ -= landing.size_bytes;
  }
  landing = {};
  block.place = Block::Place::kIn;
  block.guarded = guarded;
  block.moved_natively = false;
  drop_event(block);
  if (!guard)
    change_bytes(block);
  else if (block.copy->in_memory())
    block.copy = std::shared_ptr(block.copy->below);
  use_.add(block);
  stats_.out_bytes -= block.requested_bytes;
  return 0;
}

Arena::Answer Arena::stage(void* address, bool packed, char** staging) {
  const Lock lock(mutex_);
  require_reserve();
  auto* block = start(address);
  *staging = nullptr;
  if (block == nullptr) return Answer::kUnknown;
  if (!block->is_out() || block->copy->in_swap_file || block->copy->in_memory()) return Answer::kNo;
  if (packed && block->copy->packing.packed_bytes == 0) return Answer::kNo;
  if (block->staging == nullptr) {
    const auto packed_bytes = round_up(block->copy->packing.packed_bytes, kPageBytes);
    const auto size_bytes = packed ? packed_bytes : block->requested_bytes;
    if (pages() && !fits(size_bytes, packed ? size_bytes : block->memory_bytes)) return Answer::kNo;
    Landing landing;
    if (!(packed ? take_memory(size_bytes, &landing) : take_landing(*block, &landing))) return Answer::kNo;
    block->staging = landing.address;
    stagings_[landing.address] = {landing, block->serial, block->copy, size_bytes, packed};
    count_in(size_bytes);
  }
  *staging = block->staging;
  return Answer::kYes;
}

// What is read there is not wanted any more; its addresses stay until whoever reads is done.
void Arena::drop_staging(Staging& staging) {
  of_serial(staging.serial)->staging = nullptr;
  empty_landing(staging.landing);
  in_memory_bytes_ -= std::exchange(staging.counted_bytes, 0);
}

// Of what is staged there.
void Arena::end_staging(char* address) {
  const auto found = stagings_.find(address);
  auto& staging = found->second;
  if (auto* block = of_serial(staging.serial); block != nullptr && block->staging == address) block->staging = nullptr;
  if (staging.landing.address != nullptr) in_memory_bytes_ -= staging.counted_bytes;
  drop_landing(staging.landing);
  stagings_.erase(found);
  changed_.notify();
}

Arena::Answer Arena::arrive(char* address, bool guard, int* error) {
  const Lock lock(mutex_);
  const auto found = stagings_.find(address);
  if (found == stagings_.end()) return Answer::kUnknown;
  auto& staging = found->second;
  auto* const block = of_serial(staging.serial);
  const bool wanted = block != nullptr && block->is_out() && block->copy == staging.copy;
  *error = 0;
  if (block != nullptr) drop_event(*block);  // the answer is newer
  if (wanted && staging.landing.emptied) {
    end_staging(address);
    return Answer::kAsk;
  }
  if (wanted && staging.packed) {
    const auto copy = new_copy(*block);
    copy->packing = block->copy->packing;
    copy->memory = std::exchange(staging.landing, {});
    copy->below = std::exchange(block->copy, copy);
  } else if (wanted) {
    *error = land(*block, staging.landing, guard || in_child_);
  }
  const bool packed = staging.packed;
  end_staging(address);
  if (block == nullptr) return Answer::kNo;
  if (packed) return block->is_out() && block->copy->in_memory() ? Answer::kYes : Answer::kNo;
  if (!guard && block->is_in() && block->guarded) make_writable(*block);  // a fault was faster
  if (*error != 0) return Answer::kError;
  return block->is_in() ? Answer::kYes : Answer::kNo;
}

Arena::Answer Arena::unstage(char* address) {
  const Lock lock(mutex_);
  if (!stagings_.contains(address)) return Answer::kUnknown;
  end_staging(address);
  return Answer::kYes;
}

Arena::Answer Arena::abandon(char* address) {
  const Lock lock(mutex_);
  const auto found = stagings_.find(address);
  if (found == stagings_.end()) return Answer::kUnknown;
  auto& staging = found->second;
  if (!staging.landing.emptied) in_memory_bytes_ -= staging.counted_bytes;
  leave_behind(staging.landing);
  end_staging(address);
  return Answer::kYes;
}

}  // namespace penstock
