// Blocking reads and writes of namespaces, for the arena, which has no thread for callbacks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io/io.hpp"

namespace penstock::nvme {

// Starts the threads that carry them out; idempotent. They never touch Python. False if the system refuses them.
bool prepare_to_wait();

// What must not be reused yet after a move has ended.
struct StillInUse {
  bool abandoned = false;  // the memory: it may be read or written for ever
  double may_land_s = 0;  // the place, for so long: a lost write may still be carried out
};

// Moves all of it; 0, or an errno. What is written is whole blocks, from memory that stays as it is. A forked child
// has no connections: a thread of its parent reads for it, into shared memory; ESTALE where the parent has ended, and
// for writes. In a child it allocates nothing, and takes no lock that the fork may have left held.
int move_and_wait(bool write, Handle handle, std::byte* address, std::size_t size_bytes, std::uint64_t offset,
                  StillInUse* in_use = nullptr);

}  // namespace penstock::nvme
