// How fast each link works for each tensor, alone and beside others.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
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

}  // namespace penstock::planning
