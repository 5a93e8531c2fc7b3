// What Python sees of the search for a better plan.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "planning/model.hpp"
#include "planning/replay.hpp"
#include "planning/search.hpp"
#include "planning_columns.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

using Ways = Column<std::int8_t>;

// The replay as the search's objective.
class Replayed final : public search::Objective {
 public:
  Replayed(planning::Trace trace, planning::Machine machine, std::vector<double> time_s,
           std::vector<std::int64_t> workspace)
      : trace_(std::move(trace)), machine_(std::move(machine)), time_s_(std::move(time_s)),
        workspace_(std::move(workspace)), kernels_{time_s_.data(), workspace_.data()} {}

  void static_bytes(const search::Rows& rows, std::vector<std::int64_t>& bytes) override {
    bytes = planning::static_bytes(trace_, view(rows), kernels_);
  }

  void tier_bytes(const search::Rows& rows, std::vector<std::int64_t>& host,
                  std::vector<std::int64_t>& disk) override {
    auto tiers = planning::tier_bytes(trace_, view(rows));
    host = std::move(tiers[0]);
    disk = std::move(tiers[1]);
  }

  void prefetch(search::Rows& rows, const std::vector<double>& start_s, std::int64_t early) override {
    rows.prefetch_at =
        planning::place_prefetches(trace_, machine_, view(rows), kernels_, start_s.data(), early);
  }

  void run(const search::Rows& rows, search::Verdict& verdict) override {
    auto outcome = planning::replay(trace_, machine_, view(rows), kernels_,
                                    {.record = false, .stop_on_deadlock = true});
    verdict.iteration_s = outcome.deadlock ? std::numeric_limits<double>::infinity() : outcome.iteration_s;
    verdict.stall_s = std::move(outcome.stall_s);
    verdict.stall_cause = std::move(outcome.cause);
    verdict.start_s = std::move(outcome.start_s);
    verdict.start_s.resize(static_cast<std::size_t>(trace_.kernels));
    verdict.start_s.push_back(outcome.iteration_s);
  }

 private:
  static planning::Absences view(const search::Rows& rows) {
    return {static_cast<std::int64_t>(rows.size()), rows.tensor.data(), rows.after.data(), rows.begin.data(),
            rows.end.data(), rows.prefetch_at.data(), rows.how.data()};
  }

  const planning::Trace trace_;
  const planning::Machine machine_;
  std::vector<double> time_s_;
  std::vector<std::int64_t> workspace_;
  planning::Kernels kernels_;
};

search::State state_of(const Ways& how, const Ways& late) {
  search::State state;
  state.how = copied(how);
  state.late.assign(late.data(), late.data() + late.shape(0));
  return state;
}

nb::tuple columns(search::Rows rows) {
  return nb::make_tuple(array(std::move(rows.tensor)), array(std::move(rows.after)),
                        array(std::move(rows.begin)), array(std::move(rows.end)),
                        array(std::move(rows.prefetch_at)), array(std::move(rows.how)));
}

std::vector<std::int8_t> flags(const std::vector<std::uint8_t>& values) { return {values.begin(), values.end()}; }

// Entries of a dict of columns, by name.
class Table {
 public:
  explicit Table(const nb::dict& columns) : columns_(columns) {}

  template <typename Value>
  std::vector<Value> column(const char* name) const {
    return copied(nb::cast<Column<Value>>(columns_[name]));
  }
  template <typename Value>
  Value value(const char* name) const {
    return nb::cast<Value>(columns_[name]);
  }

 private:
  nb::dict columns_;
};

// The columns are made by penstock.planners.search.improve.
void make(search::Search* self, const nb::dict& trace_columns, const nb::dict& machine_columns,
          const nb::dict& choice_columns) {
  const Table trace(trace_columns), machine(machine_columns), table(choice_columns);
  search::Choices choices;
  choices.kernels = trace.value<std::int64_t>("kernels");
  choices.tensors = static_cast<std::int64_t>(trace.column<std::int64_t>("bytes").size());
  choices.kernel_time_s = trace.column<double>("time_s");
  choices.tensor = table.column<std::int64_t>("tensor");
  choices.begin = table.column<std::int64_t>("begin");
  choices.end = table.column<std::int64_t>("end");
  choices.ready = table.column<std::int64_t>("ready");
  choices.bytes = table.column<std::int64_t>("size_bytes");
  choices.allowed = table.column<std::uint8_t>("allowed");
  choices.cost_s = table.column<double>("cost_s");
  choices.bias = table.column<double>("bias");
  choices.order = table.column<std::int64_t>("order");
  choices.parent_starts = table.column<std::int64_t>("parent_starts");
  choices.parents = table.column<std::int64_t>("parents");
  choices.budget_bytes = machine.value<std::int64_t>("budget");
  choices.host_bytes = machine.value<std::int64_t>("host_bytes");
  choices.disk_bytes = machine.value<std::int64_t>("disk_bytes");
  new (self) search::Search(
      std::move(choices),
      std::make_unique<Replayed>(trace_of(trace_columns), machine_of(machine_columns), trace.column<double>("time_s"),
                                 trace.column<std::int64_t>("workspace_bytes")));
}

nb::object repair(search::Search& self, const Ways& how, const Ways& late) {
  auto state = state_of(how, late);
  bool fits = false;
  {
    const nb::gil_scoped_release release;
    fits = self.repair(state);
    if (fits) self.prune(state);
  }
  return fits ? array(std::move(state.how)) : nb::none();
}

nb::tuple improve(search::Search& self, const Ways& how, const Ways& late, std::int64_t evaluations,
                  double seconds, double target_s, double temperature, std::uint64_t seed) {
  const auto state = state_of(how, late);
  search::Found found;
  {
    const nb::gil_scoped_release release;
    found = self.improve(state, {evaluations, seconds, target_s, temperature, seed});
  }
  return nb::make_tuple(array(std::move(found.state.how)), array(flags(found.state.late)), found.iteration_s,
                        columns(std::move(found.rows)), found.evaluations, found.timed_out);
}

}  // namespace

void bind_search(nb::module_& module) {
  nb::class_<search::Search>(module, "PlanSearch",
                             "Local search over what happens in each inactive period. Not for two threads at once.")
      .def("__init__", &make, nb::arg("trace"), nb::arg("machine"), nb::arg("choices"),
           nb::sig("def __init__(self, trace: dict[str, object], machine: dict[str, object], "
                   "choices: dict[str, object]) -> None"))
      .def("repair", &repair, nb::arg("how"), nb::arg("late"))
      .def("improve", &improve, nb::arg("how"), nb::arg("late"), nb::arg("evaluations"), nb::arg("seconds"),
           nb::arg("target_s"), nb::arg("temperature"), nb::arg("seed"));
}

}  // namespace penstock
