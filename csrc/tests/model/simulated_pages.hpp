#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock::model {

// From here on these addresses are simulated. Called once, before any is used.
void simulate_pages(char* arena, std::size_t arena_bytes);
bool accessible(const char* address, bool is_write);
// Another number once other memory is there.
std::uint64_t frames_at(const char* address, std::size_t size_bytes);

}  // namespace penstock::model
