// Four links that carry one copy at a time each, and share a bus: rates change while copies run.
#pragma once

#include <array>
#include <limits>

#include "model.hpp"
#include "rates.hpp"

namespace penstock::planning {

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
  int next() const;
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

inline int Links::next() const { return next_; }

}  // namespace penstock::planning
