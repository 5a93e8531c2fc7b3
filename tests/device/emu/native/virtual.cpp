#include "virtual.h"

#include "streams.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <pthread.h>
#include <unistd.h>
#include <unordered_map>
#include <vector>

namespace emu {
namespace {

using Wall = std::chrono::steady_clock;
constexpr auto kCatchUp = std::chrono::milliseconds(2);    // a helper that holds the program up any longer is late
constexpr auto kNothing = std::chrono::milliseconds(100);  // so long without any activity: nobody will wake us
constexpr auto kReached = std::chrono::milliseconds(500);  // until work that a helper waits for is carried out

struct VirtualStream {
  double free_s = 0;
  Cause latest = Cause::None;  // what its latest item was, to who waits for it
  Moment awaited;
};

struct Thread {
  enum { Busy, Waiting, Blocked } state = Busy;  // Blocked: another thread must wake it
  bool is_program = false;
  bool is_helper = false;  // it has waited for the device, or another thread has woken it; others have nothing to tell
  double now_s = 0;     // of a helper
  Cause cause = Cause::Host;   // of its latest wait
  double until_s = 0;   // Waiting
  Wall::time_point since = Wall::now();  // Busy
  int64_t epoch = 0;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<bool> on{false};
  int64_t epoch = 0;
  Machine machine{};
  VirtualStream streams[kStreams];
  std::map<double, double> busy[4];  // of the links: begin and end of each stretch
  double program_s = 0;
  std::unordered_map<int64_t, Thread*> threads;
  int64_t next_thread = 0;
  int64_t activity = 0;
  int64_t early = 0;  // helpers that went on before their time
  std::vector<Span> spans;
  std::vector<HostWait> waits;
};

// Never destroyed: threads outlive main.
State& state() {
  static State* instance = new State;
  return *instance;
}

thread_local int waits_for_room = 0;

struct Registered {
  Thread thread;
  int64_t id;

  Registered() {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    thread.is_program = getpid() == gettid() || !strncmp(name, "pt_autograd", 11);
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    id = s.next_thread++;
    s.threads[id] = &thread;
  }
  ~Registered() {
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    s.threads.erase(id);
    s.changed.notify_all();
  }
};

Registered& registered() {
  static thread_local Registered instance;
  return instance;
}

// With the lock.
double& now_of(State& s, Thread& thread) {
  if (thread.epoch != s.epoch) {
    thread.epoch = s.epoch;
    thread.now_s = s.program_s;  // it was not seen before: it cannot be earlier
    thread.cause = Cause::Host;
  }
  return thread.is_program ? s.program_s : thread.now_s;
}

void reach(State& s, Thread& thread, double at_s, Cause cause) {
  double& now_s = now_of(s, thread);
  if (at_s <= now_s) return;
  s.waits.push_back({now_s, at_s, cause, thread.is_program});
  now_s = at_s;
  thread.cause = cause;
}

bool is_program_blocked(State& s) {
  return std::any_of(s.threads.begin(), s.threads.end(), [](auto& entry) {
    return entry.second->is_program && entry.second->state == Thread::Blocked;
  });
}

// The program is not before the moment, or cannot be but by somebody who is: then those go first that are earlier.
bool is_its_turn(State& s, const Thread& helper, const Moment& moment) {
  if (moment.epoch != s.epoch || s.program_s >= moment.at_s) return true;
  if (!is_program_blocked(s)) return false;
  return std::none_of(s.threads.begin(), s.threads.end(), [&](auto& entry) {
    const Thread& other = *entry.second;
    if (!other.is_helper || &other == &helper || other.epoch != s.epoch) return false;
    return other.state == Thread::Busy || (other.state == Thread::Waiting && other.until_s < moment.at_s);
  });
}

// The beginning of a copy on its link, which serves one at a time.
double placed(std::map<double, double>& busy, double ready_s, double takes_s) {
  auto next = busy.upper_bound(ready_s);
  double begin_s = ready_s;
  if (next != busy.begin()) begin_s = std::max(begin_s, std::prev(next)->second);
  while (next != busy.end() && next->first < begin_s + takes_s) {
    begin_s = std::max(begin_s, next->second);
    ++next;
  }
  double end_s = begin_s + takes_s;
  if (next != busy.end() && next->first == end_s) {  // stretches without a gap become one
    end_s = next->second;
    next = busy.erase(next);
  }
  if (next != busy.begin() && std::prev(next)->second == begin_s)
    std::prev(next)->second = end_s;
  else
    busy.emplace(begin_s, end_s);
  return begin_s;
}

thread_local int on_lists = -1;     // kernels so far; -1: not now
constexpr int kTensorsAtOnce = 36;  // of four lists; fewer lists have more

int link_of(Cost::Kind kind) { return kind - Cost::ToDevice; }

double seconds(const Machine& m, const Cost& cost) {
  if (cost.kind != Cost::Kernel) return cost.bytes / m.link_bytes_per_s[link_of(cost.kind)];
  double arithmetic_s = cost.operations / m.operations_per_s[cost.precision];
  return std::max({cost.bytes / m.memory_bytes_per_s, arithmetic_s, m.kernel_s});
}

Cause as_cause(Cost::Kind kind) {
  if (kind == Cost::Kernel) return Cause::Kernels;
  return kind == Cost::ToDevice || kind == Cost::DiskRead ? Cause::Arrival : Cause::Departure;
}

}  // namespace

bool has_machine() { return state().on; }

void set_machine(const Machine* machine) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.epoch++;
  s.on = machine != nullptr;
  if (machine) s.machine = *machine;
  for (auto& stream : s.streams) stream = {};
  for (auto& link : s.busy) link.clear();
  s.program_s = 0;
  s.spans.clear();
  s.waits.clear();
  s.early = 0;
  s.changed.notify_all();
}

void virtual_launch(int stream, const char* name, const Cost& cost) {
  if (!has_machine() || cost.kind == Cost::Nothing) return;
  State& s = state();
  Thread& thread = registered().thread;
  std::lock_guard<std::mutex> lock(s.mutex);
  double& now_s = now_of(s, thread);
  Machine machine = s.machine;
  if (cost.kind == Cost::Kernel && on_lists >= 0 && on_lists++ % kTensorsAtOnce != 0)
    machine.launch_s = machine.kernel_s = 0;  // a part of the launch before
  now_s += machine.launch_s;
  s.activity++;
  VirtualStream& on = s.streams[stream];
  double ready_s = std::max({on.free_s, on.awaited.at_s, now_s});
  Cause cause = ready_s == on.free_s ? Cause::None
                : ready_s == on.awaited.at_s ? on.awaited.cause
                                             : Cause::Host;
  double takes_s = seconds(machine, cost), begin_s = ready_s;
  if (cost.kind != Cost::Kernel) {
    begin_s = placed(s.busy[link_of(cost.kind)], ready_s, takes_s);
    if (begin_s > ready_s) cause = Cause::Link;
  }
  s.spans.push_back({name, on.free_s, now_s, begin_s, begin_s + takes_s, cost.bytes, cost.kind, stream, cause});
  on.free_s = begin_s + takes_s;
  on.latest = as_cause(cost.kind);
  if (thread.is_program) s.changed.notify_all();
}

Moment virtual_record(int stream) {
  if (!has_machine()) return {};
  State& s = state();
  Thread& thread = registered().thread;
  std::lock_guard<std::mutex> lock(s.mutex);
  const VirtualStream& on = s.streams[stream];
  Moment made{s.epoch, on.free_s, on.latest};
  if (on.awaited.at_s > made.at_s) made = on.awaited;
  if (double now_s = now_of(s, thread); now_s > made.at_s) made = {s.epoch, now_s, Cause::Host};
  made.epoch = s.epoch;
  return made;
}

void virtual_wait(int stream, const Moment& moment) {
  if (!has_machine()) return;
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  Moment& awaited = s.streams[stream].awaited;
  if (moment.epoch == s.epoch && moment.at_s > awaited.at_s) awaited = moment;
}

Moment virtual_disk(Cost::Kind kind, double bytes) {
  if (!has_machine()) return {};
  State& s = state();
  Thread& thread = registered().thread;
  std::lock_guard<std::mutex> lock(s.mutex);
  double asked_s = now_of(s, thread), ready_s = asked_s + s.machine.disk_latency_s;
  double takes_s = seconds(s.machine, {kind, bytes});
  double begin_s = placed(s.busy[link_of(kind)], ready_s, takes_s);
  const char* name = kind == Cost::DiskRead ? "read from the disk" : "write to the disk";
  Cause cause = begin_s > ready_s ? Cause::Link : Cause::None;
  s.spans.push_back({name, ready_s, asked_s, begin_s, begin_s + takes_s, bytes, kind, -1, cause});
  s.activity++;
  return {s.epoch, begin_s + takes_s, as_cause(kind)};
}

OnLists::OnLists() : within(on_lists >= 0) {
  if (!within) on_lists = 0;
}
OnLists::~OnLists() {
  if (!within) on_lists = -1;
}

bool is_past(const Moment& moment) {
  State& s = state();
  Thread& thread = registered().thread;
  std::lock_guard<std::mutex> lock(s.mutex);
  return moment.epoch != s.epoch || moment.at_s <= now_of(s, thread);
}

void begin_host_wait(const Moment& moment) {
  if (!has_machine()) return;
  State& s = state();
  Thread& thread = registered().thread;
  std::lock_guard<std::mutex> lock(s.mutex);
  s.activity++;
  if (moment.epoch != s.epoch) return;
  if (thread.is_program) {  // from here on helpers may see what happens until then
    reach(s, thread, moment.at_s, waits_for_room ? Cause::Room : moment.cause);
  } else {
    now_of(s, thread);
    thread.is_helper = true;
    thread.state = Thread::Waiting;
    thread.until_s = moment.at_s;
  }
  s.changed.notify_all();
}

void end_host_wait(const Moment& moment) {
  if (!has_machine()) return;
  State& s = state();
  Thread& thread = registered().thread;
  if (thread.is_program) return;
  std::unique_lock<std::mutex> lock(s.mutex);
  while (!is_its_turn(s, thread, moment)) {
    int64_t before = s.activity;
    if (s.changed.wait_for(lock, kNothing) == std::cv_status::timeout && s.activity == before) {
      s.early++;
      break;
    }
  }
  thread.state = Thread::Busy;
  thread.since = Wall::now();
  s.activity++;
  if (moment.epoch == s.epoch) reach(s, thread, moment.at_s, moment.cause);
  s.changed.notify_all();
}

void let_helpers_catch_up() {
  if (!has_machine()) return;
  State& s = state();
  if (!registered().thread.is_program) return;
  std::unique_lock<std::mutex> lock(s.mutex);
  auto deadline = Wall::now() + kReached;
  for (;;) {
    auto now = Wall::now();
    bool waits = now < deadline && std::any_of(s.threads.begin(), s.threads.end(), [&](auto& entry) {
      const Thread& other = *entry.second;
      if (!other.is_helper || other.epoch != s.epoch) return false;
      return other.state == Thread::Waiting ? other.until_s <= s.program_s
                                            : other.state == Thread::Busy && now < other.since + kCatchUp;
    });
    if (!waits) return;
    s.changed.wait_for(lock, kCatchUp / 4);
  }
}

WaitsForRoom::WaitsForRoom() { waits_for_room++; }
WaitsForRoom::~WaitsForRoom() { waits_for_room--; }

}  // namespace emu

extern "C" {

void emu_set_machine(const emu::Machine* machine) { emu::set_machine(machine); }

double emu_now_s() {
  auto& s = emu::state();
  auto& thread = emu::registered().thread;
  std::lock_guard<std::mutex> lock(s.mutex);
  return emu::now_of(s, thread);
}

// A transfer to or from the disk: asked for by one thread, awaited by another.
emu::Moment emu_disk(int kind, double bytes) {
  return emu::virtual_disk(static_cast<emu::Cost::Kind>(kind), bytes);
}

void emu_await(emu::Moment moment) {
  emu::begin_host_wait(moment);
  emu::end_host_wait(moment);
}

// This thread gets what another one left at that time.
void emu_reach(double at_s) {
  auto& s = emu::state();
  auto& thread = emu::registered().thread;
  std::lock_guard<std::mutex> lock(s.mutex);
  emu::reach(s, thread, at_s, emu::Cause::Host);
  s.changed.notify_all();
}

// For what threads hand over to each other in Python.
int64_t emu_thread() { return emu::registered().id; }

void emu_blocked(int begins) {
  auto& s = emu::state();
  auto& thread = emu::registered().thread;
  std::lock_guard<std::mutex> lock(s.mutex);
  thread.state = begins ? emu::Thread::Blocked : emu::Thread::Busy;
  thread.since = emu::Wall::now();
  s.activity++;
  s.changed.notify_all();
}

// This thread wakes that one, which cannot be earlier.
void emu_wakes(int64_t id) {
  auto& s = emu::state();
  auto& thread = emu::registered().thread;
  std::lock_guard<std::mutex> lock(s.mutex);
  auto found = s.threads.find(id);
  if (found == s.threads.end()) return;
  emu::Thread& other = *found->second;
  if (other.is_program != thread.is_program || !other.is_program)
    emu::reach(s, other, emu::now_of(s, thread), thread.cause);
  other.is_helper = !other.is_program;
  other.state = emu::Thread::Busy;
  other.since = emu::Wall::now();
  s.activity++;
  s.changed.notify_all();
}

void emu_clear_log() {
  auto& s = emu::state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.spans.clear();
  s.waits.clear();
  s.early = 0;
}

int64_t emu_early() {
  auto& s = emu::state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.early;
}

// How many there are; as many as fit are written.
int64_t emu_spans(emu::Span* to, int64_t most) {
  auto& s = emu::state();
  std::lock_guard<std::mutex> lock(s.mutex);
  std::copy_n(s.spans.begin(), std::min<int64_t>(most, s.spans.size()), to);
  return s.spans.size();
}

int64_t emu_host_waits(emu::HostWait* to, int64_t most) {
  auto& s = emu::state();
  std::lock_guard<std::mutex> lock(s.mutex);
  std::copy_n(s.waits.begin(), std::min<int64_t>(most, s.waits.size()), to);
  return s.waits.size();
}
}
