// Chunks in memory. All samples of a chunk come and go together: being held here is their presence bit.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "catalog.hpp"
#include "reads.hpp"
#include "io/staging.hpp"

namespace penstock::samples {

class ChunkCache;

// A buffer, and the chunk whose body is in it or on its way. Its memory has room for any chunk's.
class Chunk final : public Target, public std::enable_shared_from_this<Chunk> {
 public:
  Chunk(ChunkCache& cache, std::shared_ptr<Staging> area, std::byte* memory)
      : cache_(cache), area_(std::move(area)), memory_(memory) {}
  void arrived(std::uint64_t number, int error) override;

  bool loading() const { return state_.load(std::memory_order_acquire) == State::loading; }
  // Of an extent in the body.
  const std::byte* at(std::uint64_t offset) const { return memory_ + (offset - read_begin_); }
  const Body& body() const { return body_; }
  bool damaged() const { return damaged_; }
  // What is wrong with a sample of the body; to be asked only where it is damaged.
  bool good(std::uint64_t sample, Failure& failure) const;

 private:
  friend class ChunkCache;
  enum class State { idle, loading, held };
  void verify(int error);

  ChunkCache& cache_;
  const std::shared_ptr<Staging> area_;
  std::byte* const memory_;
  // The cache's, under its mutex, but for what is written before `state_` becomes held.
  std::atomic<State> state_ = State::idle;
  Body body_{};
  std::uint64_t number_ = 0, read_begin_ = 0;
  std::size_t users_ = 0;
  std::list<Chunk*>::iterator place_;  // among those that nobody uses, or their end
  bool damaged_ = false;
  int error_ = 0;
  std::vector<std::uint64_t> bad_samples_;  // ascending
};

class ChunkCache {
 public:
  ChunkCache(const Catalog& catalog, Reads& reads, std::size_t buffers, bool verify);

  // Makes sure that `buffers` can be used at once besides all others so reserved.
  void reserve(std::size_t buffers);
  void unreserve(std::size_t buffers);

  // The chunk, which stays until it is let go; its read begins if it is not here. Within what is reserved.
  // Null where `stop` came first.
  Chunk* use(std::uint64_t number, const Body& body, const std::atomic<bool>& stop);
  // The same if its body is here, whole; else null, and nothing begins.
  Chunk* use_held(std::uint64_t number);
  void let_go(Chunk* chunk);
  // Until it is no longer loading, or `stop`.
  void wait(const Chunk* chunk, const std::atomic<bool>& stop);
  void notify();
  // Whether every chunk can be held.
  bool holds_all() const { return buffers_ >= catalog_.chunks(); }

 private:
  friend class Chunk;
  void grow(std::size_t buffers);
  Chunk* free_chunk(std::unique_lock<std::mutex>& lock, const std::atomic<bool>& stop);
  void add_user(Chunk* chunk);
  void make_idle(Chunk* chunk);

  const Catalog& catalog_;
  Reads& reads_;
  const std::size_t buffers_, buffer_bytes_;
  const bool verify_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Chunk>> all_;
  std::list<Chunk*> idle_;  // the last is the next to be used anew
  std::unordered_map<std::uint64_t, Chunk*> by_number_;
  std::size_t reserved_ = 0;
};

}  // namespace penstock::samples
