// What Python sees of the replay and of the search for a better plan. Every array is checked: a wrong one raises
// ValueError. The columns are made by penstock.simulator and penstock.planners.optimal.search.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"
#include "planning/search.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

using namespace planning;

template <class T>
std::vector<T> copied(const Column<T>& column) {
  return {column.data(), column.data() + column.shape(0)};
}

template <class T>
std::vector<T> column(const nb::dict& columns, const char* name) {
  return copied(nb::cast<Column<T>>(columns[name]));
}

template <class Work>
auto without_gil(Work work) {
  const nb::gil_scoped_release release;
  return work();
}

Lists lists_of(const nb::dict& values, const char* name) {
  const auto pair = nb::cast<nb::tuple>(values[name]);
  return {copied(nb::cast<Column<Index>>(pair[0])), copied(nb::cast<Column<Index>>(pair[1]))};
}

Trace trace_of(const nb::dict& trace) {
  Trace t;
  t.kernels = nb::cast<Index>(trace["kernels"]);
  t.bytes = column<Bytes>(trace, "bytes");
  t.compressed = column<Bytes>(trace, "compressed");
  t.birth = column<Index>(trace, "birth");
  t.death = column<Index>(trace, "death");
  t.persistent = column<std::uint8_t>(trace, "persistent");
  t.producer = column<Index>(trace, "producer");
  t.outputs = lists_of(trace, "outputs");
  t.writers = lists_of(trace, "writers");
  t.tensors = static_cast<Index>(t.bytes.size());
  check(t);
  t.prepare();
  return t;
}

Machine machine_of(const nb::dict& machine, const Trace& trace) {
  Machine m;
  m.budget = nb::cast<Bytes>(machine["budget"]);
  m.shares_bus = nb::cast<bool>(machine["shares_bus"]);
  m.duplex = nb::cast<double>(machine["duplex"]);
  m.compress_s = copied(nb::cast<Column<double>>(machine["compress_s"]));
  m.expand_s = copied(nb::cast<Column<double>>(machine["expand_s"]));
  m.copy_overhead_s = nb::cast<double>(machine["copy_overhead_s"]);
  m.byte_overhead_s = nb::cast<double>(machine["byte_overhead_s"]);
  const auto links = nb::cast<nb::list>(machine["links"]);
  for (std::size_t link = 0; link < kLinks; ++link) {
    const auto values = nb::cast<nb::tuple>(links[link]);
    m.latency_s[link] = nb::cast<double>(values[0]);
    m.rate[link] = copied(nb::cast<Column<double>>(values[1]));
    m.rate_compressed[link] = copied(nb::cast<Column<double>>(values[2]));
  }
  check(trace, m);
  return m;
}

// -- the replay ----------------------------------------------------------------------------------------

struct Planner {
  Trace trace;
  Machine machine;
};

// The columns of a plan and of its kernels: borrowed while Python waits.
struct Plan {
  Column<Index> tensor, after, begin, end, prefetch_at;
  Column<std::int8_t> action;
  Column<double> time_s;
  Column<Bytes> workspace;

  Plan(const nb::tuple& columns, const Trace& trace)
      : tensor(nb::cast<Column<Index>>(columns[0])), after(nb::cast<Column<Index>>(columns[1])),
        begin(nb::cast<Column<Index>>(columns[2])), end(nb::cast<Column<Index>>(columns[3])),
        prefetch_at(nb::cast<Column<Index>>(columns[4])), action(nb::cast<Column<std::int8_t>>(columns[5])),
        time_s(nb::cast<Column<double>>(columns[6])), workspace(nb::cast<Column<Bytes>>(columns[7])) {
    for (const auto length :
         {after.shape(0), begin.shape(0), end.shape(0), prefetch_at.shape(0), action.shape(0)})
      require(length == tensor.shape(0), "columns of different lengths");
    require(time_s.shape(0) == at(trace.kernels) && workspace.shape(0) == at(trace.kernels),
            "times and workspaces of another number of kernels");
  }
  Intervals intervals() const {
    return {static_cast<Index>(tensor.shape(0)), tensor.data(), after.data(), begin.data(), end.data(),
            prefetch_at.data(), action.data()};
  }
  Kernels kernels() const { return {time_s.data(), workspace.data()}; }
};

void construct(Planner* self, const nb::dict& trace, const nb::dict& machine) {
  auto checked = trace_of(trace);
  auto with_rates = machine_of(machine, checked);
  new (self) Planner{std::move(checked), std::move(with_rates)};
}

// The fields of all entries, each as an array.
template <class Entry, class... Fields>
nb::tuple fields(const std::vector<Entry>& entries, Fields Entry::*... of) {
  const auto one = [&]<class T>(T Entry::*field) {
    std::vector<T> values;
    for (const auto& entry : entries) values.push_back(entry.*field);
    return array(std::move(values));
  };
  return nb::make_tuple(one(of)...);
}

nb::dict run(const Planner& self, const nb::tuple& columns, bool record, bool stop_on_deadlock) {
  const Plan plan(columns, self.trace);
  auto outcome = without_gil([&] {
    return replay(self.trace, self.machine, plan.intervals(), plan.kernels(), {record, stop_on_deadlock});
  });
  nb::dict result;
  result["deadlock"] = outcome.deadlock;
  result["iteration_s"] = outcome.iteration_s;
  result["stall_s"] = array(std::move(outcome.stall_s));
  result["stall_cause"] = array(std::move(outcome.cause));
  result["start_s"] = array(std::move(outcome.start_s));
  result["peak_bytes"] = nb::make_tuple(outcome.peak[0], outcome.peak[1], outcome.peak[2]);
  if (!record) return result;
  result["spans"] = fields(outcome.spans, &Span::stream, &Span::kind, &Span::index, &Span::start_s, &Span::end_s,
                           &Span::bytes);
  result["stalls"] = fields(outcome.stalls, &Stall::start_s, &Stall::end_s, &Stall::cause, &Stall::kernel);
  result["samples"] = fields(outcome.samples, &Sample::tier, &Sample::time_s, &Sample::bytes);
  return result;
}

Numpy<Bytes> static_bytes_of(const Planner& self, const nb::tuple& columns) {
  const Plan plan(columns, self.trace);
  return array(without_gil([&] { return static_bytes(self.trace, plan.intervals(), plan.kernels()); }));
}

nb::tuple tier_bytes_of(const Planner& self, const nb::tuple& columns) {
  const Plan plan(columns, self.trace);
  auto tiers = without_gil([&] {
    check(self.trace, plan.intervals());
    Copies copies;
    find_copies(self.trace, plan.intervals(), copies);
    return tier_bytes(self.trace, plan.intervals(), copies);
  });
  return nb::make_tuple(array(std::move(tiers[0])), array(std::move(tiers[1])));
}

// -- the search ----------------------------------------------------------------------------------------

using search::Search;
using Actions = Column<std::int8_t>;

void make(Search* self, const nb::dict& trace, const nb::dict& machine, const nb::dict& table) {
  search::Choices choices{
      .tensor = column<Index>(table, "tensor"),
      .begin = column<Index>(table, "begin"),
      .end = column<Index>(table, "end"),
      .ready = column<Index>(table, "ready"),
      .bytes = column<Bytes>(table, "size_bytes"),
      .allowed = column<std::uint8_t>(table, "allowed"),
      .cost_s = column<double>(table, "cost_s"),
      .bias = column<double>(table, "bias"),
      .order = column<Index>(table, "order"),
      .parent_starts = column<Index>(table, "parent_starts"),
      .parents = column<Index>(table, "parents"),
      .kept = {column<Index>(table, "kept"), column<Index>(table, "kept_begin"), column<Index>(table, "kept_end")},
      .tier_bytes = {nb::cast<Bytes>(machine["host_bytes"]), nb::cast<Bytes>(machine["disk_bytes"])},
  };
  auto checked = trace_of(trace);
  auto with_rates = machine_of(machine, checked);
  new (self) Search(std::move(checked), std::move(with_rates), column<double>(trace, "time_s"),
                    column<Bytes>(trace, "workspace_bytes"), std::move(choices));
}

std::optional<Numpy<std::int8_t>> repair(Search& self, const Actions& action, bool pruned) {
  search::State state{copied(action), std::vector<std::int8_t>(action.shape(0))};
  const bool fits = without_gil([&] { return self.repair(state, pruned); });
  if (!fits) return std::nullopt;
  return array(std::move(state.action));
}

nb::tuple improve(Search& self, const Actions& action, const Actions& late, std::int64_t evaluations, double seconds,
                  double target_s, double temperature, std::uint64_t seed) {
  const search::State state{copied(action), copied(late)};
  auto found = without_gil([&] {
    return self.improve(state, {evaluations, seconds, target_s, temperature, seed});
  });
  auto& rows = found.rows;
  return nb::make_tuple(
      array(std::move(found.state.action)), array(std::move(found.state.late)), found.iteration_s,
      nb::make_tuple(array(std::move(rows.tensor)), array(std::move(rows.after)), array(std::move(rows.begin)),
                     array(std::move(rows.end)), array(std::move(rows.prefetch_at)), array(std::move(rows.action))),
      found.evaluations, found.timed_out);
}

}  // namespace

void bind_planning(nb::module_& module) {
  nb::class_<Planner>(module, "Replay", "A trace on a machine, on which plans are tried.")
      .def("__init__", &construct, nb::arg("trace"), nb::arg("machine"),
           nb::sig("def __init__(self, trace: dict[str, object], machine: dict[str, object]) -> None"))
      .def("run", &run, nb::arg("columns"), nb::arg("record"), nb::arg("stop_on_deadlock"))
      .def("static_bytes", &static_bytes_of, nb::arg("columns"))
      .def("tier_bytes", &tier_bytes_of, nb::arg("columns"));
  nb::class_<Search>(module, "PlanSearch",
                     "Local search over what happens in each inactive period. One thread works at a time.")
      .def("__init__", &make, nb::arg("trace"), nb::arg("machine"), nb::arg("choices"),
           nb::sig("def __init__(self, trace: dict[str, object], machine: dict[str, object], "
                   "choices: dict[str, object]) -> None"))
      .def("repair", &repair, nb::arg("action"), nb::arg("pruned"))
      .def("improve", &improve, nb::arg("action"), nb::arg("late"), nb::arg("evaluations"), nb::arg("seconds"),
           nb::arg("target_s"), nb::arg("temperature"), nb::arg("seed"));
  module.def("plan_actions", [] {
    nb::list rows;
    for (const auto& [name, tier, codec] : kActionNames) rows.append(nb::make_tuple(name, tier, codec));
    return rows;
  });
}

}  // namespace penstock
