// Bytes and arrays of Python objects, and the GIL while they are worked on.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstring>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace penstock {

// Below this size other threads wait shorter than the GIL takes to be handed over.
inline constexpr std::size_t kReleaseGilBytes = std::size_t{64} << 10;

class GilReleasedFor {
 public:
  explicit GilReleasedFor(std::size_t size_bytes) {
    if (size_bytes >= kReleaseGilBytes) released_.emplace();
  }

 private:
  std::optional<nanobind::gil_scoped_release> released_;
};

// The bytes of a Python object, which stay in place and alive meanwhile.
class Bytes {
 public:
  explicit Bytes(nanobind::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw nanobind::python_error();
  }
  ~Bytes() { PyBuffer_Release(&buffer_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  const void* data() const { return buffer_.buf; }
  std::size_t size_bytes() const { return static_cast<std::size_t>(buffer_.len); }
  std::string_view view() const { return {static_cast<const char*>(buffer_.buf), size_bytes()}; }

 private:
  Py_buffer buffer_;
};

inline std::string_view view(const nanobind::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// The bytes of a vector's items, as they lie in memory.
template <class T>
nanobind::bytes bytes_of(const std::vector<T>& items) {
  static_assert(std::is_trivially_copyable_v<T>);
  return nanobind::bytes(items.data(), items.size() * sizeof(T));
}

}  // namespace penstock
