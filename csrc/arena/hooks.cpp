#include "arena/hooks.hpp"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "arena/faults.hpp"
#include "arena/linkage.hpp"

namespace penstock {

namespace {

// Set before the first hook is, and never cleared: the hooks read it without a lock.
std::atomic<Arena*> installed{nullptr};
std::atomic<bool> active{false};

int hooked_posix_memalign(void** address, std::size_t alignment, std::size_t size_bytes) {
  if (!active.load(std::memory_order_acquire) || size_bytes < kPageBytes || alignment > kPageBytes)
    return posix_memalign(address, alignment, size_bytes);
  try {
    switch (installed.load(std::memory_order_acquire)->allocate(size_bytes, address)) {
      case Arena::Outcome::kDone: return 0;
      case Arena::Outcome::kNoMemory: return ENOMEM;
      case Arena::Outcome::kNoAddresses: break;
    }
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
  return posix_memalign(address, alignment, size_bytes);
}

void hooked_free(void* address) {
  auto* arena = installed.load(std::memory_order_acquire);
  if (!arena->contains(address)) {
    free(address);
  } else if (!arena->release(address)) {
    std::fprintf(stderr, "penstock: free() of %p, where no block starts\n", address);
    std::abort();
  }
}

// Addresses cost nothing, and blocks that are out keep theirs; but leave the program its own where they
// are limited.
std::size_t reserve_bytes() {
  const auto physical =
      static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  rlimit addresses{};
  const auto wanted = std::min<std::size_t>(64 * physical, std::size_t{4} << 40);
  if (getrlimit(RLIMIT_AS, &addresses) != 0 || addresses.rlim_cur == RLIM_INFINITY) return wanted;
  return std::min<std::size_t>(wanted, addresses.rlim_cur / 2);
}

}  // namespace

bool install_hooks(std::string_view library_suffix) {
  static std::mutex once;
  static bool done = false;
  const std::lock_guard guard(once);
  if (done) return true;
  const auto allocating = find_slots(library_suffix, "posix_memalign");
  const auto freeing = find_slots(library_suffix, "free");
  if (allocating.empty() || freeing.empty()) return false;
  if (installed_arena() == nullptr) {
    auto arena = std::make_unique<Arena>(reserve_bytes());
    if (!arena->usable()) return false;
    installed.store(arena.release(), std::memory_order_release);  // outlives every block: never destroyed
    pthread_atfork([] { installed_arena()->lock(); }, [] { installed_arena()->unlock_in_parent(); },
                   [] {
                     serve_faults_in_child();
                     installed_arena()->unlock_in_child();
                   });
  }
  // All of free before any of posix_memalign: the first block must find its way back.
  const auto point = [](const std::vector<Slot>& slots, void* hook) {
    return std::ranges::all_of(slots, [hook](const Slot& slot) { return write_slot(slot, hook); });
  };
  done = point(freeing, reinterpret_cast<void*>(hooked_free)) &&
         point(allocating, reinterpret_cast<void*>(hooked_posix_memalign));
  return done;
}

Arena* installed_arena() { return installed.load(std::memory_order_acquire); }

void set_active(bool value) { active.store(value, std::memory_order_release); }

}  // namespace penstock
