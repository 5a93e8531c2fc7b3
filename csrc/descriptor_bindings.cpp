// Files that close themselves, for Python.
#include <nanobind/nanobind.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "bindings.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int number() const { return number_; }
  int release() { return std::exchange(number_, -1); }
  void close() {
    const int number = release();
    if (number < 0) return;
    int error = 0;
    {
      nb::gil_scoped_release released;
      if (::close(number) != 0) error = errno;
    }
    if (error == 0 || error == EINTR) return;  // it is closed then, too
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }

 private:
  int number_;
};

int opened(nb::handle path, int flags, int mode) {
  PyObject* encoded = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &encoded) == 0) throw nb::python_error();
  const auto name = nb::steal<nb::bytes>(encoded);
  while (true) {
    int number = -1, error = 0;
    {
      nb::gil_scoped_release released;
      number = ::open(name.c_str(), flags | O_CLOEXEC, mode);
      error = errno;
    }
    if (number >= 0) return number;
    if (error == EINTR && PyErr_CheckSignals() == 0) continue;
    if (error != EINTR) {
      errno = error;
      PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path.ptr());
    }
    throw nb::python_error();
  }
}

}  // namespace

void bind_descriptors(nb::module_& module) {
  nb::class_<Descriptor>(module, "Descriptor",
                         "An open file, closed with the last reference to it. Ctrl-C cannot come between the two.")
      .def(
          "__init__",
          [](Descriptor* self, nb::object path, int flags, int mode) { new (self) Descriptor(opened(path, flags, mode)); },
          nb::arg("path"), nb::arg("flags"), nb::arg("mode") = 0777,
          nb::sig("def __init__(self, path: str | bytes | os.PathLike[str], flags: int, mode: int = 0o777) -> None"),
          "As os.open.")
      .def_static(
          "owning", [](int number) { return new Descriptor(number); }, nb::arg("number"),
          "Of a file that is open.")
      .def("fileno", &Descriptor::number, "-1 where it is closed.")
      .def("close", &Descriptor::close, "Idempotent. Raises OSError.")
      .def("release", &Descriptor::release, "Its number, which nobody closes any more.")
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Descriptor"))
      .def(
          "__exit__", [](Descriptor& self, nb::args) { self.close(); }, nb::sig("def __exit__(self, *_: object) -> None"));
}

}  // namespace penstock
