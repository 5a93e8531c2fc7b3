// A controller that reconnects by itself after a loss.
//
// Its thread sends keep-alives, connects queues, notices losses, and reconnects. The Ios drive the queues that
// they were given.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "nvme/association.hpp"
#include "nvme/queue_pool.hpp"
#include "sync.hpp"

namespace penstock::nvme {

struct Counters {
  std::atomic<std::uint64_t> reads = 0, writes = 0, read_bytes = 0, write_bytes = 0, reconnects = 0,
                             retries = 0, timeouts = 0, violations = 0;
  std::atomic<int> uses_io_uring = -1;  // -1: nothing was read or written yet
};

// The controller as an Io sees it: see `look`.
struct View {
  enum class State { up, down, closed };
  State state;
  std::uint64_t generation;  // of the association: queues of another are lost
  std::vector<std::unique_ptr<Channel>> channels;
  std::string why;                      // it is not up
  Clock::time_point given_up_before{};  // what was asked for before has waited long enough
};

class Controller : public std::enable_shared_from_this<Controller> {
 public:
  // The one there is, or a new one, connected. Throws Error.
  static std::shared_ptr<Controller> open(const Options& options);
  explicit Controller(const Options& options);
  Controller(const Controller&) = delete;
  Controller& operator=(const Controller&) = delete;
  ~Controller();
  // Once for each open; the last ends everything. False: its thread still works, and is left behind.
  bool close(double timeout_s);

  const Options& options() const { return options_; }
  Facts facts();
  std::vector<std::uint32_t> namespaces();
  // encrypted_from: what is written there, and behind it, is encrypted with a key of its own; none: nothing.
  Handle open_namespace(std::uint32_t nsid, std::optional<std::uint64_t> encrypted_from = std::nullopt);
  void close_namespace(Handle handle);
  std::string last_loss();
  // So long, a write that was lost may land yet, of whatever used the association.
  double late_s();
  Counters counters;

  // For Ios.
  std::shared_ptr<IoClient> add_client(std::function<void()> wake);
  void ask_for_queue(IoClient& client);
  // A quiet queue, of the association of that generation.
  void give_back(IoClient& client, std::uint64_t generation, std::unique_ptr<Channel> channel);
  // Where it holds a queue that it did not give back, the association is lost.
  void remove_client(const std::shared_ptr<IoClient>& client);
  View look(IoClient& client);
  std::string why_down();
  void reconnect_now();  // without the pause before the next attempt: somebody waits
  void report_loss(std::uint64_t generation, Kind kind, std::string_view why);
  void expect_late_write();
  void wake_by(Clock::time_point time);  // Ios that have something under way
  std::uint32_t most_command_bytes(const Namespace& name_space) const;
  // Before a command that ended with this status for the so manieth time is sent again.
  Clock::duration pause_before_retry(std::uint16_t status, int tries) const;
  void require_own_process() const;  // throws Error
  Error described(const Error& error) const;

 private:
  struct Job {
    std::function<void()> work;
    std::exception_ptr error;
    bool done = false;
  };
  enum class State { starting, up, down, closed };

  void run();
  void establish();
  void check_namespaces(const Deadline& deadline);
  void serve();
  void serve_clients();
  void serve_jobs();
  bool go_on(const Error& error, Clock::time_point begun, Clock::duration& pause);
  void lose(const Error& error);
  void shut_down();
  void run_job(std::function<void()> work);
  Deadline deadline(double seconds);
  void call_thread();
  void watch();
  bool wait_before_retry(Clock::duration pause);
  void set_text(std::string& text, const Error& error) noexcept;

  const Options options_;
  const int process_;
  EventFd event_;
  std::atomic<bool> asked_ = false;  // something for the thread to do
  std::atomic<bool> reconnect_now_ = false;
  std::thread thread_;

  mutable Mutex mutex_;
  Condition changed_;
  State state_ = State::starting;
  bool closing_ = false, ended_ = false;
  unsigned users_ = 1;
  std::uint64_t generation_ = 0;
  std::uint64_t lost_generation_ = 0;  // that an Io has reported
  std::exception_ptr reported_, start_error_;
  std::string loss_, last_attempt_;
  Clock::time_point down_since_{}, given_up_before_{};
  std::optional<Clock::time_point> lost_write_;  // the last
  QueuePool queue_pool_;
  std::list<std::shared_ptr<Job>> jobs_;
  std::set<Handle> opened_;
  Facts facts_;
  Clock::time_point next_tick_{};

  // The thread's own.
  std::unique_ptr<Association> association_;
};

// What was written to the namespace is durable when this returns. Throws Error.
void flush(Controller& controller, std::uint32_t nsid);

}  // namespace penstock::nvme
