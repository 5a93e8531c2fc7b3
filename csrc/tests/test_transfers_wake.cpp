// What is submitted while every thread is about to wait begins all the same.
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "check.hpp"
#include "io/transfers.hpp"
#include "sync.hpp"
#include "waking_io.hpp"

using namespace penstock;

namespace {

constexpr auto kPatience = std::chrono::seconds(20);  // of a test that fails
constexpr unsigned kThreads = 2;

// Holds each thread of the pool at its so manieth lock.
class Holder final : public Interleaver {
 public:
  explicit Holder(unsigned at) : at_(at) { interleaver.store(this); }
  ~Holder() override { interleaver.store(nullptr); }

  void begin_thread() { locks_ = 1; }
  void lock(Mutex& mutex) override {
    if (locks_ > 0 && locks_++ == at_) stop();
    mutex.real.lock();
  }
  void unlock(Mutex& mutex) override { mutex.real.unlock(); }
  void wait(std::atomic<std::uint32_t>&, std::uint32_t, std::int64_t) override {}
  void notify(std::atomic<std::uint32_t>&) override {}
  void io_step(const char*) override {}

  // A thread of the pool goes no further by itself: it is held, or waits.
  void at_rest() {
    const std::lock_guard lock(mutex_);
    ++resting_;
    changed_.notify_all();
  }
  bool all_at_rest() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [this] { return resting_ >= kThreads; });
  }
  void let_go() {
    const std::lock_guard lock(mutex_);
    gone_ = true;
    changed_.notify_all();
  }
  bool was_needed() const { return held_; }

 private:
  void stop() {
    held_ = true;
    at_rest();
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kPatience, [this] { return gone_; });
  }

  const unsigned at_;
  static thread_local unsigned locks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  unsigned resting_ = 0;
  bool gone_ = false;
  std::atomic<bool> held_ = false;
};

thread_local unsigned Holder::locks_ = 0;

struct Begun {
  std::mutex mutex;
  std::condition_variable changed;
  unsigned count = 0;
};

// Carries out what it is given at once.
class Device final : public test::WakingIo {
 public:
  Device(Holder& holder, Begun& begun) : holder_(holder), begun_(begun) {}
  void prepare(const Operation& operation, std::uint64_t tag) override {
    results_.push_back({tag, static_cast<int>(operation.size_bytes)});
    const std::lock_guard lock(begun_.mutex);
    ++begun_.count;
    begun_.changed.notify_all();
  }

 private:
  void rest() override { holder_.at_rest(); }

  Holder& holder_;
  Begun& begun_;
};

}  // namespace

TEST(what_comes_while_all_are_about_to_wait_begins) {
  bool held = true;
  unsigned tried = 0;
  // Two locks belong to the start, which the constructor waits for.
  for (unsigned at = 3; held; ++at, ++tried) {
    Holder holder(at);
    Begun begun;
    std::vector<std::byte> memory(512);
    {
      Transfers transfers(
          [&] {
            holder.begin_thread();
            return std::make_unique<Device>(holder, begun);
          },
          {1, 4096, 4096, 1, kThreads});
      CHECK(holder.all_at_rest());
      held = holder.was_needed();
      const Transfer asked{1, true, Method::buffered, true, {3, -1, 512}, 0, memory.data(), memory.size()};
      CHECK(transfers.submit({&asked, 1}));
      holder.let_go();
      std::unique_lock lock(begun.mutex);
      CHECK(begun.changed.wait_for(lock, kPatience, [&] { return begun.count > 0; }));
    }
  }
  CHECK(tried > 2);
}
