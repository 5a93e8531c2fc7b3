#pragma once

#include <cstddef>

namespace penstock::model {

// From here on these addresses are simulated. Called once, before any is used.
void simulate_pages(char* arena, std::size_t arena_bytes);
bool accessible(const char* address, bool is_write);

}  // namespace penstock::model
