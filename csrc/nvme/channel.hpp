// A connection with its socket: one queue pair. Until it is handed over to an Io, one thread uses it and waits
// for each answer.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "io/event_fd.hpp"
#include "nvme/connection.hpp"
#include "nvme/error.hpp"

namespace penstock::nvme {

using Clock = std::chrono::steady_clock;

// Closes with the object. Another process may hold it too, so that the connection is shut down first.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int number) : number_(number) {}
  Socket(Socket&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Socket();
  int number() const { return number_; }
  void shut_down() const;

 private:
  int number_ = -1;
};

// The end of a wait. `look` is called periodically meanwhile, and ends the wait by what it throws.
struct Deadline {
  Clock::time_point until;
  const EventFd* event = nullptr;  // calls `look` at once
  std::function<void()> look = {};
  Clock::duration period = std::chrono::hours(1);
  bool event_ends = false;  // the wait
};

// Waits until the socket is ready for one of `events`. False: the time is over.
bool wait_for(int socket, short events, const Deadline& deadline);
// Throws Error.
Socket connect_to(const std::string& host, std::uint16_t port, const Deadline& deadline);

class Channel {
 public:
  // Sends the first PDU and awaits its answer. Throws Error.
  Channel(Socket socket, const Connection::Options& options, const Deadline& deadline);
  // Nothing else may be under way. Throws Error; a completion with a status is none.
  Completion execute(const Command& command, const Deadline& deadline);
  // Sends what there is to send without waiting, and takes what has come.
  void exchange();

  int socket() const { return socket_.number(); }
  Connection& connection() { return connection_; }
  void shut_down() const { socket_.shut_down(); }

  std::uint16_t queue = 0;  // its number at the controller

 private:
  template <class Done>
  void run(const Done& done, const Deadline& deadline, const char* what);

  Socket socket_;
  Connection connection_;
};

}  // namespace penstock::nvme
