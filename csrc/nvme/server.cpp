#include "nvme/server.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "checksum.hpp"
#include "nvme/libcrypto.hpp"
#include "threads.hpp"

namespace penstock::nvme::served {

namespace {

constexpr std::uint64_t kListener = 0, kEvent = 1, kFirstConnection = 2;  // what epoll calls them
constexpr std::size_t kInputBytes = 32U << 10, kMostParts = 64;
static_assert(kInputBytes >= 2 * Queue::kMostPduBytes);
constexpr int kSweepMs = 1000;
constexpr auto kGrace = std::chrono::milliseconds(500);  // for a keep-alive on its way

void add_to(int epoll, int descriptor, std::uint32_t events, std::uint64_t name) {
  epoll_event wanted{};
  wanted.events = events;
  wanted.data.u64 = name;
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, descriptor, &wanted) != 0)
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
}

std::pair<std::string, std::uint16_t> local_address_of(int socket) {
  sockaddr_in6 six{};  // as large as that of IPv4
  socklen_t size = sizeof six;
  auto* address = reinterpret_cast<sockaddr*>(&six);
  if (getsockname(socket, address, &size) != 0) return {};
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET6) {
    inet_ntop(AF_INET6, &six.sin6_addr, text, sizeof text);
    return {text, ntohs(six.sin6_port)};
  }
  sockaddr_in four;
  std::memcpy(&four, &six, sizeof four);
  inet_ntop(AF_INET, &four.sin_addr, text, sizeof text);
  return {text, ntohs(four.sin_port)};
}

}  // namespace

struct Server::Connection {
  Connection(int descriptor_, std::uint64_t number_, const Offer& offer, Associations& associations, Counts& counts)
      : descriptor(descriptor_),
        number(number_),
        queue(offer, associations, counts, local_address_of(descriptor_).first, local_address_of(descriptor_).second),
        input(std::make_unique<std::array<std::byte, kInputBytes>>()) {}
  ~Connection() {
    // A forked child may have the descriptor, too: the host must hear of the end all the same.
    shutdown(descriptor, SHUT_RDWR);
    close(descriptor);
  }
  std::size_t room() const { return input->size() - input_bytes; }

  const int descriptor;
  const std::uint64_t number;
  Queue queue;
  std::unique_ptr<std::array<std::byte, kInputBytes>> input;
  std::size_t input_bytes = 0, sent_bytes = 0;  // sent: of the first of its output
  std::size_t bytes = 0;                         // of data that are being read, or have not been sent
  std::deque<std::size_t> held;                  // of each output: so many of these
  std::uint32_t watched = EPOLLIN;
  const Clock::time_point opened = Clock::now();
  Clock::time_point moved = opened;  // when it last had nothing to send, or has sent something
};

Server::Server(int listener, Offer offer, std::unique_ptr<const Files> files)
    : listener_(listener),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      offer_(std::move(offer)),
      files_(std::move(files)),
      next_number_(kFirstConnection),
      swept_(Clock::now()) {
  if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  try {
    if (offer_.keys.host) libcrypto("authentication by keys");
    if (fcntl(listener_, F_SETFL, fcntl(listener_, F_GETFL) | O_NONBLOCK) != 0)
      throw std::system_error(errno, std::generic_category(), "fcntl");
    add_to(epoll_, listener_, EPOLLIN, kListener);
    add_to(epoll_, event_.number(), EPOLLIN, kEvent);
    threads_.emplace_back([this] { run(); });
    for (std::size_t count = 0; count < kReaders; ++count) threads_.emplace_back([this] { read_files(); });
  } catch (...) {
    stop_ = true;
    event_.notify();
    wanted_.notify_all();
    for (auto& thread : threads_) thread.join();
    close(epoll_);
    throw;
  }
}

Server::~Server() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  event_.notify();
  wanted_.notify_all();
  for (auto& thread : threads_) thread.join();
  close(epoll_);
}

Server::Totals Server::totals() const {
  const std::lock_guard lock(mutex_);
  return totals_;
}

// -- The thread that speaks to the hosts

void Server::run() {
  begin_thread("penstock-serve");
  std::array<epoll_event, 64> events;
  while (!stop_) {
    const auto found = epoll_wait(epoll_, events.data(), events.size(), kSweepMs);
    for (int place = 0; place < found; ++place) {
      const auto& event = events[static_cast<std::size_t>(place)];
      try {
        if (event.data.u64 == kListener) {
          accept_all();
        } else if (event.data.u64 == kEvent) {
          event_.clear();
          end_reads();
        } else {
          ready(event.data.u64, event.events);
        }
      } catch (const std::exception&) {  // no memory, or no descriptor, for this one
        drop(event.data.u64);
      }
    }
    if (Clock::now() - swept_ >= std::chrono::milliseconds(kSweepMs)) sweep();
  }
  connections_.clear();
}

void Server::accept_all() {
  while (true) {
    const auto descriptor = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (descriptor < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      // No descriptors are left: the next sweep listens again.
      if (errno != EAGAIN) listens_ = epoll_ctl(epoll_, EPOLL_CTL_DEL, listener_, nullptr) != 0;
      return;
    }
    if (connections_.size() >= kMostConnections) {
      close(descriptor);
      const std::lock_guard lock(mutex_);
      ++totals_.turned_away;
      continue;
    }
    const int on = 1;
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    const auto number = next_number_++;
    auto made = std::make_unique<Connection>(descriptor, number, offer_, associations_, totals_);
    add_to(epoll_, descriptor, EPOLLIN, number);
    connections_[number] = std::move(made);
    const std::lock_guard lock(mutex_);
    ++totals_.connections;
  }
}

void Server::ready(std::uint64_t number, std::uint32_t events) {
  const auto found = connections_.find(number);
  if (found == connections_.end()) return;
  auto& connection = *found->second;
  const bool in = (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0;
  if ((in && !receive(connection)) || !advance(connection)) drop(number);
}

// False where the connection has ended, as in those below.
bool Server::receive(Connection& connection) {
  while (connection.room() > 0) {
    const auto count = recv(connection.descriptor, connection.input->data() + connection.input_bytes,
                            connection.room(), MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno == EAGAIN;
    if (count == 0) return false;
    connection.input_bytes += static_cast<std::size_t>(count);
    return true;  // epoll calls again where there is more
  }
  return true;
}

// Everything that can be done for it now.
bool Server::advance(Connection& connection) {
  auto& queue = connection.queue;
  while (true) {
    const bool could_take = queue.takes();
    std::size_t taken;
    {
      const std::lock_guard lock(mutex_);  // of the counts
      taken = queue.take({connection.input->data(), connection.input_bytes});
    }
    connection.input_bytes -= taken;
    std::memmove(connection.input->data(), connection.input->data() + taken, connection.input_bytes);
    begin_reads(connection);
    if (!send(connection)) return false;
    if (queue.ended() && queue.output.empty()) return false;
    if (!queue.takes() || (could_take && taken == 0)) break;
  }
  watch(connection);
  return true;
}

void Server::begin_reads(Connection& connection) {
  while (const auto size = connection.queue.next_read_bytes()) {
    const bool first = connection.bytes == 0;
    if (!first && (connection.bytes + size > kMostConnectionBytes || bytes_ + size > kMostBytes)) return;
    auto read = connection.queue.begin_read();
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back({connection.number, std::move(read)});
    }
    connection.bytes += size;
    bytes_ += size;
    wanted_.notify_one();
  }
}

void Server::end_reads() {
  std::deque<Job> done;
  {
    const std::lock_guard lock(mutex_);
    done.swap(done_);
  }
  std::vector<std::uint64_t> touched;
  for (auto& job : done) {
    const auto found = connections_.find(job.connection);
    if (found == connections_.end()) {
      bytes_ -= job.read.size_bytes;
      continue;
    }
    auto& connection = *found->second;
    const auto size = job.read.size_bytes;
    const auto before = connection.queue.output.size();
    connection.held.resize(before);  // what answers commands holds none
    {
      const std::lock_guard lock(mutex_);
      connection.queue.end_read(std::move(job.read), job.good);
    }
    if (connection.queue.output.size() == before || !job.good) {
      connection.bytes -= size;
      bytes_ -= size;
    } else {
      connection.held.push_back(size);
    }
    if (touched.empty() || touched.back() != job.connection) touched.push_back(job.connection);
  }
  for (const auto number : touched) ready(number, 0);
}

bool Server::send(Connection& connection) {
  auto& output = connection.queue.output;
  connection.held.resize(output.size());
  while (!output.empty()) {
    std::array<iovec, kMostParts> parts;
    std::size_t count = 0;
    for (const auto& each : output) {
      if (count == parts.size()) break;
      const auto begin = count == 0 ? connection.sent_bytes : 0;
      parts[count++] = {each.data.get() + begin, each.size - begin};
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const auto sent = sendmsg(connection.descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN;
    connection.moved = Clock::now();
    connection.queue.sent(static_cast<std::size_t>(sent));
    connection.sent_bytes += static_cast<std::size_t>(sent);
    while (!output.empty() && connection.sent_bytes >= output.front().size) {
      connection.sent_bytes -= output.front().size;
      connection.bytes -= connection.held.front();
      bytes_ -= connection.held.front();
      output.pop_front();
      connection.held.pop_front();
    }
    begin_reads(connection);
  }
  return true;
}

void Server::watch(Connection& connection) {
  const std::uint32_t wanted = (connection.room() > 0 && connection.queue.takes() ? EPOLLIN : 0U) |
                               (connection.queue.output.empty() ? 0U : EPOLLOUT);
  if (wanted == connection.watched) return;
  epoll_event event{};
  event.events = connection.watched = wanted;
  event.data.u64 = connection.number;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, connection.descriptor, &event);
}

void Server::drop(std::uint64_t number) {
  const auto found = connections_.find(number);
  if (found == connections_.end()) return;
  const auto connection = std::move(found->second);
  connections_.erase(found);
  for (const auto size : connection->held) {
    connection->bytes -= size;
    bytes_ -= size;
  }
  {
    const std::lock_guard lock(mutex_);  // what has not begun never does; the rest comes back by `end_reads`
    --totals_.connections;
    std::erase_if(jobs_, [&](const Job& job) {
      if (job.connection == number) bytes_ -= job.read.size_bytes;
      return job.connection == number;
    });
  }
  if (const auto& association = connection->queue.association()) {
    if (connection->queue.number() == 0) {
      drop_association(association);
    } else {
      association->connected.erase(connection->queue.number());
    }
  }
}

void Server::drop_association(const std::shared_ptr<Association>& association) {
  associations_.erase(association->id);
  std::vector<std::uint64_t> its;
  for (const auto& [number, connection] : connections_)
    if (connection->queue.association() == association) its.push_back(number);
  for (const auto number : its) drop(number);
}

void Server::sweep() {
  const auto now = Clock::now();
  const bool slept = now - std::exchange(swept_, now) > 3 * std::chrono::milliseconds(kSweepMs);
  if (!std::exchange(listens_, true)) add_to(epoll_, listener_, EPOLLIN, kListener);
  std::vector<std::shared_ptr<Association>> silent;
  for (const auto& [id, each] : associations_) {
    if (slept) each->alive = now;  // this machine stood still: that is not the hosts' fault
    if (each->keep_alive_ms != 0 && now > each->alive + std::chrono::milliseconds(each->keep_alive_ms) + kGrace)
      silent.push_back(each);
  }
  for (const auto& each : silent) drop_association(each);
  std::vector<std::uint64_t> lost;
  for (const auto& [number, connection] : connections_) {
    if (slept || connection->queue.output.empty()) connection->moved = now;
    if (now > (connection->queue.admitted() ? connection->moved : connection->opened) + kPatience)
      lost.push_back(number);
  }
  for (const auto number : lost) drop(number);
}

// -- The others

void Server::read_files() {
  begin_thread("penstock-serve");
  while (true) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      wanted_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
      if (stop_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    auto* data = job.read.answer.data.get() + job.read.begin;
    job.good = files_->read(job.read.offset, {data, job.read.size_bytes});
    if (job.good && job.read.digest) store(data + job.read.size_bytes, crc32c(0, data, job.read.size_bytes));
    bool first;
    {
      const std::lock_guard lock(mutex_);
      first = done_.empty();
      done_.push_back(std::move(job));
    }
    if (first) event_.notify();
  }
}

}  // namespace penstock::nvme::served
