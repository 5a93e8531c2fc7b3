// What devices of tests have in common: they wait for a result, or until they are woken.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>

#include "io/io.hpp"

namespace penstock::test {

class WakingIo : public Io {
 public:
  bool register_memory(std::byte*, std::size_t) override { return false; }
  void submit() override {}
  void wait() override {
    if (!results_.empty()) return;
    rest();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return woken_; });
    woken_ = false;
  }
  bool next(Result& result) override {
    if (results_.empty()) return false;
    result = results_.front();
    results_.pop_front();
    return true;
  }
  void wake() override {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    changed_.notify_one();
  }

 protected:
  virtual void rest() {}  // it is about to wait
  std::deque<Result> results_;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool woken_ = false;
};

}  // namespace penstock::test
