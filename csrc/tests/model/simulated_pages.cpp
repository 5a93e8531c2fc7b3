// Memory as csrc/arena/pages.cpp makes it, without a system call: so a step takes a fraction of the time.
//
// Addresses of the arena have a protection of their own here. Of each page the first and the last number are kept,
// which is where tests write. What lies elsewhere, such as tables, is the system's.
#include "model/simulated_pages.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "arena/pages.hpp"

namespace penstock {

namespace model {

namespace {

char* begin = nullptr;
std::size_t bytes = 0;
std::vector<unsigned char> protections;  // of each page
std::vector<std::uint32_t> moves;         // of each page: how often it got other memory
std::vector<char*> scratches;            // of one size, that are free
constexpr std::size_t kScratchBytes = std::size_t{16} << 20, kScratchSlot = std::size_t{64} << 10;

bool is_ours(const char* address) { return address >= begin && address < begin + bytes; }
std::size_t page_of(const char* address) { return static_cast<std::size_t>(address - begin) / kPageBytes; }

void clear(char* address, std::size_t size_bytes) {
  for (std::size_t at = 0; at < size_bytes; at += kPageBytes) {
    std::memset(address + at, 0, 8);
    std::memset(address + at + kPageBytes - 8, 0, 8);
  }
}

void set(char* address, std::size_t size_bytes, int protection) {
  std::memset(protections.data() + page_of(address), protection, size_bytes / kPageBytes);
}

void moved(const char* address, std::size_t size_bytes) {
  for (std::size_t at = 0; at < size_bytes; at += kPageBytes) ++moves[page_of(address + at)];
}

}  // namespace

void simulate_pages(char* arena, std::size_t arena_bytes) {
  begin = arena;
  bytes = arena_bytes;
  protections.assign(bytes / kPageBytes, PROT_NONE);
  moves.assign(bytes / kPageBytes, 0);
  mprotect(begin, bytes, PROT_READ | PROT_WRITE);
  madvise(begin, bytes, MADV_NOHUGEPAGE);
  // The last of its addresses: no run gets there.
  for (auto at = kScratchBytes; at > 0; at -= kScratchSlot) scratches.push_back(begin + bytes - at);
}

bool accessible(const char* address, bool is_write) {
  if (!is_ours(address)) return true;
  const auto protection = protections[page_of(address)];
  return (protection & (is_write ? PROT_WRITE : PROT_READ)) != 0;
}

std::uint64_t frames_at(const char* address, std::size_t size_bytes) {
  std::uint64_t all = 0;
  for (std::size_t at = 0; is_ours(address) && at < size_bytes; at += kPageBytes) all += moves[page_of(address + at)];
  return all;
}

}  // namespace model

using namespace model;

bool map_nothing(char* address, std::size_t size_bytes) {
  if (!is_ours(address)) return true;
  clear(address, size_bytes);
  set(address, size_bytes, PROT_NONE);
  moved(address, size_bytes);
  return true;
}
void give_pages(char* address, std::size_t size_bytes) {
  clear(address, size_bytes);
  moved(address, size_bytes);
}
bool map_fresh(char* address, std::size_t size_bytes) { return protect(address, size_bytes, PROT_READ | PROT_WRITE); }
void make_huge(char*, std::size_t) {}

bool protect(char* address, std::size_t size_bytes, int protection) {
  if (!is_ours(address)) return mprotect(address, size_bytes, protection) == 0;
  set(address, size_bytes, protection);
  return true;
}
bool protect_or_undo(char* address, std::size_t size_bytes, int protection, int) {
  return protect(address, size_bytes, protection);
}

std::size_t move_memory(char* from, char* to, std::size_t size_bytes, std::size_t) {
  for (std::size_t at = 0; at < size_bytes; at += kPageBytes) {
    std::memcpy(to + at, from + at, 8);
    std::memcpy(to + at + kPageBytes - 8, from + at + kPageBytes - 8, 8);
  }
  clear(from, size_bytes);
  moved(from, size_bytes);
  moved(to, size_bytes);
  std::memcpy(protections.data() + page_of(to), protections.data() + page_of(from), size_bytes / kPageBytes);
  return size_bytes;
}
bool replace_memory(char* scratch, char* to, std::size_t size_bytes) {
  move_memory(scratch, to, size_bytes, size_bytes);
  unmap_scratch(scratch, size_bytes);
  return true;
}
char* map_scratch(std::size_t size_bytes) {
  if (size_bytes > kScratchSlot || scratches.empty()) return nullptr;
  auto* const scratch = scratches.back();
  scratches.pop_back();
  clear(scratch, size_bytes);
  set(scratch, size_bytes, PROT_READ | PROT_WRITE);
  return scratch;
}
void unmap_scratch(char* scratch, std::size_t size_bytes) {
  set(scratch, size_bytes, PROT_NONE);
  scratches.push_back(scratch);
}

std::string paging_problem() { return {}; }

}  // namespace penstock
