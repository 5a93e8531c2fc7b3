// What a replay knows of a trace, a machine and a plan: plain arrays, indices as in Python.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace penstock::planning {

using Index = std::int64_t;
using Bytes = std::int64_t;

inline std::size_t at(Index index) { return static_cast<std::size_t>(index); }

// Lists one after the other: list i is values[starts[i]] to values[starts[i + 1]].
struct Lists {
  std::vector<Index> starts{0};
  std::vector<Index> values;

  const Index* begin(Index list) const { return values.data() + starts[at(list)]; }
  const Index* end(Index list) const { return values.data() + starts[at(list) + 1]; }
};

// Links, in the order of penstock.core.hardware.LINKS: a host copy's and a disk copy's, out and back.
enum Link : int { kHostOut, kHostBack, kDiskOut, kDiskBack, kLinks };

struct Trace {
  Index kernels = 0, tensors = 0;
  std::vector<Bytes> bytes, compressed;  // [T]
  std::vector<Index> birth, death;       // [T] within [0, K]
  std::vector<std::uint8_t> persistent;  // [T]
  std::vector<Index> producer;           // [T] kernel that recomputes it, -1 for none
  Lists outputs;                         // K lists of tensors
  Lists writers;                         // T lists of kernels, ascending

  // Derived by prepare().
  Bytes initial = 0;           // alive before the first kernel
  std::vector<Bytes> live;     // [K] without workspaces
  std::vector<Bytes> births;   // [K] allocated by each kernel
  std::vector<Bytes> deaths;   // [K + 1] freed before each kernel; at K: when the iteration is over
  Lists dying;                 // K + 1 lists of tensors, likewise

  void prepare();
  bool initially_alive(Index tensor) const {
    return persistent[at(tensor)] != 0 && birth[at(tensor)] == 0;
  }
};

struct Machine {
  Bytes budget = 0;
  bool shares_bus = true;
  double duplex = 1.0;
  std::vector<double> compress_s, expand_s;  // [T]
  double copy_overhead_s = 0.0;  // of the compute stream, for each copy that it starts
  double byte_overhead_s = 0.0;  // likewise, for each byte of it
  std::array<double, kLinks> latency_s{};
  // By link: [T] bytes per second of each tensor when alone there, as it is and compressed; 0: no such link.
  std::array<std::vector<double>, kLinks> rate, rate_compressed;
};

// What happens to a tensor in an eviction interval. Python reads this table: penstock.simulator.
enum Action : std::int8_t { kKeep, kHost, kDisk, kHostCsr, kDiskCsr, kRecompute };
struct ActionNames {
  const char *name, *tier, *codec;
};
inline constexpr std::array<ActionNames, kRecompute + 1> kActionNames{{{"keep", "", ""},
                                                                       {"host", "host", "raw"},
                                                                       {"disk", "disk", "raw"},
                                                                       {"host_csr", "host", "csr"},
                                                                       {"disk_csr", "disk", "csr"},
                                                                       {"recompute", "", ""}}};
inline constexpr int kActions = static_cast<int>(kActionNames.size());

inline bool is_moved(std::int8_t action) { return action >= kHost && action <= kDiskCsr; }
inline bool is_raw(std::int8_t action) { return action == kHost || action == kDisk; }
inline bool is_csr(std::int8_t action) { return action == kHostCsr || action == kDiskCsr; }
inline bool is_disk(std::int8_t action) { return action == kDisk || action == kDiskCsr; }

// One row for each eviction interval, in the order of the plan. Rows that are kept are skipped. A row that ends
// where it begins is of a tensor that is dead by then while the program keeps it: its memory is free when it is
// written, and it does not come back.
struct Intervals {
  Index count = 0;
  const Index *tensor = nullptr, *after = nullptr, *begin = nullptr, *end = nullptr, *prefetch_at = nullptr;
  const std::int8_t* action = nullptr;

  bool is_last(Index row) const { return is_moved(action[row]) && end[row] == begin[row]; }
};

// The same, owned.
struct Rows {
  std::vector<Index> tensor, after, begin, end, prefetch_at;
  std::vector<std::int8_t> action;

  Intervals view() const {
    return {static_cast<Index>(size()), tensor.data(), after.data(), begin.data(), end.data(), prefetch_at.data(),
            action.data()};
  }
  std::size_t size() const { return action.size(); }
  void clear() {
    for (auto* column : {&tensor, &after, &begin, &end, &prefetch_at}) column->clear();
    action.clear();
  }
  void add(Index tensor_, Index after_, Index begin_, Index end_, Index prefetch_at_, std::int8_t action_) {
    tensor.push_back(tensor_);
    after.push_back(after_);
    begin.push_back(begin_);
    end.push_back(end_);
    prefetch_at.push_back(prefetch_at_);
    action.push_back(action_);
  }
};

// What the program keeps beyond its last use: of no use from kernel `begin` on, and given up before kernel `end`.
// The trace counts it as gone from `begin` on. What is of no use first comes first.
struct Kept {
  std::vector<Index> tensor, begin, end;
};

// How the kernels run: as traced, or by another variant, or with other times.
struct Kernels {
  const double* time_s = nullptr;      // [K]
  const Bytes* workspace = nullptr;    // [K]
};

// Which copy serves each row, and where copies take room.
struct Copies {
  Lists rows_of;               // T lists of rows that are not kept, by `begin`
  std::vector<Index> source;   // [R] row whose write serves it; -1: its copy is always there
  std::vector<Index> slot;     // [R] row that stands for the room its copy takes
  std::vector<Index> closes;   // [R] the row, of those that its source serves, that is served last
  std::vector<std::uint8_t> carried;  // [R] source whose copy is there when an iteration begins
  // [R] for slots: kernels [since, until) during which the copy takes room; until may exceed K
  std::vector<Index> since, until;
};

// These throw std::invalid_argument. A trace is checked before it is prepared.
inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}
inline bool all_within(const std::vector<Index>& values, Index low, Index high) {
  return std::all_of(values.begin(), values.end(), [=](Index value) { return low <= value && value <= high; });
}
void check(const Trace& trace);
void check(const Trace& trace, const Machine& machine);
void check(const Trace& trace, const Intervals& rows);
void check(const Trace& trace, const Kept& kept);
// The rows of each tensor, by `begin`, then in the order of the plan.
void group(const Trace& trace, const Intervals& rows, Lists& rows_of);
void find_copies(const Trace& trace, const Intervals& rows, Copies& copies);

// [K] device bytes during each kernel if every copy took no time, operations before the kernel included.
std::vector<Bytes> static_bytes(const Trace& trace, const Intervals& rows, const Kernels& kernels);
// [K] bytes that copies occupy on the host, and on disk.
std::array<std::vector<Bytes>, 2> tier_bytes(const Trace& trace, const Intervals& rows, const Copies& copies);
// A plan as a run carries it out. Adds the rows of what the program keeps and the budget has no room for, which is
// written and does not come back; the rest of it lives on in `as_run`, a copy of the trace. The rule is that of
// penstock.core.memory_profile.leaves_for_good.
void carry_out(const Trace& trace, const Kept& kept, const Kernels& kernels, Bytes budget,
               std::array<Bytes, 2> tier_bytes, Rows& rows, Trace& as_run);

// For each row the kernel after which to start its copy: of those that could be written, the one whose memory is
// wanted first, where its tier has room that early.
//
// earliest   [R] the first kernel after which each can be written; rows.after is the last one
// wanted     [R] the kernel from which on its memory is wanted, maybe of the next iteration
// start_s    [K + 1] of the kernels; the last is the end
// slack      by tier: [K] bytes that are free with each copy as late as `after`; empty where there is plenty
std::vector<Index> place_writes(const Trace& trace, const Machine& machine, const Intervals& rows,
                                const Copies& copies, const std::vector<Index>& earliest,
                                const std::vector<Index>& wanted, const Kernels& kernels, const double* start_s,
                                std::array<std::vector<Bytes>, 2> slack);

// For each row the kernel at which to issue its prefetch. start_s: [K + 1], the last is the end.
std::vector<Index> place_prefetches(const Trace& trace, const Machine& machine, const Intervals& rows,
                                    const Kernels& kernels, const double* start_s, Index early);

}  // namespace penstock::planning
