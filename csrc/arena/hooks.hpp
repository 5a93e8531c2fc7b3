// The arena in the place of one library's posix_memalign and free.
#pragma once

#include <string_view>

#include "arena/arena.hpp"

namespace penstock {

// Sends the library's allocations here, for the rest of the process's life: blocks may outlive any
// use of the arena. False if the library does not call posix_memalign and free through the dynamic
// linker, or no addresses can be reserved. Only the first success counts.
bool install_hooks(std::string_view library_suffix);

// Null until install_hooks succeeds; never destroyed.
Arena* installed_arena();

// While inactive, new allocations go to the C library.
void set_active(bool active);

}  // namespace penstock
