// What the device and the tiers hold if every copy took no time, and which copies have to be written.
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
  const bool always = around && newest == head;  // no kernel writes the tensor
  for (const auto row : list) {
    auto& source = copies.source[at(row)];
    const bool before = around && source == head;  // served by the copy of the iteration before
    if (before) source = always ? -1 : newest;
    const auto slot = always ? head : source;
    copies.slot[at(row)] = slot;
    auto &since = copies.since[at(slot)], &until = copies.until[at(slot)];
    if (always) {
      until = K;
    } else if (rows.is_last(row)) {
      since = rows.after[slot] + 1;  // and nothing asks for it again
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
    repeats = repeats || (is_moved(rows.action[r]) && rows.end[r] >= trace.kernels && !rows.is_last(r));

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

std::array<std::vector<Bytes>, 2> tier_bytes(const Trace& trace, const Intervals& rows, const Copies& copies) {
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
    for (std::size_t k = 0; k < K; ++k) tier[k] += tier[K + k] + tier[2 * K + k];
    tier.resize(K);
  }
  return result;
}

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
  for (std::size_t k = 1; k < 2 * K + 1; ++k) change[k] += change[k - 1];
  for (std::size_t k = 0; k < K; ++k) result[k] = change[k] + change[K + k];
  if (K > 0) result[0] += change[2 * K];
  // Operations come before the kernel's outputs and its workspace take memory.
  for (std::size_t k = 0; k < K; ++k) {
    const auto held = result[k] + trace.live[k];
    const auto extra = std::max(leaving[k] + largest[k], most[k]);
    result[k] = std::max(held + kernels.workspace[k], held - trace.births[k] + extra);
  }
  return result;
}

void carry_out(const Trace& trace, const Kept& kept, const Kernels& kernels, Bytes budget,
               std::array<Bytes, 2> capacity, Rows& rows, Trace& as_run) {
  if (kept.tensor.empty() || (capacity[0] <= 0 && capacity[1] <= 0)) return;
  auto needed = static_bytes(trace, rows.view(), kernels);
  std::vector<Bytes> change(needed.size() + 1);
  for (std::size_t i = 0; i < kept.tensor.size(); ++i) {
    change[at(kept.begin[i])] += trace.bytes[at(kept.tensor[i])];
    change[at(kept.end[i])] -= trace.bytes[at(kept.tensor[i])];
  }
  Bytes sum = 0;
  for (std::size_t k = 0; k < needed.size(); ++k) needed[k] += sum += change[k];

  std::vector<Index> last(trace.bytes.size(), -1);  // by tensor: its row that leaves last
  for (std::size_t r = 0; r < rows.size(); ++r) {
    auto& latest = last[at(rows.tensor[r])];
    if (is_moved(rows.action[r]) && (latest < 0 || rows.after[r] >= rows.after[at(latest)]))
      latest = static_cast<Index>(r);
  }
  std::vector<Bytes> on_host(needed.size());
  if (capacity[0] > 0) {
    Copies copies;
    find_copies(trace, rows.view(), copies);
    on_host = tier_bytes(trace, rows.view(), copies)[0];
  }
  for (std::size_t i = 0; i < kept.tensor.size(); ++i) {
    const auto tensor = kept.tensor[i], begin = kept.begin[i], end = kept.end[i];
    const auto bytes = trace.bytes[at(tensor)];
    const auto most = [&](const std::vector<Bytes>& levels) {
      return *std::max_element(levels.begin() + begin, levels.begin() + end);
    };
    const bool used = trace.birth[at(tensor)] < begin;
    const bool leaves = most(needed) > budget;
    as_run.death[at(tensor)] = used && !leaves ? end : begin;
    if (!leaves) continue;
    const auto latest = last[at(tensor)];
    const bool disk = latest >= 0 ? is_disk(rows.action[at(latest)])
                                  : capacity[1] > 0 && most(on_host) + bytes > capacity[0];
    for (auto k = begin; k < end; ++k) {
      needed[at(k)] -= bytes;
      if (!disk) on_host[at(k)] += bytes;
    }
    rows.add(tensor, begin - 1, begin, begin, begin, disk ? kDisk : kHost);
  }
  as_run.prepare();
}

}  // namespace penstock::planning
