// Sockets beside files: what is sent and received in the background, by one thread.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <deque>
#include <vector>

#include "io/event_fd.hpp"
#include "io/io.hpp"

namespace penstock {

class SocketIo : public Io {
 public:
  // Sends or receives a part of the message, which stays until its result. Not within the depth.
  virtual void prepare_message(bool send, int socket, msghdr* message, std::uint64_t tag) = 0;
  // The message of this tag ends soon, with -ECANCELED unless it had begun.
  virtual void cancel_message(std::uint64_t tag) = 0;
};

// By poll, where io_uring is refused. Files are read and written by calls that wait.
class PollIo final : public SocketIo {
 public:
  bool register_memory(std::byte*, std::size_t) override { return false; }
  void prepare(const Operation& operation, std::uint64_t tag) override;
  void prepare_message(bool send, int socket, msghdr* message, std::uint64_t tag) override;
  void cancel_message(std::uint64_t tag) override;
  void submit() override;
  void wait() override;
  bool next(Result& result) override;
  void wake() override;

 private:
  struct Message {
    bool send;
    int socket;
    msghdr* message;
    std::uint64_t tag;
  };
  bool try_now(const Message& message);

  EventFd event_;
  std::deque<Result> results_;
  std::vector<Message> fresh_, waiting_;
  std::atomic<bool> woken_ = false;
};

}  // namespace penstock
