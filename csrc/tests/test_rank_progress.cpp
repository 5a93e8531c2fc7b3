// Ranks wait for each other: as threads that share memory here, so that a race of what they share shows.
#include "check.hpp"
#include "runtime/rank_progress.hpp"

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

using penstock::RankProgress;

namespace {

constexpr std::size_t kRanks = 3, kElements = 8, kDepth = RankProgress::kDepth;
constexpr int kPieces = 500;

struct alignas(64) Memory {
  std::byte bytes[1024]{};
  std::uintptr_t address() { return reinterpret_cast<std::uintptr_t>(bytes); }
};

// Plain memory: slots of each rank, and of the results.
long cells[kRanks + 1][kDepth][kElements];

long value(std::size_t rank, int piece, std::size_t element) {
  return static_cast<long>(rank + 1) * (1000 * piece + static_cast<long>(element));
}

// The stages of penstock.distributed.exchange, in its order.
int wrong_of(RankProgress& progress, std::size_t rank) {
  int wrong = 0;
  for (int step = 0; step < kPieces + 2; ++step) {
    if (const int k = step; k < kPieces)
      for (std::size_t i = 0; i < kElements; ++i) cells[rank][k % kDepth][i] = value(rank, k, i);
    if (const int k = step - 1; k >= 0 && k < kPieces) {
      progress.mark(RankProgress::kFilled, static_cast<std::uint64_t>(k) + 1, 7);
      wrong += progress.wait(RankProgress::kFilled, static_cast<std::uint64_t>(k) + 1, 60).rank != -1;
      wrong += progress.what((rank + 1) % kRanks, static_cast<std::uint64_t>(k)) != 7;
      for (std::size_t i = rank; i < kElements; i += kRanks) {
        long sum = 0;
        for (std::size_t other = 0; other < kRanks; ++other) sum += cells[other][k % kDepth][i];
        cells[kRanks][k % kDepth][i] = sum;
      }
      progress.mark(RankProgress::kSummed, static_cast<std::uint64_t>(k) + 1);
    }
    if (const int k = step - 2; k >= 0) {
      wrong += progress.wait(RankProgress::kSummed, static_cast<std::uint64_t>(k) + 1, 60).rank != -1;
      for (std::size_t i = 0; i < kElements; ++i) {
        long sum = 0;
        for (std::size_t other = 0; other < kRanks; ++other) sum += value(other, k, i);
        wrong += cells[kRanks][k % kDepth][i] != sum;
      }
    }
  }
  return wrong;
}

}  // namespace

TEST(slots_are_used_again_when_all_are_done_with_them) {
  Memory memory;
  CHECK(RankProgress::bytes(kRanks) <= sizeof memory.bytes);
  std::atomic<int> wrong{0};
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < kRanks; ++rank)
    ranks.emplace_back([&, rank] {
      RankProgress progress(memory.address(), kRanks, rank, {});
      wrong += wrong_of(progress, rank);
    });
  for (auto& rank : ranks) rank.join();
  CHECK_EQUAL(wrong.load(), 0);
}

TEST(who_is_late_or_has_failed_is_told) {
  Memory memory;
  RankProgress first(memory.address(), 2, 0, {}), second(memory.address(), 2, 1, {});
  first.mark(RankProgress::kFilled, 1);
  const auto late = first.wait(RankProgress::kFilled, 1, 0.01);
  CHECK_EQUAL(late.rank, 1);
  CHECK_EQUAL(late.reason, "late");
  std::thread failing([&] { second.fail(); });
  const auto failed = first.wait(RankProgress::kFilled, 1, 60);
  failing.join();
  CHECK_EQUAL(failed.rank, 1);
  CHECK_EQUAL(failed.reason, "failed");
  second.mark(RankProgress::kFilled, 1);  // what it has done counts nevertheless
  CHECK_EQUAL(first.wait(RankProgress::kFilled, 1, 60).rank, -1);
}

TEST(a_process_that_ends_is_noticed) {
  Memory memory;
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    usleep(100'000);
    _exit(0);
  }
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, child, 0));
  CHECK(pidfd >= 0);
  RankProgress first(memory.address(), 2, 0, {-1, pidfd});
  const auto gone = first.wait(RankProgress::kFilled, 1, 60);
  close(pidfd);
  waitpid(child, nullptr, 0);
  CHECK_EQUAL(gone.reason, "gone");
  CHECK_EQUAL(gone.rank, 1);
}
