#include "arena/handlers.hpp"

#include <pthread.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string_view>

#include "arena/linkage.hpp"

namespace penstock {

namespace {

using Sigaction = int (*)(int, const struct sigaction*, struct sigaction*);
using PlainHandler = void (*)(int);
using Signal = PlainHandler (*)(int, PlainHandler);

// The C library's own. Where nothing was taken over, calls of this library reach it anyway.
Sigaction system_sigaction = sigaction;
Signal system_signal = signal, system_sysv_signal = signal;

std::atomic<SignalHandler> first{nullptr};

// Read in a signal handler while another thread sets it: an action is never changed once it is the next, but by
// so many that follow.
class NextAction {
 public:
  struct sigaction get() const { return actions_[current_.load()]; }

  struct sigaction exchange(const struct sigaction& action) {
    auto place = taken_.fetch_add(1) % actions_.size();
    if (place == current_.load()) place = taken_.fetch_add(1) % actions_.size();
    actions_[place] = action;
    return actions_[current_.exchange(place)];
  }

 private:
  std::array<struct sigaction, 64> actions_{};
  std::atomic<std::size_t> current_{0}, taken_{1};
};

NextAction next_action;

// Of the handler that this thread is in, called from here.
struct HandedOver {
  const void* context = nullptr;
  const char* frame = nullptr;
};
__attribute__((tls_model("initial-exec"))) thread_local constinit HandedOver handed_over;

bool calls(const struct sigaction& action, SignalHandler handler) {
  return (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == handler;
}

bool is(const struct sigaction& action, PlainHandler handler) {
  return !(action.sa_flags & SA_SIGINFO) && action.sa_handler == handler;
}

struct sigaction plain(PlainHandler handler, int flags) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigemptyset(&action.sa_mask);
  return action;
}

int hooked_sigaction(int signal_number, const struct sigaction* action, struct sigaction* before) {
  if (signal_number != SIGSEGV || !is_first()) return system_sigaction(signal_number, action, before);
  const auto next = action != nullptr ? next_action.exchange(*action) : next_action.get();
  if (before != nullptr) *before = next;
  return 0;
}

PlainHandler set_plain(PlainHandler handler, int flags) {
  const auto action = plain(handler, flags);
  struct sigaction before = {};
  return hooked_sigaction(SIGSEGV, &action, &before) == 0 ? before.sa_handler : SIG_ERR;
}

PlainHandler hooked_signal(int signal_number, PlainHandler handler) {
  if (signal_number != SIGSEGV || handler == SIG_ERR) return system_signal(signal_number, handler);
  return set_plain(handler, SA_RESTART);
}

PlainHandler hooked_sysv_signal(int signal_number, PlainHandler handler) {
  if (signal_number != SIGSEGV || handler == SIG_ERR) return system_sysv_signal(signal_number, handler);
  return set_plain(handler, static_cast<int>(SA_RESETHAND | SA_NODEFER));
}

// In the place of what the C library calls by these names.
template <class Function>
void take_over(std::string_view name, Function hook, Function* system) {
  const auto before = reinterpret_cast<Function>(find_function(name));
  if (before == nullptr) return;
  if (system != nullptr) *system = before;
  for (const auto& slot : find_slots("", name)) write_slot(slot, reinterpret_cast<void*>(hook));
  redirect(name, reinterpret_cast<void*>(before), reinterpret_cast<void*>(hook));
}

void take_over_all() {
  static std::once_flag once;
  std::call_once(once, [] {
    take_over("sigaction", hooked_sigaction, &system_sigaction);
    take_over<Sigaction>("__sigaction", hooked_sigaction, nullptr);
    take_over("signal", hooked_signal, &system_signal);
    take_over<Signal>("bsd_signal", hooked_signal, nullptr);
    take_over<Signal>("ssignal", hooked_signal, nullptr);
    take_over("sysv_signal", hooked_sysv_signal, &system_sysv_signal);
    take_over<Signal>("__sysv_signal", hooked_sysv_signal, nullptr);
  });
}

}  // namespace

bool is_first() {
  const auto handler = first.load();
  struct sigaction now = {};
  return handler != nullptr && system_sigaction(SIGSEGV, nullptr, &now) == 0 && calls(now, handler);
}

bool come_first(SignalHandler handler) {
  take_over_all();
  struct sigaction before = {};
  if (system_sigaction(SIGSEGV, nullptr, &before) != 0) return false;
  first.store(handler);
  if (calls(before, handler)) return false;
  next_action.exchange(before);
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  return system_sigaction(SIGSEGV, &action, nullptr) == 0;
}

void step_back() {
  if (!is_first()) return;
  const auto next = next_action.get();
  system_sigaction(SIGSEGV, &next, nullptr);
}

void hand_over(int signal_number, siginfo_t* info, void* context) {
  const auto* const frame = static_cast<const char*>(__builtin_frame_address(0));
  const auto action = next_action.get();
  const bool failed = info->si_code > 0;  // an access; else somebody has sent the signal
  // A handler that calls the one before it, and knows no other than this: the system's own is left. What a handler
  // jumped out of has left its mark too, but not deeper in the stack.
  const bool again = handed_over.context == context && frame < handed_over.frame;
  if (again || is(action, SIG_DFL) || (failed && is(action, SIG_IGN))) {
    const auto standard = plain(SIG_DFL, 0);
    system_sigaction(signal_number, &standard, nullptr);
    // An access that failed fails again; what was sent must be sent again.
    if (!failed) raise(signal_number);
    return;
  }
  if (is(action, SIG_IGN)) return;
  if (action.sa_flags & static_cast<int>(SA_RESETHAND)) next_action.exchange(plain(SIG_DFL, 0));
  // Until this signal's handling ends: then the system restores what was blocked before.
  sigset_t blocked = action.sa_mask;
  if (!(action.sa_flags & SA_NODEFER)) sigaddset(&blocked, signal_number);
  pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  handed_over = {context, frame};
  if (action.sa_flags & SA_SIGINFO)
    action.sa_sigaction(signal_number, info, context);
  else
    action.sa_handler(signal_number);
  handed_over = {};
}

}  // namespace penstock
