// A target of NVMe/TCP that gives one namespace to read. One thread speaks to all hosts, others read files.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "io/event_fd.hpp"
#include "nvme/served_files.hpp"
#include "nvme/served_queue.hpp"

namespace penstock::nvme::served {

class Server {
 public:
  // Hosts beyond these are turned away. One that takes nothing, or says nothing before it connects, for so long is
  // lost. Of the memory for data each connection has one read, and all together the rest.
  static constexpr std::size_t kMostConnections = 512, kReaders = 8;
  static constexpr std::size_t kMostBytes = 256U << 20, kMostConnectionBytes = 2U << 20;
  static constexpr auto kPatience = std::chrono::seconds(30);

  // `listener` is the caller's, and stays open. Throws std::system_error.
  Server(int listener, Offer offer, std::unique_ptr<const Files> files);
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  ~Server();

  const Files& files() const { return *files_; }
  struct Totals : Counts {
    std::uint64_t connections = 0, turned_away = 0;  // connections: open now
  };
  Totals totals() const;

 private:
  struct Connection;
  struct Job {
    std::uint64_t connection;
    Read read;
    bool good = false;
  };

  void run();
  void read_files();
  void accept_all();
  void ready(std::uint64_t number, std::uint32_t events);
  bool receive(Connection& connection);
  bool advance(Connection& connection);
  bool send(Connection& connection);
  void begin_reads(Connection& connection);
  void end_reads();
  void watch(Connection& connection);
  void drop(std::uint64_t number);
  void drop_association(const std::shared_ptr<Association>& association);
  void sweep();

  const int listener_, epoll_;
  const Offer offer_;
  const std::unique_ptr<const Files> files_;
  const EventFd event_;
  std::atomic<bool> stop_ = false;

  // Of the thread that speaks to the hosts.
  Associations associations_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::uint64_t next_number_;
  std::size_t bytes_ = 0;
  Clock::time_point swept_;
  bool listens_ = true;

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable wanted_;
  std::deque<Job> jobs_, done_;
  Totals totals_;

  std::vector<std::thread> threads_;
};

}  // namespace penstock::nvme::served
