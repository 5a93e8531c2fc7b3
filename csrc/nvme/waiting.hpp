// Reads and writes of namespaces for who can only wait: the arena, which has no thread to come back with.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io/io.hpp"

namespace penstock::nvme {

// Has the threads that carry them out; idempotent. They never touch Python. False if the system refuses them.
bool prepare_to_wait();

// Moves all of it; 0, or an errno. What is written is whole blocks, from memory that stays as it is. A forked child
// has no connections: for it a thread of its parent's reads, into memory that they share; ESTALE where that has ended,
// and where the child would write. Takes no memory then, and no lock that a fork may leave held.
int move_and_wait(bool write, Handle handle, std::byte* address, std::size_t size_bytes, std::uint64_t offset);

}  // namespace penstock::nvme
