#include "io/poller.hpp"

#include <poll.h>

#include <cerrno>
#include <system_error>

#include "io/blocking.hpp"

namespace penstock {

namespace {

// A program that closes all descriptors closes the one that wakes this thread, too: it looks by itself now and then.
constexpr int kLongestWaitMs = 1000;

}  // namespace

void PollIo::prepare(const Operation& operation, std::uint64_t tag) {
  results_.push_back({tag, move(operation)});
}

void PollIo::prepare_message(bool send, int socket, msghdr* message, std::uint64_t tag) {
  fresh_.push_back({send, socket, message, tag});
}

void PollIo::cancel_message(std::uint64_t tag) {
  for (auto* messages : {&fresh_, &waiting_})
    if (std::erase_if(*messages, [&](const auto& each) { return each.tag == tag; }) > 0)
      results_.push_back({tag, -ECANCELED});
}

// False: it would have to wait.
bool PollIo::try_now(const Message& message) {
  const auto moved = message.send ? sendmsg(message.socket, message.message, MSG_DONTWAIT | MSG_NOSIGNAL)
                                  : recvmsg(message.socket, message.message, MSG_DONTWAIT);
  if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  results_.push_back({message.tag, moved < 0 ? -errno : static_cast<int>(moved)});
  return true;
}

void PollIo::submit() {
  for (const auto& message : fresh_)
    if (!try_now(message)) waiting_.push_back(message);
  fresh_.clear();
}

void PollIo::wait() {
  submit();
  std::vector<pollfd> polled;
  for (const auto& message : waiting_)
    polled.push_back({message.socket, static_cast<short>(message.send ? POLLOUT : POLLIN), 0});
  polled.push_back({event_.number(), POLLIN, 0});
  if (poll(polled.data(), polled.size(), results_.empty() ? kLongestWaitMs : 0) < 0) {
    if (errno == EINTR) return;
    throw std::system_error(errno, std::generic_category(), "poll");
  }
  if (polled.back().revents != 0) {
    event_.clear();
    woken_ = false;
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < waiting_.size(); ++i)
    if (polled[i].revents == 0 || !try_now(waiting_[i])) waiting_[kept++] = waiting_[i];
  waiting_.resize(kept);
}

bool PollIo::next(Result& result) {
  if (results_.empty()) return false;
  result = results_.front();
  results_.pop_front();
  return true;
}

void PollIo::wake() {
  if (!woken_.exchange(true)) event_.notify();
}

}  // namespace penstock
