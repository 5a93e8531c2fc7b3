#include "batch.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <new>
#include <utility>

#include "checksum.hpp"

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

// Indices and offsets come first; data begin at a block, as direct reads want it.
std::uint64_t data_begin(std::size_t samples) {
  return (8 * (2 * samples + 1) + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
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

SampleBatch::SampleBatch(const Catalog& catalog, bool verify, BatchPool& pool, std::size_t samples,
             std::uint64_t data_bytes, std::shared_ptr<Signal> signal)
    : catalog_(catalog),
      verify_(verify),
      size_(samples),
      data_begin_(data_begin(samples)),
      data_bytes_(data_bytes),
      block_(pool.take(data_begin_ + data_bytes)),
      signal_(std::move(signal)) {
  offsets()[0] = 0;
}

Read SampleBatch::read(std::size_t position, const Extent& extent) {
  const std::lock_guard lock(mutex_);
  reads_.push_back({position, extent});
  ++under_way_;
  return {extent, data() + offsets()[position], shared_from_this(), reads_.size() - 1,
          static_cast<std::uint64_t>(indices()[position])};
}

void SampleBatch::arrived(std::uint64_t number, int error) {
  SampleRead read;
  {
    const std::lock_guard lock(mutex_);
    read = reads_[number];
  }
  const bool good = error == 0 && right(read.position, read.extent);
  {
    const std::lock_guard lock(mutex_);
    reads_[number].outcome = good ? Outcome::right : Outcome::wrong;
    reads_[number].error = error;
  }
  if (under_way_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  // Kept: once it is whole, its last owner may let it go.
  const auto signal = signal_;
  const std::lock_guard lock(signal->mutex);
  signal->changed.notify_all();
}

bool SampleBatch::right(std::size_t position, const Extent& extent) const {
  return !verify_ || crc32c(0, data() + offsets()[position], extent.size_bytes) ==
                         catalog_.sum(static_cast<std::uint64_t>(indices()[position]));
}

void SampleBatch::check(std::size_t position, const Extent& extent) {
  if (!right(position, extent)) add_bad(position, {Fault::checksum, extent, indices()[position], 0});
}

void SampleBatch::add_bad(std::size_t position, const Failure& failure) {
  const std::lock_guard lock(mutex_);
  insert_bad(position, failure);
}

void SampleBatch::insert_bad(std::size_t position, const Failure& failure) {
  bad_.insert(std::ranges::lower_bound(bad_, position, {}, &Bad::position), {position, failure});
}

const std::vector<SampleBatch::Bad>& SampleBatch::bad() {
  const std::lock_guard lock(mutex_);
  for (auto& [position, extent, outcome, error] : reads_) {
    if (outcome != Outcome::wrong) continue;
    insert_bad(position, {error != 0 ? Fault::read : Fault::checksum, extent, indices()[position], error});
    outcome = Outcome::listed;
  }
  return bad_;
}

Extent SampleBatch::waits_for() {
  const std::lock_guard lock(mutex_);
  for (const auto& read : reads_)
    if (read.outcome == Outcome::none) return read.extent;
  return {};
}

}  // namespace penstock::samples
