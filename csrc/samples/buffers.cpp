#include "buffers.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <new>
#include <utility>

namespace penstock::samples {

namespace {

constexpr std::size_t kPageBytes = 4096, kHugePageBytes = 2U << 20;
constexpr std::size_t kSpareBlocks = 4;

// Eight sizes between two powers of two: blocks fit again where batches differ a little.
std::size_t rounded(std::size_t size_bytes) {
  const auto step = std::max(kPageBytes, std::bit_floor(std::max<std::size_t>(size_bytes, 1)) / 8);
  return (size_bytes + step - 1) / step * step;
}

std::byte* allocate(std::size_t size_bytes) {
  const bool huge = size_bytes >= kHugePageBytes;
  auto* data = static_cast<std::byte*>(
      operator new(size_bytes, std::align_val_t(huge ? kHugePageBytes : kPageBytes)));
  if (huge) madvise(data, size_bytes / kHugePageBytes * kHugePageBytes, MADV_HUGEPAGE);  // refused: fine
  return data;
}

void release(std::byte* data, std::size_t size_bytes) {
  operator delete(data, std::align_val_t(size_bytes >= kHugePageBytes ? kHugePageBytes : kPageBytes));
}

}  // namespace

PoolBlock::PoolBlock(PoolBlock&& other) noexcept { *this = std::move(other); }

PoolBlock& PoolBlock::operator=(PoolBlock&& other) noexcept {
  std::swap(home_, other.home_);
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

PoolBlock::~PoolBlock() {
  if (data_ != nullptr) home_->give(data_, size_bytes_);
}

BatchPool::~BatchPool() {
  for (const auto& block : free_) release(block.data, block.size_bytes);
}

void BatchPool::keep(std::size_t kept_bytes) {
  const std::lock_guard lock(mutex_);
  kept_bytes_ = std::max(kept_bytes_, kept_bytes);
}

PoolBlock BatchPool::take(std::size_t size_bytes) {
  const auto needed = rounded(std::max(size_bytes, kPageBytes));
  PoolBlock block;
  block.home_ = shared_from_this();
  block.size_bytes_ = needed;
  {
    const std::lock_guard lock(mutex_);
    largest_bytes_ = std::max(largest_bytes_, needed);
    // The last given is the likeliest to be in the processor's cache.
    for (auto found = free_.rbegin(); found != free_.rend(); ++found) {
      if (found->size_bytes < needed || found->size_bytes > 2 * needed) continue;
      block.data_ = found->data;
      block.size_bytes_ = found->size_bytes;
      free_bytes_ -= found->size_bytes;
      free_.erase(std::next(found).base());
      return block;
    }
  }
  block.data_ = allocate(needed);
  return block;
}

void BatchPool::give(std::byte* data, std::size_t size_bytes) {
  std::vector<Free> released;
  {
    const std::lock_guard lock(mutex_);
    free_.push_back({data, size_bytes});
    free_bytes_ += size_bytes;
    const auto most_bytes = kept_bytes_ + kSpareBlocks * largest_bytes_;
    std::size_t count = 0;
    while (free_bytes_ > most_bytes) free_bytes_ -= free_[count++].size_bytes;  // the oldest
    const auto end = free_.begin() + static_cast<std::ptrdiff_t>(count);
    released.assign(free_.begin(), end);
    free_.erase(free_.begin(), end);
  }
  for (const auto& block : released) release(block.data, block.size_bytes);
}

}  // namespace penstock::samples
