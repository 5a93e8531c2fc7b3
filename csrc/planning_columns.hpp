// Arrays between Python and C++, and the trace and machine that penstock.simulator.replay hands over.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "planning/model.hpp"

namespace penstock {

namespace nb = nanobind;

template <class T>
std::vector<T> copied(const Column<T>& column) {
  return {column.data(), column.data() + column.shape(0)};
}

template <class T>
std::vector<T> column(const nb::dict& columns, const char* name) {
  return copied(nb::cast<Column<T>>(columns[name]));
}

inline planning::Lists lists_of(const nb::dict& values, const char* name) {
  const auto pair = nb::cast<nb::tuple>(values[name]);
  return {copied(nb::cast<Column<planning::Index>>(pair[0])), copied(nb::cast<Column<planning::Index>>(pair[1]))};
}

inline planning::Trace trace_of(const nb::dict& trace) {
  using planning::Bytes, planning::Index;
  planning::Trace t;
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
  planning::check(t);
  t.prepare();
  return t;
}

inline planning::Machine machine_of(const nb::dict& machine, const planning::Trace& trace) {
  planning::Machine m;
  m.budget = nb::cast<planning::Bytes>(machine["budget"]);
  m.shares_bus = nb::cast<bool>(machine["shares_bus"]);
  m.duplex = nb::cast<double>(machine["duplex"]);
  m.compress_bytes_per_s = nb::cast<double>(machine["compress_bytes_per_s"]);
  m.expand_bytes_per_s = nb::cast<double>(machine["expand_bytes_per_s"]);
  m.copy_overhead_s = nb::cast<double>(machine["copy_overhead_s"]);
  const auto links = nb::cast<nb::list>(machine["links"]);
  for (std::size_t link = 0; link < planning::kLinks; ++link) {
    const auto values = nb::cast<nb::tuple>(links[link]);
    m.latency_s[link] = nb::cast<double>(values[0]);
    m.rate[link] = copied(nb::cast<Column<double>>(values[1]));
    m.rate_compressed[link] = copied(nb::cast<Column<double>>(values[2]));
  }
  planning::check(trace, m);
  return m;
}

}  // namespace penstock
