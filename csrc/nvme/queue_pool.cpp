#include "nvme/queue_pool.hpp"

#include <algorithm>
#include <utility>

namespace penstock::nvme {

std::shared_ptr<IoClient> QueuePool::add_client(std::function<void()> wake) {
  return clients_.emplace_back(std::make_shared<IoClient>(std::move(wake)));
}

void QueuePool::remove_client(const std::shared_ptr<IoClient>& client) {
  std::erase(clients_, client);
  for (auto& channel : std::exchange(client->channels, {})) spare_.push_back(std::move(channel));
}

void QueuePool::give_back(IoClient& client, std::unique_ptr<Channel> channel) {
  --client.held;
  client.must_yield = false;
  spare_.push_back(std::move(channel));
}

void QueuePool::add(IoClient& client, std::unique_ptr<Channel> channel) {
  spare_.reserve(connected_ + 1);  // so that giving back allocates nothing
  ++connected_;
  const auto taken = std::ranges::any_of(clients_, [&](const auto& each) { return each.get() == &client; });
  if (taken) {
    hand_out(client, std::move(channel));
  } else {
    spare_.push_back(std::move(channel));
  }
}

std::shared_ptr<IoClient> QueuePool::serve(unsigned most) {
  const auto found = std::ranges::find_if(clients_, [&](auto& each) { return needs_queue(*each, most); });
  return found == clients_.end() ? nullptr : *found;
}

bool QueuePool::needs_queue(IoClient& client, unsigned most) {
  if (!client.asked) return false;
  if (!spare_.empty()) {
    auto channel = std::move(spare_.back());
    spare_.pop_back();
    hand_out(client, std::move(channel));
    return false;
  }
  if (connected_ < most) return true;
  if (client.held > 0) {  // it must do with those
    client.asked = false;
    return false;
  }
  const auto richest =
      std::ranges::max_element(clients_, {}, [](const auto& each) { return each->must_yield ? 0 : each->held; });
  if ((*richest)->held > 0 && !(*richest)->must_yield.exchange(true)) (*richest)->notify();
  return false;
}

void QueuePool::hand_out(IoClient& client, std::unique_ptr<Channel> channel) {
  client.channels.push_back(std::move(channel));
  client.asked = false;
  ++client.held;
  client.notify();
}

void QueuePool::lose() {
  for (const auto& client : clients_) {
    client->asked = client->asked || !client->channels.empty();
    client->channels.clear();
    client->held = 0;
    client->must_yield = false;
  }
  spare_.clear();
  connected_ = 0;
  notify_all();
}

void QueuePool::close() {
  for (const auto& client : clients_) client->channels.clear();
  spare_.clear();
  notify_all();
}

void QueuePool::notify_all() {
  for (const auto& client : clients_) client->notify();
}

void QueuePool::wake_busy() {
  for (const auto& client : clients_)
    if (client->under_way > 0) client->wake();
}

}  // namespace penstock::nvme
