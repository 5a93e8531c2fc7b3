// Copies out and back, who gets memory for them, and how the compute stream waits.
#include "replayer.hpp"

namespace penstock::planning {

void Replayer::write_after(Index kernel) {
  for (const auto* row = writes_.begin(kernel + 1); row != writes_.end(kernel + 1); ++row) write(*row);
  dispatch();
  charge_copies();
}

void Replayer::write(Index row) {
  if (written_[at(row)] == kQueued || written_[at(row)] == kUnderWay) return;
  start(row);
  written_[at(row)] = kQueued;
  push(writes_queue_[is_disk(rows_.action[row]) ? 1 : 0], row);
}

bool Replayer::write_last(Index row) {
  const auto source = copies_.source[at(row)];
  if (source != row && written_[at(source)] == kComplete) return false;
  if (written_[at(row)] == kQueued || written_[at(row)] == kUnderWay) return false;  // of the iteration before
  write(row);
  return true;
}

void Replayer::abandon(Index row) {
  if (row < 0) return;
  auto& written = written_[at(row)];
  if (written == kUnderWay) {
    const auto link = link_of(rows_.action[row], false);
    if (links_.row(link) == row) end_copy(link, static_cast<Bytes>(links_.moved(link, now_s_)));
  }
  if (written == kQueued || written == kUnderWay) {
    written = kNoCopy;
    ++ticket_[at(row)];
    release_buffer(row);
    dispatch();
  }
}

void Replayer::release_buffer(Index row) {
  if (!buffered_[at(row)]) return;
  buffered_[at(row)] = 0;
  --freeing_;
  use(0, -packed(row));
}

void Replayer::written(Index row) {
  written_[at(row)] = kComplete;
  const auto freed = leaving_[at(row)];
  if (freed >= 0) {
    leaving_[at(row)] = -1;
    --freeing_;
    use(0, packed_[at(freed)] ? -packed(freed) : -raw(freed));
    packed_[at(freed)] = 0;
    state_[at(freed)] = kAway;
    if (pending_[at(freed)]) {
      pending_[at(freed)] = 0;
      ask(freed);
    }
  }
  release_buffer(row);
  auto& held = held_[at(rows_.tensor[row])];
  if (held > 0 && !is_csr(rows_.action[row]) && --held == 0) {
    --freeing_;
    use(0, -raw(row));
    vacate(copies_.slot[at(row)]);
  }
}

void Replayer::admit() {
  if (ended_) return;
  bool admitted = false;
  for (auto* queue : {&demands_, &prefetches_}) {
    for (; queue->head < queue->entries.size(); ++queue->head) {
      const auto [row, ticket] = queue->entries[queue->head];
      if (ticket_[at(row)] != ticket) continue;
      if (levels_[0] + stored(row) + reserve_ > machine_.budget) {
        if (admitted) dispatch();
        return;
      }
      take_memory(row);
      admitted = true;
    }
  }
  if (admitted) dispatch();
}

void Replayer::take_memory(Index row) {
  state_[at(row)] = kReturning;
  use(0, stored(row));
  const auto link = at(link_of(rows_.action[row], true));
  push(needed_[at(row)] ? urgent_[link] : reads_[link], row);
}

void Replayer::came_back(Index row) {
  state_[at(row)] = is_csr(rows_.action[row]) ? kPacked : kResident;
  if (needed_[at(row)]) {
    needed_[at(row)] = 0;
    --missing_;
  }
  const auto slot = copies_.slot[at(row)];
  if (copies_.closes[at(slot)] == row) vacate(slot);
}

void Replayer::wait_for_memory(Index kernel, Bytes amount) {
  const auto missing = missing_;
  missing_ = 0;
  wait(kernel, amount);
  missing_ = missing;
}

void Replayer::wait(Index kernel, Bytes amount) {
  double waited_s[3] = {};
  while (missing_ > 0 || levels_[0] + amount > machine_.budget) {
    const bool can_free = freeing_ > 0 && links_.active() > 0;
    const auto demanded = waiting_demand();
    if (demanded >= 0 && !can_free) {
      outcome_.deadlock = true;
      ++demands_.head;
      take_memory(demanded);
      dispatch();
      continue;
    }
    if (links_.active() == 0 || !(missing_ > 0 || can_free)) {
      outcome_.deadlock = true;
      missing_ = 0;
      break;
    }
    const auto cause = missing_ > 0 && demanded < 0 ? kPrefetch : kMemory;
    const auto start_s = now_s_;
    complete();
    if (now_s_ > start_s && reported_) stalled(kernel, start_s, cause, waited_s);
  }
}

Index Replayer::waiting_demand() {
  while (demands_.head < demands_.entries.size()) {
    const auto [row, ticket] = demands_.entries[demands_.head];
    if (ticket_[at(row)] == ticket) return row;
    ++demands_.head;
  }
  return -1;
}

void Replayer::stalled(Index kernel, double start_s, Cause cause, double (&waited_s)[3]) {
  outcome_.stall_s[at(kernel)] += now_s_ - start_s;
  waited_s[cause] += now_s_ - start_s;
  outcome_.cause[at(kernel)] = waited_s[kMemory] > waited_s[kPrefetch] ? kMemory : kPrefetch;
  if (!options_.record) return;
  auto& stalls = outcome_.stalls;
  if (!stalls.empty() && stalls.back().end_s == start_s - origin_s_ && stalls.back().cause == cause &&
      stalls.back().kernel == kernel)
    stalls.back().end_s = now_s_ - origin_s_;
  else
    stalls.push_back({start_s - origin_s_, now_s_ - origin_s_, kernel, cause});
}

void Replayer::advance(double until_s) {
  while (links_.active() > 0 && links_.next_s() <= until_s) complete();
}

void Replayer::complete() {
  const auto link = links_.next();
  now_s_ = std::max(now_s_, links_.next_s());
  if (!links_.step(link)) return;
  const auto row = links_.row(link);
  end_copy(link, stored(row));
  if (link == kHostOut || link == kDiskOut)
    written(row);
  else
    came_back(row);
  admit();
  dispatch();
}

void Replayer::end_copy(int link, Bytes moved) {
  const auto row = links_.row(link);
  const auto started_s = std::max(links_.started_s(link), origin_s_);
  if (reported_ && options_.record)
    outcome_.spans.push_back({static_cast<std::int8_t>(link + 1), kRun, rows_.tensor[row],
                              started_s - origin_s_, now_s_ - origin_s_, moved - moved_before_[at(link)]});
  moved_before_[at(link)] = 0;
  links_.stop(link, now_s_);
}

void Replayer::dispatch() {
  if (ended_) return;
  for (const auto link : {kHostOut, kHostBack, kDiskOut, kDiskBack}) {
    if (links_.busy(link)) continue;
    const bool back = link == kHostBack || link == kDiskBack;
    auto row = pop(back ? urgent_[at(link)] : writes_queue_[link == kDiskOut ? 1 : 0]);
    if (row < 0 && back) row = pop(reads_[at(link)]);
    if (row < 0) continue;
    links_.start(link, row, at(rows_.tensor[row]), is_csr(rows_.action[row]), stored(row), now_s_);
    if (!back) {
      written_[at(row)] = kUnderWay;
      occupy(copies_.slot[at(row)]);
    }
  }
}

Index Replayer::pop(Queue& queue) {
  while (queue.head < queue.entries.size()) {
    const auto [row, ticket] = queue.entries[queue.head++];
    if (ticket_[at(row)] == ticket) return row;
  }
  return -1;
}

}  // namespace penstock::planning
