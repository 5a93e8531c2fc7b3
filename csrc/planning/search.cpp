// One file: one local search, whose changes share their state.

#include "search.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "random.hpp"

namespace penstock::planning::search {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Kernel kReturning = 60;      // kernels after a late one whose tensors may have delayed it
constexpr Kernel kLeaving = 200;       // kernels before a full one whose copies may be in progress
constexpr double kTraffic = 2e-3;      // what a second of copies or recomputation counts for, of one waited
constexpr double kAmple = 3.0;         // a period this many times as long as its copies is as good as any
constexpr int kRoomTries = 4;
constexpr double kPolish = 0.1;        // of the evaluations, on top, for single prefetches

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void check(const Choices& choices, const Trace& trace) {
  const auto P = choices.periods();
  const auto K = trace.kernels;
  for (const auto* column : {&choices.begin, &choices.end, &choices.ready, &choices.bytes, &choices.order})
    require(column->size() == P, "columns of periods differ in length");
  require(choices.allowed.size() == P, "columns of periods differ in length");
  require(choices.cost_s.size() == P * kActions && choices.bias.size() == P * kActions,
          "costs or shares of another number of periods");
  require(all_within(choices.tensor, 0, trace.tensors - 1), "a period names a tensor that the trace lacks");
  require(all_within(choices.begin, 0, K) && all_within(choices.end, 0, 2 * K - 1) &&
              all_within(choices.ready, -1, K - 1),
          "a period names a kernel that the trace lacks");
  for (std::size_t period = 0; period < P; ++period) {
    require(choices.begin[period] < choices.end[period], "a period ends before it begins");
    require(choices.allowed[period] >> kActions == 0, "a period can leave by no known action");
    require(!(choices.allowed[period] >> kRecompute & 1) ||
                trace.producer[static_cast<std::size_t>(choices.tensor[period])] >= 0,
            "a period recomputes a tensor that no kernel can recompute");
  }
  auto order = choices.order;
  std::sort(order.begin(), order.end());
  for (std::size_t period = 0; period < P; ++period)
    require(order[period] == static_cast<std::int64_t>(period), "the order of the periods is not one of all");
  const auto& starts = choices.parent_starts;
  require(starts.size() == P + 1 && starts.front() == 0 && std::is_sorted(starts.begin(), starts.end()) &&
              starts.back() == static_cast<std::int64_t>(choices.parents.size()),
          "lists of parents do not fit their starts");
  require(all_within(choices.parents, 0, trace.tensors - 1), "a parent is a tensor that the trace lacks");
  planning::check(trace, choices.kept);
}

}  // namespace

Search::Search(Trace trace, Machine machine, std::vector<double> time_s, std::vector<Bytes> workspace, Choices choices)
    : trace_(std::move(trace)), machine_(std::move(machine)), time_s_(std::move(time_s)),
      workspace_(std::move(workspace)), kernels_{time_s_.data(), workspace_.data()}, choices_(std::move(choices)) {
  const auto count = static_cast<std::size_t>(trace_.kernels);
  require(time_s_.size() == count && workspace_.size() == count, "times or workspaces of another number of kernels");
  search::check(choices_, trace_);
  as_run_ = trace_;
  ideal_start_s_.assign(1, 0.0);
  for (const double time_s : time_s_) ideal_start_s_.push_back(ideal_start_s_.back() + time_s);
  begin_ = choices_.begin;
  end_ = choices_.end;
  by_begin_.resize(choices_.periods());
  std::iota(by_begin_.begin(), by_begin_.end(), std::size_t{0});
  std::stable_sort(by_begin_.begin(), by_begin_.end(),
                   [this](std::size_t a, std::size_t b) { return choices_.begin[a] < choices_.begin[b]; });
  for (std::size_t period = 0; period < choices_.periods(); ++period) {
    const auto at = [&](Kernel kernel) {
      const auto turns = static_cast<double>(kernel / trace_.kernels) * ideal_start_s_.back();
      return turns + ideal_start_s_[static_cast<std::size_t>(kernel % trace_.kernels)];
    };
    double least_s = kInfinity;
    for (std::size_t action = kHost; action < kActions; ++action) {
      least_s = std::min(least_s, choices_.cost_s[period * kActions + action]);
    }
    const double idle_s = at(choices_.end[period]) - at(choices_.begin[period]);
    const double ease = least_s < kInfinity ? idle_s / (kAmple * least_s + 1e-12) : 0.0;
    const auto bytes = static_cast<double>(choices_.bytes[period]);
    leaving_.push_back(bytes * std::clamp(ease, 0.02, 1.0));
    staying_.push_back(bytes * (1.1 - std::clamp(ease, 0.02, 1.0)));
  }
  std::int64_t all_bytes = 0;
  for (const auto bytes : choices_.bytes) all_bytes += 2 * bytes;
  for (const std::size_t tier : {0, 1}) ample_[tier] = choices_.tier_bytes[tier] >= all_bytes;
  // The last period of a tensor reaches into the next iteration: up to the first kernel that uses it.
  std::vector<std::size_t> wrapping(static_cast<std::size_t>(trace_.tensors), kNone);
  for (std::size_t period = 0; period < choices_.periods(); ++period)
    if (choices_.end[period] >= trace_.kernels) wrapping[static_cast<std::size_t>(choices_.tensor[period])] = period;
  for (std::size_t period = 0; period < choices_.periods(); ++period) {
    const auto tensor = choices_.tensor[period];
    const auto before = wrapping[static_cast<std::size_t>(tensor)];
    const bool written = trace_.writers.begin(tensor) != trace_.writers.end(tensor);
    before_.push_back(written && choices_.ready[period] < 0 && before != period ? before : kNone);
  }
  pulls_.resize(static_cast<std::size_t>(trace_.tensors));
  last_end_.assign(static_cast<std::size_t>(trace_.tensors), -1);
}

void Search::check(const State& state) const {
  require(state.action.size() == choices_.periods() && state.late.size() == choices_.periods(),
          "a choice for another number of periods");
  for (std::size_t period = 0; period < choices_.periods(); ++period) {
    const auto action = state.action[period];
    require(action == kKeep || (action > kKeep && action < kActions && (choices_.allowed[period] >> action & 1)),
            "a period leaves by an action that it cannot take");
  }
}

void Search::carry_out(const Rows& rows) {
  carried_out_ = rows;
  planning::carry_out(trace_, choices_.kept, kernels_, machine_.budget, choices_.tier_bytes, carried_out_, as_run_);
}

Outcome Search::run(const Rows& rows) {
  carry_out(rows);
  auto outcome =
      replay(as_run_, machine_, carried_out_.view(), kernels_, {.record = false, .stop_on_deadlock = true});
  outcome.start_s.resize(time_s_.size());
  outcome.start_s.push_back(outcome.iteration_s);
  if (outcome.deadlock) outcome.iteration_s = kInfinity;
  return outcome;
}

bool Search::covers(std::size_t period, Kernel kernel) const {
  const auto begin = choices_.begin[period], end = choices_.end[period];
  return (begin <= kernel && kernel < end) || (begin <= kernel + trace_.kernels && kernel + trace_.kernels < end);
}

// Keeps the longer part of the period during which kernel `pull` does not find the tensor away.
void Search::shrink(std::size_t period, Kernel pull) {
  auto &begin = begin_[period], &end = end_[period];
  const auto kernels = trace_.kernels;
  const bool wraps = choices_.end[period] > kernels;
  for (const Kernel at : {pull, pull + kernels}) {
    if (at < begin || at >= end) continue;
    const bool before = at > begin && (!wraps || at > kernels);
    const bool behind = at + 1 < end && (!wraps || at + 1 <= kernels);
    if (before && (!behind || at - begin >= end - at - 1)) {
      end = at;
    } else if (behind) {
      begin = at + 1;
    } else {
      end = begin;
    }
  }
}

void Search::expand(const State& state) {
  const auto& order = choices_.order;
  for (auto position = order.rbegin(); position != order.rend(); ++position) {
    const auto period = static_cast<std::size_t>(*position);
    const auto action = state.action[period];
    if (action == kKeep) continue;
    const auto tensor = static_cast<std::size_t>(choices_.tensor[period]);
    begin_[period] = choices_.begin[period];
    end_[period] = choices_.end[period];
    for (const auto pull : pulls_[tensor]) shrink(period, pull);
    if (begin_[period] >= end_[period]) continue;
    if (end_[period] >= trace_.kernels) last_end_[tensor] = end_[period] - trace_.kernels;
    if (action != kRecompute) continue;
    for (auto at = choices_.parent_starts[period]; at < choices_.parent_starts[period + 1]; ++at) {
      const auto parent = choices_.parents[static_cast<std::size_t>(at)];
      auto& pulls = pulls_[static_cast<std::size_t>(parent)];
      if (pulls.empty()) pulled_.push_back(parent);
      pulls.push_back(end_[period]);
    }
  }

  rows_.clear();
  periods_.clear();
  earliest_.clear();
  wanted_.clear();
  const auto add = [&](std::size_t period, Kernel earliest) {
    const auto begin = begin_[period], end = end_[period];
    rows_.add(choices_.tensor[period], begin - 1, begin, end, end, state.action[period]);
    earliest_.push_back(earliest);
    wanted_.push_back(begin);
    periods_.push_back(period);
  };
  const auto away = [&](std::size_t period) {
    return state.action[period] != kKeep && begin_[period] < end_[period];
  };
  // Of copies that may start after the same kernel, the first is the one whose memory is free first.
  for (const auto period : by_begin_) {
    if (!away(period)) continue;
    const auto action = state.action[period];
    auto& last_end = last_end_[static_cast<std::size_t>(choices_.tensor[period])];
    if (is_moved(action)) add(period, is_csr(action) ? begin_[period] - 1 : std::max(choices_.ready[period], last_end));
    last_end = end_[period];
  }
  // What makes a tensor comes before what it is made into.
  for (const auto position : order) {
    const auto period = static_cast<std::size_t>(position);
    if (state.action[period] == kRecompute && away(period)) add(period, begin_[period] - 1);
  }
  away_ = rows_.size();
  const bool repeats = std::any_of(rows_.end.begin(), rows_.end.end(), [&](Kernel end) { return end >= trace_.kernels; });
  // What is ready in the iteration before is written then: its tensor is asked back before it has left.
  for (std::size_t row = 0; row < away_; ++row) {
    const auto period = periods_[row];
    const auto tensor = rows_.tensor[row];
    const auto action = rows_.action[row];
    const auto before = before_[period];
    if (!repeats || before == kNone || state.late[period] || !is_raw(action) || !ample_[is_disk(action)]) continue;
    if (state.action[before] != kKeep || last_end_[at(tensor)] < 0) continue;
    last_end_[at(tensor)] = -1;  // one for each tensor
    const auto begin = choices_.begin[before];
    const auto latest = trace_.kernels - 3;  // it is back within the iteration
    if (begin - 1 > latest) continue;
    rows_.add(tensor, latest, begin, begin + 1, begin, action);
    earliest_.push_back(begin - 1);
    wanted_.push_back(rows_.begin[row] + trace_.kernels);
    periods_.push_back(before);
  }
  for (const auto tensor : pulled_) pulls_[static_cast<std::size_t>(tensor)].clear();
  pulled_.clear();
  for (const auto tensor : rows_.tensor) last_end_[static_cast<std::size_t>(tensor)] = -1;
}

bool Search::memory_fits(const Rows& rows) {
  memory_ = static_bytes(trace_, rows.view(), kernels_);
  return all_within(memory_, std::numeric_limits<std::int64_t>::min(), machine_.budget);
}

bool Search::tiers_fit() {
  find_copies(trace_, rows_.view(), copies_);
  // A look that suffices where there is plenty: each row takes room at most once.
  for (auto& tier : tiers_) tier.clear();
  std::array<std::int64_t, 2> most{};
  for (std::size_t row = 0; row < rows_.size(); ++row)
    if (is_moved(rows_.action[row])) most[is_disk(rows_.action[row])] += choices_.bytes[periods_[row]];
  const auto& room = choices_.tier_bytes;
  if (most[0] <= room[0] && most[1] <= room[1]) return true;
  tiers_ = tier_bytes(trace_, rows_.view(), copies_);
  return all_within(tiers_[0], 0, room[0]) && all_within(tiers_[1], 0, room[1]);
}

bool Search::fits(const State& state) {
  expand(state);
  return memory_fits(rows_) && tiers_fit();
}

// Sends the period away: the cheapest action that the tiers have room for, the linear program's favourite first.
bool Search::place(State& state, std::size_t period) {
  std::int8_t actions[kActions];
  int count = 0;
  for (std::int8_t action = kHost; action < kActions; ++action) {
    if (choices_.allowed[period] >> action & 1) actions[count++] = action;
  }
  const auto rank = [&](std::int8_t action) {
    const auto at = period * kActions + static_cast<std::size_t>(action);
    return choices_.cost_s[at] * (1.0 - 0.9 * choices_.bias[at]);
  };
  std::stable_sort(actions, actions + count, [&](std::int8_t a, std::int8_t b) { return rank(a) < rank(b); });
  const auto before = state.action[period];
  for (int action = 0; action < count; ++action) {
    state.action[period] = actions[action];
    expand(state);
    if (tiers_fit()) return true;
  }
  state.action[period] = before;
  return false;
}

bool Search::repair_tiers(State& state) {
  for (std::size_t step = 0; step < 2 * choices_.periods() + 2; ++step) {
    expand(state);
    find_copies(trace_, rows_.view(), copies_);
    tiers_ = tier_bytes(trace_, rows_.view(), copies_);
    const bool host = !all_within(tiers_[0], 0, choices_.tier_bytes[0]);
    if (!host && all_within(tiers_[1], 0, choices_.tier_bytes[1])) return true;
    const auto& used = tiers_[host ? 0 : 1];
    const Kernel kernel = std::max_element(used.begin(), used.end()) - used.begin();
    // Of the copies that are there then, the one that the linear program wants there least; the longest of those.
    std::size_t chosen = kNone;
    double least = kInfinity;
    for (const bool there : {true, false}) {
      for (std::size_t row = 0; row < rows_.size(); ++row) {
        const auto period = periods_[row];
        const auto action = state.action[period];
        if (!is_moved(action) || is_disk(action) == host) continue;
        const auto begin = rows_.after[row] + 1, end = rows_.end[row], later = kernel + trace_.kernels;
        if (there && !(begin <= kernel && kernel < end) && !(begin <= later && later < end)) continue;
        const auto* bias = &choices_.bias[period * kActions];
        const double here = host ? bias[kHost] + bias[kHostCsr] : bias[kDisk] + bias[kDiskCsr];
        const double share = static_cast<double>(rows_.end[row] - rows_.begin[row]) /
                             static_cast<double>(std::max<Kernel>(trace_.kernels, 1));
        const double score = here - 1e-3 * share;
        if (score < least) {
          least = score;
          chosen = period;
        }
      }
      if (chosen != kNone) break;
    }
    if (chosen == kNone) return false;
    const auto action = state.action[chosen];
    const std::int8_t other = action == kHost ? kDisk : kDiskCsr;
    if (host && (choices_.allowed[chosen] >> other & 1)) {
      state.action[chosen] = other;
    } else if (choices_.allowed[chosen] >> kRecompute & 1) {
      state.action[chosen] = kRecompute;
    } else {
      state.action[chosen] = kKeep;
    }
  }
  return false;
}

// A look at three moments, by the last sums: the exact answer takes longer.
bool Search::host_seems_free(std::size_t period) const {
  const auto begin = choices_.begin[period], end = choices_.end[period];
  for (const auto kernel : {begin, (begin + end) / 2, end - 1}) {
    const auto used = tiers_[0][static_cast<std::size_t>(kernel % trace_.kernels)];
    if (used + choices_.bytes[period] > choices_.tier_bytes[0]) return false;
  }
  return true;
}

bool Search::repair_memory(State& state) {
  std::vector<double> over_s(static_cast<std::size_t>(2 * trace_.kernels) + 1);
  std::vector<std::uint8_t> refused(choices_.periods(), 0);
  const auto all_bytes = std::accumulate(choices_.bytes.begin(), choices_.bytes.end(), std::int64_t{0});
  const bool scarce = choices_.tier_bytes[0] > 0 && all_bytes > choices_.tier_bytes[0];
  for (std::size_t step = 0; step < 3 * choices_.periods() + 3; ++step) {
    expand(state);
    if (memory_fits(rows_)) return true;
    if (scarce) {
      find_copies(trace_, rows_.view(), copies_);
      tiers_ = tier_bytes(trace_, rows_.view(), copies_);
    }
    const auto most = std::max_element(memory_.begin(), memory_.end());
    const Kernel worst = most - memory_.begin();
    const double excess = static_cast<double>(*most - machine_.budget);
    over_s[0] = 0.0;
    for (std::size_t at = 0; at + 1 < over_s.size(); ++at) {
      const auto kernel = at % static_cast<std::size_t>(trace_.kernels);
      const bool over = memory_[kernel] > machine_.budget;
      over_s[at + 1] = over_s[at] + (over ? time_s_[kernel] + 1e-9 : 0.0);
    }
    std::size_t chosen = kNone;
    double best = -1.0;
    for (std::size_t period = 0; period < choices_.periods(); ++period) {
      if (state.action[period] != kKeep || refused[period] || !covers(period, worst)) continue;
      double cost_s = kInfinity;
      for (std::int8_t action = kHost; action < kActions; ++action) {
        if ((choices_.allowed[period] >> action & 1) && !(scarce && is_moved(action) && !is_disk(action) && !host_seems_free(period))) {
          cost_s = std::min(cost_s, choices_.cost_s[period * kActions + static_cast<std::size_t>(action)]);
        }
      }
      if (cost_s == kInfinity) continue;
      const double relief = over_s[static_cast<std::size_t>(choices_.end[period])] -
                            over_s[static_cast<std::size_t>(choices_.begin[period])];
      const double bytes = std::min(static_cast<double>(choices_.bytes[period]), excess);
      const double score = relief * bytes / (cost_s + 1e-9);
      if (score > best) {
        best = score;
        chosen = period;
      }
    }
    if (chosen != kNone) {
      if (!place(state, chosen)) refused[chosen] = 1;
      continue;
    }
    // Recomputations may hold what could leave: move the nearest one's tensor instead.
    std::size_t nearest = kNone;
    Kernel distance = std::numeric_limits<Kernel>::max();
    for (std::size_t period = 0; period < choices_.periods(); ++period) {
      if (state.action[period] != kRecompute) continue;
      const auto away = std::abs(choices_.end[period] - worst);
      if (away < distance) {
        distance = away;
        nearest = period;
      }
    }
    if (nearest == kNone) return false;
    state.action[nearest] = kKeep;
    for (const std::int8_t action : {kHost, kDisk}) {
      if (!(choices_.allowed[nearest] >> action & 1)) continue;
      state.action[nearest] = action;
      expand(state);
      if (tiers_fit()) break;
      state.action[nearest] = kKeep;
    }
    refused[nearest] = 1;
  }
  return false;
}

bool Search::repair(State& state, bool pruned) {
  const std::lock_guard lock(mutex_);
  check(state);
  if (!repair_tiers(state) || !repair_memory(state) || !fits(state)) return false;
  if (pruned) prune(state);
  return true;
}

void Search::prune(State& state) {
  expand(state);
  memory_fits(rows_);
  candidates_.clear();
  for (std::size_t period = 0; period < choices_.periods(); ++period) {
    if (state.action[period] == kKeep) continue;
    const auto cost_s = choices_.cost_s[period * kActions + static_cast<std::size_t>(state.action[period])];
    candidates_.emplace_back(-cost_s, period);
  }
  std::sort(candidates_.begin(), candidates_.end());
  const auto order = candidates_;
  for (const auto& [cost_s, period] : order) {
    // A cheap look before the exact one.
    bool room = true;
    const auto begin = choices_.begin[period], end = choices_.end[period];
    if (is_moved(state.action[period])) {
      for (auto kernel = begin_[period]; kernel < end_[period] && room; ++kernel) {
        const auto used = memory_[static_cast<std::size_t>(kernel % trace_.kernels)];
        room = used + choices_.bytes[period] <= machine_.budget;
      }
    }
    if (!room || begin >= end) continue;
    const auto action = state.action[period];
    state.action[period] = kKeep;
    if (!fits(state)) state.action[period] = action;
    expand(state);
    memory_fits(rows_);
  }
}

// The time of what the last call of `expand` made of `state`, which memory and tiers have room for.
double Search::evaluate(const State& state, Prefetching prefetching, const std::vector<double>& start_s,
                        Current& into) {
  auto slack = tiers_;
  for (const std::size_t tier : {0, 1})
    for (auto& bytes : slack[tier]) bytes = choices_.tier_bytes[tier] - bytes;
  // A late one is written when its memory is needed: it may stay as long as there is room.
  auto room = memory_;
  for (auto& bytes : room) bytes = machine_.budget - bytes;
  for (std::size_t row = 0; row < away_; ++row) {
    const auto period = periods_[row];
    if (!state.late[period] || !is_moved(rows_.action[row])) continue;
    auto& kernel = wanted_[row];
    for (; kernel < rows_.end[row]; ++kernel) {
      auto& bytes = room[static_cast<std::size_t>(kernel % trace_.kernels)];
      if (bytes < choices_.bytes[period]) break;
      bytes -= choices_.bytes[period];
    }
  }
  rows_.after = place_writes(trace_, machine_, rows_.view(), copies_, earliest_, wanted_, kernels_, start_s.data(),
                             std::move(slack));
  auto leaving = rows_.view();
  leaving.count = static_cast<Index>(away_);
  if (prefetching.beside_kept) carry_out(rows_);
  const auto& there = prefetching.beside_kept ? as_run_ : trace_;
  rows_.prefetch_at = place_prefetches(there, machine_, leaving, kernels_, start_s.data(), prefetching.early);
  for (auto row = away_; row < rows_.size(); ++row) {
    rows_.begin[row] = rows_.after[row] + 1;
    rows_.end[row] = rows_.begin[row] + 1;
    rows_.prefetch_at.push_back(rows_.begin[row]);
  }
  into.verdict = run(rows_);
  into.state = state;
  into.rows = rows_;
  into.away = away_;
  return into.verdict.iteration_s;
}

// Plans that take the same time differ in what they leave the next change: idle links are better.
double Search::score(const Current& candidate) const {
  double work_s = 0.0;
  for (std::size_t period = 0; period < choices_.periods(); ++period) {
    const auto action = candidate.state.action[period];
    if (action != kKeep) work_s += choices_.cost_s[period * kActions + static_cast<std::size_t>(action)];
  }
  return candidate.verdict.iteration_s + kTraffic * work_s;
}

double Search::uniform() { return static_cast<double>(samples::draw(seed_, drawn_++) >> 11) * 0x1p-53; }

std::size_t Search::below(std::size_t count) {
  return std::min(static_cast<std::size_t>(uniform() * static_cast<double>(count)), count - 1);
}

// A period that passes the test, likely one of great weight; kNone where none does.
template <typename Test>
std::size_t Search::pick(const std::vector<double>& weight, Test test) {
  candidates_.clear();
  double total = 0.0;
  for (std::size_t period = 0; period < choices_.periods(); ++period) {
    if (choices_.allowed[period] <= 1 || !test(period)) continue;
    total += weight[period];
    candidates_.emplace_back(total, period);
  }
  if (candidates_.empty()) return kNone;
  const double draw = uniform() * total;
  const auto at = std::upper_bound(candidates_.begin(), candidates_.end(), std::pair{draw, kNone});
  return at == candidates_.end() ? candidates_.back().second : at->second;
}

bool Search::alter(State& state, std::size_t period, bool may_keep) {
  if (period == kNone) return false;
  std::int8_t actions[kActions];
  std::size_t count = 0;
  for (std::int8_t action = may_keep ? kKeep : kHost; action < kActions; ++action) {
    const bool possible = action == kKeep || (choices_.allowed[period] >> action & 1);
    if (possible && action != state.action[period]) actions[count++] = action;
  }
  if (count == 0) return false;
  state.action[period] = actions[below(count)];
  return true;
}

// One small change, half of the time aimed at a kernel that waits.
bool Search::change(State& state, const Outcome& verdict) {
  const auto kernels = trace_.kernels;
  const auto kept = [&](std::size_t period) { return state.action[period] == kKeep; };
  const double draw = uniform();
  if (draw < 0.55) {
    double total = 0.0;
    for (const double stall_s : verdict.stall_s) total += stall_s;
    if (total > 0.0) {
      double left = uniform() * total;
      Kernel at = 0;
      while (at + 1 < kernels && (left -= verdict.stall_s[static_cast<std::size_t>(at)]) > 0.0) ++at;
      if (verdict.cause[static_cast<std::size_t>(at)] == kPrefetch) {
        return alter(state, pick(staying_, [&](std::size_t period) {
                       const auto until = ((choices_.end[period] - at) % kernels + kernels) % kernels;
                       return is_moved(state.action[period]) && until < kReturning;
                     }), true);
      }
      if (uniform() < 0.5) {
        return alter(state, pick(leaving_, [&](std::size_t period) { return kept(period) && covers(period, at); }), false);
      }
      const auto leaving = pick(staying_, [&](std::size_t period) {
        const auto since = ((at - choices_.begin[period]) % kernels + kernels) % kernels;
        return is_moved(state.action[period]) && since < kLeaving && covers(period, at);
      });
      if (leaving == kNone || uniform() < 0.5) return alter(state, leaving, true);
      state.late[leaving] ^= 1;
      return true;
    }
  }
  const auto any = [&](std::size_t) { return true; };
  if (draw < 0.8) {
    const auto leaves = pick(staying_, [&](std::size_t period) { return !kept(period); });
    if (leaves == kNone) return false;
    const auto middle = (choices_.begin[leaves] + choices_.end[leaves]) / 2 % kernels;
    const auto enters = pick(leaving_, [&](std::size_t period) { return kept(period) && covers(period, middle); });
    if (enters == kNone) return false;
    state.action[leaves] = kKeep;
    return alter(state, enters, false);
  }
  if (draw < 0.83) {
    const auto period = pick(leaving_, [&](std::size_t at) { return is_moved(state.action[at]); });
    if (period == kNone) return false;
    state.late[period] ^= 1;
    return true;
  }
  const bool altered = alter(state, pick(leaving_, any), true);
  if (uniform() < 0.3) alter(state, pick(leaving_, any), true);
  return altered;
}

// Sends a period away that covers the fullest kernel, as drawn. False where nothing can leave.
bool Search::give_room(State& state) {
  const Kernel worst = std::max_element(memory_.begin(), memory_.end()) - memory_.begin();
  return alter(state, pick(leaving_, [&](std::size_t period) {
                 return state.action[period] == kKeep && covers(period, worst);
               }), false);
}

// Takes a copy, as drawn, off the tier that is fullest. False where none is there.
bool Search::give_tier_room(State& state) {
  const bool host = !all_within(tiers_[0], 0, choices_.tier_bytes[0]);
  const auto& used = tiers_[host ? 0 : 1];
  const Kernel worst = std::max_element(used.begin(), used.end()) - used.begin();
  const auto period = pick(staying_, [&](std::size_t at) {
    const auto action = state.action[at];
    return is_moved(action) && is_disk(action) != host && covers(at, worst);
  });
  if (period == kNone) return false;
  const bool disk = choices_.allowed[period] >> kDisk & 1;
  state.action[period] = host && disk && uniform() < 0.7 ? kDisk : kKeep;
  return true;
}

Found Search::improve(const State& start, const Limits& limits) {
  const std::lock_guard lock(mutex_);
  check(start);
  const auto begun = Clock::now();
  seed_ = limits.seed * samples::kGolden + 1;
  drawn_ = 0;
  Found found;
  Current current, trial;
  double current_s = kInfinity;
  Prefetching chosen;
  found.iteration_s = kInfinity;
  const auto keep_best = [&](const Current& candidate, double iteration_s) {
    if (iteration_s >= found.iteration_s) return;
    found.iteration_s = iteration_s;
    found.state = candidate.state;
    found.rows = candidate.rows;
    found.away = candidate.away;
  };
  // How early to prefetch, each on the timeline that it leads to.
  std::vector<Prefetching> ways;
  for (const Kernel early : {trace_.kernels, Kernel{0}, Kernel{30}, Kernel{100}}) {
    if (!choices_.kept.tensor.empty()) ways.push_back({early, true});
    ways.push_back({early, false});
  }
  for (const auto prefetching : ways) {
    auto start_s = ideal_start_s_;
    double before_s = kInfinity;
    for (int round = 0; round < 3; ++round) {
      expand(start);
      const double iteration_s = memory_fits(rows_) && tiers_fit() ? evaluate(start, prefetching, start_s, trial) : kInfinity;
      ++found.evaluations;
      if (!(iteration_s < before_s)) break;
      before_s = iteration_s;
      start_s = trial.verdict.start_s;
      if (iteration_s < current_s) {
        current_s = iteration_s;
        chosen = prefetching;
        current = trial;
        keep_best(current, current_s);
      }
      if (seconds_since(begun) > limits.seconds) break;
    }
    found.timed_out = seconds_since(begun) > limits.seconds;
    if (found.timed_out) break;
  }
  const double first_s = current_s;
  if (!std::isfinite(first_s)) return found;

  State proposal = current.state;
  double current_score = score(current);
  while (found.evaluations < limits.evaluations && found.iteration_s > limits.target_s) {
    found.timed_out = seconds_since(begun) > limits.seconds;
    if (found.timed_out) break;
    ++found.evaluations;  // also of what is refused before the replay: the loop has to end
    proposal.action = current.state.action;
    proposal.late = current.state.late;
    if (!change(proposal, current.verdict)) continue;
    bool room = (expand(proposal), memory_fits(rows_));
    for (int attempt = 0; !room && attempt < kRoomTries && give_room(proposal); ++attempt) {
      room = (expand(proposal), memory_fits(rows_));
    }
    bool fits = room && tiers_fit();
    for (int attempt = 0; room && !fits && attempt < kRoomTries; ++attempt) {
      room = give_tier_room(proposal) && (expand(proposal), memory_fits(rows_));
      if (!room) room = give_room(proposal) && (expand(proposal), memory_fits(rows_));
      fits = room && tiers_fit();
    }
    if (!fits) continue;
    const double iteration_s = evaluate(proposal, chosen, current.verdict.start_s, trial);
    const double left = 1.0 - static_cast<double>(found.evaluations) / static_cast<double>(limits.evaluations);
    const double temperature_s = first_s * limits.temperature * left * left;
    if (!std::isfinite(iteration_s)) continue;
    const double trial_score = score(trial);
    const bool taken = trial_score <= current_score ||
                       (temperature_s > 0.0 && uniform() < std::exp((current_score - trial_score) / temperature_s));
    if (!taken) continue;
    std::swap(current, trial);
    current_score = trial_score;
    keep_best(current, iteration_s);
  }
  polish(found, limits, begun);
  return found;
}

// Moves single prefetches of the best plan, at first likely those of tensors that are late.
void Search::polish(Found& found, const Limits& limits, Clock::time_point begun) {
  std::vector<std::size_t> moves;
  for (std::size_t row = 0; row < found.away; ++row) {
    if (is_moved(found.rows.action[row])) moves.push_back(row);
  }
  if (moves.empty()) return;
  const auto until = found.evaluations + static_cast<std::int64_t>(kPolish * static_cast<double>(limits.evaluations));
  while (found.evaluations < until && found.iteration_s > limits.target_s) {
    found.timed_out = found.timed_out || seconds_since(begun) > limits.seconds;
    if (found.timed_out) break;
    ++found.evaluations;
    const auto row = moves[below(moves.size())];
    const auto before = found.rows.prefetch_at[row];
    const auto span = found.rows.end[row] - found.rows.begin[row];
    auto reach = static_cast<std::size_t>(span) + 1;
    if (uniform() < 0.5) reach = std::min<std::size_t>(reach, 8);
    auto wish = found.rows.end[row] - static_cast<Kernel>(below(reach));
    if (wish == before) continue;
    found.rows.prefetch_at[row] = wish;
    const double iteration_s = memory_fits(found.rows) ? run(found.rows).iteration_s : kInfinity;
    if (iteration_s <= found.iteration_s) {
      found.iteration_s = iteration_s;
    } else {
      found.rows.prefetch_at[row] = before;
    }
  }
}

}  // namespace penstock::planning::search
