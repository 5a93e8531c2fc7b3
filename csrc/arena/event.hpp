// Waiting for something that another thread changes. Unlike a condition variable it holds no state of
// its waiters, so that a forked child can use it on.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <mutex>

#include "sync.hpp"

namespace penstock {

// Returns when `word` is no longer `value`, somebody wakes it, a signal comes or `timeout_ns` are over. `shared`: other
// processes have the word, too.
inline void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value, std::int64_t timeout_ns,
                       bool shared = false) {
  timespec timeout{static_cast<time_t>(timeout_ns / 1'000'000'000), static_cast<long>(timeout_ns % 1'000'000'000)};
  syscall(SYS_futex, &word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, value, timeout_ns < 0 ? nullptr : &timeout,
          nullptr, 0);
}

inline void futex_wake(std::atomic<std::uint32_t>& word, bool shared = false) {
  syscall(SYS_futex, &word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

inline std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const auto now_ns = now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
#ifdef PENSTOCK_SEAMS
  if (auto* chooser = interleaver.load()) return chooser->now_ns(now_ns);
#endif
  return now_ns;
}

class Event {
 public:
  // Forever if `timeout_ns` is negative.
  void wait(std::unique_lock<Mutex>& lock, std::int64_t timeout_ns = -1) {
    const auto seen = changes_.load();
    lock.unlock();
#ifdef PENSTOCK_SEAMS
    if (auto* chooser = interleaver.load())
      chooser->wait(changes_, seen, timeout_ns);
    else
#endif
      futex_wait(changes_, seen, timeout_ns);
    lock.lock();
  }
  void notify() {
    changes_.fetch_add(1);
#ifdef PENSTOCK_SEAMS
    if (auto* chooser = interleaver.load()) return chooser->notify(changes_);
#endif
    futex_wake(changes_);
  }

 private:
  std::atomic<std::uint32_t> changes_{0};
};

}  // namespace penstock
