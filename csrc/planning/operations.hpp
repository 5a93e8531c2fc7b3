// What the compute stream does before a kernel, in order: compress, expand, recompute. After each kernel,
// and before it, it starts copies.
#pragma once

#include <algorithm>
#include <vector>

#include "model.hpp"

namespace penstock::planning {

enum Kind : std::uint8_t { kRun, kCompress, kExpand, kRecomputation, kStartCopies };

struct Operation {
  Index kernel;
  Kind kind;
  Index row;

  bool operator<(const Operation& other) const {
    if (kernel != other.kernel) return kernel < other.kernel;
    if (kind != other.kind) return kind < other.kind;
    return row < other.row;
  }
};

inline std::vector<Operation> operations_of(const Trace& trace, const Intervals& rows, const Copies& copies) {
  std::vector<Operation> operations;
  for (Index r = 0; r < rows.count; ++r) {
    const auto action = rows.action[r];
    if (action == kRecompute) {
      operations.push_back({rows.end[r] % trace.kernels, kRecomputation, r});
    } else if (is_csr(action)) {
      operations.push_back({rows.end[r] % trace.kernels, kExpand, r});
      if (copies.source[at(r)] == r)
        operations.push_back({rows.begin[r] % trace.kernels, kCompress, r});
    }
  }
  std::sort(operations.begin(), operations.end());
  return operations;
}

}  // namespace penstock::planning
