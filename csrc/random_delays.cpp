#include "random_delays.hpp"

#include <sched.h>
#include <time.h>

#include <atomic>

#include "arena/event.hpp"
#include "sync.hpp"

namespace penstock {

namespace {

std::atomic<std::uint64_t> seed{0}, epoch{0}, threads{0}, delays{0};
std::atomic<std::uint64_t> share_of_2_32{0};
std::atomic<std::uint32_t> longest_ns{0};

// The fault handler draws, too: no memory is taken at a thread's first use of these.
__attribute__((tls_model("initial-exec"))) thread_local std::uint64_t drawn = 0, drawn_in = 0;

std::uint64_t next() {
  if (drawn_in != epoch.load()) {
    drawn_in = epoch.load();
    drawn = seed.load() * 0x9E3779B97F4A7C15u + threads.fetch_add(1);
  }
  auto mixed = drawn += 0x9E3779B97F4A7C15u;  // splitmix64
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBu;
  return mixed ^ mixed >> 31;
}

void maybe_delay() {
  const auto value = next();
  if ((value & 0xFFFFFFFFu) >= share_of_2_32.load()) return;
  delays.fetch_add(1);
  const auto most = longest_ns.load();
  const auto ns = most == 0 ? 0 : static_cast<long>((value >> 34) % most);
  if ((value >> 32 & 3) == 0 || ns == 0) {
    sched_yield();
    return;
  }
  const timespec pause{0, ns};
  nanosleep(&pause, nullptr);
}

class RandomDelays : public Interleaver {
 public:
  void lock(Mutex& mutex) override {
    maybe_delay();
    mutex.real.lock();
  }
  void unlock(Mutex& mutex) override {
    mutex.real.unlock();
    maybe_delay();
  }
  void wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t timeout_ns) override {
    maybe_delay();
    futex_wait(word, seen, timeout_ns);
  }
  void notify(std::atomic<std::uint32_t>& word) override { futex_wake(word); }
  void io_step(const char*) override { maybe_delay(); }
};

RandomDelays random_delays;

}  // namespace

void delay_at_random(std::uint64_t wanted, double share, std::uint32_t longest_us) {
  seed.store(wanted);
  share_of_2_32.store(static_cast<std::uint64_t>(share * 4294967296.0));
  longest_ns.store(longest_us * 1000 < 1'000'000'000 ? longest_us * 1000 : 999'999'999);
  threads.store(0);
  epoch.fetch_add(1);
  interleaver.store(wanted == 0 ? nullptr : &random_delays);
}

std::uint64_t delays_so_far() { return delays.load(); }

}  // namespace penstock
