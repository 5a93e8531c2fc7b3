// What Python sees of the arena.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <stdexcept>
#include <tuple>

#include "arena/arena.hpp"
#include "bindings.hpp"
#include "arena/faults.hpp"
#include "arena/hooks.hpp"
#include "nvme/waiting.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

using Answer = Arena::Answer;

Arena& arena() {
  auto* arena = installed_arena();
  if (arena == nullptr) throw std::runtime_error("the arena is not installed: call arena_install first");
  return *arena;
}

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

nb::object find_block(std::uintptr_t address) {
  const auto block = arena().block(reinterpret_cast<const void*>(address));
  if (!block) return nb::none();
  return nb::make_tuple(block->start, block->capacity_bytes, block->serial);
}

[[noreturn]] void raise_os_error(int error) {
  errno = error;
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

// True for kYes and false for kNo.
bool check(Answer answer, std::uintptr_t address, int error = ENOMEM) {
  if (answer == Answer::kUnknown)
    throw std::invalid_argument("no block of the arena starts at address " + std::to_string(address));
  if (answer == Answer::kError) raise_os_error(error);
  return answer == Answer::kYes;
}

// What a call on a block answers, and the errno that it leaves.
template <class Call>
bool checked(std::uintptr_t address, Call call) {
  int error = 0;
  const auto answer = call(pointer(address), &error);
  return check(answer, address, error);
}

// For calls that may read or write files.
bool without_gil(Answer (Arena::*call)(void*, int*), std::uintptr_t address) {
  auto& current = arena();
  return checked(address, [&](void* block, int* error) {
    const nb::gil_scoped_release release;
    return (current.*call)(block, error);
  });
}

std::uint64_t budget(std::optional<std::uint64_t> budget_bytes) { return budget_bytes.value_or(kUnlimited); }

constexpr char kFaultsRefused[] =
    "the system refuses the thread or the SIGSEGV handler that brings memory back: raise the limits on threads and "
    "on address space (ulimit -u, ulimit -v)";
std::atomic<bool> faults_refused{false};  // by the last call of activate

void activate(std::uint64_t limit_bytes, std::optional<std::uint64_t> budget_bytes) {
  auto& current = arena();
  const nb::gil_scoped_release release;
  if (current.paging_problem().empty()) {
    faults_refused = !serve_faults(current);
    if (faults_refused) throw std::runtime_error(kFaultsRefused);
  }
  current.set_limits(limit_bytes, budget(budget_bytes));
  set_active(true);
}

void deactivate() {
  auto& current = arena();
  const nb::gil_scoped_release release;
  set_active(false);
  current.set_limits(kUnlimited, kUnlimited);
  current.trim();
}

nb::object paging_unavailable() {
  const auto& problem = arena().paging_problem();
  if (problem.empty() && faults_refused) return nb::str(kFaultsRefused);
  if (problem.empty()) return nb::none();
  return nb::str(problem.c_str());
}

bool set_swap_file(Handle direct, std::optional<Handle> buffered, std::size_t capacity_bytes, std::size_t begin) {
  if (buffered && is_namespace(*buffered) && !nvme::prepare_to_wait())
    throw std::runtime_error("the system refuses the threads that read namespaces");
  return arena().set_swap_file(direct, buffered.value_or(-1), capacity_bytes, begin);
}

using Segments = std::vector<std::tuple<Handle, std::uint64_t, std::size_t, std::size_t>>;

std::vector<Segment> parts_of(const Segments& segments) {
  std::vector<Segment> parts;
  parts.reserve(segments.size());
  for (const auto& [file, file_offset, begin, size_bytes] : segments)
    parts.push_back({file, file_offset, begin, size_bytes});
  return parts;
}

bool leave(std::uintptr_t address, const Segments& segments, const Packing& packing) {
  int error = 0;
  const auto answer = arena().leave(pointer(address), parts_of(segments), &error, packing);
  if (answer == Answer::kError && error == EINVAL)
    throw std::invalid_argument("the segments do not hold all bytes of the block, or lie outside of it");
  return check(answer, address, error);
}

// A packed copy of a block, kept while it is written.
struct Packed {
  std::shared_ptr<const Copy> copy;

  explicit Packed(std::shared_ptr<const Copy> made) : copy(std::move(made)) {}
  Packed(Packed&&) = default;
  Packed(const Packed&) = delete;
  ~Packed() {
    if (copy) arena().let_go(std::move(copy));
  }
};

std::optional<Packed> pack_block(std::uintptr_t address, Codec codec, std::size_t itemsize) {
  auto& current = arena();
  const nb::gil_scoped_release release;
  auto copy = current.pack(pointer(address), codec, itemsize);
  if (!copy) return std::nullopt;
  return Packed(std::move(copy));
}

bool leave_packed(std::uintptr_t address, const Packed& packed) {
  return checked(address, [&](void* block, int* error) { return arena().leave_packed(block, packed.copy, error); });
}

bool packed_written(std::uintptr_t address, const Packed& packed, const Segments& segments, bool keeps) {
  const auto answer = arena().packed_written(pointer(address), packed.copy, parts_of(segments), keeps);
  return check(answer, address, EINVAL);
}

std::uintptr_t stage(std::uintptr_t address, bool packed) {
  char* staging = nullptr;
  check(arena().stage(pointer(address), packed, &staging), address);
  return reinterpret_cast<std::uintptr_t>(staging);
}

// True for kYes and false for kNo, of what is staged at this address.
bool check_staged(Answer answer, std::uintptr_t staging, int error = 0) {
  if (answer == Answer::kUnknown)
    throw std::invalid_argument("nothing is staged at address " + std::to_string(staging) + ": call arena_stage first");
  if (answer == Answer::kError) raise_os_error(error);
  return answer == Answer::kYes;
}

std::optional<bool> arrive(std::uintptr_t staging, bool guard) {
  int error = 0;
  const auto answer = arena().arrive(static_cast<char*>(pointer(staging)), guard, &error);
  if (answer == Answer::kAsk) return std::nullopt;
  return check_staged(answer, staging, error);
}

std::uint64_t lend(std::uintptr_t address, bool guards) {
  std::uint64_t loan = 0;
  if (guards)
    check(arena().guard(pointer(address), &loan), address);
  else if ((loan = arena().lend(pointer(address))) == 0)
    check(Answer::kUnknown, address);
  return loan;
}

bool hold(std::uintptr_t address, int change, bool writable) {
  auto& current = arena();
  int error = 0;
  bool known = false;
  {
    const nb::gil_scoped_release release;
    known = current.hold(pointer(address), change, writable, &error);
  }
  if (error != 0) raise_os_error(error);
  return known;
}

const char* state(std::uintptr_t address) {
  Arena::State state{};
  check(arena().state(pointer(address), &state), address);
  switch (state) {
    case Arena::State::kIn: return "in";
    case Arena::State::kGuarded: return "guarded";
    case Arena::State::kStaged: return "staged";
    case Arena::State::kDropped: return "dropped";
    case Arena::State::kOut: break;
  }
  return "out";
}

// PyGILState_Check is in no limited interface.
bool is_held() {
  static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check != nullptr && check() != 0;
}

constexpr Interpreter kPython{is_held, [] { return static_cast<void*>(PyEval_SaveThread()); },
                              [](void* held) { PyEval_RestoreThread(static_cast<PyThreadState*>(held)); }};

void compute_dropped(bool computes) {
  is_held();  // finds its function
  set_interpreter(computes ? &kPython : nullptr);
}

nb::object wait_for_question(double seconds) {
  std::optional<OwnerQuestion> question;
  {
    const nb::gil_scoped_release release;
    question = next_question(seconds);
  }
  if (!question) return nb::none();
  return nb::make_tuple(question->number, reinterpret_cast<std::uintptr_t>(question->address), question->is_write,
                        static_cast<std::uintptr_t>(question->asker));
}

bool take(std::uintptr_t address, std::uintptr_t from) {
  auto& current = arena();
  return checked(address, [&](void* block, int* error) {
    const nb::gil_scoped_release release;
    return current.take(block, pointer(from), error);
  });
}

void keep_for(std::uintptr_t address, int change) {
  checked(address, [&](void* block, int* error) { return arena().keep_for(block, change, error); });
}

nb::list events() {
  nb::list found;
  for (const auto& [address, event] : arena().events())
    found.append(nb::make_tuple(address, event == Block::Event::kOut ? "out" : "in"));
  return found;
}

}  // namespace

std::size_t touch_blocks(std::span<const std::uintptr_t> addresses) {
  auto& current = arena();
  std::size_t blocks_out = 0;
  const auto events = current.touch(addresses, &blocks_out);
  if (blocks_out == 0) return events;
  int error = 0;
  {
    const nb::gil_scoped_release release;
    error = current.bring_in_moved(addresses);
  }
  if (error != 0) raise_os_error(error);
  return current.events_pending();
}

void bind_arena(nb::module_& module) {
  nb::class_<ArenaStats>(module, "ArenaStats", "Bytes an arena holds, and held at most since the last reset.")
      .def_ro("in_use_bytes", &ArenaStats::in_use_bytes)
      .def_ro("new_bytes", &ArenaStats::new_bytes)
      .def_ro("peak_new_bytes", &ArenaStats::peak_new_bytes)
      .def_ro("resident_bytes", &ArenaStats::resident_bytes)
      .def_ro("peak_resident_bytes", &ArenaStats::peak_resident_bytes)
      .def_ro("limit_bytes", &ArenaStats::limit_bytes)
      .def_ro("serial", &ArenaStats::serial)
      .def_ro("purged_bytes", &ArenaStats::purged_bytes)
      .def_ro("over_limit_bytes", &ArenaStats::over_limit_bytes)
      .def_prop_ro("budget_bytes",
                   [](const ArenaStats& stats) -> std::optional<std::uint64_t> {
                     if (stats.budget_bytes == kUnlimited) return std::nullopt;
                     return stats.budget_bytes;
                   })
      .def_ro("in_memory_bytes", &ArenaStats::in_memory_bytes)
      .def_ro("foreign_bytes", &ArenaStats::foreign_bytes)
      .def_ro("peak_in_memory_bytes", &ArenaStats::peak_in_memory_bytes)
      .def_ro("out_bytes", &ArenaStats::out_bytes)
      .def_ro("swap_used_bytes", &ArenaStats::swap_used_bytes)
      .def_ro("faults", &ArenaStats::faults)
      .def_ro("swapped_out_bytes", &ArenaStats::swapped_out_bytes)
      .def_ro("swapped_in_bytes", &ArenaStats::swapped_in_bytes)
      .def_ro("refused_bytes", &ArenaStats::refused_bytes)
      .def_ro("refused_at_bytes", &ArenaStats::refused_at_bytes)
      .def_ro("write_error", &ArenaStats::write_error)
      .def_ro("system_refused_bytes", &ArenaStats::system_refused_bytes)
      .def_ro("over_budget_bytes", &ArenaStats::over_budget_bytes);

  module.def(
      "arena_install",
      [](const std::string& suffix, bool through_torch) { return install_hooks(suffix, through_torch); },
      nb::arg("library_suffix"), nb::arg("through_torch") = false,
      nb::sig("def arena_install(library_suffix: str, through_torch: bool = False) -> bool"));
  module.def("arena_paging_unavailable", &paging_unavailable,
             nb::sig("def arena_paging_unavailable() -> str | None"));
  module.def("arena_activate", &activate, nb::arg("limit_bytes"), nb::arg("budget_bytes") = nb::none());
  module.def("arena_deactivate", &deactivate);
  module.def(
      "arena_set_limit",
      [](std::uint64_t limit_bytes, std::optional<std::uint64_t> budget_bytes) {
        arena().set_limits(limit_bytes, budget(budget_bytes));
      },
      nb::arg("limit_bytes"), nb::arg("budget_bytes") = nb::none());
  module.def("arena_disown_all", [] { arena().disown_all(); });
  module.def("arena_own_all", [] { arena().own_all(); });
  module.def("arena_own", [](std::uintptr_t address) { return arena().own(pointer(address)); }, nb::arg("address"));
  module.def("arena_trim", [] { arena().trim(); }, nb::call_guard<nb::gil_scoped_release>());
  module.def("arena_reset_peak", [] { arena().reset_peak(); });
  module.def("arena_stats", [] { return arena().stats(); });
  module.def("arena_block", &find_block, nb::arg("address"),
             nb::sig("def arena_block(address: int) -> tuple[int, int, int] | None"));
  module.def("arena_swap_file", &set_swap_file, nb::arg("fd_direct"), nb::arg("fd_buffered").none(),
             nb::arg("capacity_bytes"), nb::arg("begin") = 0);
  module.def(
      "arena_touch", [](const std::vector<std::uintptr_t>& addresses) { return touch_blocks(addresses); },
      nb::arg("addresses"), nb::sig("def arena_touch(addresses: list[int]) -> int"));
  module.def("arena_kernel_over", [] { arena().kernel_over(); });
  module.def("arena_bring_in_all", [] {
    auto& current = arena();
    int error = 0;
    {
      const nb::gil_scoped_release release;
      error = current.bring_in_all();
    }
    if (error != 0) raise_os_error(error);
  });
  module.def(
      "arena_hold",
      [](std::uintptr_t address, int change, bool writable) {
        return writable ? hold(address, change, true) : arena().hold(pointer(address), change);
      },
      nb::arg("address"), nb::arg("change"), nb::arg("writable") = false);
  module.def("arena_lend", &lend, nb::arg("address"), nb::arg("guards") = false);
  module.def("arena_lent_back", [](std::uint64_t loan) { return arena().lent_back(loan); }, nb::arg("loan"));
  module.def(
      "arena_unguard", [](std::uintptr_t address) { without_gil(&Arena::unguard, address); }, nb::arg("address"));
  module.def(
      "arena_written",
      [](std::uintptr_t address) { return check(arena().written(pointer(address)), address); },
      nb::arg("address"));
  module.def("arena_leave", &leave, nb::arg("address"), nb::arg("segments"),
             nb::arg("packing") = Packing{});
  nb::class_<Packed>(module, "ArenaPacked", "A packed copy of a block in memory: whole pages, which it ends with.")
      .def_prop_ro("address",
                   [](const Packed& self) {
                     return reinterpret_cast<std::uintptr_t>(arena().packed_address(*self.copy));
                   })
      .def_prop_ro("packing", [](const Packed& self) { return self.copy->packing; });
  module.def("arena_pack", &pack_block, nb::arg("address"), nb::arg("codec"), nb::arg("itemsize"),
             nb::sig("def arena_pack(address: int, codec: Codec, itemsize: int) -> ArenaPacked | None"));
  module.def("arena_leave_packed", &leave_packed, nb::arg("address"), nb::arg("packed"));
  module.def("arena_packed_written", &packed_written, nb::arg("address"), nb::arg("packed"), nb::arg("segments"),
             nb::arg("keeps"));
  module.def(
      "arena_drop_packed",
      [](std::uintptr_t address) { return check(arena().drop_packed(pointer(address)), address); },
      nb::arg("address"));
  module.def("arena_stage", &stage, nb::arg("address"), nb::arg("packed") = false);
  module.def("arena_arrive", &arrive, nb::arg("staging"), nb::arg("guard") = true);
  module.def(
      "arena_unstage",
      [](std::uintptr_t staging) { check_staged(arena().unstage(static_cast<char*>(pointer(staging))), staging); },
      nb::arg("staging"));
  module.def(
      "arena_abandon",
      [](std::uintptr_t staging) { check_staged(arena().abandon(static_cast<char*>(pointer(staging))), staging); },
      nb::arg("staging"));
  module.def(
      "arena_bring_in", [](std::uintptr_t address) { without_gil(&Arena::bring_in, address); },
      nb::arg("address"));
  module.def("arena_state", &state, nb::arg("address"));
  module.def(
      "arena_drop",
      [](std::uintptr_t address) {
        const auto answer = arena().drop(pointer(address));
        return check(answer, address, errno);
      },
      nb::arg("address"));
  module.def("arena_take", &take, nb::arg("address"), nb::arg("source"));
  module.def("arena_keep_for", &keep_for, nb::arg("address"), nb::arg("change"));
  module.def("arena_compute_dropped", &compute_dropped, nb::arg("computes"));
  module.def("arena_wait_for_fault", &wait_for_question, nb::arg("seconds"),
             nb::sig("def arena_wait_for_fault(seconds: float) -> tuple[int, int, bool, int] | None"));
  module.def("arena_end_fault", &answer_question, nb::arg("number"), nb::arg("done"));
  module.def(
      "arena_make_room",
      [](std::size_t size_bytes, const std::vector<std::uintptr_t>& pinned) {
        auto& current = arena();
        const nb::gil_scoped_release release;
        return current.make_room(size_bytes, pinned);
      },
      nb::arg("size_bytes"), nb::arg("pinned"),
      nb::sig("def arena_make_room(size_bytes: int, pinned: list[int]) -> bool"));
  module.def("arena_events", &events, nb::sig("def arena_events() -> list[tuple[int, typing.Literal['out', 'in']]]"));
  module.def("arena_own_faults", &own_faults);
  module.def("arena_leave_faults", &leave_faults, nb::call_guard<nb::gil_scoped_release>());
  module.def("arena_set_fault_timeout", &set_fault_timeout, nb::arg("seconds"));
}

}  // namespace penstock
