// What Python sees of the checksum.
#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "checksum.hpp"
#include "python_bytes.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

std::uint32_t crc32c_of_bytes(nb::handle object, std::uint32_t crc) {
  const Bytes bytes(object);
  const GilReleasedFor released(bytes.size_bytes());
  return crc32c(crc, bytes.data(), bytes.size_bytes());
}

std::uint32_t crc32c_at(std::uintptr_t address, std::size_t size_bytes, std::uint32_t crc) {
  const GilReleasedFor released(size_bytes);
  return crc32c(crc, reinterpret_cast<const void*>(address), size_bytes);
}

std::uint32_t copy_crc32c_at(std::uintptr_t destination, std::uintptr_t source, std::size_t size_bytes,
                             std::uint32_t crc) {
  const GilReleasedFor released(size_bytes);
  return copy_crc32c(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), size_bytes,
                     crc);
}

}  // namespace

void bind_checksum(nb::module_& module) {
  module.def("crc32c_at", &crc32c_at, nb::arg("address"), nb::arg("size_bytes"), nb::arg("crc") = 0);
  module.def("crc32c", &crc32c_of_bytes, nb::arg("data"), nb::arg("crc") = 0,
             nb::sig("def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int"));
  module.def("copy_crc32c", &copy_crc32c_at, nb::arg("destination"), nb::arg("source"), nb::arg("size_bytes"),
             nb::arg("crc") = 0);
  module.def("crc32c_combine", &crc32c_combine, nb::arg("first"), nb::arg("second"), nb::arg("second_bytes"));
}

}  // namespace penstock
