// Memory of the emulated device: addresses that the host cannot touch, and page-locked ranges of the host's.
#pragma once

#include <cstddef>
#include <memory>

namespace emu {

// Device memory lies in one file that is mapped twice. Tensors carry addresses of a mapping without access; the
// executor reads and writes the same bytes at their alias.
void* alias_of(const void* device_address);
bool is_device_address(const void* address);

// Segments of addresses with memory behind them. Addresses are not used twice, so that a late access to memory
// that was given back is an error of the system's. nullptr: no addresses are left.
char* map_segment(size_t size_bytes);
void unmap_segment(char* address, size_t size_bytes);

// Host memory that copies read and write when they are carried out, and not when they are launched. A copy keeps
// what `hold` gives; it is empty where the range is not page-locked.
void page_lock(const void* address, size_t size_bytes, std::shared_ptr<void> memory);
void page_unlock(const void* address);
std::shared_ptr<void> hold_page_locked(const void* address, size_t size_bytes);

}  // namespace emu
