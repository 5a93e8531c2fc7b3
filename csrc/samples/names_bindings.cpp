// What Python sees of the sample store's names.
#include <nanobind/nanobind.h>

#include "bindings.hpp"

namespace nb = nanobind;

namespace penstock {

void bind_sample_names(nb::module_& module) { (void)module; }

}  // namespace penstock
