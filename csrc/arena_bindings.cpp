// What Python sees of the arena.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "bindings.hpp"
#include "hooks.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

Arena& arena() {
  auto* arena = installed_arena();
  if (arena == nullptr) throw std::runtime_error("the arena is not installed: call arena_install first");
  return *arena;
}

nb::object find_block(std::uintptr_t address) {
  const auto block = arena().block(reinterpret_cast<const void*>(address));
  if (!block) return nb::none();
  return nb::make_tuple(block->start, block->capacity_bytes, block->serial);
}

}  // namespace

void bind_arena(nb::module_& module) {
  nb::class_<ArenaStats>(module, "ArenaStats", "Bytes an arena holds, and held at most since the last reset.")
      .def_ro("in_use_bytes", &ArenaStats::in_use_bytes)
      .def_ro("peak_in_use_bytes", &ArenaStats::peak_in_use_bytes)
      .def_ro("resident_bytes", &ArenaStats::resident_bytes)
      .def_ro("peak_resident_bytes", &ArenaStats::peak_resident_bytes)
      .def_ro("limit_bytes", &ArenaStats::limit_bytes)
      .def_ro("serial", &ArenaStats::serial)
      .def_ro("purged_bytes", &ArenaStats::purged_bytes)
      .def_ro("over_limit_bytes", &ArenaStats::over_limit_bytes);

  module.def("arena_install", [](const std::string& suffix) { return install_hooks(suffix); },
             nb::arg("library_suffix"), nb::sig("def arena_install(library_suffix: str) -> bool"));
  module.def(
      "arena_activate",
      [](std::size_t limit_bytes) {
        arena().set_limit(limit_bytes);
        set_active(true);
      },
      nb::arg("limit_bytes"), nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "arena_deactivate",
      [] {
        auto& current = arena();
        set_active(false);
        current.trim();
      },
      nb::call_guard<nb::gil_scoped_release>());
  module.def("arena_set_limit", [](std::size_t limit_bytes) { arena().set_limit(limit_bytes); },
             nb::arg("limit_bytes"), nb::call_guard<nb::gil_scoped_release>());
  module.def("arena_trim", [] { arena().trim(); }, nb::call_guard<nb::gil_scoped_release>());
  module.def("arena_reset_peak", [] { arena().reset_peak(); });
  module.def("arena_stats", [] { return arena().stats(); });
  module.def("arena_block", &find_block, nb::arg("address"),
             nb::sig("def arena_block(address: int) -> tuple[int, int, int] | None"));
}

}  // namespace penstock
