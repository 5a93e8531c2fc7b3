// What each part adds to penstock._native.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace penstock {

void bind_checksum(nanobind::module_& module);
void bind_codecs(nanobind::module_& module);
void bind_descriptors(nanobind::module_& module);
void bind_planning(nanobind::module_& module);
void bind_runtime(nanobind::module_& module);
void bind_sample_names(nanobind::module_& module);
void bind_sample_order(nanobind::module_& module);

// Linux only.
void bind_arena(nanobind::module_& module);
void bind_nvme(nanobind::module_& module);
void bind_sample_reader(nanobind::module_& module);
void bind_transfers(nanobind::module_& module);

// A kind of exception of this module.
PyObject* add_exception(nanobind::module_& module, const char* name, const char* doc);

// A kernel begins that uses the arena's blocks at these addresses; they come back where the arena took them. Gives
// the number of events pending.
std::size_t touch_blocks(std::span<const std::uintptr_t> addresses);

}  // namespace penstock
