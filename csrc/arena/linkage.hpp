// Where a loaded library keeps the addresses of the functions it calls in other libraries.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace penstock {

struct Slot {
  std::uintptr_t address = 0;
  bool read_only = false;  // the loader protected it after linking
  void* own = nullptr;     // the function, where the library defines it itself
};

// Every slot through which the loaded library whose path ends in `library_suffix` reaches `symbol`;
// none if the library is not loaded or does not call it through the dynamic linker. Those of all that is loaded, the
// program too, where the suffix is empty.
std::vector<Slot> find_slots(std::string_view library_suffix, std::string_view symbol);

// Makes calls through the slot go to `target`, also those of threads that run meanwhile.
// False if its page cannot be made writable.
bool write_slot(const Slot& slot, void* target);

// What the program reaches by this name. Null if nothing.
void* find_function(std::string_view name);

// Whoever looks the name up from now on, libraries that are loaded later among them, gets `target` where he would get
// `function`. False if the page of the library that defines it cannot be written.
bool redirect(std::string_view name, void* function, void* target);

}  // namespace penstock
