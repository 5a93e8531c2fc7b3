#include "arena/pages.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#ifdef __SANITIZE_THREAD__
#include <sys/syscall.h>
#endif

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace penstock {

bool map_nothing(char* address, std::size_t size_bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
#ifdef __SANITIZE_THREAD__
  // The thread sanitizer takes mmap for a write to all of the bytes. Those of a block stay what they are when it leaves:
  // who reads them meanwhile waits until they are back.
  return syscall(SYS_mmap, address, size_bytes, PROT_NONE, kFlags, -1, 0) != -1;
#else
  return mmap(address, size_bytes, PROT_NONE, kFlags, -1, 0) != MAP_FAILED;
#endif
}

void give_pages(char* address, std::size_t size_bytes) { madvise(address, size_bytes, MADV_DONTNEED); }

bool map_fresh(char* address, std::size_t size_bytes) {
  if (mprotect(address, size_bytes, PROT_READ | PROT_WRITE) != 0) return false;
  madvise(address, size_bytes, MADV_HUGEPAGE);  // where huge pages are off, small ones serve
  return true;
}

void make_huge(char* address, std::size_t size_bytes) {
  madvise(address, size_bytes, MADV_HUGEPAGE);
  madvise(address, size_bytes, MADV_COLLAPSE);
}

bool protect(char* address, std::size_t size_bytes, int protection) {
  return mprotect(address, size_bytes, protection) == 0;
}

bool protect_or_undo(char* address, std::size_t size_bytes, int protection, int before) {
  if (protect(address, size_bytes, protection)) return true;
  // What lacks is a mapping, to split the last one at the end of the range. It fails again, after all
  // before it are as they were.
  const int error = errno;
  protect(address, size_bytes, before);
  errno = error;
  return false;
}

std::size_t move_memory(char* from, char* to, std::size_t size_bytes, std::size_t unit_bytes) {
  constexpr int kFlags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
  if (mremap(from, size_bytes, size_bytes, kFlags, to) != MAP_FAILED) return size_bytes;
  // A move must stay within one mapping of the kernel's.
  if ((errno != EFAULT && errno != EINVAL) || size_bytes <= unit_bytes) return 0;
  const auto half = round_up(size_bytes / 2, unit_bytes);
  const auto moved = move_memory(from, to, half, unit_bytes);
  if (moved < half) return moved;
  return half + move_memory(from + half, to + half, size_bytes - half, unit_bytes);
}

bool replace_memory(char* scratch, char* to, std::size_t size_bytes) {
  return mremap(scratch, size_bytes, size_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED;
}

char* map_scratch(std::size_t size_bytes) {
  void* mapping = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return mapping == MAP_FAILED ? nullptr : static_cast<char*>(mapping);
}

void unmap_scratch(char* scratch, std::size_t size_bytes) { munmap(scratch, size_bytes); }

namespace {

std::string try_paging(char* base) {
  const auto failed = [](const char* what) {
    return std::string(what) + " fails on this system: " + std::strerror(errno);
  };
  char* away = base + kPageBytes;
  if (!map_fresh(base, kPageBytes)) return failed("mprotect(PROT_WRITE)");
  std::memset(base, 0x5a, kPageBytes);
  if (!protect(base, kPageBytes, PROT_NONE)) return failed("mprotect(PROT_NONE)");
  if (move_memory(base, away, kPageBytes, kPageBytes) != kPageBytes)
    return failed("mremap(MREMAP_DONTUNMAP), which needs Linux 5.7,");
  if (!protect(away, kPageBytes, PROT_READ | PROT_WRITE)) return failed("mprotect after mremap");
  if (!map_nothing(base, kPageBytes)) return failed("mmap(MAP_FIXED)");
  if (move_memory(away, base, kPageBytes, kPageBytes) != kPageBytes) return failed("mremap back");
  for (std::size_t i = 0; i < kPageBytes; ++i) {
    if (base[i] != 0x5a) return "mremap(MREMAP_DONTUNMAP) loses bytes on this system";
  }
  return {};
}

}  // namespace

std::string paging_problem() {
  if (sysconf(_SC_PAGESIZE) != static_cast<long>(kPageBytes))
    return "pages of this system are of " + std::to_string(sysconf(_SC_PAGESIZE)) + " bytes, not 4096";
  void* mapping =
      mmap(nullptr, 2 * kPageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return std::string("mmap fails on this system: ") + std::strerror(errno);
  const auto problem = try_paging(static_cast<char*>(mapping));
  munmap(mapping, 2 * kPageBytes);
  return problem;
}

}  // namespace penstock
