// What Python sees of the sample store's names, and what packing needs of C++.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"
#include "checksum.hpp"
#include "python_bytes.hpp"
#include "samples/names.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

using samples::Entry, samples::LookupShape, samples::Names, samples::NameTable;

using Directory = nb::ndarray<const std::uint64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;

std::span<const Entry> entries(const Directory& directory) {
  return {reinterpret_cast<const Entry*>(directory.data()), directory.shape(0)};
}

NameTable table_of(const Directory& directory, const Column<std::uint8_t>& names,
                   const Column<std::uint64_t>& anchors) {
  return {directory.shape(0), view(names), span(anchors)};
}

Numpy<std::uint8_t> sample_lookup(const Directory& directory) {
  const LookupShape shape(directory.shape(0));
  std::vector<std::uint64_t> words;
  {
    const nb::gil_scoped_release released;
    words.resize((shape.size_bytes + 7) / 8);
    samples::write_lookup(entries(directory), reinterpret_cast<std::byte*>(words.data()));
  }
  auto* const bytes = reinterpret_cast<std::uint8_t*>(words.data());
  return array(bytes, shape.size_bytes, std::move(words));
}

// What `of` makes of stretches that lie back to back from an address on, of which the i-th ends at ends[i].
template <class Value>
Numpy<Value> of_each(const char* begin, const Column<std::int64_t>& ends, Value (*of)(std::string_view)) {
  std::vector<Value> values(ends.size());
  {
    const nb::gil_scoped_release released;
    std::int64_t from = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto end = ends.data()[i];
      if (end < from)
        throw std::invalid_argument("end " + std::to_string(i) + " is " + std::to_string(end) + ", before " +
                                    std::to_string(from) + ": ends must ascend from 0");
      values[i] = of({begin + from, static_cast<std::size_t>(end - from)});
      from = end;
    }
  }
  return array(std::move(values));
}

Numpy<std::uint32_t> sample_sums(std::uintptr_t address, const Column<std::int64_t>& ends) {
  return of_each<std::uint32_t>(reinterpret_cast<const char*>(address), ends,
                                [](std::string_view bytes) { return crc32c(0, bytes.data(), bytes.size()); });
}

Numpy<std::uint64_t> sample_keys(const Column<std::uint8_t>& names, const Column<std::int64_t>& ends) {
  if (ends.size() > 0 && ends.data()[ends.size() - 1] > static_cast<std::int64_t>(names.size()))
    throw std::invalid_argument("the names end before their last end");
  return of_each<std::uint64_t>(view(names).data(), ends, [](std::string_view name) { return samples::key_of(name); });
}

class SampleNames {
 public:
  SampleNames(Directory directory, Column<std::uint8_t> names, Column<std::uint64_t> anchors,
              Column<std::uint8_t> lookup)
      : bytes_(std::move(names)), anchors_(std::move(anchors)), lookup_(std::move(lookup)),
        names_(table_of(directory, bytes_, anchors_), view(lookup_)) {}

  std::int64_t find(const nb::bytes& name) const { return names_.find(view(name)); }

  Numpy<std::int64_t> find_many(const Column<std::uint8_t>& names, const Column<std::int64_t>& ends) const {
    std::vector<std::int64_t> found(ends.size());
    {
      const nb::gil_scoped_release released;
      names_.find_many(view(names), span(ends), found.data());
    }
    return array(std::move(found));
  }

  nb::bytes name(std::int64_t index) const {
    check(index, index + 1);
    return bytes_of_name(names_.table().name(static_cast<std::uint64_t>(index)));
  }

  nb::list names(std::int64_t begin, std::int64_t end) const {
    check(begin, end);
    nb::list list;
    if (begin == end) return list;
    const auto& table = names_.table();
    auto position = table.position(static_cast<std::uint64_t>(begin));
    for (auto index = begin; index < end; ++index) {
      const auto name = table.at(position);
      list.append(bytes_of_name(name));
      position += 2 + name.size();
    }
    return list;
  }

 private:
  static nb::bytes bytes_of_name(std::string_view name) { return nb::bytes(name.data(), name.size()); }

  void check(std::int64_t begin, std::int64_t end) const {
    const auto samples = static_cast<std::int64_t>(names_.table().samples());
    if (begin < 0 || end < begin || end > samples)
      throw nb::index_error(("samples " + std::to_string(begin) + " to " + std::to_string(end) +
                             " are not among the " + std::to_string(samples) + " of the store")
                                .c_str());
  }

  const Column<std::uint8_t> bytes_;
  const Column<std::uint64_t> anchors_;
  const Column<std::uint8_t> lookup_;
  const Names names_;
};

}  // namespace

void bind_sample_names(nb::module_& module) {
  module.def("sample_sums", &sample_sums, nb::arg("address"), nb::arg("ends"));
  module.def("sample_keys", &sample_keys, nb::arg("names"), nb::arg("ends"));
  module.def("sample_lookup", &sample_lookup, nb::arg("directory").noconvert());
  nb::class_<SampleNames>(module, "SampleNames")
      .def(nb::init<Directory, Column<std::uint8_t>, Column<std::uint64_t>, Column<std::uint8_t>>(),
           nb::arg("directory").noconvert(), nb::arg("names").noconvert(), nb::arg("anchors").noconvert(),
           nb::arg("lookup").noconvert())
      .def("find", &SampleNames::find, nb::arg("name"))
      .def("find_many", &SampleNames::find_many, nb::arg("names"), nb::arg("ends"))
      .def("name", &SampleNames::name, nb::arg("index"))
      .def("names", &SampleNames::names, nb::arg("begin"), nb::arg("end"));
}

}  // namespace penstock
