#include "reader.hpp"

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

#include "feed.hpp"

namespace penstock::samples {

namespace {

constexpr std::size_t kKeptBytes = 64U << 20;    // of batches' memory
constexpr std::size_t kSubmittedAtOnce = 64;

}  // namespace

Reader::Reader(std::vector<Partition> partitions, const ReaderOptions& options, Reads::MakeIo make_io)
    : catalog_(std::move(partitions)),
      reads_(catalog_, options.direct, options.ring, options.depth, std::move(make_io)),
      cache_(catalog_, reads_, options.buffers, options.verify),
      blocks_(std::make_shared<BatchPool>(kKeptBytes)),
      verify_(options.verify),
      copy_threads_(options.copy_threads) {}

std::shared_ptr<SampleBatch> Reader::make_batch(std::size_t samples, std::uint64_t data_bytes,
                                          std::shared_ptr<Signal> signal) {
  return std::make_shared<SampleBatch>(catalog_, verify_, *blocks_, samples, data_bytes, std::move(signal));
}

bool Reader::copy_held(const Extent& extent, std::byte* to) {
  auto* chunk = cache_.use_held(catalog_.chunk_of(extent));
  if (chunk == nullptr) return false;
  const auto& body = chunk->body().extent;
  const bool inside = extent.offset >= body.offset &&
                      extent.offset + extent.size_bytes <= body.offset + body.size_bytes;
  if (inside) std::memcpy(to, chunk->at(extent.offset), extent.size_bytes);
  cache_.let_go(chunk);
  return inside;
}

Extent Reader::find(std::uint64_t sample) const {
  Extent extent;
  if (!catalog_.find(sample, extent))
    throw Failed({Fault::directory, extent, static_cast<std::int64_t>(sample), 0});
  return extent;
}

// Different samples are together no larger than the store: nothing larger is allocated for a damaged directory.
void Reader::check_total(std::span<const std::int64_t> indices, std::span<const Extent> extents) const {
  std::unordered_set<std::int64_t> seen;
  std::uint64_t left_bytes = catalog_.size_bytes();
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (!seen.insert(indices[i]).second) continue;
    if (extents[i].size_bytes > left_bytes) throw Failed({Fault::directory, extents[i], indices[i], 0});
    left_bytes -= extents[i].size_bytes;
  }
}

bool Reader::read_now(const Extent& extent, std::byte* to) {
  if (copy_held(extent, to)) return true;
  return extent.size_bytes <= kReadHereBytes && reads_.read_cached(extent, to);
}

void Reader::read_into(SampleBatch& batch, std::size_t position, const Extent& extent, std::vector<Read>& reads) {
  if (extent.size_bytes == 0 || read_now(extent, batch.data() + batch.offsets()[position])) {
    batch.check(position, extent);
    return;
  }
  reads.push_back(batch.read(position, extent));
  if (reads.size() == kSubmittedAtOnce) reads_.submit(Traffic::samples, std::exchange(reads, {}));
}

bool Reader::wait(const SampleBatch& batch, Signal& signal, Clock::time_point until) {
  if (!batch.under_way()) return true;
  std::unique_lock lock(signal.mutex);
  return signal.changed.wait_until(lock, until, [&batch] { return !batch.under_way(); });
}

std::shared_ptr<SampleBatch> Reader::begin(std::span<const std::int64_t> indices,
                                     std::shared_ptr<Signal> signal) {
  if (closed_) throw Failed({});
  std::vector<Extent> extents(indices.size());
  std::uint64_t data_bytes = 0;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (i + 8 < indices.size()) catalog_.prefetch(static_cast<std::uint64_t>(indices[i + 8]));
    extents[i] = find(static_cast<std::uint64_t>(indices[i]));
    data_bytes += extents[i].size_bytes;
  }
  if (data_bytes > catalog_.size_bytes()) check_total(indices, extents);
  auto batch = make_batch(indices.size(), data_bytes, std::move(signal));
  std::vector<Read> reads;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    batch->set(i, static_cast<std::uint64_t>(indices[i]), extents[i].size_bytes);
    read_into(*batch, i, extents[i], reads);
  }
  reads_.submit(Traffic::samples, std::move(reads));
  batch->assembled();
  return batch;
}

void Reader::add(const std::shared_ptr<Feed>& feed) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Failed({});
  std::erase_if(feeds_, [](const auto& one) { return one.expired(); });
  feeds_.push_back(feed);
}

bool Reader::close(Clock::time_point deadline) {
  std::vector<std::weak_ptr<Feed>> feeds;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    feeds = std::exchange(feeds_, {});
  }
  for (const auto& weak : feeds)
    if (const auto feed = weak.lock()) feed->close();
  return reads_.close(deadline);
}

}  // namespace penstock::samples
