// One connection of a host, as a state machine over bytes: what it sends comes in, answers and reads come out.
// Read only. What breaks the protocol ends the connection. Section numbers as in wire.hpp.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>

#include "nvme/authentication.hpp"
#include "nvme/wire.hpp"

namespace penstock::nvme::served {

using Clock = std::chrono::steady_clock;

// What hosts see.
struct Offer {
  std::string subsystem_nqn;
  std::array<std::byte, 16> id{};  // NGUID and UUID of the namespace
  std::uint64_t blocks = 0;
  Keys keys{};  // without one for hosts, any host may read
};

// What a host has connected: an admin queue, and queues to read by.
struct Association {
  std::uint16_t id = 0;
  bool discovery = false;
  std::string host_nqn;
  std::array<std::byte, 16> host_id{};
  std::uint32_t keep_alive_ms = 0, configuration = 0, status = 0;
  std::uint16_t queues = 0;
  std::set<std::uint16_t> connected;
  Clock::time_point alive;
};
using Associations = std::map<std::uint16_t, std::shared_ptr<Association>>;

struct Bytes {
  std::unique_ptr<std::byte[]> data;
  std::size_t size = 0;
};

// A read under way. The data come at `answer.data + begin`, and behind them their digest, where there is one.
struct Read {
  std::uint16_t command;
  std::uint64_t offset;
  std::uint32_t size_bytes;
  std::size_t begin;
  bool digest;
  Bytes answer;
};

struct Counts {
  std::uint64_t reads = 0, read_bytes = 0, refused_writes = 0, violations = 0, denied = 0;
};

class Queue {
 public:
  static constexpr std::uint32_t kMostPduBytes = 8192 + 256, kMostReadBytes = 512U << 10;
  static constexpr std::size_t kMostUnsentBytes = 256U << 10, kMostEntries = 1024;

  // `local_address`, `port`: where the host has reached us.
  Queue(const Offer& offer, Associations& associations, Counts& counts, std::string local_address,
        std::uint16_t port)
      : offer_(offer),
        associations_(associations),
        counts_(counts),
        local_address_(std::move(local_address)),
        port_(port) {}

  // Takes whole PDUs, while the answers to earlier ones are not too many. Gives the bytes that it has taken.
  std::size_t take(std::span<const std::byte> input);
  bool takes() const { return !ended_ && unsent_bytes_ <= kMostUnsentBytes; }
  // The bytes of the next read that waits; 0: none. `begin_read` begins it.
  std::uint32_t next_read_bytes() const { return waiting_.empty() ? 0 : waiting_.front().size_bytes; }
  Read begin_read();
  void end_read(Read read, bool good);

  // Answers, in order.
  std::deque<Bytes> output;
  void sent(std::size_t size_bytes) { unsent_bytes_ -= size_bytes; }
  bool ended() const { return ended_; }  // once its output is sent
  bool connected() const { return association_ != nullptr; }
  // It may read: it is connected, and has shown the key, where one is asked for.
  bool admitted() const { return connected() && (!authentication_ || authentication_->done()); }
  const std::shared_ptr<Association>& association() const { return association_; }
  std::uint16_t number() const { return number_; }

 private:
  struct Waiting {
    std::uint16_t command;
    std::uint64_t offset;
    std::uint32_t size_bytes;
  };
  using Data = std::span<const std::byte>;

  void refuse(std::uint16_t reason, std::uint32_t at, const std::byte* pdu, std::size_t size_bytes);
  void take_pdu(const Header& header, const std::byte* pdu);
  void initialize(const Header& header, const std::byte* pdu);
  void take_command(const std::byte* entry, Data data);
  void fabrics(const std::byte* entry, Data data);
  void connect(const std::byte* entry, Data data);
  void authenticate(const std::byte* entry, Data data, bool sends);
  void property(const std::byte* entry, bool set);
  void admin(const std::byte* entry, Data data);
  void log_page(const std::byte* entry);
  void identify(const std::byte* entry);
  void features(const std::byte* entry, Data data, bool set);
  void transfer(const std::byte* entry);

  std::byte* add(std::size_t size_bytes);
  std::size_t data_begin() const;
  void write_response(std::byte* at, std::uint16_t command, std::uint16_t status, std::uint64_t result);
  std::size_t response_bytes() const { return kDataHeaderBytes + (header_digest_ ? kDigestBytes : 0); }
  void respond(std::uint16_t command, std::uint16_t status, std::uint64_t result = 0);
  void respond_data(std::uint16_t command, Data data);
  Read answer_of(std::uint16_t command, std::uint32_t size_bytes) const;
  void deliver(Read read);
  void release();

  const Offer& offer_;
  Associations& associations_;
  Counts& counts_;
  const std::string local_address_;
  const std::uint16_t port_;
  std::shared_ptr<Association> association_;
  std::optional<ControllerAuthentication> authentication_;
  bool initialized_ = false, ended_ = false, header_digest_ = false, data_digest_ = false, flow_control_ = true;
  std::size_t alignment_ = 4;
  std::uint16_t number_ = 0, entries_ = 1, head_ = 0, events_ = 0;
  std::size_t in_flight_ = 0, unsent_bytes_ = 0;
  std::deque<Waiting> waiting_;
};

}  // namespace penstock::nvme::served
