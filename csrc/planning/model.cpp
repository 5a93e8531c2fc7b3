#include "model.hpp"

#include <limits>
#include <string>

namespace penstock::planning {

void Trace::prepare() {
  const auto count = at(kernels);
  std::vector<Bytes> change(count + 1);
  births.assign(count + 1, 0);
  deaths.assign(count + 1, 0);
  initial = 0;
  dying.starts.assign(count + 2, 0);
  for (std::size_t t = 0; t < bytes.size(); ++t) {
    const auto born = at(birth[t]), dead = at(death[t]);
    if (born >= dead) continue;  // it takes no memory
    change[born] += bytes[t];
    change[dead] -= bytes[t];
    if (initially_alive(static_cast<Index>(t))) {
      initial += bytes[t];
      if (dead == count) continue;  // and alive for good
    } else {
      births[born] += bytes[t];
    }
    deaths[dead] += bytes[t];
    ++dying.starts[dead + 1];
  }
  for (std::size_t k = 0; k <= count; ++k) dying.starts[k + 1] += dying.starts[k];
  dying.values.assign(at(dying.starts.back()), 0);
  auto next = dying.starts;
  for (std::size_t t = 0; t < bytes.size(); ++t) {
    const auto dead = at(death[t]);
    if (at(birth[t]) >= dead) continue;
    if (dead == count && initially_alive(static_cast<Index>(t))) continue;
    dying.values[at(next[dead]++)] = static_cast<Index>(t);
  }
  births.pop_back();
  live.assign(count, 0);
  Bytes sum = 0;
  for (std::size_t k = 0; k < count; ++k) live[k] = sum += change[k];
}

namespace {

void check(const Lists& lists, Index count, Index limit) {
  require(lists.starts.size() == at(count) + 1 && lists.starts.front() == 0 &&
              std::is_sorted(lists.starts.begin(), lists.starts.end()) &&
              at(lists.starts.back()) == lists.values.size(),
          "lists do not fit their starts");
  require(all_within(lists.values, 0, limit - 1), "a list has an entry that the trace lacks");
}

}  // namespace

void check(const Trace& trace) {
  const auto T = trace.bytes.size();
  require(trace.kernels >= 0, "the number of kernels is negative");
  for (const auto* column : {&trace.compressed, &trace.birth, &trace.death, &trace.producer})
    require(column->size() == T, "columns of tensors differ in length");
  require(trace.persistent.size() == T, "columns of tensors differ in length");
  for (const auto* column : {&trace.bytes, &trace.compressed})
    require(all_within(*column, 0, std::numeric_limits<Index>::max()), "a tensor has a negative size");
  for (const auto* column : {&trace.birth, &trace.death})
    require(all_within(*column, 0, trace.kernels), "a tensor is born or dies at a kernel that the trace lacks");
  require(all_within(trace.producer, -1, trace.kernels - 1), "a tensor is made by a kernel that the trace lacks");
  check(trace.outputs, trace.kernels, trace.tensors);
  check(trace.writers, trace.tensors, trace.kernels);
}

void check(const Trace& trace, const Machine& machine) {
  for (const auto* times : {&machine.compress_s, &machine.expand_s})
    require(times->size() == trace.bytes.size(), "codec times of another number of tensors");
  for (const auto* columns : {&machine.rate, &machine.rate_compressed})
    for (const auto& rates : *columns)
      require(rates.size() == trace.bytes.size(), "rates of another number of tensors");
}

void check(const Trace& trace, const Kept& kept) {
  require(kept.begin.size() == kept.tensor.size() && kept.end.size() == kept.tensor.size(),
          "columns of what is kept differ in length");
  require(all_within(kept.tensor, 0, trace.tensors - 1), "what is kept is a tensor that the trace lacks");
  for (std::size_t i = 0; i < kept.tensor.size(); ++i)
    require(0 <= kept.begin[i] && kept.begin[i] < kept.end[i] && kept.end[i] <= trace.kernels,
            "what is kept ends before it begins, or at a kernel that the trace lacks");
}

void check(const Trace& trace, const Intervals& rows) {
  const auto K = trace.kernels;
  for (Index r = 0; r < rows.count; ++r) {
    const auto action = rows.action[r];
    if (action == kKeep) continue;
    const auto fail = [r](const char* what) {
      throw std::invalid_argument("row " + std::to_string(r) + " " + what);
    };
    if (action < kKeep || action > kRecompute) fail("leaves by no known action");
    if (rows.tensor[r] < 0 || rows.tensor[r] >= trace.tensors) fail("names a tensor that the trace lacks");
    if (rows.begin[r] < 0 || rows.begin[r] > K) fail("begins at a kernel that the trace lacks");
    if (rows.end[r] < rows.begin[r] || rows.end[r] >= 2 * K) fail("ends at a kernel that the trace lacks");
    if (action == kRecompute) {
      if (trace.producer[at(rows.tensor[r])] < 0)
        fail("recomputes a tensor that no kernel can recompute");
      continue;
    }
    if (rows.after[r] < -1 || rows.after[r] >= K) fail("is copied after a kernel that the trace lacks");
    if (rows.prefetch_at[r] < 0 || rows.prefetch_at[r] >= 2 * K)
      fail("is prefetched at a kernel that the trace lacks");
  }
}

}  // namespace penstock::planning
