// Who has which I/O queue of a controller. Where it grants fewer than Ios want, each gets one before any gets two.
// No lock of its own: the controller's.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "nvme/channel.hpp"

namespace penstock::nvme {

// An Io's place at a controller: what is connected for it comes here.
struct Seat {
  explicit Seat(std::function<void()> wake) : wake(std::move(wake)) {}
  const std::function<void()> wake;        // the Io, which then looks
  std::atomic<bool> changed = true;        // something to look at
  std::atomic<std::size_t> under_way = 0;  // commands: while there are some, the Io is woken now and then
  std::atomic<bool> yields = false;        // it shall give a queue back: others have none
  // Under the controller's mutex.
  bool asked = false;  // for a queue more
  unsigned held = 0;   // queues
  std::vector<std::unique_ptr<Channel>> channels;

  void tell() {
    changed = true;
    wake();
  }
};

class Seats {
 public:
  std::shared_ptr<Seat> take(std::function<void()> wake);
  void leave(const std::shared_ptr<Seat>& seat);
  void give_back(Seat& seat, std::unique_ptr<Channel> channel);
  // A new one is shared by nobody yet.
  void add(Seat& seat, std::unique_ptr<Channel> channel);
  // Serves who has asked from what nobody has. The first seat for which a queue has to be connected: fewer than
  // `most` are; null: none.
  std::shared_ptr<Seat> serve(unsigned most);
  // All queues are lost: who had some has asked.
  void lose();
  // For good.
  void close();
  void tell_all();
  void wake_busy();
  unsigned connected() const { return connected_; }

 private:
  void hand_out(Seat& seat, std::unique_ptr<Channel> channel);
  bool needs_queue(Seat& seat, unsigned most);

  std::vector<std::shared_ptr<Seat>> seats_;
  std::vector<std::unique_ptr<Channel>> spare_;
  unsigned connected_ = 0;
};

}  // namespace penstock::nvme
