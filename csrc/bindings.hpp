// What each part adds to penstock._native.
#pragma once

#include <nanobind/nanobind.h>

namespace penstock {

void bind_checksum(nanobind::module_& module);
void bind_planning(nanobind::module_& module);
void bind_search(nanobind::module_& module);
void bind_sample_builder(nanobind::module_& module);
void bind_sample_names(nanobind::module_& module);
void bind_sample_order(nanobind::module_& module);

// Linux only.
void bind_arena(nanobind::module_& module);
void bind_sample_reader(nanobind::module_& module);
void bind_transfers(nanobind::module_& module);

}  // namespace penstock
