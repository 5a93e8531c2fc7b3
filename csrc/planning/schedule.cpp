// When to start copies: writes in the order in which their memory is wanted, prefetches in time for the kernels
// that need them, where memory allows.
#include <algorithm>
#include <limits>
#include <queue>
#include <tuple>
#include <utility>

#include "links.hpp"

namespace penstock::planning {

namespace {

// Deadlines first, so that they compare by them.
struct Write {
  double wanted_s, ready_s, seconds;  // wanted: its memory, within one iteration
  Index row;

  bool operator>(const Write& other) const {
    return std::tie(wanted_s, row) > std::tie(other.wanted_s, other.row);
  }
};

struct Read {
  Index row;
  double deadline_s;  // within one iteration
  double seconds;     // when nothing else uses the link
  double start_s = 0;
};

// Reads of one channel work one after the other: each starts in time for itself and those behind it.
// Where the iteration repeats, the first of the next one push back the last of this one.
void latest_starts(std::vector<Read>& reads, double period_s, bool repeats) {
  double next_s = std::numeric_limits<double>::infinity();
  for (int round = 0; round < (repeats ? 2 : 1); ++round) {
    for (auto read = reads.rbegin(); read != reads.rend(); ++read)
      next_s = read->start_s = std::min(read->deadline_s, next_s) - read->seconds;
    next_s += period_s;
  }
}

// Takes `size` of memory from as far back as `target` up to kernel `end`, without a gap. From where.
Index take(std::vector<Bytes>& slack, Index target, Index end, Bytes size) {
  auto first = end;
  while (first > target && slack[at(first - 1)] >= size) --first;
  for (auto kernel = first; kernel < end; ++kernel) slack[at(kernel)] -= size;
  return first;
}

Bytes stored(const Trace& trace, const Intervals& rows, Index row) {
  const auto tensor = at(rows.tensor[row]);
  return is_csr(rows.action[row]) ? trace.compressed[tensor] : trace.bytes[tensor];
}

}  // namespace

std::vector<Index> place_writes(const Trace& trace, const Machine& machine, const Intervals& rows,
                                const Copies& copies, const std::vector<Index>& earliest,
                                const std::vector<Index>& wanted, const Kernels& kernels, const double* start_s,
                                std::array<std::vector<Bytes>, 2> slack) {
  const auto K = trace.kernels;
  const double period_s = start_s[K];
  std::vector<Index> placed(rows.after, rows.after + rows.count);
  std::vector<double> end_s(at(K));
  for (Index k = 0; k < K; ++k) end_s[at(k)] = start_s[k] + kernels.time_s[k];
  std::array<std::vector<Write>, 2> channels;  // by tier
  bool repeats = false;
  for (Index r = 0; r < rows.count; ++r) {
    repeats = repeats || rows.end[r] >= K;
    if (!is_moved(rows.action[r]) || copies.source[at(r)] != r) continue;
    const auto seconds = alone_s(trace, machine, rows.action[r], at(rows.tensor[r]), /*back=*/false);
    const double ready_s = earliest[at(r)] < 0 ? 0.0 : end_s[at(earliest[at(r)])];
    const auto next = wanted[at(r)] / K;
    const auto wanted_s = start_s[wanted[at(r)] - next * K] + static_cast<double>(next) * period_s;
    channels[is_disk(rows.action[r]) ? 1 : 0].push_back({wanted_s, ready_s, seconds, r});
  }
  for (const std::size_t tier : {0, 1}) {
    auto& writes = channels[tier];
    std::sort(writes.begin(), writes.end(), [](const Write& a, const Write& b) {
      return std::tie(a.ready_s, a.row) < std::tie(b.ready_s, b.row);
    });
    // Where the iteration repeats, the last writes of one push back the first of the next: the second counts.
    const auto once = writes.size();
    for (std::size_t index = 0; repeats && index < once; ++index) {
      auto write = writes[index];
      write.wanted_s += period_s;
      write.ready_s += period_s;
      writes.push_back(write);
    }
    std::vector<std::pair<Index, double>> starts;
    std::vector<std::uint8_t> seen(repeats ? at(rows.count) : 0);
    std::priority_queue<Write, std::vector<Write>, std::greater<>> waiting;
    double now_s = 0.0;
    for (auto next = writes.begin(); next != writes.end() || !waiting.empty();) {
      if (waiting.empty()) now_s = std::max(now_s, next->ready_s);
      for (; next != writes.end() && next->ready_s <= now_s; ++next) waiting.push(*next);
      const auto write = waiting.top();
      waiting.pop();
      if (!repeats || std::exchange(seen[at(write.row)], 1)) starts.emplace_back(write.row, now_s - repeats * period_s);
      now_s += write.seconds;
    }
    auto& room = slack[tier];
    for (const auto& [row, when_s] : starts) {
      const auto last = std::upper_bound(end_s.begin(), end_s.end(), when_s) - end_s.begin() - 1;
      auto& after = placed[at(row)];
      const auto first = std::clamp<Index>(last, earliest[at(row)], after);
      after = room.empty() ? first : take(room, first + 1, after + 1, stored(trace, rows, row)) - 1;
    }
  }
  return placed;
}

std::vector<Index> place_prefetches(const Trace& trace, const Machine& machine, const Intervals& rows,
                                    const Kernels& kernels, const double* start_s, Index early) {
  const auto K = trace.kernels;
  const double period_s = start_s[K];
  std::vector<Index> placed(rows.prefetch_at, rows.prefetch_at + rows.count);
  std::vector<Index> order;
  bool repeats = false;
  for (Index r = 0; r < rows.count; ++r) {
    if (rows.action[r] == kKeep) continue;
    placed[at(r)] = rows.end[r];
    if (is_moved(rows.action[r])) order.push_back(r);
    repeats = repeats || rows.end[r] >= K;
  }
  auto on_demand = rows;
  on_demand.prefetch_at = placed.data();
  const auto required = static_bytes(trace, on_demand, kernels);
  std::vector<Bytes> slack(at(K));
  for (Index k = 0; k < K; ++k) slack[at(k)] = machine.budget - required[at(k)];

  std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return rows.end[a] < rows.end[b]; });
  std::vector<Read> reads[2];  // by tier
  for (const auto row : order) {
    const auto tensor = at(rows.tensor[row]);
    const auto seconds = alone_s(trace, machine, rows.action[row], tensor, /*back=*/true);
    reads[is_disk(rows.action[row]) ? 1 : 0].push_back({row, start_s[rows.end[row] % K], seconds});
  }
  std::vector<Index> wish(at(rows.count));
  for (auto& channel : reads) {
    std::stable_sort(channel.begin(), channel.end(),
                     [](const Read& a, const Read& b) { return a.deadline_s < b.deadline_s; });
    latest_starts(channel, period_s, repeats);
    for (const auto& read : channel) {
      const bool wraps = rows.end[read.row] >= K;
      auto when_s = read.start_s + (wraps ? period_s : 0.0);
      Index offset = 0;
      if (wraps && when_s >= period_s) {
        when_s -= period_s;
        offset = K;
      }
      // The last kernel that starts no later.
      const auto kernel = std::upper_bound(start_s, start_s + K, when_s) - start_s - 1;
      wish[at(read.row)] = std::clamp<Index>(kernel + offset, rows.begin[read.row], rows.end[read.row]);
    }
  }
  // `slack` holds what memory is left as prefetches take it, each as far as it needs, then further.
  for (const bool further : {false, true}) {
    if (further && early <= 0) break;
    for (const auto row : order) {
      const auto size = stored(trace, rows, row);
      auto& kernel = placed[at(row)];
      // One that had to stay behind its wish gains nothing from going on.
      if (further && kernel > wish[at(row)]) continue;
      const auto target = further ? std::max(rows.begin[row], kernel - early) : wish[at(row)];
      // Kernels from K on are those of the next iteration, whose memory is the same.
      if (kernel > K) kernel = K + take(slack, std::max(target - K, Index{0}), kernel - K, size);
      if (kernel <= K) kernel = take(slack, target, kernel, size);
    }
  }
  return placed;
}

}  // namespace penstock::planning
