#include "memory.h"

#include <cstdint>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <stdexcept>
#include <sys/mman.h>

namespace emu {
namespace {

constexpr size_t kSpan = size_t(1) << 44;  // of addresses: far more than there is memory

struct Span {
  char* device;
  char* alias;
  int file;
  size_t next = 0;

  Span() {
    file = memfd_create("emu", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, kSpan)) throw std::runtime_error("emu: no file in memory");
    device = map();
    alias = map();
    madvise(alias, kSpan, MADV_DONTDUMP);
  }

  char* map() {
    void* address = mmap(nullptr, kSpan, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (address == MAP_FAILED) throw std::runtime_error("emu: no addresses for device memory");
    return static_cast<char*>(address);
  }
};

Span& span() {
  static Span* instance = new Span;
  return *instance;
}

struct Range {
  size_t size_bytes;
  std::shared_ptr<void> memory;
};

std::mutex ranges_mutex;
std::map<uintptr_t, Range>& ranges() {
  static auto* instance = new std::map<uintptr_t, Range>;
  return *instance;
}

}  // namespace

void* alias_of(const void* address) {
  if (!address) return nullptr;
  Span& s = span();
  return s.alias + (static_cast<const char*>(address) - s.device);
}

bool is_device_address(const void* address) {
  auto* at = static_cast<const char*>(address);
  return at >= span().device && at < span().device + kSpan;
}

// The allocator calls these two under its lock.

char* map_segment(size_t size_bytes) {
  Span& s = span();
  if (s.next + size_bytes > kSpan) return nullptr;
  char* address = s.device + s.next;
  s.next += size_bytes;
  mprotect(alias_of(address), size_bytes, PROT_READ | PROT_WRITE);
  return address;
}

void unmap_segment(char* address, size_t size_bytes) {
  Span& s = span();
  mprotect(alias_of(address), size_bytes, PROT_NONE);
  fallocate(s.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, address - s.device, size_bytes);
}

void page_lock(const void* address, size_t size_bytes, std::shared_ptr<void> memory) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  ranges()[reinterpret_cast<uintptr_t>(address)] = {size_bytes, std::move(memory)};
}

void page_unlock(const void* address) {
  std::shared_ptr<void> memory;  // freed outside the lock
  std::lock_guard<std::mutex> lock(ranges_mutex);
  auto found = ranges().find(reinterpret_cast<uintptr_t>(address));
  if (found == ranges().end()) return;
  memory = std::move(found->second.memory);
  ranges().erase(found);
}

std::shared_ptr<void> hold_page_locked(const void* address, size_t size_bytes) {
  auto at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(ranges_mutex);
  auto next = ranges().upper_bound(at);
  if (next == ranges().begin()) return nullptr;
  auto& [begin, range] = *--next;
  return at + size_bytes <= begin + range.size_bytes ? range.memory : nullptr;
}

}  // namespace emu
