#include "arena/hooks.hpp"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "arena/faults.hpp"
#include "arena/linkage.hpp"

namespace penstock {

namespace {

// Set before the first hook is, and never cleared: the hooks read it without a lock.
std::atomic<Arena*> installed{nullptr};
std::atomic<bool> active{false};

constexpr std::string_view kAllocCpu = "_ZN3c109alloc_cpuEm", kFreeCpu = "_ZN3c108free_cpuEPv";
void* (*alloc_cpu)(std::size_t) = nullptr;
void (*free_cpu)(void*) = nullptr;

// Whether this is a thread of gloo's. It has the system write to what it allocates, such as one tensor for all that
// all_gather fetches, and a page that is away or protected then fails the collective.
bool is_gloo() {
  enum : char { kUnknown, kNo, kYes };
  static constinit thread_local char is = kUnknown;
  if (is == kUnknown) {
    char name[16] = {};
    is = pthread_getname_np(pthread_self(), name, sizeof name) == 0 && std::string_view(name) == "pt_gloo_runloop" ? kYes : kNo;
  }
  return is == kYes;
}

// As posix_memalign. Nothing: it is not for the arena.
std::optional<int> allocate(void** address, std::size_t size_bytes) {
  if (!active.load(std::memory_order_acquire) || size_bytes < kPageBytes) return std::nullopt;
  try {
    switch (installed.load(std::memory_order_acquire)->allocate(size_bytes, address, is_gloo())) {
      case Arena::Outcome::kDone: return 0;
      case Arena::Outcome::kNoMemory: return ENOMEM;
      case Arena::Outcome::kNoAddresses: break;
    }
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
  return std::nullopt;
}

// False: it is not the arena's.
bool release(void* address) {
  auto* arena = installed.load(std::memory_order_acquire);
  if (!arena->contains(address)) return false;
  if (arena->release(address)) return true;
  std::fprintf(stderr, "penstock: free() of %p, where no block starts\n", address);
  std::abort();
}

int hooked_posix_memalign(void** address, std::size_t alignment, std::size_t size_bytes) {
  const auto error = alignment > kPageBytes ? std::nullopt : allocate(address, size_bytes);
  return error ? *error : posix_memalign(address, alignment, size_bytes);
}

void hooked_free(void* address) {
  if (!release(address)) free(address);
}

void* hooked_alloc_cpu(std::size_t size_bytes) {
  void* address = nullptr;
  const auto error = size_bytes > PTRDIFF_MAX ? std::nullopt : allocate(&address, size_bytes);
  if (!error) return alloc_cpu(size_bytes);
  if (*error == 0) return address;
  throw std::runtime_error("DefaultCPUAllocator: can't allocate memory: you tried to allocate " +
                           std::to_string(size_bytes) + " bytes");
}

void hooked_free_cpu(void* address) {
  if (!release(address)) free_cpu(address);
}

// What is called through `slots` from now on.
struct Hook {
  std::vector<Slot> slots;
  void* function;
  bool install() const {
    return std::ranges::all_of(slots, [this](const Slot& slot) { return write_slot(slot, function); });
  }
};

// Where torch's own functions are called from; nothing if the library has none.
std::vector<Slot> calls_of(std::string_view library_suffix, std::string_view name, void** function) {
  for (const auto& slot : find_slots(library_suffix, name)) *function = slot.own;
  return *function == nullptr ? std::vector<Slot>{} : find_slots("", name);
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

bool install_hooks(std::string_view library_suffix, bool through_torch) {
  static std::mutex once;
  static bool done = false;
  const std::lock_guard guard(once);
  if (done) return true;
  Hook allocating{find_slots(library_suffix, "posix_memalign"), reinterpret_cast<void*>(hooked_posix_memalign)};
  Hook freeing{find_slots(library_suffix, "free"), reinterpret_cast<void*>(hooked_free)};
  if (through_torch || allocating.slots.empty()) {
    allocating = {calls_of(library_suffix, kAllocCpu, reinterpret_cast<void**>(&alloc_cpu)),
                  reinterpret_cast<void*>(hooked_alloc_cpu)};
    freeing = {calls_of(library_suffix, kFreeCpu, reinterpret_cast<void**>(&free_cpu)),
               reinterpret_cast<void*>(hooked_free_cpu)};
  }
  if (allocating.slots.empty() || freeing.slots.empty()) return false;
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
  // All that frees before anything that allocates: the first block must find its way back.
  done = freeing.install() && allocating.install();
  return done;
}

Arena* installed_arena() { return installed.load(std::memory_order_acquire); }

void set_active(bool value) { active.store(value, std::memory_order_release); }

}  // namespace penstock
