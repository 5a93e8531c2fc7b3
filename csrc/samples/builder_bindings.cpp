// What Python sees of the sample store's builder.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"
#include "checksum.hpp"
#include "python_bytes.hpp"
#include "samples/builder.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

using samples::Builder;

class SampleBuilder {
 public:
  SampleBuilder(std::uint64_t chunk_bytes, std::uint64_t data_file_bytes, const nb::bytes& state)
      : builder_(chunk_bytes, data_file_bytes, view(state)) {}

  void add(const nb::bytes& name, nb::handle object, std::int32_t label) {
    const Bytes data(object);
    const auto name_view = view(name);
    const std::int64_t name_end = static_cast<std::int64_t>(name_view.size());
    const std::int64_t data_end = static_cast<std::int64_t>(data.size_bytes());
    const Use use(*this);
    const GilReleasedFor released(data.size_bytes());
    builder_.add({name_view, {&name_end, 1}, data.view(), {&data_end, 1}, {&label, 1}});
  }

  void add_many(const Column<std::uint8_t>& names, const Column<std::int64_t>& name_ends,
                const Column<std::uint8_t>& data, const Column<std::int64_t>& data_ends,
                const std::optional<Column<std::int32_t>>& labels) {
    const Use use(*this);
    const nb::gil_scoped_release released;
    if (labels && labels->size() != name_ends.size())
      throw std::invalid_argument("there must be one label for every sample, or None for all");
    builder_.add({view(names), span(name_ends), view(data), span(data_ends),
                  labels ? span(*labels) : std::span<const std::int32_t>()});
  }

  void finish() {
    const Use use(*this);
    builder_.finish();
  }

  nb::tuple take() {
    const Use use(*this);
    const auto& made = builder_.made();
    nb::list pieces;
    // Arrays share the builder's memory, which is used again once they are gone.
    for (const auto& [file, bytes, size_bytes] : made.data)
      pieces.append(nb::make_tuple(file, array(reinterpret_cast<std::uint8_t*>(bytes.get()), size_bytes, bytes)));
    nb::dict files;
    files["directory.bin"] = bytes_of(made.directory);
    files["sums.bin"] = bytes_of(made.sums);
    files["chunks.bin"] = bytes_of(made.chunks);
    files["names.bin"] = bytes_of(made.names);
    files["anchors.bin"] = bytes_of(made.anchors);
    files["large.bin"] = bytes_of(made.large);
    files["labels.bin"] = bytes_of(made.labels);
    builder_.forget();
    return nb::make_tuple(pieces, files);
  }

  nb::bytes state() {
    const Use use(*this);
    return bytes_of(builder_.state());
  }

  nb::list data_files() {
    const Use use(*this);
    nb::list data_files;
    for (const auto& data_file : builder_.data_files())
      data_files.append(nb::make_tuple(data_file.samples, data_file.chunks, data_file.size_bytes));
    return data_files;
  }

  std::uint64_t samples() {
    const Use use(*this);
    return builder_.samples();
  }

  std::uint64_t pending_bytes() {
    const Use use(*this);
    return builder_.made().size_bytes();
  }

 private:
  // One thread at a time; who comes second is told, since waiting with the GIL held could last for ever.
  class Use {
   public:
    explicit Use(SampleBuilder& builder) : busy_(builder.busy_) {
      if (busy_.exchange(true)) throw std::logic_error("another thread is using this builder");
    }
    ~Use() { busy_ = false; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    std::atomic<bool>& busy_;
  };

  Builder builder_;
  std::atomic<bool> busy_ = false;
};

// Of stretches that lie back to back from an address on, of which the i-th ends at ends[i].
nb::object sample_sums(std::uintptr_t address, const Column<std::int64_t>& ends) {
  std::vector<std::uint32_t> sums(ends.size());
  {
    const nb::gil_scoped_release released;
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const auto end = ends.data()[i];
      if (end < begin)
        throw std::invalid_argument("end " + std::to_string(i) + " is " + std::to_string(end) +
                                    ", before " + std::to_string(begin) + ": ends must ascend from 0");
      const auto* const bytes = reinterpret_cast<const char*>(address) + begin;
      sums[i] = crc32c(0, bytes, static_cast<std::size_t>(end - begin));
      begin = end;
    }
  }
  return array(std::move(sums));
}

}  // namespace

void bind_sample_builder(nb::module_& module) {
  module.def("sample_sums", &sample_sums, nb::arg("address"), nb::arg("ends"));
  nb::class_<SampleBuilder>(module, "SampleBuilder")
      .def(nb::init<std::uint64_t, std::uint64_t, const nb::bytes&>(), nb::arg("chunk_bytes"),
           nb::arg("data_file_bytes"), nb::arg("state") = nb::bytes("", 0))
      .def("add", &SampleBuilder::add, nb::arg("name"), nb::arg("data"), nb::arg("label") = -1,
           nb::sig("def add(self, name: bytes, data: bytes | bytearray | memoryview, label: int = -1) -> None"))
      .def("add_many", &SampleBuilder::add_many, nb::arg("names"), nb::arg("name_ends"), nb::arg("data"),
           nb::arg("data_ends"), nb::arg("labels") = nb::none())
      .def("finish", &SampleBuilder::finish)
      .def("take", &SampleBuilder::take)
      .def("state", &SampleBuilder::state)
      .def_prop_ro("samples", &SampleBuilder::samples)
      .def_prop_ro("pending_bytes", &SampleBuilder::pending_bytes)
      .def_prop_ro("data_files", &SampleBuilder::data_files);
}

}  // namespace penstock
