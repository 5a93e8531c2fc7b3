#include "links.hpp"

#include <algorithm>
#include <cmath>

namespace penstock::planning {

void Links::start(Link link, Index row, std::size_t tensor, bool compressed, Bytes bytes, double now_s) {
  auto& copy = copies_[link];
  const auto latency_s = bytes == 0 ? 0.0 : latency_on(machine_, link);
  const auto size = static_cast<double>(bytes);
  copy = {};
  copy.row = row;
  copy.bytes = copy.remaining = size;
  copy.started_s = copy.changed_s = now_s;
  copy.alone = rate_on(machine_, link, compressed, tensor);
  const auto bus = link < kDiskOut ? link : bus_of(link);
  copy.bus = machine_.shares_bus ? rate_on(machine_, bus, compressed, tensor) : Links::kNever;
  ++active_;
  if (latency_s > 0) {
    copy.event_s = now_s + latency_s;
    find_next();
  } else {
    copy.flowing = true;
    share(now_s);
  }
}

void Links::stop(int link, double now_s) {
  copies_[link] = {};
  --active_;
  share(now_s);
}

bool Links::step(int link) {
  auto& copy = copies_[link];
  if (copy.flowing) {
    copy.remaining = 0;
    copy.changed_s = copy.event_s;
    return true;
  }
  copy.flowing = true;
  copy.changed_s = copy.event_s;
  share(copy.event_s);
  return false;
}

double Links::moved(int link, double now_s) const {
  const auto& copy = copies_[link];
  if (!copy.flowing) return 0;
  const auto since_s = now_s - copy.changed_s;
  const auto remaining = since_s > 0 ? copy.remaining - copy.rate * since_s : copy.remaining;
  return copy.bytes - std::max(remaining, 0.0);
}

// Where the disk shares the bus, its copy has its own rate, but at most half of the bus while a host copy
// runs in the same direction, which has the rest.
void Links::share(double now_s) {
  for (const auto [host, disk, opposite] : {std::array<int, 3>{kHostOut, kDiskOut, kDiskBack},
                                            std::array<int, 3>{kHostBack, kDiskBack, kDiskOut}}) {
    auto &beside = copies_[host], &below = copies_[disk];
    double left = 1.0;  // of the bus
    if (below.flowing) {
      auto rate = copies_[opposite].flowing ? below.alone * machine_.duplex : below.alone;
      if (machine_.shares_bus) {
        rate = std::min(rate, beside.flowing ? below.bus / 2 : below.bus);
        if (std::isfinite(below.bus)) left = 1.0 - rate / below.bus;
      }
      set_rate(below, rate, now_s);
    }
    if (beside.flowing) set_rate(beside, left < 1.0 ? beside.alone * left : beside.alone, now_s);
  }
  find_next();
}

void Links::set_rate(Copy& copy, double rate, double now_s) {
  if (copy.rate == rate && copy.event_s != kNever) return;
  if (now_s > copy.changed_s) copy.remaining -= copy.rate * (now_s - copy.changed_s);
  copy.remaining = std::max(copy.remaining, 0.0);
  copy.changed_s = now_s;
  copy.rate = rate;
  copy.event_s = copy.remaining > 0 ? now_s + copy.remaining / rate : now_s;
}

void Links::find_next() {
  next_ = kLinks;
  next_s_ = kNever;
  for (int link = 0; link < kLinks; ++link) {
    if (copies_[link].row >= 0 && copies_[link].event_s < next_s_) {
      next_ = link;
      next_s_ = copies_[link].event_s;
    }
  }
}

}  // namespace penstock::planning
