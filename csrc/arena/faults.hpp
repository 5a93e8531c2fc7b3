// Accesses that nobody planned: a thread that touches what is out waits until it is back.
#pragma once

#include <pthread.h>

#include <optional>

#include "arena/arena.hpp"

namespace penstock {

// From now on SIGSEGV at an address of the arena is served by a thread of its own, which needs no lock of the
// program's (the one that waits may hold any). Others go to the handler that the program has set, before or later:
// see handlers.hpp. False if the system refuses a thread or the handler. The arena is never destroyed.
bool serve_faults(Arena& arena);

// Puts the handler in front again if another took its place; that one is asked next then. True if so.
bool own_faults();

// Gives the program its handler back, if all blocks of the arena are in memory and writable. To be called only while
// none leaves; serve_faults begins again.
void leave_faults();

// How long an access waits before the handler gives up: 120 s unless told.
void set_fault_timeout(double seconds);

// What the thread that touches a dropped block must do with Python, so that the block's owner can compute it.
struct Interpreter {
  bool (*is_held)();  // by this thread
  void* (*release)();
  void (*take)(void* held);
};

// Null: nobody computes dropped blocks.
void set_interpreter(const Interpreter* python);

// An access, to be answered with its number: the block that holds the address was dropped, or is about to be
// written though others are computed from it.
struct OwnerQuestion {
  std::size_t number = 0;
  const void* address = nullptr;
  bool is_write = false;
  pthread_t asker = {};  // it waits
};

// For the thread of the owner, which must touch nothing that was dropped. None came in that time: nothing.
std::optional<OwnerQuestion> next_question(double seconds);
// Without `done`, the access fails as one to memory that does not exist.
void answer_question(std::size_t number, bool done);

// In the child after a fork(), which has no thread that serves: the handler does it itself, and neither
// takes nor frees memory but by mmap.
void serve_faults_in_child();

}  // namespace penstock
