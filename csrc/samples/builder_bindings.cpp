// What Python sees of the sample store's builder.
#include <nanobind/nanobind.h>

#include "bindings.hpp"

namespace nb = nanobind;

namespace penstock {

void bind_sample_builder(nb::module_& module) { (void)module; }

}  // namespace penstock
