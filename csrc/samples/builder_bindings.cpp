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

#include "bindings.hpp"
#include "checksum.hpp"
#include "python_bytes.hpp"
#include "samples/builder.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

using samples::Builder, samples::Pieces;

template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::string_view view(const Column<std::uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

template <class T>
std::span<const T> span(const Column<T>& column) {
  return {column.data(), column.size()};
}

struct SamplePieces {
  nb::list data;
  nb::bytes directory, sums, chunks, names, anchors, large, labels;
};

// Shares the builder's memory, which is used again once the array is gone.
nb::object array_of(const Pieces::Data& data) {
  auto* const kept = new std::shared_ptr<std::byte>(data.bytes);
  const nb::capsule owner(kept, [](void* pointer) noexcept {
    delete static_cast<std::shared_ptr<std::byte>*>(pointer);
  });
  return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(kept->get(), {data.size_bytes}, owner));
}

class SampleBuilder {
 public:
  SampleBuilder(std::uint64_t chunk_bytes, std::uint64_t node_bytes, const nb::bytes& state)
      : builder_(chunk_bytes, node_bytes, penstock::view(state)) {}

  void add(const nb::bytes& name, nb::handle object, std::int32_t label) {
    const Bytes data(object);
    const auto name_view = penstock::view(name);
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

  SamplePieces take() {
    const Use use(*this);
    const auto& made = builder_.made();
    SamplePieces pieces{nb::list(),           bytes_of(made.directory), bytes_of(made.sums),
                        bytes_of(made.chunks), bytes_of(made.names),     bytes_of(made.anchors),
                        bytes_of(made.large),  bytes_of(made.labels)};
    for (const auto& data : made.data) pieces.data.append(nb::make_tuple(data.node, array_of(data)));
    builder_.forget();
    return pieces;
  }

  nb::bytes state() {
    const Use use(*this);
    return bytes_of(builder_.state());
  }

  nb::list nodes() {
    const Use use(*this);
    nb::list nodes;
    for (const auto& node : builder_.nodes())
      nodes.append(nb::make_tuple(node.samples, node.chunks, node.size_bytes));
    return nodes;
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
  auto* const sums = new std::vector<std::uint32_t>(ends.size());
  const nb::capsule owner(sums, [](void* pointer) noexcept {
    delete static_cast<std::vector<std::uint32_t>*>(pointer);
  });
  {
    const nb::gil_scoped_release released;
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < sums->size(); ++i) {
      const auto end = ends.data()[i];
      if (end < begin)
        throw std::invalid_argument("end " + std::to_string(i) + " is " + std::to_string(end) +
                                    ", before " + std::to_string(begin) + ": ends must ascend from 0");
      const auto* const bytes = reinterpret_cast<const char*>(address) + begin;
      (*sums)[i] = crc32c(0, bytes, static_cast<std::size_t>(end - begin));
      begin = end;
    }
  }
  return nb::cast(nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<1>>(sums->data(), {sums->size()}, owner));
}

}  // namespace

void bind_sample_builder(nb::module_& module) {
  module.def("sample_sums", &sample_sums, nb::arg("address"), nb::arg("ends"));
  nb::class_<SamplePieces>(module, "SamplePieces")
      .def_ro("data", &SamplePieces::data)
      .def_ro("directory", &SamplePieces::directory)
      .def_ro("sums", &SamplePieces::sums)
      .def_ro("chunks", &SamplePieces::chunks)
      .def_ro("names", &SamplePieces::names)
      .def_ro("anchors", &SamplePieces::anchors)
      .def_ro("large", &SamplePieces::large)
      .def_ro("labels", &SamplePieces::labels);
  nb::class_<SampleBuilder>(module, "SampleBuilder")
      .def(nb::init<std::uint64_t, std::uint64_t, const nb::bytes&>(), nb::arg("chunk_bytes"),
           nb::arg("node_bytes"), nb::arg("state") = nb::bytes("", 0))
      .def("add", &SampleBuilder::add, nb::arg("name"), nb::arg("data"), nb::arg("label") = -1,
           nb::sig("def add(self, name: bytes, data: bytes | bytearray | memoryview, label: int = -1) -> None"))
      .def("add_many", &SampleBuilder::add_many, nb::arg("names"), nb::arg("name_ends"), nb::arg("data"),
           nb::arg("data_ends"), nb::arg("labels") = nb::none())
      .def("finish", &SampleBuilder::finish)
      .def("take", &SampleBuilder::take)
      .def("state", &SampleBuilder::state)
      .def_prop_ro("samples", &SampleBuilder::samples)
      .def_prop_ro("pending_bytes", &SampleBuilder::pending_bytes)
      .def_prop_ro("nodes", &SampleBuilder::nodes);
}

}  // namespace penstock
