// The process has one handler of SIGSEGV. The arena's comes first, and everybody else sees and sets the one after it.
#pragma once

#include <signal.h>

namespace penstock {

using SignalHandler = void (*)(int, siginfo_t*, void*);

// From now on `handler` is asked first, and the one that was set before is the next. Whoever sets or asks for
// SIGSEGV's action through the C library later means the next one; what gets past it, by a system call of its own or
// a C library of its own, is put behind `handler` by the next call. True if it was not first already. errno says why
// where the system refuses.
bool come_first(SignalHandler handler);
bool is_first();

// The process has the next handler again, as if there had never been another.
void step_back();

// For `handler`: what the next one would do if it had been called by the system. May return, may not.
void hand_over(int signal_number, siginfo_t* info, void* context);

}  // namespace penstock
