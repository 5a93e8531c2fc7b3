// Virtual time: when work would begin and end on a machine of a data sheet. No torch.
//
// It is found at launch: an item begins when its stream is free, its launch is over, and the marks that the stream
// waits for are reached, and a copy, besides, in the first gap of its link that is long enough. When work is really
// carried out does not matter to it. A transfer between host memory and the disk flows in the first gap of its
// direction, a latency after it was asked for. In seconds from `set_machine` on.
//
// Threads of the host have clocks. The program's threads, which are the first one and those of autograd, share one,
// since they work in turns. Any other is a helper. A clock moves by launches, and by waits for marks. A helper that
// waits for a mark goes on when the program's clock is there, or the program is blocked and all that happens before
// is over: what it does next is not seen before its time.
#pragma once

#include <cstdint>

namespace emu {

enum Precision : int { Double, Single, Tensor32, Half, kPrecisions };

// Rates a second; zero kernels take kernel_s, and a launch takes launch_s of the host. As `_Machine` in virtual.py.
struct Machine {
  double memory_bytes_per_s;
  double link_bytes_per_s[4];  // in the order of `Cost::Kind`
  double operations_per_s[kPrecisions];
  double kernel_s, launch_s, disk_latency_s;
};

// What an item of work asks of the machine.
struct Cost {
  enum Kind : int { Nothing, Kernel, ToDevice, ToHost, DiskRead, DiskWrite } kind = Nothing;
  double bytes = 0;  // read and written in memory, or that cross the link
  double operations = 0;
  Precision precision = Single;
};

// Why something did not happen earlier. As `CAUSES` in virtual.py.
enum class Cause : int { None, Host, Kernels, Arrival, Departure, Room, Link };

struct Moment {
  int64_t epoch = 0;  // of a machine; moments of others are long over
  double at_s = 0;
  Cause cause = Cause::None;
};

// As `_Span` and `_Wait` in virtual.py.
struct Span {
  const char* name;
  double free_s, launched_s, begin_s, end_s;  // free: when its stream had nothing else to do
  double bytes;
  Cost::Kind kind;
  int stream;
  Cause cause;
};
struct HostWait {
  double begin_s, end_s;
  Cause cause;
  int is_program;
};

bool has_machine();
void set_machine(const Machine* machine);  // nullptr: there is no virtual time

// With streams in the order of their launches.
void virtual_launch(int stream, const char* name, const Cost& cost);
Moment virtual_record(int stream);
void virtual_wait(int stream, const Moment& moment);

// A transfer that this thread asks for now. Returns its end.
Moment virtual_disk(Cost::Kind kind, double bytes);

// This thread of the host.
bool is_past(const Moment& moment);
void begin_host_wait(const Moment& moment);
void end_host_wait(const Moment& moment);  // once it is really reached: the clock is there then
void let_helpers_catch_up();

// This thread's kernels, while one is alive, are those of an operator on lists, which CUDA launches for many tensors at
// once: ATen/native/cuda/MultiTensorApply.cuh.
struct OnLists {
  OnLists();
  ~OnLists();
  const bool within;  // of another one's: then it changes nothing
};

// Waits of this thread, while one is alive, happen since there is no room.
struct WaitsForRoom {
  WaitsForRoom();
  ~WaitsForRoom();
};

}  // namespace emu
