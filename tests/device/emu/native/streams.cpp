#include "streams.h"

#include "memory.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <deque>
#include <exception>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace emu {
namespace {

struct Item {
  enum Kind { Run, Record, Wait } kind;
  const char* name;
  Work work;
  MarkPtr mark;
};

struct Stream {
  std::deque<Item> items;
  int64_t latest_launch = 0;
};

struct State {
  std::mutex mutex;
  std::condition_variable to_do, done;
  Stream streams[kStreams];
  std::vector<MarkPtr> awaited;  // by threads that wait
  Order order = Order::Random;
  std::atomic<bool> computes{true};
  std::mt19937_64 random{0};
  int64_t steps = 0;  // items that the host waits for, where orders have steps
  int64_t launches = 0;
  int running = -1;  // the stream whose item is carried out
  int latest = -1;
  int next_stream = 0;
  std::atomic<pid_t> process{0};  // whose thread the executor is
  bool halted = false;
  std::string error;  // of work, until a wait raises it
  Counters counters;
};

// Never destroyed: the executor outlives main.
State& state() {
  static State* instance = new State;
  return *instance;
}

std::atomic<const char*> executing{nullptr};  // for on_crash

double now_ms() {
  auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since).count();
}

bool is_ready(const Stream& stream) {
  return !stream.items.empty() && (stream.items.front().kind != Item::Wait || stream.items.front().mark->reached);
}

// The stream that must go on next so that a mark is reached. Waits are for marks that were recorded before, so
// they form no circle.
int needed_for(State& s, const MarkPtr& mark) {
  int stream = mark->stream;
  while (!is_ready(s.streams[stream])) {
    if (s.streams[stream].items.empty()) return -1;
    stream = s.streams[stream].items.front().mark->stream;
  }
  return stream;
}

// Streams that somebody who waits needs, once each.
std::vector<int> needed(State& s) {
  std::vector<int> found;
  for (auto& mark : s.awaited) {
    int stream = mark->reached ? -1 : needed_for(s, mark);
    if (stream >= 0 && std::find(found.begin(), found.end(), stream) == found.end()) found.push_back(stream);
  }
  return found;
}

std::vector<int> all_ready(State& s) {
  std::vector<int> found;
  for (int i = 0; i < kStreams; i++)
    if (is_ready(s.streams[i])) found.push_back(i);
  return found;
}

// The stream whose first item is carried out next; -1: none now.
int choose(State& s) {
  if (s.halted) return -1;
  std::vector<int> candidates = needed(s);
  if (s.order == Order::Random || s.steps > 0 || (s.order == Order::Newest && !candidates.empty())) {
    std::vector<int> awaited = std::exchange(candidates, all_ready(s));
    if (s.order == Order::Newest && candidates.size() > awaited.size())
      std::erase_if(candidates, [&](int i) { return std::count(awaited.begin(), awaited.end(), i) > 0; });
  }
  if (candidates.empty()) {
    if (s.steps > 0) {
      s.steps = 0;
      s.done.notify_all();
    }
    return -1;
  }
  if (s.order == Order::Newest)
    return *std::max_element(candidates.begin(), candidates.end(), [&](int a, int b) {
      return s.streams[a].latest_launch < s.streams[b].latest_launch;
    });
  return candidates[candidates.size() == 1 ? 0 : s.random() % candidates.size()];
}

void carry_out(State& s, std::unique_lock<std::mutex>& lock, int stream) {
  Item item = std::move(s.streams[stream].items.front());
  s.streams[stream].items.pop_front();
  if (stream != s.latest) s.counters.switches++;
  s.latest = stream;
  if (s.steps > 0) s.steps--;
  if (item.kind == Item::Run) {
    s.running = stream;
    lock.unlock();
    executing = item.name;
    std::string error;
    try {
      item.work();
    } catch (const std::exception& e) {
      error = std::string(item.name) + ": " + e.what();
    }
    executing = nullptr;
    item.work = nullptr;
    lock.lock();
    s.running = -1;
    s.counters.executed++;
    if (s.error.empty()) s.error = error;
  } else if (item.kind == Item::Record) {
    item.mark->time_ms = now_ms();
    item.mark->reached = true;
  }
  s.done.notify_all();
}

void execute(State& s) {
  std::unique_lock<std::mutex> lock(s.mutex);
  for (;;) {
    int stream = choose(s);
    if (stream < 0) {
      s.to_do.wait(lock);
      continue;
    }
    if (s.order == Order::Random && s.awaited.empty() && s.random() % 4 == 0) {
      // The host runs ahead meanwhile, so other streams may be ready afterwards.
      s.to_do.wait_for(lock, std::chrono::microseconds(s.random() % 400));
      if ((stream = choose(s)) < 0) continue;
    }
    carry_out(s, lock, stream);
  }
}

struct sigaction before_ours[NSIG];

// Says what was done to device memory; then the handler that was there before meets the same signal.
void on_crash(int number, siginfo_t* info, void*) {
  const char* name = executing;
  char text[200];
  if (is_device_address(info->si_addr)) {
    int length = snprintf(text, sizeof text, "emu: device memory, at %p, was touched by the host\n", info->si_addr);
    if (write(STDERR_FILENO, text, length) < 0) {}
  } else if (name) {
    int length = snprintf(text, sizeof text, "emu: signal %d at %p while a thread of the process carried out %s\n",
                          number, info->si_addr, name);
    if (write(STDERR_FILENO, text, length) < 0) {}
  }
  sigaction(number, &before_ours[number], nullptr);
}

void start(State& s) {
  if (s.process) return;
  s.process = getpid();
  struct sigaction action = {};
  action.sa_sigaction = on_crash;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS}) sigaction(number, &action, &before_ours[number]);
  sigset_t all, before;  // signals are for the threads of the host
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([&s] { execute(s); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// After something was added to a stream, with the lock held.
void added(State& s, std::unique_lock<std::mutex>& lock, int stream) {
  s.streams[stream].latest_launch = ++s.launches;
  if (s.halted) return;
  if (s.order == Order::Eager) {
    auto mark = std::make_shared<Mark>(stream);
    s.streams[stream].items.push_back({Item::Record, "record", nullptr, mark});
    s.awaited.push_back(mark);
    s.to_do.notify_one();
    s.done.wait(lock, [&] { return mark->reached || s.halted; });
    std::erase(s.awaited, mark);
  } else if (s.order == Order::Random) {
    s.to_do.notify_one();
  } else if (s.order != Order::Lazy) {
    s.steps += s.random() % 4 ? 0 : s.random() % 8;  // bursts: streams must get far apart
    if (!s.steps) return;
    s.to_do.notify_one();
    s.done.wait(lock, [&] { return (s.steps <= 0 && s.running < 0) || s.halted; });
  }
}

// Whether what is added to a stream now, and does nothing, is over at once: it costs the host no switch of
// threads, as little as on a device that is not emulated.
bool is_over_at_once(const State& s, int stream) {
  return s.order == Order::Eager && s.streams[stream].items.empty() && s.running != stream && !s.halted;
}

void raise_error(State& s) {
  if (s.error.empty()) return;
  std::string error = std::move(s.error);
  s.error.clear();
  throw std::runtime_error("emu: asynchronous error in " + error);
}

// Carried out, and not more: no error is raised.
void await(const MarkPtr& mark) {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  if (mark->reached || s.halted) return;
  start(s);
  s.awaited.push_back(mark);
  mark->waiting++;
  s.to_do.notify_one();
  s.done.wait(lock, [&] { return mark->reached || s.halted; });
  mark->waiting--;
  s.awaited.erase(std::find(s.awaited.begin(), s.awaited.end(), mark));
}

std::atomic<int> host_delay_us{0};
thread_local int stream_of_thread = 0;

}  // namespace

Counters& counters() { return state().counters; }

void set_order(Order order, uint64_t seed) {
  synchronize_device();
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.order = order;
  s.random.seed(seed);
  s.latest = -1;
  s.next_stream = 0;
}

void set_computes(bool computes) { state().computes = computes; }

bool computes() { return state().computes; }

void launch(int stream, const char* name, const Cost& cost, Work work, bool always) {
  refuse_if_forked();
  const bool works = always || computes();
  if (cost.kind != Cost::Nothing) let_helpers_catch_up();
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  start(s);
  s.counters.launched++;
  virtual_launch(stream, name, cost);
  if (!works && is_over_at_once(s, stream)) {
    s.counters.executed++;
    return;
  }
  if (!works) work = [] {};
  s.streams[stream].items.push_back({Item::Run, name, std::move(work), nullptr});
  added(s, lock, stream);
}

MarkPtr record(int stream) {
  refuse_if_forked();
  State& s = state();
  auto mark = std::make_shared<Mark>(stream);
  std::unique_lock<std::mutex> lock(s.mutex);
  start(s);
  mark->moment = virtual_record(stream);
  if (is_over_at_once(s, stream)) {
    mark->time_ms = now_ms();
    mark->reached = true;
    return mark;
  }
  s.streams[stream].items.push_back({Item::Record, "record", nullptr, mark});
  added(s, lock, stream);
  return mark;
}

void wait(int stream, const MarkPtr& mark) {
  if (!mark || (mark->reached && !has_machine())) return;
  refuse_if_forked();
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  virtual_wait(stream, mark->moment);
  if (mark->reached) return;
  start(s);
  s.streams[stream].items.push_back({Item::Wait, "wait", nullptr, mark});
  if (s.order != Order::Eager) added(s, lock, stream);  // there the mark was reached before
}

bool is_over(const MarkPtr& mark) {
  if (!has_machine()) return mark->reached;
  if (!is_past(mark->moment)) return false;
  await(mark);
  return true;
}

bool query(const MarkPtr& mark) {
  if (!mark || is_over(mark)) return true;
  refuse_if_forked();
  State& s = state();
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    // Whoever polls must see it reached at some time, also where nothing runs unless it is waited for.
    if (s.random() % 8) return !has_machine() && mark->reached;
  }
  synchronize(mark);
  return true;
}

void synchronize(MarkPtr mark) {
  if (!mark) return;
  refuse_if_forked();
  begin_host_wait(mark->moment);
  await(mark);
  end_host_wait(mark->moment);
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.counters.synchronized++;
  raise_error(s);
}

void synchronize_stream(int stream) { synchronize(record(stream)); }

void synchronize_device() {
  refuse_if_forked();
  State& s = state();
  std::vector<int> busy;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    for (int i = 0; i < kStreams; i++)
      if (has_machine() || !s.streams[i].items.empty() || s.running == i) busy.push_back(i);
    if (busy.empty()) return raise_error(s);
  }
  std::vector<MarkPtr> marks;
  for (int stream : busy) marks.push_back(record(stream));
  for (auto& mark : marks) synchronize(mark);
}

void set_host_delay(int microseconds) { host_delay_us = microseconds; }

void delay_host() {
  int most_us = host_delay_us;
  if (!most_us) return;
  static std::atomic<uint32_t> threads{0};
  static thread_local std::minstd_rand random(++threads);
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % most_us));
}

bool is_forked() { return state().process && state().process != getpid(); }

// Before any lock is taken: a thread that is not there may hold it.
void refuse_if_forked() {
  if (is_forked()) throw std::runtime_error("emu: the device cannot be used in a forked process");
}

void halt() {
  if (is_forked()) return;
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  s.halted = true;
  s.done.notify_all();
  s.done.wait(lock, [&] { return s.running < 0; });
}

int current_stream() { return stream_of_thread; }

int exchange_stream(int stream) { return std::exchange(stream_of_thread, stream); }

int new_stream() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return 1 + s.next_stream++ % (kStreams - 1);
}

}  // namespace emu
