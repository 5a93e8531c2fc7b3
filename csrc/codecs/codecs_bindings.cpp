// What Python sees of the codecs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <memory>

#include "bindings.hpp"
#include "codecs/bitmask.hpp"
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
  module.def(
      "bitmask_expand",
      [](std::uintptr_t data, std::size_t capacity_bytes, std::size_t elements, std::size_t itemsize,
         std::size_t packed_bytes) {
        const GilReleasedFor released(elements * itemsize);
        const std::unique_ptr<char[]> head(new char[bitmask_head_bytes(elements)]);
        return bitmask_expand(reinterpret_cast<void*>(data), capacity_bytes, elements, itemsize, packed_bytes,
                              head.get());
      },
      nb::arg("data"), nb::arg("capacity_bytes"), nb::arg("elements"), nb::arg("itemsize"), nb::arg("packed_bytes"));
}

}  // namespace penstock
