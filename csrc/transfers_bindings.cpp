// What Python sees of reads and writes in the background.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <list>
#include <memory>
#include <optional>
#include <string_view>
#include <system_error>

#include "bindings.hpp"
#include "io/blocking.hpp"
#include "io/transfers.hpp"
#ifdef __linux__
#include "io/ring.hpp"
#include "nvme/nvme_io.hpp"
#endif

namespace nb = nanobind;

namespace penstock {

namespace {

// About what is copied in the time that another thread takes to wake up twice.
constexpr std::uint64_t kAtOnceBytes = 1U << 20;

Method method_of(std::string_view name) {
  if (name == "direct") return Method::direct;
  if (name == "staged") return Method::staged;
  if (name == "buffered") return Method::buffered;
  if (name == "mapped") return Method::mapped;
  throw nb::value_error("no such method");
}

// Keeps what Python knows of this thread until it ends, instead of making it anew for each call.
class ThreadState {
 public:
  ThreadState() : state_(PyGILState_Ensure()), saved_(PyEval_SaveThread()) {}
  ThreadState(const ThreadState&) = delete;
  ThreadState& operator=(const ThreadState&) = delete;
  ~ThreadState() {
    PyEval_RestoreThread(saved_);
    PyGILState_Release(state_);
  }

 private:
  PyGILState_STATE state_;
  PyThreadState* saved_;
};

nb::list list_of(const std::list<Finished>& finished) {
  nb::list result;
  for (const auto& one : finished) {
    result.append(
        nb::make_tuple(one.token, one.error, one.started_s, one.finished_s, one.abandoned, one.unsettled));
  }
  return result;
}

Transfers::MakeIo maker_of(std::string_view kind, unsigned depth) {
  if (kind == "blocking") return [] { return std::make_unique<BlockingIo>(); };
#ifdef __linux__
  if (kind == "io_uring") return [depth] { return std::make_unique<Ring>(depth); };
  if (kind == "nvme") return [depth] { return nvme::make_nvme_io(depth); };
#endif
  (void)depth;
  throw std::system_error(ENOSYS, std::generic_category());
}

void construct(Transfers* self, std::string_view kind, unsigned depth, std::uint64_t piece_bytes,
               std::uint64_t slot_bytes, std::size_t slots, unsigned threads, const nb::callable& deliver) {
  if (depth == 0 || piece_bytes == 0 || slot_bytes == 0 || slots == 0 || threads == 0)
    throw nb::value_error("limits must be above zero");
  // Its last owner may be a thread without the GIL.
  const std::shared_ptr<nb::callable> callable(new nb::callable(deliver), [](nb::callable* held) {
    const nb::gil_scoped_acquire acquire;
    delete held;
  });
  const auto call = [callable](const std::list<Finished>& finished) {
    static thread_local ThreadState known;
    const nb::gil_scoped_acquire acquire;
    nb::object list;
    try {
      list = list_of(finished);
    } catch (const std::exception&) {
      throw std::bad_alloc();
    }
    try {
      (*callable)(list);
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("a completion");
    }
  };
  int error = 0;
  {
    const nb::gil_scoped_release release;
    try {
      Limits limits{depth, piece_bytes, slot_bytes, slots, threads};
      if (kind == "blocking") limits.at_once_bytes = kAtOnceBytes;
      new (self) Transfers(maker_of(kind, depth), limits, call);
    } catch (const std::system_error& failure) {
      error = failure.code().value();
    }
  }
  if (error != 0) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

Priority priority_of(int number) {
  if (number < 0 || number >= static_cast<int>(kPriorities)) throw nb::value_error("no such priority");
  return static_cast<Priority>(number);
}

// `fields` is a penstock.storage.transports.Request, whose file is a File.
Request request_of(std::uint64_t token, const nb::tuple& fields) {
  const auto file = nb::cast<nb::tuple>(fields[1]);
  return {token,
          nb::cast<std::string_view>(fields[0]) == "write",
          method_of(nb::cast<std::string_view>(fields[5])),
          nb::cast<bool>(fields[6]),
          {nb::cast<Handle>(file[0]), nb::cast<Handle>(file[1]), nb::cast<std::uint32_t>(file[2])},
          nb::cast<std::uint64_t>(fields[2]),
          reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(fields[3])),
          nb::cast<std::uint64_t>(fields[4]),
          priority_of(nb::cast<int>(fields[8]))};
}

// Those that were carried out at once; None after close.
std::optional<nb::list> submit(Transfers& self, const std::vector<std::uint64_t>& tokens,
                               const nb::sequence& list) {
  std::vector<Request> requests;
  requests.reserve(tokens.size());
  for (std::size_t index = 0; index < tokens.size(); ++index)
    requests.push_back(request_of(tokens[index], nb::cast<nb::tuple>(list[index])));
  std::list<Finished> finished;
  bool accepted;
  {
    const nb::gil_scoped_release release;
    accepted = self.submit(requests, &finished);
  }
  if (!accepted) return std::nullopt;
  return list_of(finished);
}

nb::list wait(Transfers& self) {
  std::list<Finished> finished;
  {
    const nb::gil_scoped_release release;
    finished = self.wait();
  }
  return list_of(finished);
}

}  // namespace

void bind_transfers(nb::module_& module) {
  nb::class_<Transfers>(module, "Transfers",
                        "Reads and writes by io_uring, or by blocking calls. Raises OSError where it is refused.")
      .def("__init__", &construct, nb::arg("kind"), nb::arg("depth"), nb::arg("piece_bytes"),
           nb::arg("slot_bytes"), nb::arg("slots"), nb::arg("threads"), nb::arg("deliver"))
      .def("submit", &submit, nb::arg("tokens"), nb::arg("requests"))
      .def(
          "cancel",
          [](Transfers& self, const std::vector<std::uint64_t>& tokens) { return self.cancel(tokens); },
          nb::arg("tokens"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "hurry",
          [](Transfers& self, const std::vector<std::uint64_t>& tokens) { self.hurry(tokens); },
          nb::arg("tokens"), nb::call_guard<nb::gil_scoped_release>())
      .def("wait", &wait, nb::sig("def wait(self) -> list[tuple[int, int, float, float, bool, bool]]"))
      .def("broken", &Transfers::broken)
      .def(
          "close",
          [](Transfers& self, double timeout_s) { return self.close(std::chrono::duration<double>(timeout_s)); },
          nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace penstock
