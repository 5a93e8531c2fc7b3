// One replay: what is where, and how it changes from event to event.
//
// replay.cpp follows the compute stream from kernel to kernel; waiting.cpp moves copies meanwhile.
#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "links.hpp"
#include "replay.hpp"

namespace penstock::planning {

// Where a row's tensor is.
//   kLeaving    its memory is freed when the copy that serves it is complete
//   kWaiting    the prefetch is issued and has no memory yet
//   kReturning  it has memory, and its copy is queued or in progress
//   kPacked     compressed, on the device, to be expanded
//   kUnpacked   expanded, and its compressed buffer still there
//   kReleased    to be recomputed
enum State : std::int8_t {
  kResident, kLeaving, kAway, kWaiting, kReturning, kPacked, kUnpacked, kReleased
};

enum Written : std::int8_t { kNoCopy, kQueued, kUnderWay, kComplete };

// What the compute stream does for a row before a kernel; they sort by their order.
struct Operation {
  Index kernel;
  Kind kind;
  Index row;

  auto operator<=>(const Operation& other) const = default;
};

// Rows in order of issue. A row that was queued again, or released, leaves an entry that is skipped.
struct Queue {
  struct Entry {
    Index row;
    std::uint32_t ticket;
  };
  std::vector<Entry> entries;
  std::size_t head = 0;
};

class Replayer {
 public:
  // Borrows everything until the end of run(), which is called once.
  Replayer(const Trace& trace, const Machine& machine, const Intervals& rows, const Kernels& kernels,
           Options options);
  Outcome run();

 private:
  // The order of events, from the columns of the plan.
  void index_rows();
  void find_operations();
  Bytes raw(Index row) const { return trace_.bytes[at(rows_.tensor[row])]; }
  Bytes packed(Index row) const { return trace_.compressed[at(rows_.tensor[row])]; }
  Bytes stored(Index row) const { return is_csr(rows_.action[row]) ? packed(row) : raw(row); }

  // What the iteration before has left: copies, and tensors that are away.
  void begin_first();
  void begin_reported();
  void sample_all();

  // Before a kernel: what begins, what the compute stream does, what comes back.
  void before(Index kernel, int iteration, std::size_t& operation);

  // needs_[i]: what the compute stream still needs at its worst from operation i on.
  void plan_needs(std::size_t first, std::size_t last, Bytes allocate, Index kernel);
  void leave(Index row);
  void compress(Index row, Index kernel);

  // A copy is issued, out or back.
  void start(Index row) {
    const auto size = is_csr(rows_.action[row]) ? packed(row) : raw(row);
    uncharged_s_ += machine_.copy_overhead_s + static_cast<double>(size) * machine_.byte_overhead_s;
  }

  // Asks for a tensor back. One whose copy is not complete never left.
  void issue(Index row);
  void ask(Index row) {
    start(row);
    state_[at(row)] = kWaiting;
    push(needed_[at(row)] ? demands_ : prefetches_, row);
  }

  // Sends what this kernel waits for ahead of all others.
  void demand(Index row);

  // Expands or recomputes one tensor that the kernel needs.
  void restore(const Operation& operation, Index kernel);

  // Bytes that recomputing a tensor needs beside its own: a workspace, and room for other results that
  // are not there. Those that are coming back take their own memory: it is not planned for twice.
  // What operations `before` it restore is there by then.
  Bytes beside(Index row, Index kernel, bool planned, std::span<const Operation> before = {}) const;

  // The compute stream is busy for `seconds`, while copies go on.
  void work(Kind kind, Index index, double seconds, Bytes bytes);
  void execute(Index kernel, bool last);

  // What starting the copies that were issued since the last call costs the compute stream.
  void charge_copies();

  // The kernel that needed an expanded tensor has ended: its compressed buffer goes, or stays for a copy.
  void unpacked(Index row);

  // Releases writes of tensors that die, and begins those of what the program keeps. Returns the bytes that these
  // writes and those in progress hold.
  Bytes die(Index kernel);

  // Copies out

  void write_after(Index kernel);
  void write(Index row);

  // Writes what is dead while the program keeps it. False: a copy of it is there.
  bool write_last(Index row);

  // Cancels a write that is queued or in progress.
  void abandon(Index row);
  void release_buffer(Index row);
  void written(Index row);

  // Copies back

  void admit();
  void take_memory(Index row);
  void came_back(Index row);

  // Waiting

  void wait_for_memory(Index kernel, Bytes amount);

  // Until the kernel's tensors are back and `amount` fits, or nothing can free any.
  void wait(Index kernel, Bytes amount);
  Index waiting_demand();
  void stalled(Index kernel, double start_s, Cause cause, double (&waited_s)[3]);
  void advance(double until_s);

  // Moves to the next moment at which a copy begins to flow or ends.
  void complete();
  void end_copy(int link, Bytes moved);

  // Starts a copy on every link that is free.
  void dispatch();
  Index pop(Queue& queue);
  void push(Queue& queue, Index row) { queue.entries.push_back({row, ++ticket_[at(row)]}); }

  // Memory

  void use(int tier, Bytes change) {
    if (change == 0) return;
    levels_[at(tier)] += change;
    if (!reported_) return;
    outcome_.peak[at(tier)] = std::max(outcome_.peak[at(tier)], levels_[at(tier)]);
    if (options_.record)
      outcome_.samples.push_back({static_cast<std::int8_t>(tier), now_s_ - origin_s_, levels_[at(tier)]});
  }

  void occupy(Index slot) {
    if (on_tier_[at(slot)]) return;
    on_tier_[at(slot)] = 1;
    use(is_disk(rows_.action[slot]) ? 2 : 1, stored(slot));
  }

  void vacate(Index slot) {
    if (!on_tier_[at(slot)]) return;
    on_tier_[at(slot)] = 0;
    use(is_disk(rows_.action[slot]) ? 2 : 1, -stored(slot));
  }

  // One iteration by itself ends with its last copy; one that repeats, with its last kernel.
  void finish();

  const Trace& trace_;
  const Machine& machine_;
  const Intervals& rows_;
  const Kernels& kernels_;
  const Options options_;
  Links links_;
  Copies copies_;
  std::vector<Operation> operations_;
  Lists begins_, ends_, packed_ends_, issues_, writes_;
  bool repeats_ = false;

  std::vector<State> state_;
  std::vector<Written> written_;
  std::vector<Index> leaving_;          // by source: the row whose memory its copy frees
  std::vector<std::uint8_t> packed_;    // leaving with the compressed buffer only
  std::vector<std::uint8_t> pending_;   // to be asked for as soon as it has left
  std::vector<std::uint8_t> needed_;    // counted in missing_
  std::vector<std::uint8_t> buffered_;  // its compressed buffer waits for the end of its write
  std::vector<std::uint8_t> on_tier_;   // by slot
  std::vector<std::uint32_t> ticket_;
  std::vector<int> held_;  // by tensor: writes in progress when it died
  Queue demands_, prefetches_;
  std::array<Queue, 2> writes_queue_;
  std::array<Queue, kLinks> reads_, urgent_;
  std::vector<Bytes> needs_;

  double now_s_ = 0, origin_s_ = 0;
  std::array<Bytes, 3> levels_{};  // bytes in use by tier
  Bytes reserve_ = 0;              // what the kernel at hand still has to allocate
  Index missing_ = 0;              // copies that the kernel at hand waits for
  double uncharged_s_ = 0;         // what the compute stream still pays for copies that were issued
  Index freeing_ = 0;              // what will free memory when its copy is complete
  bool reported_ = false, ended_ = false;
  std::array<Bytes, kLinks> moved_before_{};
  Outcome outcome_;
};

}  // namespace penstock::planning
