// What Python sees of the codecs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <memory>

#include "bindings.hpp"
#include "codecs/bitmask.hpp"
#include "codecs/packing.hpp"
#include "python_bytes.hpp"

namespace nb = nanobind;

namespace penstock {

void bind_codecs(nb::module_& module) {
  module.def("bitmask_head_bytes", &bitmask_head_bytes, nb::arg("elements"));
  module.def(
      "bitmask_count_kept",
      [](std::uintptr_t data, std::size_t elements, std::size_t itemsize) {
        const GilReleasedFor released(elements * itemsize);
        return count_kept(reinterpret_cast<const void*>(data), elements, itemsize);
      },
      nb::arg("data"), nb::arg("elements"), nb::arg("itemsize"));
  module.def(
      "bitmask_encode",
      [](std::uintptr_t data, std::size_t elements, std::size_t itemsize, std::uintptr_t packed,
         std::size_t capacity_bytes) {
        const GilReleasedFor released(elements * itemsize);
        return bitmask_encode(reinterpret_cast<const void*>(data), elements, itemsize,
                              reinterpret_cast<void*>(packed), capacity_bytes);
      },
      nb::arg("data"), nb::arg("elements"), nb::arg("itemsize"), nb::arg("packed"), nb::arg("capacity_bytes"));
  module.def(
      "bitmask_decode",
      [](std::uintptr_t packed, std::size_t packed_bytes, std::uintptr_t data, std::size_t elements,
         std::size_t itemsize) {
        const GilReleasedFor released(elements * itemsize);
        return bitmask_decode(reinterpret_cast<const void*>(packed), packed_bytes, reinterpret_cast<void*>(data),
                              elements, itemsize);
      },
      nb::arg("packed"), nb::arg("packed_bytes"), nb::arg("data"), nb::arg("elements"), nb::arg("itemsize"));
  nb::enum_<Codec>(module, "Codec", "How elements are packed: keys of penstock.codecs.CODECS.")
      .value("csr", Codec::kCsr)
      .value("fp16", Codec::kFp16)
      .value("bf16", Codec::kBf16);
  nb::class_<Packing>(module, "Packing", "So many elements, in so many packed bytes; 0: they are not packed.")
      .def(nb::init<>())
      .def("__init__",
           [](Packing* self, Codec codec, std::size_t packed_bytes, std::size_t elements, std::size_t itemsize) {
             new (self) Packing{packed_bytes, elements, itemsize, codec};
           },
           nb::arg("codec"), nb::arg("packed_bytes"), nb::arg("elements"), nb::arg("itemsize"))
      .def_ro("packed_bytes", &Packing::packed_bytes)
      .def_ro("codec", &Packing::codec);
  module.def(
      "pack",
      [](const Packing& packing, std::uintptr_t data, std::uintptr_t packed) {
        const GilReleasedFor released(packing.elements * packing.itemsize);
        return pack(packing, reinterpret_cast<const void*>(data), reinterpret_cast<void*>(packed));
      },
      nb::arg("packing"), nb::arg("data"), nb::arg("packed"));
  module.def(
      "unpack",
      [](const Packing& packing, std::uintptr_t packed, std::uintptr_t data) {
        const GilReleasedFor released(packing.elements * packing.itemsize);
        return unpack(packing, reinterpret_cast<const void*>(packed), reinterpret_cast<void*>(data));
      },
      nb::arg("packing"), nb::arg("packed"), nb::arg("data"));
  module.def(
      "unpack_in_place",
      [](const Packing& packing, std::uintptr_t data, std::size_t capacity_bytes) {
        const GilReleasedFor released(packing.elements * packing.itemsize);
        const std::unique_ptr<char[]> head(new char[head_bytes(packing)]);
        return unpack_in_place(packing, reinterpret_cast<void*>(data), capacity_bytes, head.get());
      },
      nb::arg("packing"), nb::arg("data"), nb::arg("capacity_bytes"));
}

}  // namespace penstock
