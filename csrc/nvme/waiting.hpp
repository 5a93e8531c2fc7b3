// Reads and writes of namespaces for who can only wait: the arena, which has no thread to come back with.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io/io.hpp"

namespace penstock::nvme {

// Has the threads that carry them out; idempotent. They never touch Python. False if the system refuses them.
bool prepare_to_wait();

// Moves all of it; 0, or an errno. What is written is whole blocks, from memory that stays as it is. ESTALE in a
// forked child, whose connections are the parent's.
int move_and_wait(bool write, Handle handle, std::byte* address, std::size_t size_bytes, std::uint64_t offset);

}  // namespace penstock::nvme
