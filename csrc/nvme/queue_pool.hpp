// Divides the I/O queues of a controller among Ios. Where it grants fewer than they want, each Io gets one before any
// gets two. Guarded by the controller's mutex.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "nvme/channel.hpp"

namespace penstock::nvme {

// An Io, as a client of a controller. Queues that are connected for it arrive here.
struct IoClient {
  explicit IoClient(std::function<void()> wake) : wake(std::move(wake)) {}
  const std::function<void()> wake;        // the Io, which then looks
  std::atomic<bool> changed = true;        // something to look at
  std::atomic<std::size_t> under_way = 0;  // commands: while there are some, the Io is woken now and then
  std::atomic<bool> must_yield = false;    // it must give a queue back: another Io has none
  // Under the controller's mutex.
  bool asked = false;  // for another queue
  unsigned held = 0;   // queues
  std::vector<std::unique_ptr<Channel>> channels;

  void notify() {
    changed = true;
    wake();
  }
};

class QueuePool {
 public:
  std::shared_ptr<IoClient> add_client(std::function<void()> wake);
  void remove_client(const std::shared_ptr<IoClient>& client);
  void give_back(IoClient& client, std::unique_ptr<Channel> channel);
  // A queue that was just connected for the client.
  void add(IoClient& client, std::unique_ptr<Channel> channel);
  // Gives spare queues to clients that have asked. Returns the first client for which a queue must be connected, as
  // fewer than `most` are; null: none.
  std::shared_ptr<IoClient> serve(unsigned most);
  // All queues are lost: clients that had some ask again.
  void lose();
  // For good.
  void close();
  void notify_all();
  void wake_busy();
  unsigned connected() const { return connected_; }

 private:
  void hand_out(IoClient& client, std::unique_ptr<Channel> channel);
  bool needs_queue(IoClient& client, unsigned most);

  std::vector<std::shared_ptr<IoClient>> clients_;
  std::vector<std::unique_ptr<Channel>> spare_;
  unsigned connected_ = 0;
};

}  // namespace penstock::nvme
