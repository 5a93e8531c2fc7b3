#include "nvme/seats.hpp"

#include <algorithm>
#include <utility>

namespace penstock::nvme {

std::shared_ptr<Seat> Seats::take(std::function<void()> wake) {
  return seats_.emplace_back(std::make_shared<Seat>(std::move(wake)));
}

void Seats::leave(const std::shared_ptr<Seat>& seat) {
  std::erase(seats_, seat);
  for (auto& channel : std::exchange(seat->channels, {})) spare_.push_back(std::move(channel));
}

void Seats::give_back(Seat& seat, std::unique_ptr<Channel> channel) {
  --seat.held;
  seat.yields = false;
  spare_.push_back(std::move(channel));
}

void Seats::add(Seat& seat, std::unique_ptr<Channel> channel) {
  spare_.reserve(connected_ + 1);  // what is given back needs no memory
  ++connected_;
  const auto taken = std::ranges::any_of(seats_, [&](const auto& each) { return each.get() == &seat; });
  if (taken) {
    hand_out(seat, std::move(channel));
  } else {
    spare_.push_back(std::move(channel));
  }
}

std::shared_ptr<Seat> Seats::serve(unsigned most) {
  const auto found = std::ranges::find_if(seats_, [&](auto& each) { return needs_queue(*each, most); });
  return found == seats_.end() ? nullptr : *found;
}

bool Seats::needs_queue(Seat& seat, unsigned most) {
  if (!seat.asked) return false;
  if (!spare_.empty()) {
    auto channel = std::move(spare_.back());
    spare_.pop_back();
    hand_out(seat, std::move(channel));
    return false;
  }
  if (connected_ < most) return true;
  if (seat.held > 0) {  // what it has must do
    seat.asked = false;
    return false;
  }
  const auto richest =
      std::ranges::max_element(seats_, {}, [](const auto& each) { return each->yields ? 0 : each->held; });
  if ((*richest)->held > 0 && !(*richest)->yields.exchange(true)) (*richest)->tell();
  return false;
}

void Seats::hand_out(Seat& seat, std::unique_ptr<Channel> channel) {
  seat.channels.push_back(std::move(channel));
  seat.asked = false;
  ++seat.held;
  seat.tell();
}

void Seats::lose() {
  for (const auto& seat : seats_) {
    seat->asked = seat->asked || !seat->channels.empty();
    seat->channels.clear();
    seat->held = 0;
    seat->yields = false;
  }
  spare_.clear();
  connected_ = 0;
  tell_all();
}

void Seats::close() {
  for (const auto& seat : seats_) seat->channels.clear();
  spare_.clear();
  tell_all();
}

void Seats::tell_all() {
  for (const auto& seat : seats_) seat->tell();
}

void Seats::wake_busy() {
  for (const auto& seat : seats_)
    if (seat->under_way > 0) seat->wake();
}

}  // namespace penstock::nvme
