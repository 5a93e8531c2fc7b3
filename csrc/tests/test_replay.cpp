// The replay by hand, and of random plans that nobody checked: it ends, and stays within its arrays.
#include <limits>

#include "check.hpp"
#include "planning/replay.hpp"

using namespace penstock::planning;
using penstock::test::Random;

namespace {

Lists lists_of(const std::vector<std::vector<Index>>& entries) {
  Lists lists;
  for (const auto& entry : entries) {
    lists.values.insert(lists.values.end(), entry.begin(), entry.end());
    lists.starts.push_back(static_cast<Index>(lists.values.size()));
  }
  return lists;
}

Machine machine(std::size_t tensors, Bytes budget, double rate) {
  Machine made;
  made.budget = budget;
  made.shares_bus = false;
  made.compress_s.assign(tensors, 1.0);
  made.expand_s.assign(tensors, 1.0);
  for (auto* rates : {&made.rate, &made.rate_compressed})
    for (auto& link : *rates) link.assign(tensors, rate);
  return made;
}

// Tensor 0 of 100 bytes is made by kernel 0 and needed by kernel 2; kernels take 1, 5 and 1 s.
Trace three_kernels() {
  Trace trace;
  trace.kernels = 3;
  trace.tensors = 1;
  trace.bytes = trace.compressed = {100};
  trace.birth = {0};
  trace.death = {3};
  trace.persistent = {0};
  trace.producer = {0};
  trace.outputs = lists_of({{0}, {}, {}});
  trace.writers = lists_of({{0}});
  trace.prepare();
  return trace;
}

const std::vector<double> kTimes{1, 5, 1};
const std::vector<Bytes> kWorkspaces{0, 0, 0};

Outcome run(const Trace& trace, const Machine& on, const Rows& columns) {
  return replay(trace, on, columns.view(), {kTimes.data(), kWorkspaces.data()}, {.record = true});
}

}  // namespace

TEST(an_eviction_on_demand_is_waited_for) {
  Rows plan;
  plan.add(0, 0, 1, 2, 2, kDisk);
  const auto outcome = run(three_kernels(), machine(1, 100, 50.0), plan);
  CHECK_EQUAL(outcome.iteration_s, 9.0);  // 2 s for the read
  CHECK_EQUAL(outcome.stall_s[2], 2.0);
  CHECK_EQUAL(static_cast<int>(outcome.cause[2]), static_cast<int>(kPrefetch));
  CHECK_EQUAL(outcome.peak[0], 100);
  CHECK_EQUAL(outcome.peak[2], 100);
}

TEST(a_recomputation_runs_its_kernel_again) {
  Rows plan;
  plan.add(0, 0, 1, 2, 2, kRecompute);
  CHECK_EQUAL(run(three_kernels(), machine(1, 100, 50.0), plan).iteration_s, 8.0);
}

// Reads take 2 s, one after the other: of the two that are due at 12 s and 13 s, the first has to be issued by
// 10 s, and kernel 1 starts at 1 s; with room to spare both may be issued sooner.
TEST(prefetches_are_placed_at_the_latest_moment_in_time) {
  Trace trace;
  trace.kernels = 14;
  trace.tensors = 2;
  trace.bytes = trace.compressed = {100, 100};
  trace.birth = {0, 0};
  trace.death = {13, 14};
  trace.persistent = {0, 0};
  trace.producer = {-1, -1};
  std::vector<std::vector<Index>> outputs(14);
  outputs[0] = {0, 1};
  trace.outputs = lists_of(outputs);
  trace.writers = lists_of({{0}, {0}});
  trace.prepare();
  const std::vector<double> times(14, 1.0);
  const std::vector<Bytes> workspaces(14);
  const Kernels kernels{times.data(), workspaces.data()};
  std::vector<double> starts(15);
  for (std::size_t k = 0; k < starts.size(); ++k) starts[k] = static_cast<double>(k);
  Rows plan;
  plan.add(0, 0, 1, 12, 12, kDisk);
  plan.add(1, 0, 1, 13, 13, kDisk);
  const auto placed = [&](Bytes budget, Index early) {
    return place_prefetches(trace, machine(2, budget, 50.0), plan.view(), kernels, starts.data(), early);
  };
  CHECK(placed(1'000'000'000, 0) == (std::vector<Index>{9, 11}));
  CHECK(placed(1'000'000'000, 3) == (std::vector<Index>{6, 8}));
  CHECK(placed(100, 0) == (std::vector<Index>{9, 13}));
}

TEST(nothing_that_a_plan_says_is_read_past_the_end_of_the_trace) {
  const auto trace = three_kernels();
  const auto on = machine(1, 100, 50.0);
  const Index far = std::numeric_limits<Index>::max();
  for (const auto& [tensor, after, begin, end] : std::vector<std::array<Index, 4>>{
           {1, 0, 1, 2}, {-1, 0, 1, 2}, {0, 3, 1, 2}, {0, -2, 1, 2}, {0, 0, 4, 5}, {0, 0, 1, far},
           {0, 0, -1, 2}, {0, 0, 2, 1}}) {
    Rows plan;
    plan.add(tensor, after, begin, end, begin, kHost);
    bool refused = false;
    try {
      run(trace, on, plan);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

TEST(random_plans_come_to_an_end) {
  Random random(1);
  for (int round = 0; round < 2000; ++round) {
    const auto K = static_cast<Index>(random(1, 12));
    const auto T = static_cast<Index>(random(1, 8));
    Trace trace;
    trace.kernels = K;
    trace.tensors = T;
    std::vector<std::vector<Index>> outputs(at(K)), writers(at(T));
    for (Index t = 0; t < T; ++t) {
      const bool persistent = random(0, 2) == 0;
      const auto birth = persistent ? 0 : static_cast<Index>(random(0, at(K) - 1));
      trace.bytes.push_back(static_cast<Bytes>(random(0, 100)));
      trace.compressed.push_back(trace.bytes.back() / 2);
      trace.birth.push_back(birth);
      trace.death.push_back(persistent ? K : static_cast<Index>(random(at(birth) + 1, at(K))));
      trace.persistent.push_back(persistent);
      const auto writer = static_cast<Index>(random(at(birth), at(K) - 1));
      trace.producer.push_back(writer);
      outputs[at(writer)].push_back(t);
      writers[at(t)].push_back(writer);
    }
    trace.outputs = lists_of(outputs);
    trace.writers = lists_of(writers);
    trace.prepare();

    Rows plan;
    const auto rows = random(0, 12);
    for (std::size_t row = 0; row < rows; ++row) {
      const auto begin = static_cast<Index>(random(0, at(K)));
      const auto end = static_cast<Index>(random(at(begin), 2 * at(K) - 1));
      plan.add(static_cast<Index>(random(0, at(T) - 1)), static_cast<Index>(random(0, at(K))) - 1, begin, end,
               static_cast<Index>(random(at(begin), at(end))), static_cast<Action>(random(0, 5)));
    }
    const std::vector<double> times(at(K), 0.5);
    const std::vector<Bytes> workspaces(at(K), 10);
    const Kernels kernels{times.data(), workspaces.data()};
    auto on = machine(at(T), static_cast<Bytes>(random(0, 500)), random(0, 1) ? 100.0 : 5.0);
    on.shares_bus = random(0, 1) == 0;
    on.duplex = 0.5;
    on.latency_s.fill(random(0, 1) ? 0.1 : 0.0);
    const auto outcome = replay(trace, on, plan.view(), kernels, {.record = true});
    CHECK(outcome.iteration_s >= 0.5 * static_cast<double>(K) - 1e-9);
    const auto again = replay(trace, on, plan.view(), kernels, {});
    CHECK_EQUAL(outcome.iteration_s, again.iteration_s);
    static_bytes(trace, plan.view(), kernels);
    Copies copies;
    find_copies(trace, plan.view(), copies);
    tier_bytes(trace, plan.view(), copies);
    std::vector<double> starts(at(K) + 1);
    for (std::size_t k = 0; k <= at(K); ++k) starts[k] = 0.5 * static_cast<double>(k);
    // Placed prefetches stay within their rows and the budget, where what comes back on demand does.
    auto lazy = plan;
    lazy.prefetch_at = lazy.end;
    const auto before = static_bytes(trace, lazy.view(), kernels);
    const auto placed = place_prefetches(trace, on, plan.view(), kernels, starts.data(), 3);
    for (std::size_t row = 0; row < rows; ++row)
      CHECK(plan.action[row] == kKeep || (placed[row] >= plan.begin[row] && placed[row] <= plan.end[row]));
    lazy.prefetch_at = placed;
    const auto after = static_bytes(trace, lazy.view(), kernels);
    for (std::size_t k = 0; k < at(K); ++k) CHECK(after[k] <= std::max(before[k], on.budget));
  }
}
