// What Python sees of the sample store's names.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "bindings.hpp"
#include "python_bytes.hpp"
#include "samples/hash.hpp"
#include "samples/names.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

using samples::Entry, samples::LookupShape, samples::Names, samples::NameTable;

template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Directory = nb::ndarray<const std::uint64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;

std::string_view view(const Column<std::uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::span<const Entry> entries(const Directory& directory) {
  return {reinterpret_cast<const Entry*>(directory.data()), directory.shape(0)};
}

NameTable table_of(const Directory& directory, const Column<std::uint8_t>& names,
                   const Column<std::uint64_t>& anchors) {
  return {directory.shape(0), view(names), {anchors.data(), anchors.size()}};
}

// Zeros. What is written to in no order is written faster in large pages.
std::byte* zeroed(std::size_t size_bytes) {
  constexpr std::size_t kLargePageBytes = std::size_t{2} << 20;
  const auto rounded = (size_bytes + kLargePageBytes - 1) / kLargePageBytes * kLargePageBytes;
  const bool large = size_bytes >= 2 * kLargePageBytes;
  auto* const memory = large ? std::aligned_alloc(kLargePageBytes, rounded) : std::malloc(size_bytes + 1);
  if (memory == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (large) madvise(memory, rounded, MADV_HUGEPAGE);  // a wish, which may fail
#endif
  std::memset(memory, 0, size_bytes);
  return static_cast<std::byte*>(memory);
}

nb::tuple sample_lookup(const Directory& directory, const Column<std::uint8_t>& names,
                        const Column<std::uint64_t>& anchors) {
  const auto table = table_of(directory, names, anchors);
  const LookupShape shape(directory.shape(0));
  auto* const lookup = zeroed(shape.size_bytes);
  const nb::capsule owner(lookup, [](void* pointer) noexcept { std::free(pointer); });
  samples::Twins twins;
  {
    const nb::gil_scoped_release released;
    samples::write_lookup(entries(directory), lookup);
    twins = samples::find_twins(entries(directory), table, lookup);
  }
  const nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>> bytes(lookup, {shape.size_bytes}, owner);
  return nb::make_tuple(bytes, twins ? nb::object(nb::make_tuple(twins->first, twins->second)) : nb::none());
}

class SampleNames {
 public:
  SampleNames(Directory directory, Column<std::uint8_t> names, Column<std::uint64_t> anchors,
              Column<std::uint8_t> lookup)
      : bytes_(std::move(names)), anchors_(std::move(anchors)), lookup_(std::move(lookup)),
        names_(table_of(directory, bytes_, anchors_), view(lookup_)) {}

  std::int64_t find(const nb::bytes& name) const { return names_.find(penstock::view(name)); }

  nb::object find_many(const Column<std::uint8_t>& names, const Column<std::int64_t>& ends) const {
    auto* const found = new std::vector<std::int64_t>(ends.size());
    const nb::capsule owner(found, [](void* pointer) noexcept {
      delete static_cast<std::vector<std::int64_t>*>(pointer);
    });
    {
      const nb::gil_scoped_release released;
      names_.find_many(view(names), {ends.data(), ends.size()}, found->data());
    }
    return nb::cast(nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>(found->data(), {found->size()}, owner));
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
  module.def("sample_key", [](const nb::bytes& name) { return samples::key_of(view(name)); }, nb::arg("name"));
  module.def("sample_lookup", &sample_lookup, nb::arg("directory").noconvert(), nb::arg("names").noconvert(),
             nb::arg("anchors").noconvert());
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
