// The batches of one replica of one epoch, made before they are taken.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "assembler.hpp"
#include "order.hpp"
#include "reader.hpp"

namespace penstock::samples {

struct FeedOptions {
  std::size_t ahead = 1;               // chunks read ahead
  std::uint64_t prefetch_bytes = 0;    // of batches that are ready, or being made
  bool skip_damaged = false;           // else a damaged sample ends the feed
};

class Feed {
 public:
  Feed(std::shared_ptr<Reader> reader, std::shared_ptr<Order> order, const FeedOptions& options);
  Feed(const Feed&) = delete;
  Feed& operator=(const Feed&) = delete;
  ~Feed();

  enum class Outcome { batch, end, late };
  // The next `samples` of the order, fewer at its end, less those that are damaged. Late: not by `until`.
  // Which samples these are never depends on when and how this is called. Throws Failed.
  Outcome take(std::size_t samples, Clock::time_point until, std::shared_ptr<SampleBatch>& batch);
  // What `take` waits for.
  Failure late();
  std::uint64_t taken();
  std::vector<std::uint64_t> skipped();  // since the last call
  void close();

 private:
  struct Ready {
    std::shared_ptr<SampleBatch> batch;
    std::size_t taken = 0;  // of its samples
  };
  void run();
  bool has_room() const;
  bool has(std::size_t samples) const;
  struct Run {  // of good samples, one after the other
    std::shared_ptr<SampleBatch> batch;
    std::size_t begin, end;  // positions
  };
  std::shared_ptr<SampleBatch> cut(std::size_t samples);
  std::vector<Run> find_good(std::size_t samples, std::vector<std::uint64_t>& skipped);
  std::shared_ptr<SampleBatch> join(const std::vector<Run>& runs) const;
  void remove(std::size_t samples);
  [[noreturn]] void fail(const Failure& failure);

  const std::shared_ptr<Reader> reader_;
  const FeedOptions options_;
  const std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
  std::atomic<bool> stop_ = false;
  Assembler assembler_;
  const std::uint64_t begun_at_;  // samples of the order that were gone before
  // Under the signal's mutex.
  std::deque<Ready> ready_;
  std::uint64_t ready_bytes_ = 0, ready_samples_ = 0, taken_;
  std::size_t wanted_ = 0;  // samples of a batch: as many as were asked for last
  std::size_t enough_ = 0;  // samples that have to be ready before who waits is woken
  bool ended_ = false, sleeps_ = false;
  std::optional<Failure> failure_;     // that was thrown to a caller
  std::optional<Failure> final_failure_;  // of the thread, after everything that is ready
  std::vector<std::uint64_t> skipped_;
  std::mutex closing_;
  std::thread thread_;
};

}  // namespace penstock::samples
