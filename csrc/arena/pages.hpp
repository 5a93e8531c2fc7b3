// The system calls that give addresses memory, take it away and move it.
#pragma once

#include <cstddef>
#include <string>

namespace penstock {

inline constexpr std::size_t kPageBytes = 4096;
inline constexpr std::size_t kChunkBytes = std::size_t{2} << 20;  // of one huge page

inline std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// All of these leave errno as the system set it where they fail.

// Huge pages in the place of small ones, where the system has them (Linux 6.1); the bytes stay.
void make_huge(char* address, std::size_t size_bytes);

// Addresses without memory: neither readable nor writable. What was there is gone. Neighbours of this
// kind become one mapping, so that what is away costs the system nothing.
bool map_nothing(char* address, std::size_t size_bytes);
// Gives the memory back; the addresses stay as they are, and hold zeros.
void give_pages(char* address, std::size_t size_bytes);
// Makes addresses from map_nothing writable; memory comes at the first touch, as huge pages where it can.
bool map_fresh(char* address, std::size_t size_bytes);
bool protect(char* address, std::size_t size_bytes, int protection);
// The same, for addresses that all have the protection `before`: where it fails they have that again.
bool protect_or_undo(char* address, std::size_t size_bytes, int protection, int before);
// Moves memory with its protection; what stays behind are mapped addresses without memory. Moves in
// pieces of whole units where it must, and gives the bytes moved: less than `size_bytes` if the system
// refuses one.
std::size_t move_memory(char* from, char* to, std::size_t size_bytes, std::size_t unit_bytes);
// Moves a mapping of its own, from map_scratch, to `to`: what was there is gone.
bool replace_memory(char* scratch, char* to, std::size_t size_bytes);
// A mapping of its own for `size_bytes`, writable. Null if the system refuses.
char* map_scratch(std::size_t size_bytes);
void unmap_scratch(char* scratch, std::size_t size_bytes);

// Empty if memory can leave and come back at its address on this system, else why it cannot.
std::string paging_problem();

}  // namespace penstock
