// Device memory at each kernel if every copy took no time: the plan checker's rule.
#include <algorithm>

#include "model.hpp"

namespace penstock::planning {

namespace {

// Whether the tensor is away during the kernel: as it is until its prefetch, otherwise until its end.
bool is_away(const Trace& trace, const Intervals& rows, const Lists& rows_of, Index tensor, Index kernel) {
  for (const auto* row = rows_of.begin(tensor); row != rows_of.end(tensor); ++row) {
    const auto until = is_raw(rows.action[*row]) ? rows.prefetch_at[*row] : rows.end[*row];
    for (const auto moment : {kernel, kernel + trace.kernels})
      if (rows.begin[*row] <= moment && moment < until) return true;
  }
  return false;
}

// What recomputing a tensor at a kernel needs beside its own bytes.
Bytes beside(const Trace& trace, const Intervals& rows, const Lists& rows_of, const Kernels& kernels,
             Index tensor, Index kernel) {
  const auto producer = trace.producer[at(tensor)];
  auto extra = kernels.workspace[producer];
  for (const auto* other = trace.outputs.begin(producer); other != trace.outputs.end(producer); ++other) {
    if (*other == tensor) continue;
    const bool alive = trace.birth[at(*other)] <= kernel && kernel < trace.death[at(*other)];
    if (!alive || is_away(trace, rows, rows_of, *other, kernel)) extra += trace.bytes[at(*other)];
  }
  return extra;
}

}  // namespace

std::vector<Bytes> static_bytes(const Trace& trace, const Intervals& rows, const Kernels& kernels) {
  check(trace, rows);
  const auto K = at(trace.kernels);
  std::vector<Bytes> change(2 * K + 2), leaving(K), largest(K), most(K);
  Lists rows_of;
  bool recomputes = false;
  for (Index r = 0; r < rows.count; ++r) {
    const auto action = rows.action[r];
    if (action == kKeep) continue;
    const auto t = at(rows.tensor[r]);
    change[at(rows.begin[r])] -= trace.bytes[t];
    change[at(is_raw(action) ? rows.prefetch_at[r] : rows.end[r])] += trace.bytes[t];
    recomputes = recomputes || action == kRecompute;
    if (!is_csr(action)) continue;
    change[at(rows.prefetch_at[r])] += trace.compressed[t];
    change[at(rows.end[r]) + 1] -= trace.compressed[t];
    const auto begin = at(rows.begin[r]) % K;
    leaving[begin] += trace.bytes[t];
    largest[begin] = std::max(largest[begin], trace.compressed[t]);
  }
  if (recomputes) {
    group(trace, rows, rows_of);
    for (Index r = 0; r < rows.count; ++r) {
      if (rows.action[r] != kRecompute) continue;
      const auto kernel = rows.end[r] % trace.kernels;
      const auto extra = beside(trace, rows, rows_of, kernels, rows.tensor[r], kernel);
      most[at(kernel)] = std::max(most[at(kernel)], extra);
    }
  }
  std::vector<Bytes> result(K);
  Bytes sum = 0;
  for (std::size_t k = 0; k < 2 * K + 1; ++k) {
    sum += change[k];
    result[k % K] += sum;
  }
  // Operations come before the kernel's outputs and its workspace take memory.
  for (std::size_t k = 0; k < K; ++k) {
    const auto held = result[k] + trace.live[k];
    const auto extra = std::max(leaving[k] + largest[k], most[k]);
    result[k] = std::max(held + kernels.workspace[k], held - trace.births[k] + extra);
  }
  return result;
}

}  // namespace penstock::planning
