// What Python sees of the sample store's order.
#include <nanobind/nanobind.h>

#include "bindings.hpp"

namespace nb = nanobind;

namespace penstock {

void bind_sample_order(nb::module_& module) { (void)module; }

}  // namespace penstock
