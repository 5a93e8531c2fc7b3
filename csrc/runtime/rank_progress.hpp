// How far each of several processes is, in memory that they share: they wait for each other without a lock.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace penstock {

class RankProgress {
 public:
  // What a rank has done with a piece, in this order.
  enum Stage { kFilled, kSummed, kStages };
  static constexpr std::size_t kDepth = 3;  // pieces in flight

  // Of the memory, which is zero at first.
  static std::size_t bytes(std::size_t ranks);

  // watched: a pidfd of each rank, which becomes readable when its process is gone; -1 for one not to be watched.
  RankProgress(std::uintptr_t address, std::size_t ranks, std::size_t rank, std::vector<int> watched);

  // This rank has done so many pieces, all told. what: of the last one, for the others to compare.
  void mark(Stage stage, std::uint64_t pieces, std::uint64_t what = 0);
  // What the rank brought in the piece, which it has filled.
  std::uint64_t what(std::size_t rank, std::uint64_t piece) const;
  // This rank does no more.
  void fail();

  struct Missing {
    std::int64_t rank;    // -1: none
    std::string reason;  // "late", "gone" or "failed"
  };
  // Until all ranks have done so many pieces, or one of them cannot.
  Missing wait(Stage stage, std::uint64_t pieces, double timeout_s) const;

 private:
  struct alignas(64) Rank {
    std::atomic<std::uint64_t> done[kStages];
    std::atomic<std::uint64_t> what[kDepth];
    std::atomic<std::uint32_t> failed;
  };
  struct alignas(64) Changes {
    std::atomic<std::uint32_t> count;
    std::atomic<std::uint32_t> waiting;
  };

  void notify();
  std::int64_t behind(Stage stage, std::uint64_t pieces) const;

  Changes& changes_;
  Rank* const ranks_;
  const std::size_t count_, rank_;
  const std::vector<int> watched_;
};

}  // namespace penstock
