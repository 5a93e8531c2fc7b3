// Mounted stores: what all their readers share, and single samples.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "batch.hpp"
#include "cache.hpp"
#include "catalog.hpp"
#include "reads.hpp"

namespace penstock::samples {

class Feed;

struct ReaderOptions {
  std::size_t buffers = 2;  // chunks that stay in memory
  bool direct = false;      // where a data file has a direct descriptor
  bool verify = true;
  bool ring = true;
  unsigned copy_threads = 0;  // besides the thread that assembles
  unsigned depth = 32;        // reads at once
};

class Reader : public std::enable_shared_from_this<Reader> {
 public:
  Reader(std::vector<Partition> partitions, const ReaderOptions& options, Reads::MakeIo make_io = {});
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  static constexpr std::uint64_t kReadHereBytes = 64U << 10;  // larger samples are read in the background

  const Catalog& catalog() const { return catalog_; }
  Reads& reads() { return reads_; }
  ChunkCache& cache() { return cache_; }
  BatchPool& blocks() { return *blocks_; }
  bool verify() const { return verify_; }
  unsigned copy_threads() const { return copy_threads_; }
  bool closed() const { return closed_; }
  std::shared_ptr<SampleBatch> make_batch(std::size_t samples, std::uint64_t data_bytes,
                                    std::shared_ptr<Signal> signal);

  // Begins to read these samples, in this order; indices must be below samples(). Throws Failed.
  std::shared_ptr<SampleBatch> begin(std::span<const std::int64_t> indices, std::shared_ptr<Signal> signal);
  // Throws Failed where the directory contradicts itself.
  Extent find(std::uint64_t sample) const;
  // Whether the sample's bytes, which go to `to`, could be had without waiting. They are not checked.
  bool read_now(const Extent& extent, std::byte* to);
  // Reads the sample at a position that is set: now, or with `reads`, which are submitted when they are many.
  void read_into(SampleBatch& batch, std::size_t position, const Extent& extent, std::vector<Read>& reads);
  // False: the batch is still under way then.
  static bool wait(const SampleBatch& batch, Signal& signal, Clock::time_point until);

  void add(const std::shared_ptr<Feed>& feed);  // to be closed with the reader
  bool close(Clock::time_point deadline);

  std::atomic<std::uint64_t> delivered = 0, waits = 0;  // samples; times that something was not there yet

 private:
  void check_total(std::span<const std::int64_t> indices, std::span<const Extent> extents) const;
  bool copy_held(const Extent& extent, std::byte* to);

  const Catalog catalog_;
  Reads reads_;
  ChunkCache cache_;
  const std::shared_ptr<BatchPool> blocks_;
  const bool verify_;
  const unsigned copy_threads_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<Feed>> feeds_;
  std::atomic<bool> closed_ = false;
};

}  // namespace penstock::samples
