// Streams and events of the emulated device, and the one thread that carries out what was launched. No torch.
#pragma once

#include "virtual.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace emu {

constexpr int kStreams = 33;  // the default stream and a pool of 32, as CUDA has

// When work is carried out. In all orders a stream's work stays in its order, and waits are obeyed.
enum class Order : int {
  Eager,    // each launch is complete before it returns
  Lazy,     // nothing runs until somebody waits, and then only what that needs
  Stepped,  // the host stops at some launches, while a drawn number of items of drawn streams run: reproducible
  Random,   // the executor runs beside the host, at random delays, and draws the stream of each item
  Newest,   // as Stepped, but the stream that was given work last goes first; the one waited for, last
};

// One recording of an event: where it stands in its stream, and whether that was reached.
struct Mark {
  explicit Mark(int stream) : stream(stream) {}
  const int stream;
  Moment moment;  // in virtual time
  std::atomic<bool> reached{false};
  std::atomic<int> waiting{0};  // threads of the host
  std::atomic<double> time_ms{0};
};
using MarkPtr = std::shared_ptr<Mark>;
using Work = std::function<void()>;

// Waits for all work first; raises what that raised.
void set_order(Order order, uint64_t seed);

// false: work is launched and nothing is computed or copied, so no memory of the device is ever touched.
void set_computes(bool computes);
bool computes();

// Work must not take the GIL, nor launch, nor wait. What it raises is raised by the next wait of any thread.
// always: it is carried out, too, where nothing is computed.
void launch(int stream, const char* name, const Cost& cost, Work work, bool always = false);
MarkPtr record(int stream);
void wait(int stream, const MarkPtr& mark);  // work launched there from now on comes after the mark
bool query(const MarkPtr& mark);
bool is_over(const MarkPtr& mark);  // to this thread, which does not wait

// For these the host waits.
void synchronize(MarkPtr mark);
void synchronize_stream(int stream);
void synchronize_device();

// Streams of this thread.
int current_stream();
int exchange_stream(int stream);
int new_stream();

// Host threads dawdle at random, up to so long, between reading addresses and launching.
void set_host_delay(int microseconds);
void delay_host();

// Whether this process was forked from the one that uses the device; what needs the device raises there.
bool is_forked();
void refuse_if_forked();

// At the end of the process: nothing is carried out any more, and nobody waits.
void halt();

struct Counters {
  std::atomic<int64_t> launched{0}, executed{0}, switches{0}, synchronized{0}, events{0};
};
Counters& counters();

}  // namespace emu
