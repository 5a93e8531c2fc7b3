// Which copies have to be written, which serve again, and the room they take on their tiers.
#include <algorithm>

#include "model.hpp"

namespace penstock::planning {

namespace {

// Whether a kernel w with low < w < high writes the tensor.
bool written_between(const Trace& trace, Index tensor, Index low, Index high) {
  const auto* last = trace.writers.end(tensor);
  const auto* found = std::upper_bound(trace.writers.begin(tensor), last, low);
  return found != last && *found < high;
}

// Finds the copies that serve `list`: the rows of one tensor with the same action, by `begin`.
// `repeats`: the iteration before has left its copies.
void serve(const Trace& trace, const Intervals& rows, Index tensor, const std::vector<Index>& list,
           bool repeats, Copies& copies) {
  const auto K = trace.kernels;
  const auto head = list.front(), tail = list.back();
  Index earlier = -1;
  for (const auto row : list) {
    const bool clean = earlier >= 0 && !written_between(trace, tensor, rows.after[earlier], rows.begin[row]);
    copies.source[at(row)] = clean ? copies.source[at(earlier)] : row;
    earlier = row;
  }
  const auto newest = copies.source[at(tail)];
  const bool around = repeats && trace.persistent[at(tensor)] != 0 &&
                      !written_between(trace, tensor, rows.after[tail], K) &&
                      !written_between(trace, tensor, -1, rows.begin[head]);
  const bool always = around && newest == head;  // nobody writes the tensor
  for (const auto row : list) {
    auto& source = copies.source[at(row)];
    const bool before = around && source == head;  // served by the copy of the iteration before
    if (before) source = always ? -1 : newest;
    const auto slot = always ? head : source;
    copies.slot[at(row)] = slot;
    auto &since = copies.since[at(slot)], &until = copies.until[at(slot)];
    if (always) {
      until = K;
    } else {
      // The copy is still needed when kernel `end` waits for it.
      const auto served = rows.end[row] + (before ? K : 0) + 1;
      since = rows.after[slot] + 1;
      if (served > until) {
        until = served;
        copies.closes[at(slot)] = row;
      }
      if (served > K) copies.carried[at(slot)] = 1;
    }
  }
}

}  // namespace

void group(const Trace& trace, const Intervals& rows, Lists& grouped) {
  std::vector<Index> starts(at(trace.kernels) + 2);
  for (Index r = 0; r < rows.count; ++r)
    if (rows.action[r] != kKeep) ++starts[at(rows.begin[r]) + 1];
  for (std::size_t k = 1; k < starts.size(); ++k) starts[k] += starts[k - 1];
  std::vector<Index> by_begin(at(starts.back()));
  for (Index r = 0; r < rows.count; ++r)
    if (rows.action[r] != kKeep)
      by_begin[at(starts[static_cast<std::size_t>(rows.begin[r])]++)] = r;

  grouped.starts.assign(at(trace.tensors) + 2, 0);
  for (const auto r : by_begin) ++grouped.starts[at(rows.tensor[r]) + 2];
  for (std::size_t t = 2; t < grouped.starts.size(); ++t) grouped.starts[t] += grouped.starts[t - 1];
  grouped.values.resize(by_begin.size());
  // Each start moves to where the next list begins: shifted by one, the lists are in place at the end.
  for (const auto r : by_begin)
    grouped.values[at(grouped.starts[static_cast<std::size_t>(rows.tensor[r]) + 1]++)] =
        r;
  grouped.starts.pop_back();
}

void find_copies(const Trace& trace, const Intervals& rows, Copies& copies) {
  const auto count = at(rows.count);
  group(trace, rows, copies.rows_of);
  for (auto* column : {&copies.source, &copies.slot, &copies.closes}) column->assign(count, -1);
  for (auto* column : {&copies.since, &copies.until}) column->assign(count, 0);
  copies.carried.assign(count, 0);
  bool repeats = false;
  for (Index r = 0; r < rows.count; ++r)
    repeats = repeats || (is_moved(rows.action[r]) && rows.end[r] >= trace.kernels);

  std::array<std::vector<Index>, kRecompute> alike;  // one tensor's rows, by action
  for (Index tensor = 0; tensor < trace.tensors; ++tensor) {
    const auto *first = copies.rows_of.begin(tensor), *last = copies.rows_of.end(tensor);
    if (first == last) continue;
    for (auto& list : alike) list.clear();
    for (const auto* row = first; row != last; ++row)
      if (is_moved(rows.action[*row])) alike[static_cast<std::size_t>(rows.action[*row])].push_back(*row);
    for (const auto& list : alike)
      if (!list.empty()) serve(trace, rows, tensor, list, repeats, copies);
  }
}

std::array<std::vector<Bytes>, 2> tier_bytes(const Trace& trace, const Intervals& rows) {
  check(trace, rows);
  Copies copies;
  find_copies(trace, rows, copies);
  const auto K = at(trace.kernels);
  std::array<std::vector<Bytes>, 2> result;
  for (auto& tier : result) tier.assign(3 * K + 2, 0);
  for (Index r = 0; r < rows.count; ++r) {
    if (copies.slot[at(r)] != r) continue;
    const auto t = at(rows.tensor[r]);
    const auto size = is_csr(rows.action[r]) ? trace.compressed[t] : trace.bytes[t];
    const auto since = copies.since[at(r)];
    const auto until = std::max(since, copies.until[at(r)]);
    auto& tier = result[is_disk(rows.action[r]) ? 1 : 0];
    tier[at(since)] += size;
    tier[at(until)] -= size;
  }
  for (auto& tier : result) {
    for (std::size_t k = 1; k < tier.size(); ++k) tier[k] += tier[k - 1];
    for (std::size_t k = K; k < 3 * K; ++k) tier[k % K] += tier[k];
    tier.resize(K);
  }
  return result;
}

}  // namespace penstock::planning
