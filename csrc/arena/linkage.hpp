// Where a loaded library keeps the addresses of the functions it calls in other libraries.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace penstock {

struct Slot {
  std::uintptr_t address = 0;
  bool read_only = false;  // the loader protected it after linking
};

// Every slot through which the loaded library whose path ends in `library_suffix` reaches `symbol`;
// none if the library is not loaded or does not call it through the dynamic linker.
std::vector<Slot> find_slots(std::string_view library_suffix, std::string_view symbol);

// Makes calls through the slot go to `target`, also those of threads that run meanwhile.
// False if its page cannot be made writable.
bool write_slot(const Slot& slot, void* target);

}  // namespace penstock
