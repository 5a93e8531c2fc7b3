// Free ranges of addresses: disjoint, never adjacent, ordered by address and by size.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "arena/bookkeeping.hpp"

namespace penstock {

class Ranges {
 public:
  using Range = std::pair<std::size_t, std::size_t>;  // size, offset: the smallest and lowest first
  using BySize = std::set<Range, std::less<>, Bookkeeping<Range>>;
  using ByOffset = std::map<std::size_t, std::size_t, std::less<>, Bookkeeping<std::pair<const std::size_t, std::size_t>>>;

  // Adds a range that overlaps none here, joined with its neighbours.
  void give(std::size_t offset, std::size_t size_bytes) {
    auto next = by_offset_.lower_bound(offset);
    if (next != by_offset_.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second == offset) {
        offset = previous->first;
        size_bytes += previous->second;
        erase(previous);
      }
    }
    if (next != by_offset_.end() && offset + size_bytes == next->first) {
      size_bytes += next->second;
      erase(next);
    }
    insert(offset, size_bytes);
  }

  // Removes [offset, offset + size), which must lie in one range here.
  void take(std::size_t offset, std::size_t size_bytes) {
    auto found = std::prev(by_offset_.upper_bound(offset));
    const auto start = found->first, end = start + found->second;
    erase(found);
    if (start < offset) insert(start, offset - start);
    if (offset + size_bytes < end) insert(offset + size_bytes, end - offset - size_bytes);
  }

  const BySize& by_size() const { return by_size_; }
  const ByOffset& by_offset() const { return by_offset_; }

 private:
  void insert(std::size_t offset, std::size_t size_bytes) {
    by_offset_.emplace(offset, size_bytes);
    by_size_.emplace(size_bytes, offset);
  }
  void erase(ByOffset::iterator range) {
    by_size_.erase({range->second, range->first});
    by_offset_.erase(range);
  }

  ByOffset by_offset_;
  BySize by_size_;
};

}  // namespace penstock
