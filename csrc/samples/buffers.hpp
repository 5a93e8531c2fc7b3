// Memory for batches, used again once nobody holds it: touching fresh pages costs more than a copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace penstock::samples {

class BatchPool;

// Memory of its own, aligned to 4096. It goes back to where it came from, which stays as long as it.
class PoolBlock {
 public:
  PoolBlock() = default;
  PoolBlock(PoolBlock&& other) noexcept;
  PoolBlock& operator=(PoolBlock&& other) noexcept;
  ~PoolBlock();
  std::byte* data() const { return data_; }
  std::size_t size_bytes() const { return size_bytes_; }

 private:
  friend class BatchPool;
  std::shared_ptr<BatchPool> home_;
  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
};

class BatchPool : public std::enable_shared_from_this<BatchPool> {
 public:
  // At most so many bytes are kept for later, and a few blocks of the largest size asked for.
  explicit BatchPool(std::size_t kept_bytes) : kept_bytes_(kept_bytes) {}
  BatchPool(const BatchPool&) = delete;
  BatchPool& operator=(const BatchPool&) = delete;
  ~BatchPool();
  // Throws std::bad_alloc.
  PoolBlock take(std::size_t size_bytes);
  void keep(std::size_t kept_bytes);  // at least so many from now on

 private:
  friend class PoolBlock;
  struct Free {
    std::byte* data;
    std::size_t size_bytes;
  };
  void give(std::byte* data, std::size_t size_bytes);

  std::mutex mutex_;
  std::vector<Free> free_;  // the last given is the last
  std::size_t free_bytes_ = 0, kept_bytes_, largest_bytes_ = 0;
};

}  // namespace penstock::samples
