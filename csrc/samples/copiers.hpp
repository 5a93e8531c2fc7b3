// A thread pool that runs the parts of one call in parallel.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "threads.hpp"

namespace penstock::samples {

class Copiers {
 public:
  explicit Copiers(unsigned threads) {
    try {
      for (unsigned i = 0; i < threads; ++i) threads_.emplace_back([this] { serve(); });
    } catch (...) {  // no more threads: those that run must end before they are destroyed
      stop();
      throw;
    }
  }
  Copiers(const Copiers&) = delete;
  Copiers& operator=(const Copiers&) = delete;
  ~Copiers() { stop(); }
  std::size_t size() const { return threads_.size(); }

  // Calls `part` with 0 to parts - 1, each once, here and on the threads; returns when all have. It must not
  // throw.
  void run(std::size_t parts, const std::function<void(std::size_t)>& part) {
    std::unique_lock lock(mutex_);
    part_ = &part;
    next_ = 0;
    parts_ = left_ = parts;
    begun_.notify_all();
    work(lock);
    ended_.wait(lock, [this] { return left_ == 0; });
  }

 private:
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      begun_.notify_all();
    }
    for (auto& thread : threads_) thread.join();
  }
  void work(std::unique_lock<std::mutex>& lock) {
    while (next_ < parts_) {
      const auto number = next_++;
      const auto* part = part_;
      lock.unlock();
      (*part)(number);
      lock.lock();
      if (--left_ == 0) ended_.notify_all();
    }
  }
  void serve() {
    begin_thread("penstock-copy");
    std::unique_lock lock(mutex_);
    while (true) {
      begun_.wait(lock, [this] { return stop_ || next_ < parts_; });
      if (stop_) return;
      work(lock);
    }
  }

  std::mutex mutex_;
  std::condition_variable begun_, ended_;
  const std::function<void(std::size_t)>* part_ = nullptr;
  std::size_t next_ = 0, parts_ = 0, left_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace penstock::samples
