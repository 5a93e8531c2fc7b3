// A small well-behaved NVMe/TCP target on threads of this process.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "nvme/association.hpp"
#include "nvme/wire.hpp"

namespace penstock::test {

using namespace penstock::nvme;

inline constexpr std::uint32_t kBlock = 512, kCapsuleData = 4096;
inline constexpr std::size_t kDiskBytes = 2U << 20;

class Server {
 public:
  // `on_thread` is called on each of its threads first.
  explicit Server(std::uint16_t queues = 8, std::function<void()> on_thread = [] {})
      : disk(kDiskBytes), queues_(queues), on_thread_(std::move(on_thread)) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener_, 64) != 0 ||
        getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0)
      throw std::system_error(errno, std::generic_category(), "a listening socket");
    port = ntohs(address.sin_port);
    acceptor_ = std::thread([this] {
      on_thread_();
      accept_all();
    });
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
  std::atomic<bool> holds = false;   // the next write, until `land`: then its connection is lost
  void land() {
    const std::lock_guard lock(disk_mutex);
    std::copy(held_.begin(), held_.end(), disk.begin() + static_cast<std::ptrdiff_t>(held_at_));
  }
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
        on_thread_();
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
    if (holds.exchange(false)) {
      const std::lock_guard lock(disk_mutex);
      held_ = std::move(taken);
      held_at_ = offset;
      return false;
    }
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
  const std::function<void()> on_thread_;
  std::vector<std::byte> held_;
  std::uint64_t held_at_ = 0;
  int listener_ = -1;
  std::atomic<bool> stop_ = false;
  std::atomic<std::uint32_t> configuration_ = 0;
  std::mutex mutex_;
  std::vector<int> sockets_;
  std::vector<std::thread> threads_;
  std::map<int, std::vector<std::vector<std::byte>>> later_;
  std::thread acceptor_;
};

inline Options options_for(const Server& server) {
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

}  // namespace penstock::test
