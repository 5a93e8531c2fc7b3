// Samples one after the other in one block of memory, with their indices and offsets.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "catalog.hpp"
#include "reads.hpp"

namespace penstock::samples {

// Memory that is used again once nobody holds it: touching fresh pages costs more than a copy.
class BatchPool : public std::enable_shared_from_this<BatchPool> {
 public:
  // Aligned to 4096. It goes back to the pool, which stays as long as it.
  struct Block {
    std::shared_ptr<std::byte> data;
    std::size_t size_bytes = 0;
  };

  // At most so many bytes are kept for later, and a few blocks of the largest size asked for.
  explicit BatchPool(std::size_t kept_bytes) : kept_bytes_(kept_bytes) {}
  BatchPool(const BatchPool&) = delete;
  BatchPool& operator=(const BatchPool&) = delete;
  ~BatchPool();
  // Throws std::bad_alloc.
  Block take(std::size_t size_bytes);
  void keep(std::size_t kept_bytes);  // at least so many from now on

 private:
  struct Free {
    std::byte* data;
    std::size_t size_bytes;
  };
  void give(std::byte* data, std::size_t size_bytes) noexcept;

  std::mutex mutex_;
  std::list<Free> free_;  // the last given is the last
  std::size_t free_bytes_ = 0, kept_bytes_, largest_bytes_ = 0;
};

// Who waits for batches.
struct Signal {
  std::mutex mutex;
  std::condition_variable changed;
};

class SampleBatch final : public Target, public std::enable_shared_from_this<SampleBatch> {
 public:
  struct Bad {
    std::size_t position;
    Failure failure;
  };

  // Under way until `assembled`, and all of its reads are.
  SampleBatch(const Catalog& catalog, bool verify, BatchPool& pool, std::size_t samples,
              std::uint64_t data_bytes, std::shared_ptr<Signal> signal);

  std::size_t size() const { return size_; }
  std::int64_t* indices() const { return reinterpret_cast<std::int64_t*>(block_.data.get()); }
  std::int64_t* offsets() const { return indices() + size_; }  // [size + 1]
  std::byte* data() const { return block_.data.get() + data_begin_; }
  std::uint64_t data_bytes() const { return data_bytes_; }
  std::uint64_t size_bytes() const { return block_.size_bytes; }
  // What lies at a position; positions are set in ascending order.
  void set(std::size_t position, std::uint64_t sample, std::uint64_t size_bytes) const {
    indices()[position] = static_cast<std::int64_t>(sample);
    offsets()[position + 1] = offsets()[position] + static_cast<std::int64_t>(size_bytes);
  }

  // A read of the sample at this position, whose index and offsets are set, to be submitted.
  Read read(std::size_t position, const Extent& extent);
  // Allocates nothing: the calling thread could not report a bad_alloc.
  void arrived(std::uint64_t number, int error) override;
  // The sample lies where it belongs: is it right?
  void check(std::size_t position, const Extent& extent);
  void add_bad(std::size_t position, const Failure& failure);
  // Called by the thread that made it, which then notifies the waiters.
  void assembled() { under_way_.fetch_sub(1, std::memory_order_acq_rel); }

  bool under_way() const { return under_way_.load(std::memory_order_acquire) > 0; }
  Extent waits_for();  // one of its reads that are under way
  // Of one that is not under way; by position.
  const std::vector<Bad>& bad();

 private:
  enum class Outcome { none, right, wrong, listed };  // listed: it is in `bad_`
  struct SampleRead {
    std::size_t position;
    Extent extent;
    Outcome outcome = Outcome::none;
    int error = 0;
  };
  bool right(std::size_t position, const Extent& extent) const;
  void insert_bad(std::size_t position, const Failure& failure);

  const Catalog& catalog_;
  const bool verify_;
  const std::size_t size_;
  const std::uint64_t data_begin_, data_bytes_;
  BatchPool::Block block_;
  const std::shared_ptr<Signal> signal_;
  std::atomic<std::size_t> under_way_ = 1;
  std::mutex mutex_;
  std::vector<SampleRead> reads_;
  std::vector<Bad> bad_;
};

}  // namespace penstock::samples
