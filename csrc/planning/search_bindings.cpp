// What Python sees of the search for a better plan.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "planning/search.hpp"
#include "planning_columns.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

using Actions = Column<std::int8_t>;

search::State state_of(const Actions& action, const Actions& late) {
  search::State state;
  state.action = copied(action);
  state.late.assign(late.data(), late.data() + late.shape(0));
  return state;
}

nb::tuple columns(search::Rows rows) {
  return nb::make_tuple(array(std::move(rows.tensor)), array(std::move(rows.after)),
                        array(std::move(rows.begin)), array(std::move(rows.end)),
                        array(std::move(rows.prefetch_at)), array(std::move(rows.action)));
}

std::vector<std::int8_t> flags(const std::vector<std::uint8_t>& values) { return {values.begin(), values.end()}; }

// The columns are made by penstock.planners.optimal.search.improve.
void make(search::Search* self, const nb::dict& trace, const nb::dict& machine, const nb::dict& table) {
  search::Choices choices{
      .tensor = column<std::int64_t>(table, "tensor"),
      .begin = column<std::int64_t>(table, "begin"),
      .end = column<std::int64_t>(table, "end"),
      .ready = column<std::int64_t>(table, "ready"),
      .bytes = column<std::int64_t>(table, "size_bytes"),
      .allowed = column<std::uint8_t>(table, "allowed"),
      .cost_s = column<double>(table, "cost_s"),
      .bias = column<double>(table, "bias"),
      .order = column<std::int64_t>(table, "order"),
      .parent_starts = column<std::int64_t>(table, "parent_starts"),
      .parents = column<std::int64_t>(table, "parents"),
      .host_bytes = nb::cast<std::int64_t>(machine["host_bytes"]),
      .disk_bytes = nb::cast<std::int64_t>(machine["disk_bytes"]),
  };
  auto checked = trace_of(trace);
  auto with_rates = machine_of(machine, checked);
  new (self) search::Search(std::move(checked), std::move(with_rates), column<double>(trace, "time_s"),
                            column<std::int64_t>(trace, "workspace_bytes"), std::move(choices));
}

nb::object repair(search::Search& self, const Actions& action, const Actions& late) {
  auto state = state_of(action, late);
  bool fits = false;
  {
    const nb::gil_scoped_release release;
    fits = self.repair(state);
  }
  return fits ? array(std::move(state.action)) : nb::none();
}

nb::tuple improve(search::Search& self, const Actions& action, const Actions& late, std::int64_t evaluations,
                  double seconds, double target_s, double temperature, std::uint64_t seed) {
  const auto state = state_of(action, late);
  search::Found found;
  {
    const nb::gil_scoped_release release;
    found = self.improve(state, {evaluations, seconds, target_s, temperature, seed});
  }
  return nb::make_tuple(array(std::move(found.state.action)), array(flags(found.state.late)), found.iteration_s,
                        columns(std::move(found.rows)), found.evaluations, found.timed_out);
}

}  // namespace

void bind_search(nb::module_& module) {
  nb::class_<search::Search>(module, "PlanSearch",
                             "Local search over what happens in each inactive period. One thread works at a time.")
      .def("__init__", &make, nb::arg("trace"), nb::arg("machine"), nb::arg("choices"),
           nb::sig("def __init__(self, trace: dict[str, object], machine: dict[str, object], "
                   "choices: dict[str, object]) -> None"))
      .def("repair", &repair, nb::arg("action"), nb::arg("late"))
      .def("improve", &improve, nb::arg("action"), nb::arg("late"), nb::arg("evaluations"), nb::arg("seconds"),
           nb::arg("target_s"), nb::arg("temperature"), nb::arg("seed"));
}

}  // namespace penstock
