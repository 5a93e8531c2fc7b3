// Four links that carry one copy at a time each, and share a bus: rates change while copies run.
#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include "model.hpp"

namespace penstock::planning {

inline Link link_of(std::int8_t action, bool back) {
  if (is_disk(action)) return back ? kDiskBack : kDiskOut;
  return back ? kHostBack : kHostOut;
}

// The link between device and host that a disk link's bytes cross where the disk shares the bus.
inline Link bus_of(Link link) { return link == kDiskOut ? kHostOut : kHostBack; }

inline double rate_on(const Machine& machine, Link link, bool compressed, std::size_t tensor) {
  return (compressed ? machine.rate_compressed : machine.rate)[link][tensor];
}

inline double latency_on(const Machine& machine, Link link) {
  const auto own = machine.latency_s[link];
  return link >= kDiskOut && machine.shares_bus ? std::max(own, machine.latency_s[bus_of(link)]) : own;
}

// Seconds that a copy takes when nothing else moves.
inline double alone_s(const Trace& trace, const Machine& machine, std::int8_t action, std::size_t tensor,
                      bool back) {
  const auto link = link_of(action, back);
  const auto size = is_csr(action) ? trace.compressed[tensor] : trace.bytes[tensor];
  if (size == 0) return 0;
  auto rate = rate_on(machine, link, is_csr(action), tensor);
  if (link >= kDiskOut && machine.shares_bus)
    rate = std::min(rate, rate_on(machine, bus_of(link), is_csr(action), tensor));
  return latency_on(machine, link) + static_cast<double>(size) / rate;
}

class Links {
 public:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  explicit Links(const Machine& machine) : machine_(machine) {}

  bool busy(int link) const { return copies_[link].row >= 0; }
  Index row(int link) const { return copies_[link].row; }
  double started_s(int link) const { return copies_[link].started_s; }
  int active() const { return active_; }

  void start(Link link, Index row, std::size_t tensor, bool compressed, Bytes bytes, double now_s);
  void stop(int link, double now_s);

  // The link whose copy is the next to begin to flow or to end, and when; kLinks, kNever where all rest.
  int next() const { return next_; }
  double next_s() const { return next_s_; }

  // Moves on to that moment. Whether the copy has ended: it stays until stop().
  bool step(int link);

  double moved(int link, double now_s) const;  // bytes

 private:
  struct Copy {
    Index row = -1;
    bool flowing = false;
    double bytes = 0, remaining = 0;  // bytes, at changed_s
    double rate = 0, changed_s = 0, started_s = 0, event_s = kNever;
    double alone = 0, bus = 0;  // bytes per second: of its own link, and of the bus for the same bytes
  };

  void share(double now_s);
  void find_next();
  void set_rate(Copy& copy, double rate, double now_s);

  const Machine& machine_;
  std::array<Copy, kLinks> copies_;
  int active_ = 0, next_ = kLinks;
  double next_s_ = kNever;
};

}  // namespace penstock::planning
