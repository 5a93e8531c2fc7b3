// Whatever allocation fails: everything that was submitted is reported once, and everything closes.
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <system_error>
#include <vector>

#include "check.hpp"
#include "failing_new.hpp"
#include "io/blocking.hpp"
#include "io/ring.hpp"
#include "io/transfers.hpp"
#include "nvme/controller.hpp"
#include "nvme/nvme_io.hpp"
#include "nvme_server.hpp"

using namespace penstock;
using namespace penstock::nvme;
using namespace penstock::test;

namespace {

constexpr unsigned kPatienceS = 60;  // of one run: then the program ends, and the test has failed
constexpr std::uint64_t kPiece = 4096;
#ifdef __SANITIZE_THREAD__
constexpr std::uint64_t kStep = 4;  // it takes four times as long
#else
constexpr std::uint64_t kStep = 1;
#endif

// Errors that somebody who asks for something may get.
template <class Work>
bool was_told(const Work& work) {
  try {
    work();
  } catch (const std::bad_alloc&) {
    return true;
  } catch (const std::system_error& error) {
    CHECK_EQUAL(error.code().value(), ENOMEM);
    return true;
  } catch (const Error&) {
    return true;
  }
  return false;
}

// What was submitted and has not been reported.
class Expected {
 public:
  void submit(Transfers& transfers, const std::vector<Transfer>& requests) {
    bool begun = false;
    if (was_told([&] { begun = transfers.submit(requests); }) || !begun) return;
    const Spared spared;
    for (const auto& request : requests) CHECK(left_.emplace(request.token, true).second);
  }
  // False: something has failed.
  bool collect(Transfers& transfers) {
    bool whole = true;
    while (!left_.empty()) {
      const auto finished = transfers.wait();
      CHECK(!finished.empty());
      for (const auto& one : finished) {
        CHECK_EQUAL(left_.erase(one.token), 1U);
        whole = whole && one.error == 0;
      }
    }
    return whole;
  }

 private:
  std::map<std::uint64_t, bool> left_;
};

// Moves pieces of all kinds, with a cancellation and a raise_priority in between; `disturb` is called meanwhile.
template <class Disturb>
void move_everything(Transfers& transfers, Target target, const Disturb& disturb) {
  Expected expected;
  std::vector<std::byte> memory;
  std::vector<Transfer> requests;
  {
    const Spared spared;
    memory.resize(12 * 4 * kPiece);
    for (std::uint64_t number = 0; number < 12; ++number)
      requests.push_back({number, number % 2 == 0, static_cast<Method>(number % 3), true, target, number * 4 * kPiece,
                          memory.data() + number * 4 * kPiece, (1 + number % 3) * kPiece,
                          number % 4 == 3 ? Priority::evict : Priority::demand});
  }
  const auto some = [&](std::size_t begin, std::size_t end) {
    const Spared spared;
    return std::vector<Transfer>(requests.begin() + static_cast<std::ptrdiff_t>(begin),
                                requests.begin() + static_cast<std::ptrdiff_t>(end));
  };
  expected.submit(transfers, some(0, 6));
  const std::uint64_t cancelled = 3, hurried = 5;
  transfers.cancel({&cancelled, 1});
  transfers.raise_priority({&hurried, 1});
  disturb();
  expected.submit(transfers, some(6, 11));
  expected.collect(transfers);
  expected.submit(transfers, some(11, 12));
  expected.collect(transfers);
  CHECK(transfers.close());
  CHECK(transfers.wait().empty());
}

void fail_transfers(const Transfers::MakeIo& make_io, unsigned depth, unsigned threads) {
  const int file = memfd_create("penstock-test", MFD_CLOEXEC);
  CHECK_EQUAL(ftruncate(file, 1 << 20), 0);
  const auto runs = fail_each_allocation([&](FailingNew& memory) {
    alarm(kPatienceS);
    memory.begin();
    was_told([&] {
      Transfers transfers(make_io, {depth, kPiece, kPiece, 2, threads});
      move_everything(transfers, {file, file, 512}, [] {});
    });
    memory.end();
  });
  CHECK(runs > 40);
  close(file);
}

// Connects, moves, is lost, moves, flushes and closes.
void fail_initiator(bool ring, std::uint64_t more) {
  std::uint64_t failed = 0;
  for (std::uint64_t number = 1; failed == 0 || FailingNew::failures() > 0; number += kStep) {
    alarm(kPatienceS);
    Server server(2, [] { Spared::this_thread(); });
    auto options = options_for(server);
    options.command_timeout_s = options.reconnect_timeout_s = 3;
    FailingNew memory(number, Whose::everybody, more);
    std::shared_ptr<Controller> controller;
    memory.begin();
    was_told([&] {
      controller = Controller::open(options);
      const auto handle = controller->open_namespace(1);
      Transfers transfers([ring] { return make_nvme_io(4, ring); }, {4, kPiece, kPiece, 2, 2});
      move_everything(transfers, {-1, handle, kBlock}, [&] { server.drop_connections(); });
    });
    if (controller != nullptr) {
      was_told([&] { flush(*controller, 1); });
      CHECK(controller->close(5));
    }
    memory.end();
    failed += FailingNew::failures() > 0;
  }
  CHECK(failed > 100 / kStep);
}

}  // namespace

TEST(transfers_by_blocking_calls) {
  fail_transfers([] { return std::make_unique<BlockingIo>(); }, 1, 3);
}

TEST(transfers_by_io_uring) {
  fail_transfers([]() -> std::unique_ptr<Io> { return std::make_unique<Ring>(4); }, 4, 2);
}

TEST(an_initiator_on_io_uring) { fail_initiator(true, 0); }

TEST(an_initiator_on_poll) { fail_initiator(false, 0); }

TEST(an_initiator_that_is_short_of_memory_for_a_while) { fail_initiator(true, 5); }
