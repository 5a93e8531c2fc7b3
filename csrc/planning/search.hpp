// The search for a better plan: small changes, of which the replay keeps those that do not cost time.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "replay.hpp"

namespace penstock::planning::search {

using Clock = std::chrono::steady_clock;
using Kernel = std::int64_t;
constexpr std::size_t kNone = static_cast<std::size_t>(-1);

// What may be chosen: P inactive periods of T tensors over K kernels.
//
// tensor, begin, end   [P] the period; end > K where it reaches into the next iteration
// ready                [P] the last kernel that writes the tensor before the period, -1 for none
// bytes                [P] of the tensor
// allowed              [P] bit a is set where `Action` a is possible; keeping always is
// cost_s               [P * kActions] seconds of link or compute that each action takes
// bias                 [P * kActions] how much of the period each action has in the linear program, or zeros
// order                [P] the periods so that what makes a tensor comes before what it is made into
// parent_starts, parents   by period: the tensors that recomputing its tensor reads
// kept                 what leaves besides, where the choices leave no room for it
struct Choices {
  std::vector<std::int64_t> tensor, begin, end, ready, bytes;
  std::vector<std::uint8_t> allowed;
  std::vector<double> cost_s, bias;
  std::vector<std::int64_t> order, parent_starts, parents;
  Kept kept;
  std::array<std::int64_t, 2> tier_bytes{};  // of the host and the disk

  std::size_t periods() const { return tensor.size(); }
};

// A choice for every period. late: its copy may wait until the memory is needed, so that others go first.
struct State {
  std::vector<std::int8_t> action, late;
};

struct Limits {
  std::int64_t evaluations = 0;
  double seconds = 0.0;    // a guard: reached, the result depends on the machine
  double target_s = 0.0;   // an iteration time that is good enough
  double temperature = 0.0;  // of the iteration time: how much worse a change may be at first
  std::uint64_t seed = 0;
};

struct Found {
  State state;
  Rows rows;
  std::size_t away = 0;  // the rows before this one leave: the others are written only
  double iteration_s = 0.0;
  std::int64_t evaluations = 0;
  bool timed_out = false;
};

// One thread works at a time: others wait for it.
class Search {
 public:
  // time_s, workspace: [K] of the kernels as they run. Throws std::invalid_argument where columns do not fit.
  Search(Trace trace, Machine machine, std::vector<double> time_s,
         std::vector<Bytes> workspace, Choices choices);

  // The nearest choice found that fits; pruned: without what would not be needed if copies took no time. False where
  // none was found.
  bool repair(State& state, bool pruned);

  // The best plan found near a choice; its time is infinite where the choice does not fit.
  Found improve(const State& start, const Limits& limits);

 private:
  struct Current {
    State state;
    Rows rows;
    std::size_t away = 0;
    Outcome verdict;
  };

  // How early prefetches may be, and whether only beside what the program keeps beyond its last use: else that leaves.
  struct Prefetching {
    Kernel early = 0;
    bool beside_kept = false;
  };

  void check(const State& state) const;

  // Fills rows_ with the eviction intervals that a choice leads to: recomputations bring back early what they read.
  void expand(const State& state);
  void carry_out(const Rows& rows);
  Outcome run(const Rows& rows);  // start_s: [K + 1], the last is the end
  bool fits(const State& state);

  // Takes back what is not needed, the dearest first.
  void prune(State& state);

  bool covers(std::size_t period, Kernel kernel) const;
  void shrink(std::size_t period, Kernel pull);
  bool memory_fits(const Rows& rows);
  bool tiers_fit();
  bool place(State& state, std::size_t period);
  bool repair_tiers(State& state);
  bool repair_memory(State& state);
  double evaluate(const State& state, Prefetching prefetching, const std::vector<double>& start_s, Current& into);
  double score(const Current& candidate) const;
  bool change(State& state, const Outcome& verdict);
  void polish(Found& found, const Limits& limits, Clock::time_point begun);
  bool give_room(State& state);
  bool give_tier_room(State& state);
  bool host_seems_free(std::size_t period) const;
  bool alter(State& state, std::size_t period, bool may_keep);

  double uniform();
  std::size_t below(std::size_t count);
  template <typename Test>
  std::size_t pick(const std::vector<double>& weight, Test test);

  std::mutex mutex_;
  const Trace trace_;
  const Machine machine_;
  const std::vector<double> time_s_;
  const std::vector<Bytes> workspace_;
  const Kernels kernels_;  // of the two above
  const Choices choices_;
  std::vector<std::size_t> by_begin_;  // the periods
  std::vector<std::size_t> before_;    // [P] the period of the iteration before in which its copy could be written
  std::array<bool, 2> ample_{};        // the tier has room for everything
  std::vector<double> ideal_start_s_;
  std::vector<double> leaving_, staying_;  // [P] how likely a period is drawn to be away, or not
  std::uint64_t seed_ = 0, drawn_ = 0;

  // What the last call of `expand` found, and of static_bytes, find_copies and tier_bytes.
  Rows rows_;  // each copy as late as can be; from away_ on those that are written and do not leave
  std::size_t away_ = 0;
  Rows carried_out_;  // the last rows that were carried out, and what leaves for good
  Trace as_run_;      // with the rest of what is kept
  std::vector<Kernel> earliest_, wanted_;       // of each row, for place_writes
  Copies copies_;
  std::vector<std::size_t> periods_;            // of each row
  std::vector<Kernel> begin_, end_;             // [P] as shrunk; empty where the period is not away
  std::vector<std::vector<Kernel>> pulls_;      // [T]
  std::vector<std::int64_t> pulled_;            // tensors with pulls
  std::vector<Kernel> last_end_;                // [T]
  std::vector<std::int64_t> memory_;
  std::array<std::vector<std::int64_t>, 2> tiers_;
  std::vector<std::pair<double, std::size_t>> candidates_;
};

}  // namespace penstock::planning::search
