// The replay of a plan, event by event.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "model.hpp"

namespace penstock::planning {

// What the compute stream does before a kernel, in order: compress, expand, recompute. After each kernel, and
// before it, it starts copies.
enum Kind : std::int8_t { kRun, kCompress, kExpand, kRecomputation, kStartCopies };

// What occupied a stream. Streams: 0 compute, 1 + link.
struct Span {
  std::int8_t stream, kind;  // the Kind, on the compute stream
  Index index;  // kernel, or tensor
  double start_s, end_s;
  Bytes bytes;
};

struct Stall {
  double start_s, end_s;
  Index kernel;
  std::int8_t cause;  // of Cause
};

// From time_s on, `bytes` are in use. Tiers: 0 device, 1 host, 2 disk.
struct Sample {
  std::int8_t tier;
  double time_s;
  Bytes bytes;
};

enum Cause : std::int8_t { kNone, kPrefetch, kMemory };

// Of the reported iteration, which begins at 0.
struct Outcome {
  bool deadlock = false;
  double iteration_s = 0;
  std::vector<double> stall_s, start_s;  // [K]
  std::vector<std::int8_t> cause;        // [K]
  std::array<Bytes, 3> peak{};           // by tier
  std::vector<Span> spans;               // where recorded
  std::vector<Stall> stalls;
  std::vector<Sample> samples;
};

struct Options {
  bool record = false;
  bool stop_on_deadlock = false;
};

Outcome replay(const Trace& trace, const Machine& machine, const Intervals& rows, const Kernels& kernels,
               Options options);

}  // namespace penstock::planning
