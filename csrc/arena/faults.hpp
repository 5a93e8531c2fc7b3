// Accesses that nobody planned: a thread that touches what is out waits until it is back.
#pragma once

#include "arena/arena.hpp"

namespace penstock {

// From now on, for the life of the process: SIGSEGV at an address of the arena is served by a thread of
// its own, which needs no lock of the program's (the one that waits may hold any). Others go to the
// handler before. False if the system refuses a thread or the handler. The arena is never destroyed.
bool serve_faults(Arena& arena);

// Puts the handler in front again if another took its place; that one is asked next then. True if so.
bool own_faults();

// How long an access waits before the handler gives up: 120 s unless told.
void set_fault_timeout(double seconds);

// In the child after a fork(), which has no thread that serves: the handler does it itself, and neither
// takes nor frees memory but by mmap.
void serve_faults_in_child();

}  // namespace penstock
