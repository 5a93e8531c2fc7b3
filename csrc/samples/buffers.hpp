// Memory that is used again once nobody holds it: touching fresh pages costs more than a copy.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>

namespace penstock::samples {

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

}  // namespace penstock::samples
