// What Python sees of reads and writes in the background.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "io/blocking.hpp"
#include "io/transfers.hpp"
#include "sync.hpp"
#include "threads.hpp"
#ifdef __linux__
#include "io/ring.hpp"
#include "nvme/nvme_io.hpp"
#endif

namespace nb = nanobind;

namespace penstock {

namespace {

// About what is copied in the time that another thread takes to wake up twice.
constexpr std::uint64_t kAtOnceBytes = 1U << 20;

constexpr const char* kRecords = "penstock.storage.transfer";  // where Python has its side of it
constexpr std::array<std::string_view, 4> kMethods{"direct", "staged", "buffered", "mapped"};  // as in Method

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

// Called with the GIL. Transfers that end on this thread inside of an on_done are appended, and called afterwards.
void call_on_done(std::list<Transfer>& finished) {
  static thread_local std::list<Transfer>* calling = nullptr;
  if (calling != nullptr) {
    calling->splice(calling->end(), finished);
    return;
  }
  calling = &finished;
  while (!finished.empty()) {
    const auto ended = finished.front();
    finished.pop_front();
    const auto record = nb::steal(reinterpret_cast<PyObject*>(ended.token));
    if (ended.abandoned) record.inc_ref();  // it keeps its memory: nobody knows when the kernel is done with it
    try {
      record.attr("started_s") = ended.started_s;
      record.attr("finished_s") = ended.finished_s;
      if (ended.error != 0) record.attr("error_number") = ended.error;
      if (ended.abandoned) record.attr("abandoned") = true;
      if (ended.may_land) record.attr("may_land") = true;
      record.attr("on_done")(record);
    } catch (nb::python_error& error) {
      try {
        nb::module_::import_(kRecords).attr("log_failed")(record, error.value());
      } catch (nb::python_error& again) {
        again.discard_as_unraisable("a completion");
      }
    }
  }
  calling = nullptr;
}

void deliver(std::list<Transfer>& finished) {
  static thread_local ThreadState known;
  const nb::gil_scoped_acquire acquire;
  call_on_done(finished);
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

std::vector<std::uint64_t> tokens_of(const nb::sequence& records) {
  std::vector<std::uint64_t> tokens;
  for (const auto record : records) tokens.push_back(reinterpret_cast<std::uint64_t>(record.ptr()));
  return tokens;
}

// Transfers, and the thread that calls on_done where theirs do not.
class Background {
 public:
  Background(Transfers::MakeIo make_io, const Limits& limits)
      : transfers(std::move(make_io), limits, deliver), deliverer_([this] { deliver_the_rest(); }) {}
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;
  ~Background() { close(); }

  // As that of Transfers. Without the GIL.
  bool close(std::optional<std::chrono::duration<double>> timeout = {}) {
    const auto begun = std::chrono::steady_clock::now();
    if (!transfers.close(timeout)) return false;
    if (process_ != getpid() || deliverer_.get_id() == std::this_thread::get_id()) return true;
    std::unique_lock lock(mutex_);
    const auto ended = [this] { return ended_; };
    if (!timeout) {
      changed_.wait(lock, ended);
    } else if (!changed_.wait_for(lock, *timeout - (std::chrono::steady_clock::now() - begun), ended)) {
      return false;
    }
    if (deliverer_.joinable()) deliverer_.join();
    return true;
  }

  // Ends without anybody who waits: who gives it up may be one of its threads, or hold what they need.
  static void give_up(std::unique_ptr<Background> given) {
    if (given->process_ != getpid()) {  // the parent's threads seem to wait here
      (void)given.release();
      return;
    }
    if (!given->deliverer_.joinable()) return;  // it was closed
    auto* const left = given.release();
    try {
      std::thread([left] {
        begin_thread("penstock-io");
        delete left;
      }).detach();
    } catch (const std::system_error&) {  // no thread can be had: it stays
    }
  }

  Transfers transfers;

 private:
  void deliver_the_rest() {
    begin_thread("penstock-io");
    for (auto finished = transfers.wait(); !finished.empty(); finished = transfers.wait()) deliver(finished);
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }

  const int process_ = getpid();
  Mutex mutex_;
  Condition changed_;
  bool ended_ = false;
  std::thread deliverer_;
};

// Of records that have a file, an address and so on: penstock.storage.transfer.Transfer.
class PythonTransfers {
 public:
  PythonTransfers(std::string_view kind, std::vector<std::string> methods, unsigned depth, const Limits& limits)
      : methods_(std::move(methods)), background_(std::make_unique<Background>(maker_of(kind, depth), limits)) {}
  PythonTransfers(const PythonTransfers&) = delete;
  PythonTransfers& operator=(const PythonTransfers&) = delete;
  ~PythonTransfers() { Background::give_up(std::move(background_)); }

  void submit(const nb::sequence& records) {
    std::vector<Transfer> asked;
    for (const auto record : records) asked.push_back(transfer_of(record));
    for (const auto record : records) record.inc_ref();
    std::list<Transfer> at_once;
    bool accepted = false;
    try {
      const nb::gil_scoped_release release;
      accepted = background_->transfers.submit(asked, &at_once);
    } catch (...) {
      for (const auto record : records) record.dec_ref();
      throw;
    }
    if (accepted) {
      call_on_done(at_once);
      return;
    }
    for (const auto record : records) record.dec_ref();
    const auto error = background_->transfers.broken();
    if (error == 0) throw nb::value_error("the transport is closed");
    const auto broken = nb::module_::import_(kRecords).attr("TransportBroken")(error);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(broken.ptr())), broken.ptr());
    throw nb::python_error();
  }

  std::size_t cancel(const nb::sequence& records) {
    const auto tokens = tokens_of(records);
    const nb::gil_scoped_release release;
    return background_->transfers.cancel(tokens);
  }

  void raise_priority(const nb::sequence& records) {
    const auto tokens = tokens_of(records);
    const nb::gil_scoped_release release;
    background_->transfers.raise_priority(tokens);
  }

  bool close(double timeout_s) {
    const nb::gil_scoped_release release;
    return background_->close(std::chrono::duration<double>(timeout_s));
  }

 private:
  Method method_of(std::string_view name) const {
    if (std::ranges::find(methods_, name) != methods_.end())
      return static_cast<Method>(std::ranges::find(kMethods, name) - kMethods.begin());
    std::string text = "there is no method '" + std::string(name) + "', only";
    for (const auto& method : methods_) text += (&method == methods_.data() ? " " : ", ") + method;
    throw nb::value_error(text.c_str());
  }

  Transfer transfer_of(nb::handle record) const {
    const auto file = nb::cast<nb::tuple>(record.attr("file"));
    const auto size_bytes = nb::cast<std::uint64_t>(record.attr("size_bytes"));
    const auto priority = nb::cast<int>(record.attr("priority"));
    if (size_bytes == 0) throw nb::value_error("a transfer of no bytes cannot be");
    if (priority < 0 || priority >= static_cast<int>(kPriorities)) throw nb::value_error("no such priority");
    return {reinterpret_cast<std::uint64_t>(record.ptr()),
            nb::cast<std::string_view>(record.attr("kind")) == "write",
            method_of(nb::cast<std::string_view>(record.attr("method"))),
            nb::cast<bool>(record.attr("padded")),
            {nb::cast<Handle>(file[0]), nb::cast<Handle>(file[1]), nb::cast<std::uint32_t>(file[2])},
            nb::cast<std::uint64_t>(record.attr("offset")),
            reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(record.attr("address"))),
            size_bytes,
            static_cast<Priority>(priority)};
  }

  const std::vector<std::string> methods_;
  std::unique_ptr<Background> background_;
};

void construct(PythonTransfers* self, std::string_view kind, std::vector<std::string> methods, unsigned depth,
               std::uint64_t piece_bytes, std::uint64_t slot_bytes, std::size_t slots, unsigned threads) {
  if (depth == 0 || piece_bytes == 0 || slot_bytes == 0 || slots == 0 || threads == 0)
    throw nb::value_error("limits must be above zero");
  for (const auto& method : methods)
    if (std::ranges::find(kMethods, method) == kMethods.end()) throw nb::value_error("no such method");
  Limits limits{depth, piece_bytes, slot_bytes, slots, threads};
  if (kind == "blocking") limits.at_once_bytes = kAtOnceBytes;
  int error = 0;
  try {
    const nb::gil_scoped_release release;
    new (self) PythonTransfers(kind, std::move(methods), depth, limits);
  } catch (const std::system_error& failure) {
    error = failure.code().value();
  }
  if (error != 0) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

}  // namespace

void bind_transfers(nb::module_& module) {
  module.attr("DEMAND") = static_cast<int>(Priority::demand);
  module.attr("PREFETCH") = static_cast<int>(Priority::prefetch);
  module.attr("EVICT") = static_cast<int>(Priority::evict);
  nb::class_<PythonTransfers>(module, "Transfers", nb::is_weak_referenceable(),
                              "Reads and writes by io_uring, by blocking calls, or of remote namespaces. Raises "
                              "OSError where it is refused.")
      .def("__init__", &construct, nb::arg("kind"), nb::arg("methods"), nb::arg("depth"), nb::arg("piece_bytes"),
           nb::arg("slot_bytes"), nb::arg("slots"), nb::arg("threads"))
      .def("submit", &PythonTransfers::submit, nb::arg("transfers"))
      .def("cancel", &PythonTransfers::cancel, nb::arg("transfers"))
      .def("raise_priority", &PythonTransfers::raise_priority, nb::arg("transfers"))
      .def("close", &PythonTransfers::close, nb::arg("timeout_s"));
}

}  // namespace penstock
