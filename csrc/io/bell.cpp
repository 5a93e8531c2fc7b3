#include "io/bell.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

namespace penstock {

Bell::Bell() : number_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (number_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Bell::~Bell() { close(number_); }

void Bell::ring() const {
  const std::uint64_t one = 1;
  while (write(number_, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void Bell::clear() const {
  std::uint64_t count;
  while (read(number_, &count, sizeof count) < 0 && errno != EAGAIN)
    if (errno != EINTR) throw std::system_error(errno, std::generic_category(), "reading an eventfd");
}

}  // namespace penstock
