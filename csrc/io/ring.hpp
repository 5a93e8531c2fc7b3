// io_uring by the kernel's own interface.
#pragma once

#include <linux/io_uring.h>

#include <atomic>
#include <memory>

#include "io/poller.hpp"

namespace penstock {

class Ring final : public SocketIo {
 public:
  // At most `depth` operations at once. Throws std::system_error where the kernel refuses.
  explicit Ring(unsigned depth);
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() override = default;

  bool register_memory(std::byte* address, std::size_t size_bytes) override;
  void prepare(const Operation& operation, std::uint64_t tag) override;
  void prepare_message(bool send, int socket, msghdr* message, std::uint64_t tag) override;
  void cancel_message(std::uint64_t tag) override;
  void submit() override { enter(0); }
  void wait() override;
  bool next(Result& result) override;
  void wake() override;

 private:
  struct Unmap {
    std::size_t size_bytes;
    void operator()(std::byte* start) const;
  };
  using Mapping = std::unique_ptr<std::byte, Unmap>;
  // Closes with the object.
  struct Descriptor {
    Descriptor() = default;
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor();
    int number = -1;
  };

  // Of the ring's memory, shared with the kernel.
  Mapping map(std::size_t size_bytes, std::uint64_t what) const;
  io_uring_sqe& next_entry(std::uint64_t tag);
  void enter(unsigned wait_for);  // which ends by itself after a while
  void await_wake();

  Descriptor ring_;
  const EventFd event_{0};
  Mapping queues_, entries_;
  unsigned *submission_tail_, *submission_mask_, *submission_array_;
  unsigned *completion_head_, *completion_tail_, *completion_mask_;
  io_uring_sqe* submission_entries_;
  io_uring_cqe* completion_entries_;
  unsigned entries_of_queue_;
  bool limits_waits_;
  unsigned prepared_ = 0;  // entries that were not submitted to the kernel yet
  std::uint64_t event_value_ = 0;
  std::atomic<bool> woken_ = false;
};

}  // namespace penstock
