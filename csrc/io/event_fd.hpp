// An eventfd, to wake a thread that polls it.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

namespace penstock {

class EventFd {
 public:
  // flags: EFD_NONBLOCK for `clear`; none for who reads it by io_uring.
  explicit EventFd(int flags = EFD_NONBLOCK) : number_(eventfd(0, EFD_CLOEXEC | flags)) {
    if (number_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;
  ~EventFd() { close(number_); }
  int number() const { return number_; }
  void notify() const {
    const std::uint64_t one = 1;
    while (write(number_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }
  // Throws std::system_error where the program has closed its descriptor.
  void clear() const {
    std::uint64_t count;
    while (read(number_, &count, sizeof count) < 0 && errno != EAGAIN)
      if (errno != EINTR) throw std::system_error(errno, std::generic_category(), "reading an eventfd");
  }

 private:
  const int number_;
};

}  // namespace penstock
