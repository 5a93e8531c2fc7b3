// penstock._native: what Python sees of the C++ parts.
#include <string>

#include "bindings.hpp"

#ifdef PENSTOCK_SEAMS
#include "random_delays.hpp"
#endif

PyObject* penstock::add_exception(nanobind::module_& module, const char* name, const char* doc) {
  const auto full_name = std::string(nanobind::cast<nanobind::str>(module.attr("__name__")).c_str()) + "." + name;
  auto* type = PyErr_NewExceptionWithDoc(full_name.c_str(), doc, nullptr, nullptr);
  if (type == nullptr) throw nanobind::python_error();
  module.attr(name) = nanobind::borrow(type);
  return type;
}

NB_MODULE(_native, module) {
  // What a program leaves open ends with its process: no leak worth a message.
  nanobind::set_leak_warnings(false);
  module.doc() = "The C++ parts of penstock.";
  penstock::bind_checksum(module);
  penstock::bind_codecs(module);
  penstock::bind_descriptors(module);
  penstock::bind_planning(module);
  penstock::bind_runtime(module);
  penstock::bind_sample_names(module);
  penstock::bind_sample_order(module);
#ifdef __linux__
  penstock::bind_arena(module);
  penstock::bind_nvme(module);
  penstock::bind_sample_reader(module);
#endif
  penstock::bind_transfers(module);
#ifdef PENSTOCK_SEAMS
  module.def("delay_at_random", &penstock::delay_at_random, nanobind::arg("seed"), nanobind::arg("share") = 0.05,
             nanobind::arg("longest_us") = 500);
  module.def("delays_so_far", &penstock::delays_so_far);
#endif
}
