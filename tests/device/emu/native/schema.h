// What the schema of an operator says, as the fallback needs it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace emu {

struct Operator {
  std::string name;
  bool has_meta;       // it has a kernel that only computes shapes
  bool is_view;        // its results are views of arguments
  bool makes_nothing;  // its results are arguments that it has written
  bool needs_values;   // shapes of results, or what the host gets, depend on data
  bool takes_indices;  // in a list, which may be masks, or on the host
  bool is_random;
  int generator = -1;           // index of the argument
  std::vector<bool> is_written;  // by argument
  std::vector<bool> is_out;
  std::vector<int> returned;  // by result: the argument that it is; -1: it is made
};

const Operator& describe(const c10::OperatorHandle& op);

}  // namespace emu
