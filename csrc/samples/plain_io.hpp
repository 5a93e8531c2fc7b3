// Reads and writes one after the other, for where io_uring is refused, as in many containers.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <vector>

#include "io.hpp"

namespace penstock::samples {

class PlainIo final : public Io {
 public:
  bool register_memory(std::byte*, std::size_t) override { return false; }
  void prepare(const Operation& operation, std::uint64_t tag) override {
    prepared_.push_back({operation, tag});
  }
  void submit() override {}
  // One operation at a time: its result can be dealt with while the others wait.
  void wait() override {
    if (!prepared_.empty()) {
      const auto [operation, tag] = prepared_.front();
      prepared_.pop_front();
      results_.push_back({tag, perform(operation)});
      return;
    }
    std::unique_lock lock(mutex_);
    woken_up_.wait(lock, [this] { return woken_; });
    woken_ = false;
  }
  bool next(Result& result) override {
    if (results_.empty()) return false;
    result = results_.back();
    results_.pop_back();
    return true;
  }
  void wake() override {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    woken_up_.notify_one();
  }

 private:
  static int perform(const Operation& operation) {
    const auto at = static_cast<off_t>(operation.offset);
    const auto moved = operation.write ? pwrite(operation.file, operation.address, operation.size_bytes, at)
                                       : pread(operation.file, operation.address, operation.size_bytes, at);
    return moved < 0 ? -errno : static_cast<int>(moved);
  }

  std::deque<std::pair<Operation, std::uint64_t>> prepared_;
  std::vector<Result> results_;
  std::mutex mutex_;
  std::condition_variable woken_up_;
  bool woken_ = false;
};

}  // namespace penstock::samples
