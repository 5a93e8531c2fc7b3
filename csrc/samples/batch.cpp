#include "batch.hpp"

#include <algorithm>
#include <utility>

#include "checksum.hpp"

namespace penstock::samples {

namespace {

// Indices and offsets come first; data begin at a block, as direct reads want it.
std::uint64_t data_begin(std::size_t samples) {
  return (8 * (2 * samples + 1) + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

}  // namespace

SampleBatch::SampleBatch(const Catalog& catalog, bool verify, BatchPool& pool, std::size_t samples,
             std::uint64_t data_bytes, std::shared_ptr<Signal> signal)
    : catalog_(catalog),
      verify_(verify),
      size_(samples),
      data_begin_(data_begin(samples)),
      data_bytes_(data_bytes),
      block_(pool.take(data_begin_ + data_bytes)),
      signal_(std::move(signal)) {}

Read SampleBatch::read(std::size_t position, const Extent& extent) {
  ++under_way_;
  const std::lock_guard lock(mutex_);
  parts_.push_back({position, extent});
  return {extent, data() + offsets()[position], shared_from_this(), parts_.size() - 1};
}

void SampleBatch::arrived(std::uint64_t number, int error) {
  Part part;
  {
    const std::lock_guard lock(mutex_);
    part = parts_[number];
  }
  if (error != 0) {
    add_bad(part.position, {Fault::read, part.extent, indices()[part.position], error});
  } else {
    check(part.position, part.extent);
  }
  {
    const std::lock_guard lock(mutex_);
    parts_[number].done = true;
  }
  end_one();
}

void SampleBatch::check(std::size_t position, const Extent& extent) {
  if (!verify_) return;
  const auto sample = indices()[position];
  if (crc32c(0, data() + offsets()[position], extent.size_bytes) !=
      catalog_.sum(static_cast<std::uint64_t>(sample)))
    add_bad(position, {Fault::checksum, extent, sample, 0});
}

void SampleBatch::add_bad(std::size_t position, const Failure& failure) {
  const std::lock_guard lock(mutex_);
  const auto place = std::ranges::lower_bound(bad_, position, {}, &Bad::position);
  bad_.insert(place, {position, failure});
}

Extent SampleBatch::waits_for() {
  const std::lock_guard lock(mutex_);
  for (const auto& part : parts_)
    if (!part.done) return part.extent;
  return {};
}

void SampleBatch::end_one() {
  if (under_way_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  // Kept: once it is whole, its last owner may let it go.
  const auto signal = signal_;
  const std::lock_guard lock(signal->mutex);
  signal->changed.notify_all();
}

}  // namespace penstock::samples
