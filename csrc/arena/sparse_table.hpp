// An array of zeros that costs memory only where it is used.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "arena/pages.hpp"

namespace penstock {

// Entries can be read at any time, and written after open(): a limit on a process's data (RLIMIT_DATA) counts
// what is writable, whether it was written or not.
template <class T>
class SparseTable {
 public:
  explicit SparseTable(std::size_t count) : SparseTable(count, PROT_READ, MAP_PRIVATE) {}
  // All open, and shared: a forked child sees what its parent writes.
  static SparseTable shared(std::size_t count) { return {count, PROT_READ | PROT_WRITE, MAP_SHARED}; }
  ~SparseTable() {
    if (entries_ != nullptr) munmap(entries_, size_bytes_);
  }
  SparseTable(const SparseTable&) = delete;
  SparseTable& operator=(const SparseTable&) = delete;
  bool usable() const { return entries_ != nullptr; }

  // Makes entries [first, last) writable. False if the system refuses.
  bool open(std::size_t first, std::size_t last) {
    for (auto part = first * sizeof(T) / kPartBytes; part * kPartBytes < last * sizeof(T); ++part) {
      if (open_[part]) continue;
      const auto begin = part * kPartBytes;
      auto* address = reinterpret_cast<char*>(entries_) + begin;
      if (!protect(address, std::min(kPartBytes, size_bytes_ - begin), PROT_READ | PROT_WRITE)) return false;
      open_[part] = true;
    }
    return true;
  }
  T& operator[](std::size_t i) { return entries_[i]; }
  const T& operator[](std::size_t i) const { return entries_[i]; }

 private:
  static constexpr std::size_t kPartBytes = std::size_t{256} << 10;

  SparseTable(std::size_t count, int protection, int sharing)
      : size_bytes_(round_up(count * sizeof(T) + 1, kPageBytes)),
        open_(round_up(size_bytes_, kPartBytes) / kPartBytes, sharing == MAP_SHARED) {
    void* mapping = mmap(nullptr, size_bytes_, protection, sharing | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return;
    entries_ = static_cast<T*>(mapping);
    madvise(mapping, size_bytes_, MADV_NOHUGEPAGE);
  }

  T* entries_ = nullptr;
  std::size_t size_bytes_ = 0;
  std::vector<bool> open_;  // by part
};

}  // namespace penstock
