// An array of zeros that costs memory only where it is used.
#pragma once

#include <sys/mman.h>

#include <cstddef>

#include "arena/pages.hpp"

namespace penstock {

template <class T>
class SparseTable {
 public:
  // `sharing` is MAP_PRIVATE, or MAP_SHARED: then a forked child sees what its parent writes.
  explicit SparseTable(std::size_t count, int sharing = MAP_PRIVATE) : size_bytes_(round_up(count * sizeof(T) + 1, kPageBytes)) {
    void* mapping = mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return;
    entries_ = static_cast<T*>(mapping);
    madvise(mapping, size_bytes_, MADV_NOHUGEPAGE);
  }
  ~SparseTable() {
    if (entries_ != nullptr) munmap(entries_, size_bytes_);
  }
  SparseTable(const SparseTable&) = delete;
  SparseTable& operator=(const SparseTable&) = delete;
  bool usable() const { return entries_ != nullptr; }
  T& operator[](std::size_t i) { return entries_[i]; }
  const T& operator[](std::size_t i) const { return entries_[i]; }

 private:
  T* entries_ = nullptr;
  std::size_t size_bytes_ = 0;
};

}  // namespace penstock
