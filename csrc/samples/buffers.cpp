#include "buffers.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <new>

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
#ifdef MADV_HUGEPAGE
  if (huge) madvise(data, size_bytes / kHugePageBytes * kHugePageBytes, MADV_HUGEPAGE);  // refused: fine
#endif
  return data;
}

void release(std::byte* data, std::size_t size_bytes) {
  operator delete(data, std::align_val_t(size_bytes >= kHugePageBytes ? kHugePageBytes : kPageBytes));
}

}  // namespace

BatchPool::~BatchPool() {
  for (const auto& block : free_) release(block.data, block.size_bytes);
}

void BatchPool::keep(std::size_t kept_bytes) {
  const std::lock_guard lock(mutex_);
  kept_bytes_ = std::max(kept_bytes_, kept_bytes);
}

BatchPool::Block BatchPool::take(std::size_t size_bytes) {
  const auto needed = rounded(std::max(size_bytes, kPageBytes));
  Free block{nullptr, needed};
  {
    const std::lock_guard lock(mutex_);
    largest_bytes_ = std::max(largest_bytes_, needed);
    // The last given is the likeliest to be in the processor's cache.
    const auto found = std::find_if(free_.rbegin(), free_.rend(), [needed](const Free& one) {
      return one.size_bytes >= needed && one.size_bytes <= 2 * needed;
    });
    if (found != free_.rend()) {
      block = *found;
      free_bytes_ -= block.size_bytes;
      free_.erase(std::next(found).base());
    }
  }
  if (block.data == nullptr) block.data = allocate(needed);
  return {{block.data, [self = shared_from_this(), size = block.size_bytes](std::byte* data) {
             self->give(data, size);
           }},
          block.size_bytes};
}

void BatchPool::give(std::byte* data, std::size_t size_bytes) noexcept {
  std::list<Free> released;
  try {
    const std::lock_guard lock(mutex_);
    free_.push_back({data, size_bytes});
    free_bytes_ += size_bytes;
    while (free_bytes_ > kept_bytes_ + kSpareBlocks * largest_bytes_) {  // the oldest
      free_bytes_ -= free_.front().size_bytes;
      released.splice(released.end(), free_, free_.begin());
    }
  } catch (const std::bad_alloc&) {  // no place for it among the free ones
    release(data, size_bytes);
  }
  for (const auto& block : released) release(block.data, block.size_bytes);
}

}  // namespace penstock::samples
