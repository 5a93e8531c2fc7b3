// What Python sees of the sample store's order.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"
#include "samples/order.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

using namespace samples;

using After = std::vector<std::tuple<std::uint64_t, std::uint64_t, std::vector<std::uint64_t>>>;

void construct(SampleOrder* self, const std::string& kind, std::uint64_t samples, const Column<std::uint64_t>& firsts,
               std::uint64_t seed, std::uint64_t number, std::uint64_t replicas, std::uint64_t replica,
               std::uint64_t slots, After after, std::optional<Column<std::uint64_t>> kept) {
  Epoch epoch{seed, number, replicas, replica, slots, {}};
  for (auto& [before, mixed, taken] : after) epoch.after.push_back({before, mixed, std::move(taken)});
  const auto chunks = span(firsts);
  const nb::gil_scoped_release released;
  if (kind != "full" && kind != "chunk") throw std::invalid_argument("there is no order \"" + kind + "\"");
  if (kind == "chunk" && !chunks.empty() && chunks.back() != samples)
    throw std::invalid_argument("the chunks do not hold as many samples as there are");
  if (kept && kept->size() != samples) throw std::invalid_argument("as many samples are kept as there are");
  auto order = kind == "full" ? full_order(samples, epoch) : chunk_order(chunks, epoch);
  if (kept) order = order_of({kept->data(), kept->data() + kept->size()}, std::move(order));
  new (self) SampleOrder(std::move(order));
}

Numpy<std::int64_t> take(SampleOrder& self, std::uint64_t samples) {
  auto& order = self.get();
  std::vector<std::int64_t> indices;
  {
    const nb::gil_scoped_release released;
    std::array<Pick, 1024> picks;
    samples = std::min(samples, order.size() - order.taken());
    indices.reserve(static_cast<std::size_t>(samples));
    while (indices.size() < samples) {
      const auto wanted = std::min<std::uint64_t>(picks.size(), samples - indices.size());
      const auto count = order.take({picks.data(), static_cast<std::size_t>(wanted)});
      for (std::size_t i = 0; i < count; ++i) indices.push_back(static_cast<std::int64_t>(picks[i].sample));
    }
  }
  return array(std::move(indices));
}

}  // namespace

void bind_sample_order(nb::module_& module) {
  nb::class_<SampleOrder>(module, "SampleOrder",
                          "The order of one replica of an epoch, as penstock.samples.order says.")
      .def("__init__", &construct, nb::arg("kind"), nb::arg("samples"), nb::arg("firsts"), nb::arg("seed"),
           nb::arg("epoch"), nb::arg("replicas"), nb::arg("replica"), nb::arg("slots"), nb::arg("after"),
           nb::arg("kept") = nb::none())
      .def("take", &take, nb::arg("samples"))
      .def(
          "skip", [](SampleOrder& self, std::uint64_t samples) { return self.get().skip(samples); },
          nb::arg("samples"), nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("size", [](const SampleOrder& self) { return self.get().size(); })
      .def_prop_ro("taken", [](const SampleOrder& self) { return self.get().taken(); });
}

}  // namespace penstock
