// The compute stream, from kernel to kernel. Rows are eviction intervals; kernels from K on are the next iteration's.
#include "replay.hpp"

#include <utility>

#include "replayer.hpp"

namespace penstock::planning {

namespace {

// Rows by kernel, in the order given.
template <class Kernel>
Lists by_kernel(Index kernels, const std::vector<Index>& rows, Kernel kernel_of) {
  Lists lists;
  lists.starts.assign(at(kernels) + 2, 0);
  for (const auto row : rows) ++lists.starts[at(kernel_of(row)) + 2];
  for (std::size_t k = 2; k < lists.starts.size(); ++k) lists.starts[k] += lists.starts[k - 1];
  lists.values.resize(rows.size());
  for (const auto row : rows) lists.values[at(lists.starts[at(kernel_of(row)) + 1]++)] = row;
  lists.starts.pop_back();
  return lists;
}

}  // namespace

Replayer::Replayer(const Trace& trace, const Machine& machine, const Intervals& rows, const Kernels& kernels,
                   Options options)
    : trace_(trace), machine_(machine), rows_(rows), kernels_(kernels), options_(options), links_(machine) {
  check(trace, rows);
  find_copies(trace, rows, copies_);
  find_operations();
  const auto count = at(rows.count);
  state_.assign(count, kResident);
  written_.assign(count, kNoCopy);
  leaving_.assign(count, -1);
  packed_.assign(count, 0);
  pending_.assign(count, 0);
  needed_.assign(count, 0);
  buffered_.assign(count, 0);
  on_tier_.assign(count, 0);
  ticket_.assign(count, 0);
  held_.assign(at(trace.tensors), 0);
  index_rows();
}

Outcome Replayer::run() {
  const auto K = trace_.kernels;
  outcome_.stall_s.assign(at(K), 0);
  outcome_.start_s.assign(at(K), 0);
  outcome_.cause.assign(at(K), kNone);
  reported_ = !repeats_;
  begin_first();
  for (int iteration = 0; iteration < (repeats_ ? 2 : 1); ++iteration) {
    const bool last = iteration == (repeats_ ? 1 : 0);
    if (repeats_ && last) begin_reported();
    std::size_t operation = 0;
    if (iteration == 0 || repeats_) write_after(-1);
    for (Index kernel = 0; kernel < K; ++kernel) {
      before(kernel, iteration, operation);
      if (outcome_.deadlock && options_.stop_on_deadlock) return std::move(outcome_);
      execute(kernel, last);
    }
  }
  finish();
  return std::move(outcome_);
}

void Replayer::index_rows() {
  const auto K = trace_.kernels;
  std::vector<Index> all, moved, writers, packed;
  for (Index r = 0; r < rows_.count; ++r) {
    const auto action = rows_.action[r];
    if (action == kKeep || rows_.is_last(r)) continue;
    all.push_back(r);
    repeats_ = repeats_ || rows_.end[r] >= K;
    if (!is_moved(action)) continue;
    moved.push_back(r);
    if (is_csr(action))
      packed.push_back(r);
    else if (copies_.source[at(r)] == r)
      writers.push_back(r);
  }
  begins_ = by_kernel(K, all, [&](Index r) { return rows_.begin[r] % K; });
  ends_ = by_kernel(K, moved, [&](Index r) { return rows_.end[r] % K; });
  packed_ends_ = by_kernel(K, packed, [&](Index r) { return rows_.end[r] % K; });
  writes_ = by_kernel(K + 1, writers, [&](Index r) { return rows_.after[r] + 1; });
  // Prefetches issued at the same kernel work in the order in which kernels need them.
  const auto urgency = by_kernel(2 * K, moved, [&](Index r) {
    return std::max<Index>(rows_.end[r] - (rows_.prefetch_at[r] >= K ? K : 0), 0);
  });
  issues_ = by_kernel(K, urgency.values, [&](Index r) { return rows_.prefetch_at[r] % K; });
}

void Replayer::find_operations() {
  for (Index r = 0; r < rows_.count; ++r) {
    const auto action = rows_.action[r];
    if (action == kRecompute) {
      operations_.push_back({rows_.end[r] % trace_.kernels, kRecomputation, r});
    } else if (is_csr(action)) {
      operations_.push_back({rows_.end[r] % trace_.kernels, kExpand, r});
      if (copies_.source[at(r)] == r) operations_.push_back({rows_.begin[r] % trace_.kernels, kCompress, r});
    }
  }
  std::sort(operations_.begin(), operations_.end());
}

void Replayer::begin_first() {
  levels_[0] = trace_.initial;
  for (Index r = 0; r < rows_.count; ++r) {
    const auto action = rows_.action[r];
    if (action == kKeep) continue;
    if (is_moved(action) && copies_.slot[at(r)] == r && (copies_.source[at(r)] < 0 || copies_.carried[at(r)])) {
      written_[at(r)] = kComplete;
      on_tier_[at(r)] = 1;
      levels_[is_disk(action) ? 2 : 1] += stored(r);
    }
    if (rows_.end[r] < trace_.kernels || !trace_.initially_alive(rows_.tensor[r])) continue;
    if (action == kRecompute) {
      state_[at(r)] = kReleased;
      levels_[0] -= raw(r);
    } else if (rows_.prefetch_at[r] >= trace_.kernels) {
      state_[at(r)] = kAway;
      levels_[0] -= raw(r);
    } else if (is_csr(action)) {
      state_[at(r)] = kPacked;
      levels_[0] += packed(r) - raw(r);
    }
  }
  if (reported_) sample_all();
}

void Replayer::begin_reported() {
  reported_ = true;
  origin_s_ = now_s_;
  for (int link = 0; link < kLinks; ++link)
    if (links_.busy(link)) moved_before_[at(link)] = static_cast<Bytes>(links_.moved(link, now_s_));
  sample_all();
}

void Replayer::sample_all() {
  for (int tier = 0; tier < 3; ++tier) {
    outcome_.peak[at(tier)] = levels_[at(tier)];
    if (options_.record) outcome_.samples.push_back({static_cast<std::int8_t>(tier), 0.0, levels_[at(tier)]});
  }
}

void Replayer::before(Index kernel, int iteration, std::size_t& operation) {
  const auto first = operation;
  while (operation < operations_.size() && operations_[operation].kernel == kernel) ++operation;
  const auto allocate = trace_.births[at(kernel)] + kernels_.workspace[kernel];
  plan_needs(first, operation, allocate, kernel);
  advance(now_s_);
  for (const auto* row = begins_.begin(kernel); row != begins_.end(kernel); ++row)
    if (iteration > 0 || rows_.begin[*row] < trace_.kernels) leave(*row);
  auto next = first;
  for (; next < operation && operations_[next].kind == kCompress; ++next) {
    const auto row = operations_[next].row;
    if (state_[at(row)] == kResident && (iteration > 0 || rows_.begin[row] < trace_.kernels))
      compress(row, kernel);
    reserve_ = needs_[next - first + 1];
  }
  for (const auto* row = issues_.begin(kernel); row != issues_.end(kernel); ++row) issue(*row);
  for (const auto* row = ends_.begin(kernel); row != ends_.end(kernel); ++row) demand(*row);
  admit();
  charge_copies();
  for (; next < operation; ++next) {
    restore(operations_[next], kernel);
    reserve_ = needs_[next - first + 1];
  }
  wait(kernel, allocate);
  reserve_ = 0;
  use(0, allocate);
}

void Replayer::plan_needs(std::size_t first, std::size_t last, Bytes allocate, Index kernel) {
  needs_.assign(last - first + 1, 0);
  auto need = needs_.back() = allocate;
  for (auto i = last; i-- > first;) {
    const auto row = operations_[i].row;
    if (operations_[i].kind == kCompress)
      need = std::max(packed(row), packed(row) - raw(row) + need);
    else if (operations_[i].kind == kExpand)
      need = state_[at(row)] == kResident ? need : raw(row) + need;
    else
      need = raw(row) + std::max(beside(row, kernel, true, std::span(operations_).subspan(first, i - first)), need);
    needs_[i - first] = std::max<Bytes>(need, 0);
  }
  reserve_ = needs_.front();
}

void Replayer::leave(Index row) {
  if (state_[at(row)] != kResident) return;
  const auto action = rows_.action[row];
  const auto source = copies_.source[at(row)];
  if (action == kRecompute) {
    state_[at(row)] = kReleased;
    use(0, -raw(row));
  } else if (is_csr(action) && source == row) {
    return;  // compressed first
  } else if (source < 0 || written_[at(source)] == kComplete) {
    state_[at(row)] = kAway;
    use(0, -raw(row));
  } else {
    state_[at(row)] = kLeaving;
    leaving_[at(source)] = row;
    ++freeing_;
  }
}

void Replayer::compress(Index row, Index kernel) {
  wait_for_memory(kernel, packed(row));
  use(0, packed(row));
  work(kCompress, rows_.tensor[row], machine_.compress_s[at(rows_.tensor[row])], raw(row));
  use(0, -raw(row));
  state_[at(row)] = kLeaving;
  packed_[at(row)] = 1;
  leaving_[at(row)] = row;
  ++freeing_;
  write(row);
  dispatch();
}

void Replayer::issue(Index row) {
  auto& state = state_[at(row)];
  if (state == kAway) {
    ask(row);
  } else if (state == kLeaving && is_csr(rows_.action[row]) && !packed_[at(row)]) {
    pending_[at(row)] = 1;  // to come back whole it would need more than a prefetch
  } else if (state == kLeaving) {
    const auto source = copies_.source[at(row)];
    leaving_[at(source)] = -1;
    --freeing_;
    state = packed_[at(row)] ? kPacked : kResident;
    packed_[at(row)] = 0;
    const auto slot = copies_.slot[at(row)];
    if (copies_.closes[at(slot)] == row) {  // no other row needs the copy
      abandon(source);
      vacate(slot);
    }
  }
}

void Replayer::demand(Index row) {
  const auto state = state_[at(row)];
  if (state == kWaiting) {
    needed_[at(row)] = 1;
    push(demands_, row);
  } else if (state == kReturning) {
    needed_[at(row)] = 1;
    const auto link = link_of(rows_.action[row], true);
    if (links_.row(link) != row) push(urgent_[at(link)], row);
  } else if (state == kLeaving && pending_[at(row)]) {
    needed_[at(row)] = 1;
  } else {
    return;
  }
  ++missing_;
}

void Replayer::restore(const Operation& operation, Index kernel) {
  const auto row = operation.row;
  if (operation.kind == kExpand) {
    wait(kernel, raw(row));
    if (state_[at(row)] != kPacked) return;
    use(0, raw(row));
    work(kExpand, rows_.tensor[row], machine_.expand_s[at(rows_.tensor[row])], raw(row));
    state_[at(row)] = kUnpacked;
    return;
  }
  if (state_[at(row)] != kReleased) return;
  const auto producer = trace_.producer[at(rows_.tensor[row])];
  auto extra = beside(row, kernel, /*planned=*/false);
  for (Bytes waited = -1; extra > waited;) {  // another result may leave in a wait
    waited = extra;
    wait(kernel, raw(row) + waited);
    extra = beside(row, kernel, /*planned=*/false);
  }
  use(0, raw(row) + extra);
  work(kRecomputation, producer, kernels_.time_s[producer], raw(row));
  use(0, -extra);
  state_[at(row)] = kResident;
}

Bytes Replayer::beside(Index row, Index kernel, bool planned, std::span<const Operation> before) const {
  const auto restores = [this](const Operation& operation, Index tensor) {
    return operation.kind != kCompress && rows_.tensor[operation.row] == tensor;
  };
  const auto tensor = rows_.tensor[row];
  const auto producer = trace_.producer[at(tensor)];
  auto extra = kernels_.workspace[producer];
  for (const auto* other = trace_.outputs.begin(producer); other != trace_.outputs.end(producer); ++other) {
    if (*other == tensor) continue;
    bool there = trace_.birth[at(*other)] <= kernel && kernel < trace_.death[at(*other)];
    for (const auto* r = copies_.rows_of.begin(*other); r != copies_.rows_of.end(*other); ++r) {
      const auto state = state_[at(*r)];
      if (state == kAway || state == kReleased || state == kPacked) there = false;
      if (state == kWaiting && !planned) there = false;
      if (is_csr(rows_.action[*r]) && (state == kReturning || (state == kLeaving && packed_[at(*r)])))
        there = false;
    }
    there = there || std::ranges::any_of(before, [&](const auto& one) { return restores(one, *other); });
    if (!there) extra += trace_.bytes[at(*other)];
  }
  return extra;
}

void Replayer::work(Kind kind, Index index, double seconds, Bytes bytes) {
  const auto end_s = now_s_ + seconds;
  if (reported_ && options_.record)
    outcome_.spans.push_back({0, kind, index, now_s_ - origin_s_, end_s - origin_s_, bytes});
  advance(end_s);
  now_s_ = end_s;
}

void Replayer::execute(Index kernel, bool last) {
  if (reported_) outcome_.start_s[at(kernel)] = now_s_ - origin_s_;
  work(kRun, kernel, kernels_.time_s[kernel], 0);
  for (const auto* row = packed_ends_.begin(kernel); row != packed_ends_.end(kernel); ++row) unpacked(*row);
  auto free = kernels_.workspace[kernel];
  if (kernel + 1 < trace_.kernels || !last) free += trace_.deaths[at(kernel) + 1] - die(kernel + 1);
  use(0, -free);
  write_after(kernel);
}

void Replayer::charge_copies() {
  if (const auto seconds = std::exchange(uncharged_s_, 0.0); seconds > 0) work(kStartCopies, -1, seconds, 0);
}

void Replayer::unpacked(Index row) {
  auto& state = state_[at(row)];
  if (state != kUnpacked) return;
  state = kResident;
  const auto written = written_[at(row)];
  if (copies_.source[at(row)] == row && (written == kQueued || written == kUnderWay)) {
    buffered_[at(row)] = 1;
    ++freeing_;
  } else {
    use(0, -packed(row));
  }
}

Bytes Replayer::die(Index kernel) {
  Bytes held = 0;
  for (const auto* tensor = trace_.dying.begin(kernel); tensor != trace_.dying.end(kernel); ++tensor) {
    const auto *from = copies_.rows_of.begin(*tensor), *to = copies_.rows_of.end(*tensor);
    bool under_way = false;
    for (const auto* row = from; row != to; ++row) {
      if (rows_.is_last(*row)) {
        if (!write_last(*row)) continue;
        under_way = true;
        ++held_[at(*tensor)];
        continue;
      }
      if (written_[at(*row)] == kQueued) abandon(*row);
      if (written_[at(*row)] == kUnderWay && !is_csr(rows_.action[*row])) {
        under_way = true;
        ++held_[at(*tensor)];
      }
    }
    if (under_way) {
      held += trace_.bytes[at(*tensor)];
      ++freeing_;
    }
  }
  return held;
}

void Replayer::finish() {
  if (repeats_) {
    for (int link = 0; link < kLinks; ++link)
      if (links_.busy(link) && links_.started_s(link) < now_s_)
        end_copy(link, static_cast<Bytes>(links_.moved(link, now_s_)));
  } else {
    ended_ = true;
    while (links_.active() > 0) complete();
  }
  outcome_.iteration_s = now_s_ - origin_s_;
}

Outcome replay(const Trace& trace, const Machine& machine, const Intervals& rows, const Kernels& kernels,
               Options options) {
  if (trace.kernels == 0) {
    Outcome outcome;
    outcome.peak[0] = trace.initial;
    if (options.record) outcome.samples.push_back({0, 0.0, trace.initial});
    return outcome;
  }
  return Replayer(trace, machine, rows, kernels, options).run();
}

}  // namespace penstock::planning
