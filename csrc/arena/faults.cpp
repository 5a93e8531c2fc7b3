#include "arena/faults.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <ucontext.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <new>

#include "arena/handlers.hpp"

namespace penstock {

namespace {

constexpr std::size_t kProblemBytes = 512;
constexpr std::size_t kStackBytes = std::size_t{512} << 10;
constexpr std::int64_t kForever = std::int64_t{1} << 62;
constexpr int kMostRepeats = 1000;  // of one access that gets no further, before it is not ours

// What a thread that waits and the thread that serves share. Its state is what both wait for.
struct Request {
  enum State : std::uint32_t { kFree, kTaken, kPosted, kServing, kAnswered, kGivenUp };
  std::atomic<std::uint32_t> state{kFree};
  const void* address = nullptr;
  bool is_write = false;
  pthread_t asker = {};
  FaultHistory history;
  Arena::Answer answer = Arena::Answer::kNo;
  char problem[kProblemBytes] = {};
};

class Mailbox {
 public:
  // Null where so many others wait until then that there is no place.
  Request* post(const void* address, bool is_write, const FaultHistory& history, std::int64_t deadline_ns) {
    auto* const request = taken(deadline_ns);
    if (request == nullptr) return nullptr;
    request->address = address;
    request->is_write = is_write;
    request->asker = pthread_self();
    request->history = history;
    request->state.store(Request::kPosted);
    ring();
    return request;
  }

  // Until it is answered; false: it is not in time, and is given up.
  bool wait(Request& request, std::int64_t deadline_ns) {
    for (;;) {
      auto state = request.state.load();
      if (state == Request::kAnswered) return true;
      const auto left = deadline_ns - now_ns();
      if (left > 0)
        futex_wait(request.state, state, left);
      else if (request.state.compare_exchange_strong(state, Request::kGivenUp))
        return false;
    }
  }

  // The server's: the next request; null where there is none within so long.
  Request* next(std::int64_t wait_ns) {
    const auto deadline = now_ns() + wait_ns;
    for (;;) {
      const auto seen = asked_.load();
      for (auto& request : requests_) {
        std::uint32_t state = Request::kGivenUp;
        request.state.compare_exchange_strong(state, Request::kFree);
        state = Request::kPosted;
        if (request.state.compare_exchange_strong(state, Request::kServing)) return &request;
      }
      const auto left = deadline - now_ns();
      if (left <= 0 || closed_.load()) return nullptr;
      futex_wait(asked_, seen, left);
    }
  }

  void answer(Request& request, Arena::Answer answer) {
    request.answer = answer;
    std::uint32_t state = Request::kServing;
    if (request.state.compare_exchange_strong(state, Request::kAnswered))
      futex_wake(request.state);
    else
      request.state.store(Request::kFree);  // given up meanwhile
  }

  Request& at(std::size_t number) { return requests_.at(number); }
  std::size_t number_of(const Request& request) const { return &request - requests_.data(); }

  // A server that waits goes on, or ends.
  void close(bool closed) {
    closed_.store(closed);
    ring();
  }

 private:
  Request* taken(std::int64_t deadline_ns) {
    for (;; sched_yield()) {
      for (auto& request : requests_) {
        std::uint32_t free = Request::kFree;
        if (request.state.compare_exchange_strong(free, Request::kTaken)) return &request;
      }
      if (now_ns() >= deadline_ns) return nullptr;
    }
  }

  void ring() {
    asked_.fetch_add(1);
    futex_wake(asked_);
  }

  std::array<Request, 64> requests_;
  std::atomic<std::uint32_t> asked_{0};
  std::atomic<bool> closed_{false};
};

Mailbox faults;     // the thread of this file serves them
Mailbox questions;  // what only the owner of a block can compute
std::atomic<const Interpreter*> interpreter{nullptr};
std::atomic<Arena*> served{nullptr};
std::atomic<bool> in_child{false};
std::atomic<std::int64_t> timeout_ns{120'000'000'000};

// Of a kind that needs no memory at its first use in a thread.
#define PENSTOCK_STATIC_TLS __attribute__((tls_model("initial-exec")))
PENSTOCK_STATIC_TLS thread_local bool is_server = false;
PENSTOCK_STATIC_TLS thread_local bool is_owner = false;
PENSTOCK_STATIC_TLS thread_local const void* repeated_address = nullptr;
PENSTOCK_STATIC_TLS thread_local int repeats = 0;
PENSTOCK_STATIC_TLS thread_local constinit FaultHistory history;

bool is_write_access(const void* context) {
  const auto* machine = &static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return (machine->gregs[REG_ERR] & 2) != 0;
#elif defined(__aarch64__)
  // Records of (magic, size), of which one may hold the syndrome register.
  const auto* record = reinterpret_cast<const char*>(machine->__reserved);
  const auto* end = record + sizeof(machine->__reserved);
  while (record + 16 <= end) {
    std::uint32_t magic = 0, size = 0;
    std::memcpy(&magic, record, 4);
    std::memcpy(&size, record + 4, 4);
    if (magic == 0 || size == 0) break;
    if (magic == 0x45535201) {
      std::uint64_t syndrome = 0;
      std::memcpy(&syndrome, record + 8, 8);
      return (syndrome >> 6 & 1) != 0;
    }
    record += size;
  }
  return true;
#else
  (void)machine;
  return true;
#endif
}

void say(const char* text) {
  // What cannot be said is not said.
  if (write(2, text, std::strlen(text)) < 0) return;
}

void say_problem(const char* text) {
  say("penstock: ");
  say(text);
  say("\n");
}

// Waits until the block's owner has computed what the access needs. The owner runs Python: this thread gives up
// the interpreter meanwhile, if it has it.
bool ask_owner(const void* address, bool is_write) {
  const auto* python = interpreter.load();
  if (python == nullptr || is_owner) {
    say_problem("an access to memory that was dropped, and that nobody computes any more");
    return false;
  }
  void* const held = python->is_held() ? python->release() : nullptr;
  const auto deadline = now_ns() + timeout_ns.load();
  auto* const question = questions.post(address, is_write, history, deadline);
  const bool answered = question != nullptr && questions.wait(*question, deadline);
  const bool done = answered && question->answer == Arena::Answer::kYes;
  if (answered)
    question->state.store(Request::kFree);
  else
    say_problem("an access to memory that was dropped got no answer in time: it is not computed");
  if (held != nullptr) python->take(held);
  return done;
}

// Posts a request and waits for its answer.
Arena::Answer ask(const void* address, bool is_write) {
  const auto deadline = now_ns() + timeout_ns.load();
  auto* const request = faults.post(address, is_write, history, deadline);
  if (request == nullptr || !faults.wait(*request, deadline)) {
    say_problem("an access to memory that is out got no answer in time: its disk hangs");
    return Arena::Answer::kError;
  }
  const auto answer = request->answer;
  history = request->history;
  if (answer == Arena::Answer::kError) say_problem(request->problem);
  request->state.store(Request::kFree);
  return answer;
}

Arena::Answer serve_here(Arena& arena, const void* address, bool is_write) {
  char problem[kProblemBytes] = {};
  const auto answer = arena.serve_fault(address, is_write, history, problem, sizeof(problem));
  if (answer == Arena::Answer::kError) say_problem(problem);
  return answer;
}

void on_fault(int signal_number, siginfo_t* info, void* context) {
  const int error = errno;
  auto* arena = served.load();
  if (info->si_code > 0 && !is_server && arena->contains(info->si_addr)) {
    const bool is_write = is_write_access(context);
    history.asked_ns = now_ns();
    auto answer = in_child.load() ? serve_here(*arena, info->si_addr, is_write) : ask(info->si_addr, is_write);
    // kNo: nothing to do: it came back, or became writable, while this was on its way.
    if (answer == Arena::Answer::kAsk) answer = ask_owner(info->si_addr, is_write) ? Arena::Answer::kNo : Arena::Answer::kError;
    history.answered_ns = now_ns();
    if (answer != Arena::Answer::kNo || repeated_address != info->si_addr) repeats = 0;
    repeated_address = info->si_addr;
    if (answer == Arena::Answer::kYes || (answer == Arena::Answer::kNo && ++repeats < kMostRepeats)) {
      errno = error;
      return;
    }
    if (answer == Arena::Answer::kUnknown) say_problem("an access to memory that no tensor holds any more");
    if (answer == Arena::Answer::kNo) say_problem("an access to memory that should be there fails again and again");
  }
  errno = error;
  hand_over(signal_number, info, context);
}

void* serve(void*) {
  is_server = true;
  for (;;) {
    auto* const request = faults.next(kForever);
    if (request == nullptr) continue;
    auto answer = Arena::Answer::kError;
    try {
      answer = served.load()->serve_fault(request->address, request->is_write, request->history,
                                          request->problem, kProblemBytes);
    } catch (const std::bad_alloc&) {
      std::strcpy(request->problem, "an access to memory that is out cannot be served: there is no memory left");
    } catch (...) {
      std::strcpy(request->problem, "an access to memory that is out cannot be served: an internal error");
    }
    faults.answer(*request, answer);
  }
  return nullptr;
}

bool start_thread() {
  sigset_t all, before;
  sigfillset(&all);
  sigdelset(&all, SIGSEGV);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  const bool started = pthread_create(&thread, &attributes, serve, nullptr) == 0;
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (started) pthread_detach(thread);
  return started;
}

}  // namespace

bool serve_faults(Arena& arena) {
  static std::mutex once;
  static bool started = false, done = false;
  const std::lock_guard guard(once);
  if (done && served.load() != &arena) return false;
  if (done) {
    own_faults();
    return is_first();
  }
  served.store(&arena);
  started = started || start_thread();
  done = started && (come_first(on_fault) || is_first());
  return done;
}

bool own_faults() { return served.load() != nullptr && come_first(on_fault); }

void leave_faults() {
  if (served.load() != nullptr && served.load()->is_at_rest()) step_back();
}

void set_fault_timeout(double seconds) { timeout_ns.store(static_cast<std::int64_t>(seconds * 1e9)); }

void serve_faults_in_child() { in_child.store(true); }

void set_interpreter(const Interpreter* python) {
  interpreter.store(python);
  questions.close(python == nullptr);
}

std::optional<OwnerQuestion> next_question(double seconds) {
  is_owner = true;
  const auto* const question = questions.next(static_cast<std::int64_t>(seconds * 1e9));
  if (question == nullptr) return std::nullopt;
  return OwnerQuestion{questions.number_of(*question), question->address, question->is_write, question->asker};
}

void answer_question(std::size_t number, bool done) {
  questions.answer(questions.at(number), done ? Arena::Answer::kYes : Arena::Answer::kError);
}

}  // namespace penstock
