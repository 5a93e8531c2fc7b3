// An association with a controller: its admin queue, the I/O queues that Ios take from it, and its namespaces.
//
// A thread of its own sleeps until something has to be done: keep alive, connect a queue, notice a loss,
// connect again. Queues that were handed out are their Ios' to drive.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "nvme/channel.hpp"
#include "nvme/namespaces.hpp"

namespace penstock::nvme {

struct Options {
  std::string host;
  std::uint16_t port = 4420;
  std::string subsystem_nqn, host_nqn;
  std::array<std::byte, 16> host_id{};
  unsigned queues = 1;   // of an Io at this target
  unsigned depth = 128;  // commands of a queue at once
  bool header_digest = false, data_digest = false, io_uring = true;
  double connect_timeout_s = 10, command_timeout_s = 30, keep_alive_s = 15, reconnect_timeout_s = 60;

  std::string url() const;
  bool operator==(const Options&) const = default;
};

struct Counters {
  std::atomic<std::uint64_t> reads = 0, writes = 0, read_bytes = 0, write_bytes = 0, reconnects = 0,
                             retries = 0, timeouts = 0, violations = 0;
  std::atomic<int> uses_io_uring = -1;  // -1: nothing was read or written yet
};

class Controller;

// An Io's place at a controller: what is connected for it comes here.
struct Seat {
  explicit Seat(std::function<void()> wake) : wake(std::move(wake)) {}
  const std::function<void()> wake;        // the Io, which then looks
  std::atomic<bool> changed = true;        // something to look at
  std::atomic<std::size_t> under_way = 0;  // commands: while there are some, the Io is woken now and then
  std::atomic<bool> yields = false;        // it shall give a queue back: others have none
  // The controller's, under its mutex.
  bool asked = false;  // for a queue more
  unsigned held = 0;   // queues
  std::vector<std::unique_ptr<Channel>> channels;
};

// What an Io finds when it looks.
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
  // The entries of a discovery controller's log. Throws Error.
  static std::vector<LogEntry> discover(Options options, double timeout_s);
  // Once for each open; the last ends everything. False: its thread still works, and is left behind.
  bool close(double timeout_s);

  const Options& options() const { return options_; }
  struct Facts {
    ControllerData data;
    std::uint32_t most_data_bytes = 0;  // of a command; 0: no limit
    std::uint32_t in_capsule_bytes = 0;
    std::uint16_t most_entries = 0, queues = 0, controller = 0;
    std::uint32_t version = 0;
    bool header_digest = false, data_digest = false;
  };
  Facts facts();
  std::vector<std::uint32_t> namespaces();
  Handle open_namespace(std::uint32_t nsid);
  void close_namespace(Handle handle);
  void flush(std::uint32_t nsid);
  std::string last_loss();
  Counters counters;

  // For Ios.
  std::shared_ptr<Seat> take_seat(std::function<void()> wake);
  void ask_for_queue(Seat& seat);
  // A quiet one, of the association of that generation.
  void give_back(Seat& seat, std::uint64_t generation, std::unique_ptr<Channel> channel);
  void leave_seat(const std::shared_ptr<Seat>& seat);
  View look(Seat& seat);
  std::string why_down();
  void hasten();  // the next attempt to connect: somebody waits for it
  void report_loss(std::uint64_t generation, Kind kind, const std::string& why);
  std::uint32_t most_command_bytes(const Namespace& name_space) const;

 private:
  struct Job {
    std::function<void()> work;
    std::exception_ptr error;
    bool done = false;
  };
  enum class State { starting, up, down, closed };

  void run();
  void establish();
  void connect_admin(const Patience& patience);
  void enable(const Patience& patience);
  void learn(const Patience& patience);
  std::unique_ptr<Channel> connect_queue(std::uint16_t queue, const Patience& patience);
  void check_namespaces(const Patience& patience);
  Identity identify_namespace(std::uint32_t nsid, const Patience& patience);
  Completion ask(const Entry& entry, std::span<std::byte> data, const Patience& patience, const char* what);
  void serve();
  bool find_queue(Seat& seat);
  void hand_out(Seat& seat, std::unique_ptr<Channel> channel);
  void serve_seats();
  void serve_jobs();
  void lose(const Error& error);
  void shut_down();
  void run_job(std::function<void()> work);
  void wake_seats();  // with the mutex
  Patience patience(double seconds);
  void call_thread();
  void watch();
  bool wait_before_retry(Clock::duration pause);
  Error described(const Error& error) const;

  const Options options_;
  const int process_;
  Bell bell_;
  std::atomic<bool> asked_ = false;  // something for the thread to do
  std::atomic<bool> hastened_ = false;
  std::thread thread_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::starting;
  bool closing_ = false, ended_ = false;
  unsigned users_ = 1;
  std::uint64_t generation_ = 0;
  std::uint64_t lost_generation_ = 0;  // that an Io has reported
  std::unique_ptr<Error> reported_, start_error_;
  std::string loss_, last_attempt_;
  Clock::time_point down_since_{}, given_up_before_{};
  std::vector<std::shared_ptr<Seat>> seats_;
  std::vector<std::unique_ptr<Channel>> spare_;  // queues that nobody has
  std::uint16_t connected_queues_ = 0;
  std::list<std::shared_ptr<Job>> jobs_;
  std::set<Handle> opened_;
  Facts facts_;

  // The thread's own.
  std::unique_ptr<Channel> admin_;
  bool flow_control_ = false;
  Clock::time_point next_tick_{}, next_keep_alive_{};
};

}  // namespace penstock::nvme
