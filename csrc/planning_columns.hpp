// Arrays between Python and C++, and the trace and machine that penstock.simulator.replay hands over.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "planning/model.hpp"

namespace penstock {

namespace nb = nanobind;

template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::vector<T> copied(const Column<T>& column) {
  return {column.data(), column.data() + column.shape(0)};
}

template <class T>
nb::object array(std::vector<T> values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

inline planning::Lists lists_of(const nb::dict& values, const char* name) {
  const auto pair = nb::cast<nb::tuple>(values[name]);
  return {copied(nb::cast<Column<planning::Index>>(pair[0])), copied(nb::cast<Column<planning::Index>>(pair[1]))};
}

inline planning::Trace trace_of(const nb::dict& trace) {
  using planning::Bytes, planning::Index;
  planning::Trace t;
  t.kernels = nb::cast<Index>(trace["kernels"]);
  t.bytes = copied(nb::cast<Column<Bytes>>(trace["bytes"]));
  t.compressed = copied(nb::cast<Column<Bytes>>(trace["compressed"]));
  t.birth = copied(nb::cast<Column<Index>>(trace["birth"]));
  t.death = copied(nb::cast<Column<Index>>(trace["death"]));
  t.persistent = copied(nb::cast<Column<std::uint8_t>>(trace["persistent"]));
  t.producer = copied(nb::cast<Column<Index>>(trace["producer"]));
  t.outputs = lists_of(trace, "outputs");
  t.writers = lists_of(trace, "writers");
  t.tensors = static_cast<Index>(t.bytes.size());
  t.prepare();
  return t;
}

inline planning::Machine machine_of(const nb::dict& machine) {
  planning::Machine m;
  m.budget = nb::cast<planning::Bytes>(machine["budget"]);
  m.shares_bus = nb::cast<bool>(machine["shares_bus"]);
  m.duplex = nb::cast<double>(machine["duplex"]);
  m.compress_bytes_per_s = nb::cast<double>(machine["compress_bytes_per_s"]);
  m.expand_bytes_per_s = nb::cast<double>(machine["expand_bytes_per_s"]);
  const auto links = nb::cast<nb::list>(machine["links"]);
  for (std::size_t link = 0; link < planning::kLinks; ++link) {
    const auto values = nb::cast<nb::tuple>(links[link]);
    m.latency_s[link] = nb::cast<double>(values[0]);
    m.rate[link] = copied(nb::cast<Column<double>>(values[1]));
    m.rate_compressed[link] = copied(nb::cast<Column<double>>(values[2]));
  }
  return m;
}

}  // namespace penstock
