// What every thread of ours begins with.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace penstock {

// Signals are for the program's own threads. SIGSEGV is not blocked: the arena serves accesses to what is out,
// whoever touches it.
inline void begin_thread(const char* name) {
  sigset_t all;
  sigfillset(&all);
  sigdelset(&all, SIGSEGV);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
#ifdef __linux__
  pthread_setname_np(pthread_self(), name);
#else
  (void)name;
#endif
}

}  // namespace penstock
