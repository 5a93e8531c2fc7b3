// Reads and writes of a namespace by sockets, against a small well-behaved target on threads of this process:
// whatever is lost meanwhile, each ends once, with its bytes or an error. For the sanitizers; the tests in
// Python have hostile targets.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

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

using namespace penstock;
using namespace penstock::nvme;

namespace {

constexpr std::uint32_t kBlock = 512, kCapsuleData = 4096;
constexpr std::size_t kDiskBytes = 2U << 20;

class Server {
 public:
  explicit Server(std::uint16_t queues = 8) : disk(kDiskBytes), queues_(queues) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener_, 64) != 0 ||
        getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0)
      throw std::system_error(errno, std::generic_category(), "a listening socket");
    port = ntohs(address.sin_port);
    acceptor_ = std::thread([this] { accept_all(); });
  }
  ~Server() {
    stop_ = true;
    shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    drop_connections();
    for (auto& thread : threads_) thread.join();
    for (const auto descriptor : sockets_) close(descriptor);
    close(listener_);
  }
  void drop_connections() {
    const std::lock_guard lock(mutex_);
    for (const auto descriptor : sockets_) shutdown(descriptor, SHUT_RDWR);
  }

  std::uint16_t port;
  std::mutex disk_mutex;
  std::vector<std::byte> disk;
  std::atomic<bool> silent = false;  // to reads and writes
  std::atomic<unsigned> connections = 0;

 private:
  void accept_all() {
    while (true) {
      const auto descriptor = accept(listener_, nullptr, nullptr);
      if (descriptor < 0 || stop_) {
        if (descriptor >= 0) close(descriptor);
        return;
      }
      const int on = 1;
      setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      ++connections;
      const std::lock_guard lock(mutex_);
      sockets_.push_back(descriptor);
      threads_.emplace_back([this, descriptor] {
        serve(descriptor);
        shutdown(descriptor, SHUT_RDWR);
      });
    }
  }
  static bool take(int from, std::byte* to, std::size_t size) {
    while (size > 0) {
      const auto moved = recv(from, to, size, 0);
      if (moved <= 0) return false;
      to += moved;
      size -= static_cast<std::size_t>(moved);
    }
    return true;
  }
  static bool give(int to, const std::vector<std::byte>& bytes) {
    for (std::size_t done = 0; done < bytes.size();) {
      const auto moved = send(to, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
      if (moved <= 0) return false;
      done += static_cast<std::size_t>(moved);
    }
    return true;
  }
  static bool take_pdu(int from, std::vector<std::byte>& pdu) {
    pdu.resize(kCommonBytes);
    if (!take(from, pdu.data(), kCommonBytes)) return false;
    const auto header = load_header(pdu.data());
    if (header.pdu_bytes < kCommonBytes || header.pdu_bytes > (1U << 20)) return false;
    pdu.resize(header.pdu_bytes);
    return take(from, pdu.data() + kCommonBytes, header.pdu_bytes - kCommonBytes);
  }
  static std::vector<std::byte> response(std::uint16_t command, std::uint64_t result,
                                         std::uint16_t status = 0) {
    std::vector<std::byte> pdu(kDataHeaderBytes);
    store_header(pdu.data(), {Pdu::response, 0, kDataHeaderBytes, 0, kDataHeaderBytes});
    store(pdu.data() + 8, result);
    store(pdu.data() + 20, command);
    store(pdu.data() + 22, static_cast<std::uint16_t>(status << 1));
    return pdu;
  }
  static std::vector<std::byte> data(std::uint16_t command, const std::byte* from, std::uint32_t size) {
    std::vector<std::byte> pdu(kDataHeaderBytes + size);
    store_header(pdu.data(), {Pdu::data_to_host, kLastData | kSuccess, kDataHeaderBytes, kDataHeaderBytes,
                              kDataHeaderBytes + size});
    store_data_header(pdu.data(), {command, 0, 0, size});
    std::copy(from, from + size, pdu.data() + kDataHeaderBytes);
    return pdu;
  }
  static std::vector<std::byte> page(std::uint8_t what) {
    std::vector<std::byte> page(kIdentifyBytes);
    const auto put = [&](std::size_t at, auto value) { store(page.data() + at, value); };
    if (what == 0) {
      put(0, std::uint64_t{kDiskBytes / kBlock});
      put(130, std::uint8_t{9});
    } else if (what == 1) {
      put(77, std::uint8_t{5});  // 128 KiB
      put(536, std::uint32_t{1});
      put(1792, std::uint32_t{(kEntryBytes + kCapsuleData) / 16});
      put(1796, std::uint32_t{1});
    } else if (what == 2) {
      put(0, std::uint32_t{1});
    }
    return page;
  }
  // The rest of a write that did not come in its capsule.
  bool take_write(int from, std::uint16_t command, std::uint32_t size, std::vector<std::byte>& taken) {
    std::vector<std::byte> pdu(kDataHeaderBytes);
    store_header(pdu.data(), {Pdu::ready_to_transfer, 0, kDataHeaderBytes, 0, kDataHeaderBytes});
    store_data_header(pdu.data(), {command, 9, 0, size});
    if (!give(from, pdu)) return false;
    // Other commands come between: they wait here.
    while (taken.size() < size) {
      if (!take_pdu(from, pdu)) return false;
      if (load_header(pdu.data()).type != Pdu::data_to_controller) {
        later_[from].push_back(pdu);
        continue;
      }
      taken.insert(taken.end(), pdu.begin() + load_header(pdu.data()).data_begin, pdu.end());
    }
    return true;
  }
  void serve(int from) {
    std::vector<std::byte> pdu;
    std::vector<std::vector<std::byte>> later;
    {
      const std::lock_guard lock(mutex_);
      later_[from].clear();  // made here: later it is found, by this thread alone
    }
    while (true) {
      bool found = false;
      {
        const std::lock_guard lock(mutex_);
        auto& mine = later_[from];
        if (!mine.empty()) {
          pdu = std::move(mine.front());
          mine.erase(mine.begin());
          found = true;
        }
      }
      if (!found && !take_pdu(from, pdu)) return;
      if (!answer(from, pdu)) return;
    }
  }
  bool answer(int from, const std::vector<std::byte>& pdu) {
    const auto header = load_header(pdu.data());
    if (header.type == Pdu::init_request) {
      std::vector<std::byte> answer(kInitBytes);
      store_header(answer.data(), {Pdu::init_response, 0, kInitBytes, 0, kInitBytes});
      store(answer.data() + 12, std::uint32_t{1U << 16});
      return give(from, answer);
    }
    const auto* entry = pdu.data() + kCommonBytes;
    const auto opcode = load<std::uint8_t>(entry);
    const auto command = load<std::uint16_t>(entry + 2);
    if (opcode == kFabrics) {
      const auto type = load<std::uint8_t>(entry + 4);
      if (type == 1) return give(from, response(command, 1));
      if (type == 0) {
        configuration_ = load<std::uint32_t>(entry + 48);
        return give(from, response(command, 0));
      }
      const auto property = load<std::uint32_t>(entry + 44);
      const auto set = configuration_.load();
      const std::uint64_t status = (set & 1) | ((set >> 14 & 3) != 0 ? 8U : 0U);
      return give(from, response(command, property == 0      ? 1ULL << 37 | 2ULL << 24 | 63
                                          : property == 0x1c ? status
                                                             : set));
    }
    const bool admin = !later_is_io(from, opcode, entry);
    if (admin && opcode == kIdentify) {
      const auto what = load<std::uint8_t>(entry + 40);
      return give(from, data(command, page(what).data(), kIdentifyBytes));
    }
    if (admin && opcode == kSetFeatures) return give(from, response(command, (queues_ - 1U) * 0x10001U));
    if (admin) return give(from, response(command, 0));
    if (silent) return true;
    if (opcode == kFlush) return give(from, response(command, 0));
    const auto offset = load<std::uint64_t>(entry + 40) * kBlock;
    const auto size = (load<std::uint16_t>(entry + 48) + 1U) * kBlock;
    if (offset + size > kDiskBytes) return give(from, response(command, 0, 0x80 | kDoNotRetry));
    if (opcode == kRead) {
      std::vector<std::byte> copy(size);
      {
        const std::lock_guard lock(disk_mutex);
        std::copy_n(disk.data() + offset, size, copy.data());
      }
      return give(from, data(command, copy.data(), size));
    }
    std::vector<std::byte> taken(pdu.begin() + (header.data_begin > 0 ? header.data_begin : header.pdu_bytes),
                                 pdu.end());
    if (taken.empty() && !take_write(from, command, size, taken)) return false;
    {
      const std::lock_guard lock(disk_mutex);
      std::copy_n(taken.data(), size, disk.data() + offset);
    }
    return give(from, response(command, 0));
  }
  // I/O commands name a namespace and blocks; admin ones of the same numbers are Get Log and the like, which
  // nobody asks.
  static bool later_is_io(int, std::uint8_t opcode, const std::byte* entry) {
    return opcode <= kRead && load<std::uint32_t>(entry + 4) == 1;
  }

  const std::uint16_t queues_;
  int listener_ = -1;
  std::atomic<bool> stop_ = false;
  std::atomic<std::uint32_t> configuration_ = 0;
  std::mutex mutex_;
  std::vector<int> sockets_;
  std::vector<std::thread> threads_;
  std::map<int, std::vector<std::vector<std::byte>>> later_;
  std::thread acceptor_;
};

Options options_for(const Server& server) {
  Options options;
  options.host = "127.0.0.1";
  options.port = server.port;
  options.subsystem_nqn = "nqn.2026-11.test:s0";
  options.host_nqn = "nqn.2026-11.test:host";
  options.host_id[0] = std::byte{1};
  options.command_timeout_s = 20;
  options.reconnect_timeout_s = 20;
  return options;
}

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
    std::vector<Request> requests;
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
      return Request{token, false, Method::direct, false, {-1, handle, kBlock}, 0, memory.data() + token * 4096,
                     4096};
    };
    auto first = read(0);
    CHECK(transfers.submit({&first, 1}));
    CHECK_EQUAL(wait_for(transfers, 1).at(0), 0);
    server.silent = true;
    std::vector<Request> requests;
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
  const Request asked{1, false, Method::direct, false, {-1, opened.handle, kBlock}, 0, memory.data(), 4096};
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
    const Request asked{1, write, Method::direct, false, {-1, handle, kBlock}, offset, memory.data(), size};
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
