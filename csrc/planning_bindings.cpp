// What Python sees of the replay. Every array is checked: a wrong one raises ValueError.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "planning/model.hpp"
#include "planning/replay.hpp"
#include "planning_columns.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

using namespace planning;

// One field of each entry, as an array.
template <class T, class Entry, class Field>
nb::object field(const std::vector<Entry>& entries, Field of) {
  std::vector<T> values(entries.size());
  std::transform(entries.begin(), entries.end(), values.begin(), [&](const Entry& entry) {
    return static_cast<T>(of(entry));
  });
  return array(std::move(values));
}

struct Planner {
  Trace trace;
  Machine machine;

  // The columns of a plan and of its kernels: borrowed while Python waits.
  struct Rows {
    Column<Index> tensor, after, begin, end, prefetch_at;
    Column<std::int8_t> action;
    Column<double> time_s;
    Column<Bytes> workspace;

    Intervals intervals() const {
      const auto count = tensor.shape(0);
      for (const auto length :
           {after.shape(0), begin.shape(0), end.shape(0), prefetch_at.shape(0), action.shape(0)})
        if (length != count) throw nb::value_error("columns of different lengths");
      return {static_cast<Index>(count), tensor.data(), after.data(), begin.data(), end.data(),
              prefetch_at.data(), action.data()};
    }
    Kernels kernels(const Trace& trace) const {
      if (static_cast<Index>(time_s.shape(0)) != trace.kernels ||
          static_cast<Index>(workspace.shape(0)) != trace.kernels)
        throw nb::value_error("times and workspaces of another number of kernels");
      return {time_s.data(), workspace.data()};
    }
  };
};

Planner::Rows rows_of(const nb::tuple& columns) {
  return {nb::cast<Column<Index>>(columns[0]),  nb::cast<Column<Index>>(columns[1]),
          nb::cast<Column<Index>>(columns[2]),  nb::cast<Column<Index>>(columns[3]),
          nb::cast<Column<Index>>(columns[4]),  nb::cast<Column<std::int8_t>>(columns[5]),
          nb::cast<Column<double>>(columns[6]), nb::cast<Column<Bytes>>(columns[7])};
}

void construct(Planner* self, const nb::dict& trace, const nb::dict& machine) {
  auto checked = trace_of(trace);
  auto with_rates = machine_of(machine, checked);
  new (self) Planner{std::move(checked), std::move(with_rates)};
}

nb::dict outcome_of(Outcome&& outcome, bool record) {
  nb::dict result;
  result["deadlock"] = outcome.deadlock;
  result["iteration_s"] = outcome.iteration_s;
  result["stall_s"] = array(std::move(outcome.stall_s));
  result["stall_cause"] = array(std::move(outcome.cause));
  result["start_s"] = array(std::move(outcome.start_s));
  result["peak_bytes"] = nb::make_tuple(outcome.peak[0], outcome.peak[1], outcome.peak[2]);
  if (!record) return result;
  const auto& spans = outcome.spans;
  result["spans"] = nb::make_tuple(field<std::int8_t>(spans, [](const Span& s) { return s.stream; }),
                                   field<std::int8_t>(spans, [](const Span& s) { return s.kind; }),
                                   field<Index>(spans, [](const Span& s) { return s.index; }),
                                   field<double>(spans, [](const Span& s) { return s.start_s; }),
                                   field<double>(spans, [](const Span& s) { return s.end_s; }),
                                   field<Bytes>(spans, [](const Span& s) { return s.bytes; }));
  const auto& stalls = outcome.stalls;
  result["stalls"] = nb::make_tuple(field<double>(stalls, [](const Stall& s) { return s.start_s; }),
                                    field<double>(stalls, [](const Stall& s) { return s.end_s; }),
                                    field<std::int8_t>(stalls, [](const Stall& s) { return s.cause; }),
                                    field<Index>(stalls, [](const Stall& s) { return s.kernel; }));
  const auto& samples = outcome.samples;
  result["samples"] = nb::make_tuple(field<std::int8_t>(samples, [](const Sample& s) { return s.tier; }),
                                     field<double>(samples, [](const Sample& s) { return s.time_s; }),
                                     field<Bytes>(samples, [](const Sample& s) { return s.bytes; }));
  return result;
}

nb::dict run(const Planner& self, const nb::tuple& columns, bool record, bool stop_on_deadlock) {
  const auto rows = rows_of(columns);
  const auto intervals = rows.intervals();
  const auto kernels = rows.kernels(self.trace);
  Outcome outcome;
  {
    const nb::gil_scoped_release release;
    outcome = replay(self.trace, self.machine, intervals, kernels, {record, stop_on_deadlock});
  }
  return outcome_of(std::move(outcome), record);
}

nb::object static_bytes_of(const Planner& self, const nb::tuple& columns) {
  const auto rows = rows_of(columns);
  const auto intervals = rows.intervals();
  const auto kernels = rows.kernels(self.trace);
  std::vector<Bytes> result;
  {
    const nb::gil_scoped_release release;
    result = static_bytes(self.trace, intervals, kernels);
  }
  return array(std::move(result));
}

nb::tuple tier_bytes_of(const Planner& self, const nb::tuple& columns) {
  const auto rows = rows_of(columns);
  const auto intervals = rows.intervals();
  std::array<std::vector<Bytes>, 2> result;
  {
    const nb::gil_scoped_release release;
    result = tier_bytes(self.trace, intervals);
  }
  return nb::make_tuple(array(std::move(result[0])), array(std::move(result[1])));
}

nb::object prefetch(const Planner& self, const nb::tuple& columns, const Column<double>& start_s,
                    Index early) {
  const auto rows = rows_of(columns);
  const auto intervals = rows.intervals();
  const auto kernels = rows.kernels(self.trace);
  if (static_cast<Index>(start_s.shape(0)) != self.trace.kernels + 1)
    throw nb::value_error("starts of another number of kernels");
  std::vector<Index> result;
  {
    const nb::gil_scoped_release release;
    result = place_prefetches(self.trace, self.machine, intervals, kernels, start_s.data(), early);
  }
  return array(std::move(result));
}

}  // namespace

void bind_planning(nb::module_& module) {
  nb::class_<Planner>(module, "Replay", "A trace on a machine, on which plans are tried.")
      .def("__init__", &construct, nb::arg("trace"), nb::arg("machine"),
           nb::sig("def __init__(self, trace: dict[str, object], machine: dict[str, object]) -> None"))
      .def("run", &run, nb::arg("columns"), nb::arg("record"), nb::arg("stop_on_deadlock"))
      .def("static_bytes", &static_bytes_of, nb::arg("columns"))
      .def("tier_bytes", &tier_bytes_of, nb::arg("columns"))
      .def("prefetch", &prefetch, nb::arg("columns"), nb::arg("start_s"), nb::arg("early"));
  module.def("plan_actions", [] {
    nb::list rows;
    for (const auto& [name, tier, codec] : kActionNames) rows.append(nb::make_tuple(name, tier, codec));
    return rows;
  });
}

}  // namespace penstock
