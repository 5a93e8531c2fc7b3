#include "runtime/rank_progress.hpp"

#include <poll.h>

#include <algorithm>
#include <chrono>

#include "arena/event.hpp"

namespace penstock {

namespace {

// So often it is seen whether the others are alive.
constexpr double kLookS = 0.05;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool is_gone(int pidfd) {
  pollfd watched{pidfd, POLLIN, 0};
  return pidfd >= 0 && poll(&watched, 1, 0) > 0 && (watched.revents & POLLIN) != 0;
}

}  // namespace

std::size_t RankProgress::bytes(std::size_t ranks) { return sizeof(Changes) + ranks * sizeof(Rank); }

RankProgress::RankProgress(std::uintptr_t address, std::size_t ranks, std::size_t rank, std::vector<int> watched)
    : changes_(*reinterpret_cast<Changes*>(address)),
      ranks_(reinterpret_cast<Rank*>(address + sizeof(Changes))),
      count_(ranks),
      rank_(rank),
      watched_(std::move(watched)) {}

void RankProgress::notify() {
  changes_.count.fetch_add(1);
  if (changes_.waiting.load() != 0) futex_wake(changes_.count, true);
}

void RankProgress::mark(Stage stage, std::uint64_t pieces, std::uint64_t what) {
  auto& mine = ranks_[rank_];
  if (stage == kFilled) mine.what[(pieces - 1) % kDepth].store(what, std::memory_order_relaxed);
  mine.done[stage].store(pieces, std::memory_order_release);
  notify();
}

std::uint64_t RankProgress::what(std::size_t rank, std::uint64_t piece) const {
  return ranks_[rank].what[piece % kDepth].load(std::memory_order_relaxed);
}

void RankProgress::fail() {
  ranks_[rank_].failed.store(1);
  notify();
}

// The first rank that has not done so many; -1: all have.
std::int64_t RankProgress::behind(Stage stage, std::uint64_t pieces) const {
  for (std::size_t rank = 0; rank < count_; ++rank)
    if (ranks_[rank].done[stage].load(std::memory_order_acquire) < pieces) return static_cast<std::int64_t>(rank);
  return -1;
}

RankProgress::Missing RankProgress::wait(Stage stage, std::uint64_t pieces, double timeout_s) const {
  const double deadline_s = now_s() + timeout_s;
  while (true) {
    const auto count = changes_.count.load();
    const auto late = behind(stage, pieces);
    if (late < 0) return {-1, ""};
    for (std::size_t rank = 0; rank < count_; ++rank)
      if (ranks_[rank].failed.load() != 0) return {static_cast<std::int64_t>(rank), "failed"};
    for (std::size_t rank = 0; rank < watched_.size(); ++rank)
      if (is_gone(watched_[rank])) return {static_cast<std::int64_t>(rank), "gone"};
    const double left_s = deadline_s - now_s();
    if (left_s <= 0) return {late, "late"};
    changes_.waiting.fetch_add(1);
    futex_wait(changes_.count, count, static_cast<std::int64_t>(std::min(left_s, kLookS) * 1e9), true);
    changes_.waiting.fetch_sub(1);
  }
}

}  // namespace penstock
