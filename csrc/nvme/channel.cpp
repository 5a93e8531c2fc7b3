#include "nvme/channel.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>

namespace penstock::nvme {

namespace {

constexpr unsigned kPieces = 64;

[[noreturn]] void fail(int error, const std::string& what) {
  const auto kind = error == ECONNREFUSED                                              ? Kind::refused
                    : error == ETIMEDOUT                                               ? Kind::timeout
                    : error == EHOSTUNREACH || error == ENETUNREACH || error == EACCES ? Kind::unreachable
                                                                                       : Kind::lost;
  throw Error(kind, what + ": " + std::strerror(error));
}

std::string since(Clock::time_point begun) {
  char text[32];
  std::snprintf(text, sizeof text, ", for %.3g s", std::chrono::duration<double>(Clock::now() - begun).count());
  return text;
}

struct Addresses {
  addrinfo* first = nullptr;
  ~Addresses() {
    if (first != nullptr) freeaddrinfo(first);
  }
};

}  // namespace

Socket::~Socket() {
  if (number_ >= 0) close(number_);
}

void Socket::shut_down() const {
  if (number_ >= 0) shutdown(number_, SHUT_RDWR);
}

bool wait_for(int socket, short events, const Deadline& deadline) {
  while (true) {
    if (deadline.look) deadline.look();
    const auto now = Clock::now();
    const auto left = std::min<Clock::duration>(deadline.until - now, deadline.period);
    const auto milliseconds =
        std::chrono::ceil<std::chrono::milliseconds>(std::max(left, Clock::duration::zero()));
    pollfd waited[2] = {{socket, events, 0},
                        {deadline.event != nullptr ? deadline.event->number() : -1, POLLIN, 0}};
    const auto ready = poll(waited, 2, static_cast<int>(std::min<std::int64_t>(milliseconds.count(), 3600000)));
    if (ready < 0 && errno != EINTR) fail(errno, "poll");
    if (ready > 0 && waited[0].revents != 0) return true;
    if (ready > 0 && waited[1].revents != 0) {
      deadline.event->clear();
      if (deadline.event_ends) return false;
    }
    if (Clock::now() >= deadline.until) return false;
  }
}

Socket connect_to(const std::string& host, std::uint16_t port, const Deadline& deadline) {
  Addresses addresses;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  const auto service = std::to_string(port);
  const auto error = getaddrinfo(host.c_str(), service.c_str(), &hints, &addresses.first);
  if (error != 0) throw Error(Kind::unreachable, "no address of host " + host + ": " + gai_strerror(error));
  int last = EHOSTUNREACH;
  const auto begun = Clock::now();
  for (const auto* address = addresses.first; address != nullptr; address = address->ai_next) {
    Socket made(socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, address->ai_protocol));
    if (made.number() < 0) {
      last = errno;
      continue;
    }
    const int on = 1;
    setsockopt(made.number(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(made.number(), address->ai_addr, address->ai_addrlen) != 0) {
      if (errno != EINPROGRESS) {
        last = errno;
        continue;
      }
      if (!wait_for(made.number(), POLLOUT, deadline))
        throw Error(Kind::timeout, "no answer: awaited a connection" + since(begun));
      socklen_t size = sizeof last;
      getsockopt(made.number(), SOL_SOCKET, SO_ERROR, &last, &size);
      if (last != 0) continue;
    }
    return made;
  }
  fail(last, "connecting");
}

Channel::Channel(Socket socket, const Connection::Options& options, const Deadline& deadline)
    : socket_(std::move(socket)), connection_(options) {
  run([this] { return connection_.initialised(); }, deadline, "the answer to the connection's first PDU");
}

Completion Channel::execute(const Command& command, const Deadline& deadline) {
  Completion completion{};
  connection_.submit(command);
  run([&] { return connection_.next(completion); }, deadline, "the end of a command");
  return completion;
}

// Completions that have arrived are returned before the loss of the connection is thrown.
void Channel::exchange() {
  if (!connection_.violation().empty()) throw Error(Kind::protocol, connection_.violation());
  while (true) {
    iovec pieces[kPieces];
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = connection_.send_from(pieces, kPieces);
    if (message.msg_iovlen == 0) break;
    const auto moved = sendmsg(socket(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0 && errno == EAGAIN) break;
    if (moved < 0) fail(errno, "sending");
    connection_.sent(static_cast<std::size_t>(moved));
  }
  while (true) {
    iovec pieces[2];
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = connection_.receive_into(pieces);
    const auto moved = recvmsg(socket(), &message, MSG_DONTWAIT);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0 && errno == EAGAIN) break;
    if (moved < 0) fail(errno, "receiving");
    const bool right = moved > 0 && connection_.received(static_cast<std::size_t>(moved));
    if (connection_.anything_ended()) return;
    if (moved == 0) throw Error(Kind::lost, "the target closed the connection");
    if (!right) throw Error(Kind::protocol, connection_.violation());
  }
}

template <class Done>
void Channel::run(const Done& done, const Deadline& deadline, const char* what) {
  const auto begun = Clock::now();
  while (true) {
    exchange();
    if (done()) return;
    const short events = connection_.waits_to_send() ? POLLIN | POLLOUT : POLLIN;
    if (!wait_for(socket(), events, deadline))
      throw Error(Kind::timeout, std::string("no answer: awaited ") + what + since(begun));
  }
}

}  // namespace penstock::nvme
