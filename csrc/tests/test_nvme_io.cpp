// Reads and writes of a namespace by sockets, against a small well-behaved target on threads of this process:
// whatever is lost meanwhile, each ends once, with its bytes or an error. For the sanitizers; the tests in
// Python have hostile targets.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "check.hpp"
#include "io/transfers.hpp"
#include "nvme/controller.hpp"
#include "nvme/nvme_io.hpp"
#include "nvme_server.hpp"

using namespace penstock;
using namespace penstock::nvme;
using namespace penstock::test;

namespace {

struct Opened {
  explicit Opened(const Options& options)
      : controller(Controller::open(options)), handle(controller->open_namespace(1)) {}
  ~Opened() { controller->close(5); }
  std::shared_ptr<Controller> controller;
  Handle handle;
};

std::map<std::uint64_t, int> wait_for(Transfers& transfers, std::size_t count) {
  std::map<std::uint64_t, int> errors;
  while (errors.size() < count)
    for (const auto& one : transfers.wait()) CHECK(errors.emplace(one.token, one.error).second);
  return errors;
}

Limits limits(unsigned threads) { return {16, 256U << 10, 64U << 10, 4, threads}; }

// Writes and reads pieces of all sizes again and again; `disturb` is called in between.
void check_traffic(Server& server, const Options& options, unsigned threads, bool ring,
                   const std::function<void()>& disturb) {
  test::Random random(threads + 10 * ring);
  const Opened opened(options);
  Transfers transfers([&] { return make_nvme_io(16, ring); }, limits(threads));
  constexpr std::size_t kPieces = 12, kPieceBytes = kDiskBytes / kPieces / kBlock * kBlock;
  std::vector<std::byte> memory(kDiskBytes), model(kDiskBytes);
  std::uint64_t number = threads;
  for (int turn = 0; turn < 3; ++turn) {
    std::vector<Transfer> requests;
    for (std::size_t piece = 0; piece < kPieces; ++piece) {
      const bool write = turn != 2;
      auto offset = piece * kPieceBytes, size = random(1, kPieceBytes / kBlock) * kBlock;
      if (!write) {  // any bytes
        offset += random(0, 700);
        size = random(1, kPieceBytes - 700);
      }
      if (write)
        for (std::size_t i = 0; i < size; i += 8) store(memory.data() + offset + i, number = number * 6364136223846793005U + 1);
      requests.push_back({piece,
                          write,
                          Method::direct,
                          false,
                          {-1, opened.handle, kBlock},
                          offset,
                          memory.data() + offset,
                          size});
      if (write) std::copy_n(memory.data() + offset, size, model.data() + offset);
    }
    if (turn == 2) std::fill(memory.begin(), memory.end(), std::byte{0});
    CHECK(transfers.submit(requests));
    disturb();
    for (const auto& [token, error] : wait_for(transfers, kPieces)) CHECK_EQUAL(error, 0);
    if (turn == 2)
      for (const auto& one : requests)
        CHECK(std::equal(one.address, one.address + one.size_bytes, model.data() + one.offset));
  }
  transfers.close();
  const std::lock_guard lock(server.disk_mutex);
  CHECK(server.disk == model);
}

}  // namespace

TEST(bytes_go_and_come) {
  for (const bool ring : {true, false}) {
    Server server;
    check_traffic(server, options_for(server), 1, ring, [] {});
    CHECK_EQUAL(server.connections, 2U);
  }
}

TEST(several_threads_and_queues) {
  Server server;
  auto options = options_for(server);
  options.queues = 2;
  options.depth = 4;
  check_traffic(server, options, 3, true, [] {});
}

TEST(threads_take_turns_where_there_are_few_queues) {
  for (const bool ring : {true, false}) {
    Server server(1);
    check_traffic(server, options_for(server), 3, ring, [] {});
    CHECK_EQUAL(server.connections, 2U);
  }
}

TEST(what_is_lost_is_sent_again) {
  for (const bool ring : {true, false}) {
    Server server;
    check_traffic(server, options_for(server), 2, ring, [&] { server.drop_connections(); });
    CHECK(server.connections >= 4);
  }
}

TEST(a_write_that_may_land_again_says_so) {
  for (const bool ring : {true, false}) {
    Server server;
    const Opened opened(options_for(server));
    CHECK_EQUAL(opened.controller->facts().quiesce_s, 3 * 15.0 + 10);
    Transfers transfers([&] { return make_nvme_io(16, ring); }, limits(1));
    std::vector<std::byte> memory(4096, std::byte{1});
    const auto may_land = [&](bool write) {
      const Transfer asked{1, write, Method::direct, false, {-1, opened.handle, kBlock}, 0, memory.data(), 4096};
      CHECK(transfers.submit({&asked, 1}));
      const auto finished = transfers.wait();
      CHECK(finished.size() == 1 && finished.front().error == 0);
      return finished.front().may_land;
    };
    CHECK(!may_land(true));
    CHECK_EQUAL(opened.controller->late_s(), 0.0);
    server.holds = true;
    CHECK(may_land(true));
    CHECK(opened.controller->late_s() > 0);
    CHECK(!may_land(false));
    std::fill(memory.begin(), memory.end(), std::byte{2});
    CHECK(!may_land(true));
    server.land();  // over what is newer
    CHECK(!may_land(false));
    CHECK(memory.front() == std::byte{1});
  }
}

TEST(a_flush_has_a_queue_too) {
  Server server;
  const Opened opened(options_for(server));
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back([&] { flush(*opened.controller, 1); });
  for (auto& thread : threads) thread.join();
  server.drop_connections();
  flush(*opened.controller, 1);
  CHECK_EQUAL(opened.controller->facts().most_data_bytes, 128U << 10);
}

TEST(a_close_ends_what_is_under_way) {
  for (const bool ring : {true, false}) {
    Server server;
    auto opened = std::make_unique<Opened>(options_for(server));
    const auto handle = opened->handle;
    Transfers transfers([&] { return make_nvme_io(16, ring); }, limits(2));
    std::vector<std::byte> memory(64U << 10);
    const auto read = [&](std::uint64_t token) {
      return Transfer{token, false, Method::direct, false, {-1, handle, kBlock}, 0, memory.data() + token * 4096,
                     4096};
    };
    auto first = read(0);
    CHECK(transfers.submit({&first, 1}));
    CHECK_EQUAL(wait_for(transfers, 1).at(0), 0);
    server.silent = true;
    std::vector<Transfer> requests;
    for (std::uint64_t token = 1; token < 16; ++token) requests.push_back(read(token));
    CHECK(transfers.submit(requests));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    opened.reset();
    for (const auto& [token, error] : wait_for(transfers, 15)) CHECK(error != 0);
    first = read(0);
    CHECK(transfers.submit({&first, 1}));
    CHECK(wait_for(transfers, 1).at(0) != 0);
    transfers.close();
  }
}

TEST(a_silent_target_is_lost_in_time) {
  Server server;
  auto options = options_for(server);
  options.command_timeout_s = 0.05;
  options.reconnect_timeout_s = 1;
  const Opened opened(options);
  server.silent = true;
  Transfers transfers([] { return make_nvme_io(16); }, limits(1));
  std::vector<std::byte> memory(4096);
  const Transfer asked{1, false, Method::direct, false, {-1, opened.handle, kBlock}, 0, memory.data(), 4096};
  CHECK(transfers.submit({&asked, 1}));
  CHECK_EQUAL(wait_for(transfers, 1).at(1), ECONNRESET);
  CHECK(opened.controller->counters.timeouts >= 4 &&
        opened.controller->last_loss().find("read of 4096") != std::string::npos);
  CHECK(find_namespace(opened.handle)->error().find("5 tries") != std::string::npos);
}

TEST(what_cannot_be_is_refused) {
  Server server;
  const Opened opened(options_for(server));
  Transfers transfers([] { return make_nvme_io(16); }, limits(1));
  std::vector<std::byte> memory(4096);
  const auto error_of = [&](bool write, Handle handle, std::uint64_t offset, std::uint64_t size) {
    const Transfer asked{1, write, Method::direct, false, {-1, handle, kBlock}, offset, memory.data(), size};
    CHECK(transfers.submit({&asked, 1}));
    return wait_for(transfers, 1).at(1);
  };
  CHECK_EQUAL(error_of(false, opened.handle, kDiskBytes - 512, 513), EIO);
  CHECK_EQUAL(error_of(false, opened.handle, std::uint64_t{1} << 62, 4096), EIO);
  CHECK_EQUAL(error_of(true, opened.handle, 100, 412), EINVAL);
  CHECK_EQUAL(error_of(false, opened.handle + 1000, 0, 512), EBADF);
  CHECK_EQUAL(error_of(false, opened.handle, kDiskBytes - 1, 1), 0);
  const auto again = opened.controller->open_namespace(1);
  CHECK(again != opened.handle);
}
