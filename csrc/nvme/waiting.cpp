#include "nvme/waiting.hpp"

#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "arena/event.hpp"
#include "io/transfers.hpp"
#include "nvme/controller.hpp"
#include "nvme/namespaces.hpp"
#include "nvme/nvme_io.hpp"
#include "sync.hpp"

namespace penstock::nvme {

namespace {

constexpr unsigned kDepth = 32;

struct Wait {
  Mutex mutex;
  Condition changed;
  bool over = false;
  int error = 0;
  bool abandoned = false, may_land = false;
};

constexpr std::size_t kLentBytes = std::size_t{256} << 10;
constexpr int kPatienceMs = 100;         // between two looks whether the parent is there
constexpr int kMostLooks = 120 * 1000 / kPatienceMs;  // of a parent that is there, and does not answer

// Shared with forked children. A child that ends while it waits leaves a place taken, and no more.
struct Loans {
  enum State : std::uint32_t { kFree, kTaken, kAsked, kServing, kAnswered };
  struct Loan {
    std::atomic<std::uint32_t> state;
    int error;
    bool abandoned;  // its bytes may be written to for ever
    Handle handle;
    std::uint64_t offset;
    std::size_t size_bytes;
    std::byte bytes[kLentBytes];
  };
  std::atomic<std::uint32_t> changes;
  std::array<Loan, 16> loans;

  static Loans* make() {
    void* const memory =
        mmap(nullptr, sizeof(Loans), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    return static_cast<Loans*>(memory);  // zeros are what they begin as
  }
};

// Its threads last as long as the process.
struct Mover {
  explicit Mover(const Mover* parent)
      : process(getpid()),
        parent(parent),
        loans(Loans::make()),
        transfers([] { return make_nvme_io(kDepth); }, {.depth = kDepth, .slots = 1}) {}
  const pid_t process;
  const Mover* const parent;  // of the process that this one was forked from
  Loans* const loans;
  Transfers transfers;
};

std::atomic<Mover*> mover = nullptr;

void notify_waiters(Transfers& transfers) {
  while (true) {
    const auto finished = transfers.wait();
    if (finished.empty()) return;
    for (const auto& one : finished) {
      auto& wait = *reinterpret_cast<Wait*>(one.token);
      const std::lock_guard lock(wait.mutex);
      wait.error = one.error;
      wait.abandoned = one.abandoned;
      wait.may_land = one.may_land;
      wait.over = true;
      wait.changed.notify_one();  // with the lock: who waits then ends the object
    }
  }
}

// The parent's thread.
void lend(Loans& loans) {
  for (;;) {
    const auto seen = loans.changes.load();
    for (auto& loan : loans.loans) {
      std::uint32_t asked = Loans::kAsked;
      if (!loan.state.compare_exchange_strong(asked, Loans::kServing)) continue;
      StillInUse in_use;
      loan.error = loan.size_bytes > kLentBytes
                       ? EINVAL
                       : move_and_wait(false, loan.handle, loan.bytes, loan.size_bytes, loan.offset, &in_use);
      loan.abandoned = in_use.abandoned;
      loan.state.store(Loans::kAnswered);
      futex_wake(loan.state, true);
    }
    futex_wait(loans.changes, seen, -1, true);
  }
}

// Also of one that has ended, and that nobody has waited for.
bool has_ended(pid_t process) {
  const auto file = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
  if (file < 0) return errno == ESRCH;
  pollfd ended{file, POLLIN, 0};
  const bool readable = poll(&ended, 1, 0) > 0;
  close(file);
  return readable;
}

Loans::Loan* take_loan(const Mover& made) {
  for (int looks = 0; looks < kMostLooks; ++looks) {
    for (auto& loan : made.loans->loans) {
      std::uint32_t free = Loans::kFree;
      if (loan.state.compare_exchange_strong(free, Loans::kTaken)) return &loan;
    }
    if (has_ended(made.process)) break;
    usleep(kPatienceMs * 1000);
  }
  return nullptr;
}

// The child's part.
int borrow(const Mover& made, Handle handle, std::byte* address, std::size_t size_bytes, std::uint64_t offset) {
  auto* const loan = take_loan(made);
  if (loan == nullptr) return ESTALE;
  int error = 0;
  while (size_bytes > 0 && error == 0) {
    const auto wanted = std::min(size_bytes, kLentBytes);
    loan->handle = handle;
    loan->offset = offset;
    loan->size_bytes = wanted;
    loan->state.store(Loans::kAsked);
    made.loans->changes.fetch_add(1);
    futex_wake(made.loans->changes, true);
    int looks = 0;
    for (auto state = loan->state.load(); state != Loans::kAnswered; state = loan->state.load()) {
      // What is not answered stays taken: somebody may write to it yet.
      if (++looks > kMostLooks || has_ended(made.process)) return ESTALE;
      futex_wait(loan->state, state, kPatienceMs * 1'000'000L, true);
    }
    if (loan->abandoned) return loan->error;  // it stays taken, too
    error = loan->error;
    if (error == 0) std::memcpy(address, loan->bytes, wanted);
    address += wanted;
    offset += wanted;
    size_bytes -= wanted;
  }
  loan->state.store(Loans::kFree);
  return error;
}

}  // namespace

bool prepare_to_wait() {
  static Mutex once;
  const std::lock_guard lock(once);
  if (const auto* made = mover.load(); made != nullptr && made->process == getpid()) return true;
  try {
    auto* made = new Mover(mover.load());
    std::thread([made] { notify_waiters(made->transfers); }).detach();
    std::thread([made] { lend(*made->loans); }).detach();
    mover.store(made);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

int move_and_wait(bool write, Handle handle, std::byte* address, std::size_t size_bytes, std::uint64_t offset,
                  StillInUse* in_use) {
  auto* const made = mover.load();
  if (made == nullptr) return ESTALE;
  if (made->process != getpid()) return write ? ESTALE : borrow(*made, handle, address, size_bytes, offset);
  const auto found = find_namespace(handle);
  if (!found && !write && made->parent != nullptr) return borrow(*made->parent, handle, address, size_bytes, offset);
  if (!found) return EBADF;
  Wait wait;
  const Transfer request{.token = reinterpret_cast<std::uint64_t>(&wait),
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
  if (in_use != nullptr && (wait.abandoned || wait.may_land))
    *in_use = {in_use->abandoned || wait.abandoned, found->controller->facts().quiesce_s};
  return wait.error;
}

}  // namespace penstock::nvme
