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
      signal_(std::move(signal)) {
  offsets()[0] = 0;
}

Read SampleBatch::read(std::size_t position, const Extent& extent) {
  const std::lock_guard lock(mutex_);
  reads_.push_back({position, extent});
  ++under_way_;
  return {extent, data() + offsets()[position], shared_from_this(), reads_.size() - 1};
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
    outcome = Outcome::told;
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
