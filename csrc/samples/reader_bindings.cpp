// What Python sees of the sample store's reader.
#include <nanobind/nanobind.h>

#include "bindings.hpp"

namespace nb = nanobind;

namespace penstock {

void bind_sample_reader(nb::module_& module) { (void)module; }

}  // namespace penstock
