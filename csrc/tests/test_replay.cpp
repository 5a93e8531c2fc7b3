// The replay by hand, and of random plans that nobody checked: it ends, and stays within its arrays.
#include <limits>

#include "check.hpp"
#include "planning/replay.hpp"

using namespace penstock::planning;
using penstock::test::Random;

namespace {

struct Columns {
  std::vector<Index> tensor, after, begin, end, prefetch_at;
  std::vector<std::int8_t> action;

  void add(Index t, Index a, Index b, Index e, Index p, Action what) {
    tensor.push_back(t);
    after.push_back(a);
    begin.push_back(b);
    end.push_back(e);
    prefetch_at.push_back(p);
    action.push_back(static_cast<std::int8_t>(what));
  }
  Intervals view() const {
    return {static_cast<Index>(tensor.size()), tensor.data(), after.data(), begin.data(), end.data(),
            prefetch_at.data(), action.data()};
  }
};

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
  made.compress_bytes_per_s = made.expand_bytes_per_s = 100.0;
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

Outcome run(const Trace& trace, const Machine& on, const Columns& columns) {
  return replay(trace, on, columns.view(), {kTimes.data(), kWorkspaces.data()}, {.record = true});
}

}  // namespace

TEST(an_eviction_on_demand_is_waited_for) {
  Columns plan;
  plan.add(0, 0, 1, 2, 2, kDisk);
  const auto outcome = run(three_kernels(), machine(1, 100, 50.0), plan);
  CHECK_EQUAL(outcome.iteration_s, 9.0);  // 2 s for the read
  CHECK_EQUAL(outcome.stall_s[2], 2.0);
  CHECK_EQUAL(static_cast<int>(outcome.cause[2]), static_cast<int>(kPrefetch));
  CHECK_EQUAL(outcome.peak[0], 100);
  CHECK_EQUAL(outcome.peak[2], 100);
}

TEST(a_recomputation_runs_its_kernel_again) {
  Columns plan;
  plan.add(0, 0, 1, 2, 2, kRecompute);
  CHECK_EQUAL(run(three_kernels(), machine(1, 100, 50.0), plan).iteration_s, 8.0);
}

TEST(nothing_that_a_plan_says_is_read_past_the_end_of_the_trace) {
  const auto trace = three_kernels();
  const auto on = machine(1, 100, 50.0);
  const Index far = std::numeric_limits<Index>::max();
  for (const auto& [tensor, after, begin, end] : std::vector<std::array<Index, 4>>{
           {1, 0, 1, 2}, {-1, 0, 1, 2}, {0, 3, 1, 2}, {0, -2, 1, 2}, {0, 0, 4, 5}, {0, 0, 1, far},
           {0, 0, -1, 2}, {0, 0, 2, 1}}) {
    Columns plan;
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

    Columns plan;
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
    tier_bytes(trace, plan.view());
    std::vector<double> starts(at(K) + 1);
    for (std::size_t k = 0; k <= at(K); ++k) starts[k] = 0.5 * static_cast<double>(k);
    const auto placed = place_prefetches(trace, on, plan.view(), kernels, starts.data(), 3);
    for (std::size_t row = 0; row < rows; ++row)
      CHECK(plan.action[row] == kKeep || placed[row] >= plan.begin[row]);
  }
}
