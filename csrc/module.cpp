// penstock._native: what Python sees of the C++ parts.
#include "bindings.hpp"

NB_MODULE(_native, module) {
  // What a program leaves open ends with its process: no leak worth a message.
  nanobind::set_leak_warnings(false);
  module.doc() = "The C++ parts of penstock.";
  penstock::bind_checksum(module);
  penstock::bind_codecs(module);
  penstock::bind_planning(module);
  penstock::bind_runtime(module);
  penstock::bind_sample_builder(module);
  penstock::bind_sample_names(module);
  penstock::bind_sample_order(module);
#ifdef __linux__
  penstock::bind_arena(module);
  penstock::bind_nvme(module);
  penstock::bind_sample_reader(module);
#endif
  penstock::bind_transfers(module);
}
