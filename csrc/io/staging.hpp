// Aligned buffers on huge pages, where the machine gives them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace penstock {

class Staging {
 public:
  Staging(std::size_t slots, std::size_t slot_bytes)
      : slot_bytes_(slot_bytes), size_bytes_(slots * slot_bytes) {
    auto* mapping = mmap(nullptr, size_bytes_ + kHugePageBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<std::byte*>(mapping);
    const auto address = reinterpret_cast<std::uintptr_t>(mapping);
    start_ = mapping_ + ((kHugePageBytes - address % kHugePageBytes) % kHugePageBytes);
    madvise(start_, size_bytes_, MADV_HUGEPAGE);  // refused: small pages serve
    for (auto* slot = start_ + size_bytes_; slot > start_;) free_.push_back(slot -= slot_bytes);
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging() { munmap(mapping_, size_bytes_ + kHugePageBytes); }

  std::byte* start() const { return start_; }
  std::size_t size_bytes() const { return size_bytes_; }
  std::size_t slot_bytes() const { return slot_bytes_; }
  bool empty() const { return free_.empty(); }
  // Null: none is free.
  std::byte* take() {
    if (free_.empty()) return nullptr;
    auto* slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void give(std::byte* slot) { free_.push_back(slot); }

 private:
  static constexpr std::size_t kHugePageBytes = 2U << 20;
  std::size_t slot_bytes_, size_bytes_;
  std::byte *mapping_, *start_;
  std::vector<std::byte*> free_;
};

}  // namespace penstock
