// An association with a controller as the protocol has it: the admin queue, and how I/O queues join it. One thread
// uses it and waits for each answer. Every call throws Error; after one the association is of no more use, unless
// `at_rest` says that nothing is under way.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nvme/authentication.hpp"
#include "nvme/channel.hpp"
#include "nvme/namespaces.hpp"

namespace penstock::nvme {

struct Options {
  std::string host;
  std::uint16_t port = 4420;
  std::string subsystem_nqn, host_nqn;
  std::array<std::byte, 16> host_id{};
  Keys keys;
  unsigned queues = 1;   // of an Io at this target
  unsigned depth = 128;  // commands of a queue at once
  bool header_digest = false, data_digest = false, io_uring = true;
  double connect_timeout_s = 10, command_timeout_s = 30, keep_alive_s = 15, reconnect_timeout_s = 60;

  std::string url() const;
  bool operator==(const Options&) const = default;
};

Clock::duration seconds(double value);

// What the controller has reported of itself.
struct Facts {
  ControllerData data;
  std::uint32_t most_data_bytes = 0;  // of a command; 0: no limit
  std::uint32_t in_capsule_bytes = 0;
  std::uint16_t most_entries = 0, queues = 0, controller = 0;
  std::uint32_t version = 0;
  bool header_digest = false, data_digest = false;
  // After a loss, for so long, the controller may still carry out commands that it had.
  double quiesce_s = 0;
  std::array<std::uint16_t, 3> retry_delays{};  // of 100 ms, by the number that a status gives, less one; 0: none

  // Before a command that ended with this status for the so manieth time is sent again.
  Clock::duration pause_before_retry(std::uint16_t status, int tries) const;
};

inline constexpr int kMostTries = 5;  // of a command
inline constexpr auto kShutDownWait = std::chrono::milliseconds(1000);

class Association {
 public:
  // Connects the admin queue and enables the controller.
  Association(const Options& options, const Deadline& deadline);
  // What I/O needs: identifies the controller, and asks it for queues.
  void prepare_for_io(const Deadline& deadline);
  const Facts& facts() const { return facts_; }

  std::unique_ptr<Channel> connect_queue(std::uint16_t queue, const Deadline& deadline);
  std::vector<std::uint32_t> namespaces(const Deadline& deadline);
  Identity identify_namespace(std::uint32_t nsid, const Deadline& deadline);
  std::vector<LogEntry> discovery_log(const Deadline& deadline);
  void keep_alive(const Deadline& deadline);
  // Returns when the controller has shut down, or at the deadline.
  void shut_down(const Deadline& deadline);

  int socket() const { return admin_.socket(); }
  void exchange() { admin_.exchange(); }
  bool at_rest() { return admin_.connection().idle() && admin_.connection().violation().empty(); }

 private:
  // Throws where the answer's status is one of failure, too.
  std::uint64_t ask(const Entry& entry, std::span<std::byte> data, const Deadline& deadline, const char* what);
  Completion try_to_ask(const Entry& entry, std::span<std::byte> data, const Deadline& deadline,
                        const char* what);
  void enable(const Deadline& deadline);

  const Options options_;
  Channel admin_;
  Facts facts_;
  bool flow_control_ = false;
};

// The entries of the log of the discovery controller there.
std::vector<LogEntry> discover(Options options, double timeout_s);

}  // namespace penstock::nvme
