// What the clock of kernels does for every operator, as far as nothing has to move: finds the storages, numbers
// them, keeps them where they are while the kernel runs, and reserves room. What takes more is asked of
// penstock.runtime.offload_mode, in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "runtime/storages.hpp"

namespace penstock {

// An operator of torch.
struct Operator {
  nb::object torch_operator, callee, facts, name;
  std::vector<std::pair<Py_ssize_t, nb::object>> written;  // arguments: position, name
  bool is_kernel = false, is_repeatable = false, is_opaque = false, takes_lists = false,
       is_elementwise = false, reads_shapes = false, is_collective = false, resizes = false;
  bool records_stream = false;
  std::int64_t need_bytes = 0;  // what it took last
};

// What torch gives to know tensors by.
struct TorchTypes {
  nb::object tensor, parameter, buffer, storage, overload, untyped_storage;
  nb::object modes_below;  // counts those that an operator goes to after the one that sees it
};

class KernelClock {
 public:
  KernelClock(nb::object storages, nb::object memory, nb::object lock, nb::object prefetches, nb::object unpinned,
              TorchTypes types, nb::object set_compiler, nb::object current_stream);

  // What __torch_dispatch__ of `clock` gives.
  nb::object dispatch(nb::handle clock, nb::handle torch_operator, nb::handle types, nb::handle args,
                      nb::handle kwargs);
  nb::object run(nb::handle clock, nb::handle torch_operator, nb::handle args, nb::handle kwargs);

  // With the engine's lock: into parts, where it is large enough, and can be.
  void divide(nb::handle clock, ManagedStorage& weight);

  void begin_step(nb::object schedule);
  void follow(nb::object schedule);
  nb::object tensor(std::int64_t index) const;  // of this step, or None
  // Those that the step has touched, from this number on.
  std::vector<nb::object> numbered(std::size_t first) const {
    return {numbered_.begin() + static_cast<std::ptrdiff_t>(std::min(first, numbered_.size())), numbered_.end()};
  }
  std::vector<nb::object> seen() const { return seen_; }
  std::int64_t touched_bytes() const;

  bool entered = false;           // operators are looked at
  bool in_step = false;
  bool views_need_bytes = false;  // torch refuses views of what is away
  bool asks_needs = false;        // what a kernel takes must be right: Python infers it where it was not planned
  bool is_recording = false;      // kernels are recorded
  bool keeps_recipe = false;      // how to run the kernel that begins again
  bool in_flight = false;         // collectives have returned, and are not done
  std::int64_t step = 0, kernels = 0, operators = 0;
  double clock_s = 0, left_s = 0;
  double excluded_s = 0;  // of what Python did for kernels, but is not the clock's own
  std::int64_t least_bytes = 0;  // the smallest budget of the arena for each kernel that was not recorded
  int activation = -1;  // index of this kind of tensor
  nb::object schedule() const { return schedule_; }

  static int traverse(PyObject* self, visitproc visit, void* arg);

 private:
  class Pins;
  class Section;
  using Used = std::vector<ManagedStorage*>;
  static constexpr std::int64_t kNew = -2;  // as birth, until the kernel that made it is over

  Operator& know(nb::handle clock, nb::handle torch_operator);
  nb::object run(nb::handle clock, Operator& facts, nb::handle args, nb::handle kwargs);
  nb::object call(const Operator& facts, nb::handle args, nb::handle kwargs) const;
  nb::object planned_variant(std::int64_t kernel) const;
  nb::object view(nb::handle clock, const Operator& facts, nb::handle args, nb::handle kwargs);
  enum class Track { kUsed, kMade, kKnown };  // kKnown: no storage that is met for the first time
  void collect(nb::handle clock, nb::handle value, Pins& found, Track which = Track::kUsed,
               nb::handle owner_stream = {});
  void collect_all(nb::handle clock, nb::handle args, nb::handle kwargs, Pins& found);
  bool makes_fakes(nb::handle clock) const;
  bool is_tensor(PyObject* object) const;
  nb::object storage_of(PyObject* tensor) const;
  void add_parts(nb::handle clock, PyObject* tensor, ManagedStorage* first, Pins& found);
  void divide_viewed(nb::handle clock, nb::handle args);
  bool uses_parts(nb::handle args) const;
  void untrack_resized(nb::handle clock, const Used& written, nb::handle result);
  void number(const Used& touched, bool made);
  void act(nb::handle clock, const Operator& facts);
  bool touch(const Used& used);
  bool is_on_another_stream();
  bool has_planned_sizes(const Used& used) const;
  bool has_holes(const nb::object& pieces) const;
  std::int64_t in_use_bytes(nb::handle clock);
  void kernel_over(nb::handle clock);

  nb::object storages_object_, memory_object_;
  Storages& storages_;
  DeviceMemory& memory_;
  nb::object acquire_, release_;      // of the copy engine's lock
  nb::object prefetches_, unpinned_;  // of the copy engine: what waits for the end of a kernel
  TorchTypes types_;
  nb::object set_compiler_;
  nb::object current_stream_;  // gives that of this thread; None where a device has none
  nb::object stream_ = nb::none();  // of the last kernel
  std::unordered_map<PyObject*, Operator> operators_;
  std::uint64_t mark_ = 0;
  nb::object schedule_ = nb::none();
  nb::object names_, known_, before_, needs_, pieces_, sizes_, variants_;  // the schedule's
  std::vector<nb::object> numbered_, seen_;
  std::vector<std::uintptr_t> addresses_;  // of the kernel that begins
};

}  // namespace penstock
