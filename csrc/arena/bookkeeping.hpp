// Memory for the arena's own lists, which do not fail in the middle of a change: a block must be given back even
// where the system has no memory left.
#pragma once

#include <array>
#include <cstddef>
#include <mutex>
#include <new>

namespace penstock {

// Cells that are used where operator new fails. What may be refused asks is_ready() first; what may not be, such as
// a release, takes few.
class Reserve {
 public:
  // Null where none is left, or `size_bytes` is more than a cell.
  void* take(std::size_t size_bytes) {
    const std::lock_guard lock(mutex_);
    for (auto& kind : kinds_) {
      if (size_bytes > kind.cell_bytes || kind.left == 0) continue;
      --kind.left;
      auto* const cell = kind.free;
      if (cell == nullptr) return kind.fresh += kind.cell_bytes;
      kind.free = cell->next;
      return cell;
    }
    return nullptr;
  }

  // False if it is none of the cells.
  bool give(void* address) {
    const auto* const byte = static_cast<std::byte*>(address);
    if (byte < cells_.data() || byte >= cells_.data() + cells_.size()) return false;
    const std::lock_guard lock(mutex_);
    auto& kind = kinds_[byte < cells_.data() + kSmallBytes * (kSmall + 1) ? 0 : 1];
    kind.free = new (address) Cell{kind.free};
    ++kind.left;
    return true;
  }

  // Whether so many cells of each size are left that any one change finds enough.
  bool is_ready() {
    const std::lock_guard lock(mutex_);
    return kinds_[0].left > kSmall / 2 && kinds_[1].left > kLarge / 2;
  }

 private:
  static constexpr std::size_t kSmallBytes = 96, kSmall = 2048, kLargeBytes = 1024, kLarge = 64;
  struct Cell {
    Cell* next;
  };
  struct Kind {
    std::size_t cell_bytes, left;
    std::byte* fresh;  // the last cell that was ever used, or the place before the first
    Cell* free = nullptr;
  };

  alignas(std::max_align_t) std::array<std::byte, kSmallBytes*(kSmall + 1) + kLargeBytes*(kLarge + 1)> cells_;
  std::array<Kind, 2> kinds_{Kind{kSmallBytes, kSmall, cells_.data()},
                             Kind{kLargeBytes, kLarge, cells_.data() + kSmallBytes * (kSmall + 1)}};
  std::mutex mutex_;
};

inline Reserve& reserve() {
  static auto& cells = *new Reserve;  // outlives every list
  return cells;
}

// For lists of small nodes.
template <class T>
struct Bookkeeping {
  using value_type = T;
  Bookkeeping() = default;
  template <class U>
  Bookkeeping(const Bookkeeping<U>&) {}  // NOLINT: allocators convert

  T* allocate(std::size_t count) {
    void* address = ::operator new(count * sizeof(T), std::nothrow);
    if (address == nullptr) address = reserve().take(count * sizeof(T));
    if (address == nullptr) throw std::bad_alloc();
    return static_cast<T*>(address);
  }
  void deallocate(T* address, std::size_t) {
    if (!reserve().give(address)) ::operator delete(address);
  }
  template <class U>
  bool operator==(const Bookkeeping<U>&) const {
    return true;
  }
};

}  // namespace penstock
