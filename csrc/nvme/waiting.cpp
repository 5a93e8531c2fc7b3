#include "nvme/waiting.hpp"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "io/transfers.hpp"
#include "nvme/namespaces.hpp"
#include "nvme/nvme_io.hpp"

namespace penstock::nvme {

namespace {

constexpr unsigned kDepth = 32;

struct Wait {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  int error = 0;
};

// Its threads last as long as the process.
struct Mover {
  Mover()
      : process(getpid()), transfers([] { return make_nvme_io(kDepth); }, {.depth = kDepth, .slots = 1}) {}
  const pid_t process;
  Transfers transfers;
};

std::atomic<Mover*> mover = nullptr;

void tell(Transfers& transfers) {
  while (true) {
    const auto finished = transfers.wait();
    if (finished.empty()) return;
    for (const auto& one : finished) {
      auto& wait = *reinterpret_cast<Wait*>(one.token);
      const std::lock_guard lock(wait.mutex);
      wait.error = one.error;
      wait.over = true;
      wait.changed.notify_one();  // with the lock: who waits then ends the object
    }
  }
}

}  // namespace

bool prepare_to_wait() {
  static std::mutex once;
  const std::lock_guard lock(once);
  if (const auto* made = mover.load(); made != nullptr && made->process == getpid()) return true;
  try {
    auto* made = new Mover;
    std::thread([made] { tell(made->transfers); }).detach();
    mover.store(made);
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}

int move_and_wait(bool write, Handle handle, std::byte* address, std::size_t size_bytes, std::uint64_t offset) {
  auto* const made = mover.load();
  if (made == nullptr || made->process != getpid()) return ESTALE;
  const auto found = find_namespace(handle);
  if (!found) return EBADF;
  Wait wait;
  const Request request{.token = reinterpret_cast<std::uint64_t>(&wait),
                        .write = write,
                        .method = Method::direct,
                        .padded = false,
                        .target = {-1, handle, found->block_bytes()},
                        .offset = offset,
                        .address = address,
                        .size_bytes = size_bytes,
                        .priority = Priority::demand};
  try {
    if (!made->transfers.submit({&request, 1})) return ESHUTDOWN;
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
  std::unique_lock lock(wait.mutex);
  wait.changed.wait(lock, [&wait] { return wait.over; });
  return wait.error;
}

}  // namespace penstock::nvme
