// Reads and writes of namespaces for who can only wait: the arena, which has no thread to come back with.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io/io.hpp"

namespace penstock::nvme {

// Has the threads that carry them out; idempotent. They never touch Python. False if the system refuses them.
bool prepare_to_wait();

// What a move leaves behind that is over, and its memory and place may be used for something else.
struct Remains {
  bool abandoned = false;  // not the memory: it may be read or written for ever
  double unsettled_s = 0;  // not the place, for so long: a write that was lost may land there yet
};

// Moves all of it; 0, or an errno. What is written is whole blocks, from memory that stays as it is. A forked child
// has no connections: for it a thread of its parent's reads, into memory that they share; ESTALE where that has ended,
// and where the child would write. Takes no memory then, and no lock that a fork may leave held.
int move_and_wait(bool write, Handle handle, std::byte* address, std::size_t size_bytes, std::uint64_t offset,
                  Remains* remains = nullptr);

}  // namespace penstock::nvme
