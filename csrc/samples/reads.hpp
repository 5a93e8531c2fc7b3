// The reads of a reader: carried out in the background, and checked by the thread that learns of their end.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <vector>

#include "catalog.hpp"
#include "io/io.hpp"
#include "io/transfers.hpp"

namespace penstock::samples {

using Clock = std::chrono::steady_clock;

// Keeps it for ever: what a read that never ends may still write to.
void leave_behind(std::shared_ptr<void> what);

// What reads are for. It stays as long as one of its reads is under way.
class Target {
 public:
  virtual ~Target() = default;
  // Once for each read, on any thread. `error` is 0, or an errno.
  virtual void arrived(std::uint64_t number, int error) = 0;
};

inline constexpr std::uint64_t kWholeChunk = ~std::uint64_t{0};

struct Read {
  Extent extent;       // file bytes
  std::byte* address;  // where they go
  std::shared_ptr<Target> target;
  std::uint64_t number;  // the target's own
  std::uint64_t sample = kWholeChunk;  // its index, of a sample's read
};

// Transfers, and the thread that learns what they have done.
class ReadQueue {
 public:
  ReadQueue(Transfers::MakeIo make_io, const Limits& limits);
  ReadQueue(const ReadQueue&) = delete;
  ReadQueue& operator=(const ReadQueue&) = delete;

  void submit(const Catalog& catalog, bool direct, std::vector<Read> reads);
  // Lets go of what has not begun, and waits for the rest. False: a read is stuck, and left behind.
  bool close(Clock::time_point deadline);

 private:
  // Shared with the thread, which may outlive the queue where a read is stuck.
  struct State {
    State(Transfers::MakeIo make_io, const Limits& limits) : transfers(std::move(make_io), limits) {}
    Transfers transfers;
    std::mutex mutex;
    std::condition_variable emptied;
    std::unordered_set<Read*> under_way;
  };
  static void learn(State& state);
  static void end(State& state, Read* read, int error, bool abandoned);

  std::shared_ptr<State> state_;
  std::thread thread_;
  bool stuck_ = false;
};

class Fetches;
struct Fetch;

enum class Traffic { chunks, samples };

class Reads {
 public:
  using MakeIo = std::function<std::unique_ptr<Io>(unsigned depth)>;

  // Without `make_io`: io_uring, or where it is refused, or `ring` is false, plain reads.
  Reads(const Catalog& catalog, bool direct, bool ring, unsigned depth, MakeIo make_io = {});
  // Begins the reads; their threads begin with the first of a kind. Throws std::system_error where they cannot.
  void submit(Traffic traffic, std::vector<Read> reads);
  // Whether the bytes were in the page cache, and all are at `to` now. Never waits for a device.
  bool read_cached(const Extent& extent, std::byte* to);
  bool close(Clock::time_point deadline);
  // See `Fetches`: what has come meanwhile is read.
  bool take(std::size_t most, Clock::time_point until, std::vector<Fetch>& fetches);
  // Of files that are fetched; null where there are none.
  Fetches* fetches() const { return fetches_.get(); }

  int uses_ring() const { return uses_ring_; }  // -1: not known before the first read
  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t count(Traffic traffic) const { return counts_[static_cast<int>(traffic)]; }

 private:
  void carry_out(Traffic traffic, std::vector<Read> reads);
  ReadQueue& queue_of(Traffic traffic);
  std::unique_ptr<ReadQueue> make_queue(Traffic traffic);

  const Catalog& catalog_;
  const bool direct_, ring_;
  const unsigned depth_;
  const MakeIo make_io_;
  const std::shared_ptr<Fetches> fetches_;
  std::mutex mutex_;
  std::unique_ptr<ReadQueue> queues_[2];
  bool closed_ = false;
  std::atomic<int> uses_ring_ = -1;
  std::atomic<bool> never_cached_ = false;  // the file system cannot say
  std::atomic<std::uint64_t> bytes_ = 0, counts_[2] = {};
};

}  // namespace penstock::samples
