// The target that serves files, on threads of this process: read by our own host, and attacked by raw bytes. For
// the sanitizers; the tests in Python have a host that was written by another hand.
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <memory>
#include <thread>

#include "check.hpp"
#include "io/transfers.hpp"
#include "nvme/controller.hpp"
#include "nvme/nvme_io.hpp"
#include "nvme/server.hpp"
#include "nvme_server.hpp"

using namespace penstock;
using namespace penstock::nvme;
using penstock::test::Random;

namespace {

constexpr std::uint64_t kHeadBytes = 1000, kFirst = 64U << 10, kSecond = 1U << 20, kSize = 3U << 20;
constexpr std::uint64_t kFirstBytes = 700'001, kSecondBytes = (2U << 20) - 512;
constexpr const char* kNqn = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001";

// A namespace of a head and two files, and a server of it.
struct Served {
  Served() : model(kSize) {
    Random random(7);
    const auto fill = [&](std::uint64_t at, std::uint64_t size) {
      for (std::uint64_t i = 0; i < size; ++i) model[at + i] = static_cast<std::byte>(random(0, 255));
    };
    fill(0, kHeadBytes);
    fill(kFirst, kFirstBytes);
    fill(kSecond, kSecondBytes);
    std::vector<served::Extent> extents;
    for (const auto& [at, size] : {std::pair{kFirst, kFirstBytes}, std::pair{kSecond, kSecondBytes}}) {
      const auto file = memfd_create("served", MFD_CLOEXEC);
      CHECK_EQUAL(pwrite(file, model.data() + at, size, 0), static_cast<ssize_t>(size));
      extents.push_back({at, size, file});
      files.push_back(file);
    }
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(listener, 64) == 0 &&
          getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    port = ntohs(address.sin_port);
    served::Offer offer{kNqn, {std::byte{1}}, kSize / served::kBlockBytes};
    server = std::make_unique<served::Server>(
        listener, offer,
        std::make_unique<const served::Files>(std::vector(model.begin(), model.begin() + kHeadBytes),
                                              std::move(extents), kSize));
  }
  ~Served() {
    server.reset();
    for (const auto file : files) close(file);
    close(listener);
  }
  Options options() const {
    Options found;
    found.host = "127.0.0.1";
    found.port = port;
    found.subsystem_nqn = kNqn;
    found.host_nqn = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000002";
    found.host_id[0] = std::byte{1};
    found.reconnect_timeout_s = 1;
    return found;
  }

  std::vector<std::byte> model;
  std::vector<int> files;
  int listener;
  std::uint16_t port = 0;
  std::unique_ptr<served::Server> server;
};

// Reads pieces of all sizes, again and again, until `over`. Gives how many came; with `lossy` some may fail.
std::size_t read_all(const Served& served, unsigned seed, bool digests, const std::atomic<bool>& over, bool lossy) {
  Random random(seed);
  auto options = served.options();
  options.header_digest = options.data_digest = digests;
  std::size_t good = 0;
  try {
    const auto controller = Controller::open(options);
    const auto handle = controller->open_namespace(1);
    Transfers transfers([] { return make_nvme_io(16, false); }, {16, 256U << 10, 64U << 10, 4, 1});
    std::vector<std::byte> memory(kSize);
    while (!over) {
      std::vector<Transfer> requests;
      for (std::uint64_t token = 0, at = 0; at < kSize; ++token) {
        const auto size = std::min<std::uint64_t>(random(1, 700) * served::kBlockBytes, kSize - at);
        requests.push_back({token, false, Method::direct, false, {-1, handle, 512}, at, memory.data() + at, size});
        at += size;
      }
      CHECK(transfers.submit(requests));
      for (std::size_t left = requests.size(); left > 0;)
        for (const auto& one : transfers.wait()) {
          const auto& request = requests[one.token];
          CHECK(lossy || one.error == 0);
          if (one.error == 0)
            CHECK(std::equal(request.address, request.address + request.size_bytes, served.model.data() + request.offset));
          good += one.error == 0;
          --left;
        }
      if (lossy && good > 0) break;
      if (!lossy) break;
    }
    transfers.close();
    controller->close(5);
  } catch (const Error&) {
    CHECK(lossy);
  }
  return good;
}

}  // namespace

TEST(many_read_at_once) {
  const Served served;
  std::atomic<bool> over = false;
  std::atomic<std::size_t> good = 0;
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < 4; ++number)
    threads.emplace_back([&, number] { good += read_all(served, number, number % 2 == 1, over, false); });
  for (auto& thread : threads) thread.join();
  CHECK(good > 4 * kSize / (700 * 512));
  CHECK_EQUAL(served.server->totals().violations, 0U);
  CHECK_EQUAL(served.server->files().changed(), -1);
}

TEST(it_may_end_while_they_read) {
  for (unsigned turn = 0; turn < 3; ++turn) {
    Served served;
    std::atomic<bool> over = false;
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < 3; ++number)
      threads.emplace_back([&, number] { read_all(served, number, false, over, true); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20 * turn));
    served.server.reset();
    shutdown(served.listener, SHUT_RDWR);
    over = true;
    for (auto& thread : threads) thread.join();
  }
}

TEST(a_file_that_changes_is_not_given_out) {
  const Served served;
  CHECK_EQUAL(ftruncate(served.files[1], 100), 0);
  std::vector<std::byte> bytes(4096);
  CHECK(served.server->files().read(kFirst, bytes));
  CHECK(!served.server->files().read(kSecond, bytes));
  CHECK_EQUAL(served.server->files().changed(), 1);
}

TEST(no_bytes_harm_it) {
  const Served served;
  Random random(3);
  const auto begun = init_request(false, false);
  auto entry = connect(0, 32, 60'000, true);
  set_data_pointer(entry, kConnectDataBytes, true);
  std::array<std::byte, 16> id{std::byte{1}};
  const auto data = connect_data(id, 0xffff, kNqn, "nqn.2014-08.org:host");
  std::vector<std::byte> said(begun.begin(), begun.end());
  const auto add = [&](const Entry& command, std::span<const std::byte> more) {
    std::array<std::byte, kCommonBytes> head{};
    store_header(head.data(), {Pdu::command, 0, kCommandBytes, more.empty() ? std::uint8_t{0} : std::uint8_t{kCommandBytes},
                               static_cast<std::uint32_t>(kCommandBytes + more.size())});
    said.insert(said.end(), head.begin(), head.end());
    said.insert(said.end(), command.begin(), command.end());
    said.insert(said.end(), more.begin(), more.end());
  };
  add(entry, data);
  for (const auto& command : {identify(1, 0), identify(0, 1), get_log(2, 0, 512), keep_alive(), set_queues(4),
                              read_or_write(false, 1, 0, 8), read_or_write(true, 1, 0, 8)}) {
    auto sent = command;
    set_data_pointer(sent, 4096, false);
    add(sent, {});
  }
  for (int turn = 0; turn < 400; ++turn) {
    auto bytes = said;
    for (std::size_t changes = random(0, 5); changes > 0; --changes)
      bytes[random(0, bytes.size() - 1)] = static_cast<std::byte>(random(0, 255));
    bytes.resize(random(1, bytes.size()));
    const auto peer = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(served.port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK_EQUAL(connect(peer, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    [[maybe_unused]] const auto sent = send(peer, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (turn % 2 == 0) shutdown(peer, SHUT_WR);
    std::array<std::byte, 4096> answer;
    while (turn % 2 == 0 && recv(peer, answer.data(), answer.size(), 0) > 0) {
    }
    close(peer);
  }
  std::atomic<bool> over = false;
  CHECK(read_all(served, 1, true, over, false) > 0);
}
