#include "arena/faults.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <ucontext.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <new>

#include "arena/linkage.hpp"

namespace penstock {

namespace {

constexpr std::size_t kProblemBytes = 512;
constexpr std::size_t kStackBytes = std::size_t{512} << 10;
constexpr int kPlainRepeats = 1000;  // of one access to what is plainly there, before it is not ours

// What a thread that waits and the thread that serves share. Its state is what both wait for.
struct Request {
  enum State : std::uint32_t { kFree, kTaken, kPosted, kServing, kAnswered, kGivenUp };
  std::atomic<std::uint32_t> state{kFree};
  const void* address = nullptr;
  bool is_write = false;
  FaultHistory history;
  Arena::Answer answer = Arena::Answer::kNo;
  char problem[kProblemBytes] = {};
};

std::array<Request, 64> requests;
std::atomic<std::uint32_t> posted{0};

// The same, for what only the owner of a block can compute.
struct Question {
  enum State : std::uint32_t { kFree, kTaken, kPosted, kServing, kAnswered, kFailed, kGivenUp };
  std::atomic<std::uint32_t> state{kFree};
  const void* address = nullptr;
  bool is_write = false;
};

std::array<Question, 64> questions;
std::atomic<std::uint32_t> asked{0};
std::atomic<const Interpreter*> interpreter{nullptr};
std::atomic<Arena*> served{nullptr};
std::atomic<bool> in_child{false};
std::atomic<std::int64_t> timeout_ns{120'000'000'000};
struct sigaction next_action = {};

// Of a kind that needs no memory at its first use in a thread.
#define PENSTOCK_STATIC_TLS __attribute__((tls_model("initial-exec")))
PENSTOCK_STATIC_TLS thread_local bool is_server = false;
PENSTOCK_STATIC_TLS thread_local bool is_owner = false;
PENSTOCK_STATIC_TLS thread_local bool handing_over = false;
PENSTOCK_STATIC_TLS thread_local const void* plain_address = nullptr;
PENSTOCK_STATIC_TLS thread_local int plain_count = 0;
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

void hand_over(int signal_number, siginfo_t* info, void* context) {
  const auto action = next_action;
  // A handler that ends here again knows no other: the system's own is left.
  if (handing_over || (!(action.sa_flags & SA_SIGINFO) && action.sa_handler == SIG_DFL)) {
    signal(signal_number, SIG_DFL);
    // An access that failed fails again; what was sent must be sent again.
    if (info->si_code <= 0) raise(signal_number);
    return;
  }
  if (!(action.sa_flags & SA_SIGINFO) && action.sa_handler == SIG_IGN) return;
  handing_over = true;
  if (action.sa_flags & SA_SIGINFO)
    action.sa_sigaction(signal_number, info, context);
  else
    action.sa_handler(signal_number);
  handing_over = false;
}

void say_problem(const char* text) {
  say("penstock: ");
  say(text);
  say("\n");
}

template <typename Slot, std::size_t count>
Slot& take_slot(std::array<Slot, count>& slots) {
  for (;; sched_yield())
    for (auto& slot : slots) {
      std::uint32_t free = Slot::kFree;
      if (slot.state.compare_exchange_strong(free, Slot::kTaken)) return slot;
    }
}

// Waits until the block's owner has computed what the access needs. The owner runs Python: this thread gives up
// the interpreter meanwhile, if it has it.
bool ask_owner(const void* address, bool is_write) {
  const auto* python = interpreter.load();
  if (python == nullptr || is_owner) {
    say_problem("an access to memory that was dropped, and that nobody computes any more");
    return false;
  }
  const auto deadline = now_ns() + timeout_ns.load();
  auto& question = take_slot(questions);
  question.address = address;
  question.is_write = is_write;
  question.state.store(Question::kPosted);
  asked.fetch_add(1);
  futex_wake(asked);
  void* const held = python->is_held() ? python->release() : nullptr;
  bool done = false;
  for (;;) {
    auto state = question.state.load();
    done = state == Question::kAnswered;
    if (done || state == Question::kFailed) {
      question.state.store(Question::kFree);
      break;
    }
    const auto left = deadline - now_ns();
    if (left <= 0) {
      if (!question.state.compare_exchange_strong(state, Question::kGivenUp)) continue;
      say_problem("an access to memory that was dropped got no answer in time: it is not computed");
      break;
    }
    futex_wait(question.state, state, left);
  }
  if (held != nullptr) python->take(held);
  return done;
}

// Posts a request and waits for its answer.
Arena::Answer ask(const void* address, bool is_write) {
  const auto deadline = now_ns() + timeout_ns.load();
  auto* const request = &take_slot(requests);
  request->address = address;
  request->is_write = is_write;
  request->history = history;
  request->state.store(Request::kPosted);
  posted.fetch_add(1);
  futex_wake(posted);
  for (;;) {
    auto state = request->state.load();
    if (state == Request::kAnswered) break;
    const auto left = deadline - now_ns();
    if (left <= 0) {
      if (!request->state.compare_exchange_strong(state, Request::kGivenUp)) continue;
      say_problem("an access to memory that is out got no answer in time: its disk hangs");
      return Arena::Answer::kError;
    }
    futex_wait(request->state, state, left);
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
    if (answer == Arena::Answer::kAsk)
      answer = ask_owner(info->si_addr, is_write) ? Arena::Answer::kYes : Arena::Answer::kError;
    history.answered_ns = now_ns();
    if (answer != Arena::Answer::kNo || plain_address != info->si_addr) plain_count = 0;
    plain_address = info->si_addr;
    // Nothing to do: it came back, or became writable, while this was on its way.
    if (answer == Arena::Answer::kYes || (answer == Arena::Answer::kNo && ++plain_count < kPlainRepeats)) {
      errno = error;
      return;
    }
    if (answer == Arena::Answer::kUnknown) say_problem("an access to memory that no tensor holds any more");
    if (answer == Arena::Answer::kNo) say_problem("an access to memory that is there fails again and again");
  }
  errno = error;
  hand_over(signal_number, info, context);
}

void* serve(void*) {
  is_server = true;
  for (;;) {
    const auto seen = posted.load();
    for (auto& request : requests) {
      std::uint32_t state = Request::kPosted;
      if (request.state.load() == Request::kGivenUp) request.state.store(Request::kFree);
      if (!request.state.compare_exchange_strong(state, Request::kServing)) continue;
      try {
        request.answer = served.load()->serve_fault(request.address, request.is_write, request.history,
                                                    request.problem, kProblemBytes);
      } catch (const std::bad_alloc&) {
        request.answer = Arena::Answer::kError;
        std::strcpy(request.problem, "an access to memory that is out cannot be served: there is no memory left");
      }
      state = Request::kServing;
      if (request.state.compare_exchange_strong(state, Request::kAnswered))
        futex_wake(request.state);
      else
        request.state.store(Request::kFree);  // given up meanwhile
    }
    futex_wait(posted, seen, -1);
  }
  return nullptr;
}

bool install() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  struct sigaction before = {};
  if (sigaction(SIGSEGV, nullptr, &before) != 0) return false;
  if ((before.sa_flags & SA_SIGINFO) && before.sa_sigaction == on_fault) return false;
  next_action = before;
  return sigaction(SIGSEGV, &action, nullptr) == 0;
}

// Libraries that set a handler of their own, as torch does in the workers of a DataLoader, get what is not ours.
int hooked_sigaction(int signal_number, const struct sigaction* action, struct sigaction* before) {
  struct sigaction now = {};
  if (signal_number != SIGSEGV || sigaction(SIGSEGV, nullptr, &now) != 0 || !(now.sa_flags & SA_SIGINFO) ||
      now.sa_sigaction != on_fault)
    return sigaction(signal_number, action, before);
  if (before != nullptr) *before = next_action;
  if (action != nullptr) next_action = *action;
  return 0;
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
  if (done) return true;
  served.store(&arena);
  started = started || start_thread();
  done = started && install();
  if (done)
    for (const auto& slot : find_slots("libtorch_python.so", "sigaction"))
      write_slot(slot, reinterpret_cast<void*>(hooked_sigaction));
  return done;
}

bool own_faults() { return served.load() != nullptr && install(); }

void set_fault_timeout(double seconds) { timeout_ns.store(static_cast<std::int64_t>(seconds * 1e9)); }

void serve_faults_in_child() { in_child.store(true); }

void set_interpreter(const Interpreter* python) {
  interpreter.store(python);
  asked.fetch_add(1);
  futex_wake(asked);
}

std::optional<OwnerQuestion> next_question(double seconds) {
  is_owner = true;
  const auto deadline = now_ns() + static_cast<std::int64_t>(seconds * 1e9);
  for (;;) {
    const auto seen = asked.load();
    for (std::size_t i = 0; i < questions.size(); ++i) {
      auto& question = questions[i];
      std::uint32_t state = Question::kGivenUp;
      question.state.compare_exchange_strong(state, Question::kFree);
      state = Question::kPosted;
      if (question.state.compare_exchange_strong(state, Question::kServing))
        return OwnerQuestion{i, question.address, question.is_write};
    }
    const auto left = deadline - now_ns();
    if (left <= 0 || interpreter.load() == nullptr) return std::nullopt;
    futex_wait(asked, seen, left);
  }
}

void answer_question(std::size_t number, bool done) {
  auto& question = questions.at(number);
  std::uint32_t state = Question::kServing;
  if (question.state.compare_exchange_strong(state, done ? Question::kAnswered : Question::kFailed))
    futex_wake(question.state);
  else
    question.state.store(Question::kFree);  // given up meanwhile
}

}  // namespace penstock
