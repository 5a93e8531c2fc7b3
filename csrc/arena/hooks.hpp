// The arena in the place of torch's memory: of its library's posix_memalign and free; or, where the library has an
// allocator of its own, as for ARM it has mimalloc, of its functions c10::alloc_cpu and c10::free_cpu.
#pragma once

#include <string_view>

#include "arena/arena.hpp"

namespace penstock {

// Sends the library's allocations here, for the rest of the process's life: blocks may outlive any
// use of the arena. False if the library calls neither through the dynamic linker, or no addresses can be
// reserved. Only the first success counts. `through_torch`: by torch's functions, whatever it calls.
bool install_hooks(std::string_view library_suffix, bool through_torch = false);

// Null until install_hooks succeeds; never destroyed.
Arena* installed_arena();

// While inactive, new allocations go to where they went before.
void set_active(bool active);

}  // namespace penstock
