// One file: what a run does for each operator, on one path.

#include "runtime/dispatch.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <utility>

#ifdef __linux__
#include "arena/arena.hpp"
#include "arena/hooks.hpp"
#endif
#include "bindings.hpp"

namespace penstock {

namespace {

// Of a tensor on another device: what a kernel makes of so little needs no room to be made for it.
constexpr std::int64_t kNegligibleBytes = 4096;

// As Python's time.perf_counter.
double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// torch.compile leaves alone what Python runs for the clock.
class WithoutCompiler {
 public:
  explicit WithoutCompiler(const nb::object& set_compiler) : set_compiler_(set_compiler), before_(set(nb::none())) {}
  WithoutCompiler(const WithoutCompiler&) = delete;
  WithoutCompiler& operator=(const WithoutCompiler&) = delete;
  ~WithoutCompiler() {
    if (before_.is_none()) return;
    const nb::error_scope keep;
    if (PyObject* result = PyObject_CallFunctionObjArgs(set_compiler_.ptr(), before_.ptr(), nullptr))
      Py_DECREF(result);
    else
      PyErr_Clear();
  }

 private:
  nb::object set(nb::handle compiler) const { return set_compiler_(compiler); }

  const nb::object& set_compiler_;
  nb::object before_;
};

nb::list to_list(const std::vector<ManagedStorage*>& storages) {
  nb::list found;
  for (const auto* managed : storages) found.append(nb::handle(managed->self));
  return found;
}

bool is_empty(const nb::object& values) { return PyObject_Size(values.ptr()) <= 0; }

std::int64_t integer_at(const nb::object& values, std::int64_t position) {
  PyObject* value = PyTuple_GetItem(values.ptr(), static_cast<Py_ssize_t>(position));
  if (value == nullptr) throw nb::python_error();
  const auto integer = PyLong_AsLongLong(value);
  if (integer == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return integer;
}

bool is_on_device(const std::vector<ManagedStorage*>& storages) {
  return std::ranges::any_of(storages, [](const auto* managed) { return managed->elsewhere_bytes == 0; });
}

bool is_atom(PyObject* value) {
  return value == Py_None || PyLong_Check(value) || PyFloat_CheckExact(value) || PyUnicode_CheckExact(value);
}

}  // namespace

std::int64_t DeviceMemory::in_use_bytes() const {
#ifdef __linux__
  if (const auto* arena = installed_arena(); arena != nullptr)
    if (in_arena) return static_cast<std::int64_t>(arena->in_memory_bytes()) + unmanaged_bytes;
#endif
  // What is not free there: for what is elsewhere, the segment leaves room.
  return segment != nullptr ? budget_bytes - segment->free_bytes() : managed_bytes + unmanaged_bytes;
}

// Storages, each once, in order. They are not freed while it lives.
class KernelClock::Pins {
 public:
  explicit Pins(KernelClock& clock) : clock_(clock) {}
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  ~Pins() {
    for (auto* managed : storages) Py_DECREF(managed->self);
  }

  void add(ManagedStorage* managed) {
    if (mark_ != clock_.mark_) {  // another list was begun since
      mark_ = ++clock_.mark_;
      for (auto* known : storages) known->mark = mark_;
    }
    if (managed->mark == mark_) return;
    managed->mark = mark_;
    Py_INCREF(managed->self);
    storages.push_back(managed);
  }

  Used storages;

 private:
  KernelClock& clock_;
  std::uint64_t mark_ = ~std::uint64_t{0};  // of none yet
};

// The copy engine's lock, held.
class KernelClock::Section {
 public:
  explicit Section(const KernelClock& clock) : clock_(clock) { nb::steal(check(PyObject_CallNoArgs(clock.acquire_.ptr()))); }
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;
  ~Section() {
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    Py_XDECREF(PyObject_CallNoArgs(clock_.release_.ptr()));
    PyErr_Restore(kind, value, trace);
  }

 private:
  static PyObject* check(PyObject* result) {
    if (result == nullptr) throw nb::python_error();
    return result;
  }

  const KernelClock& clock_;
};

KernelClock::KernelClock(nb::object storages, nb::object memory, nb::object lock, nb::object prefetches,
                         nb::object unpinned, TorchTypes types, nb::object set_compiler, nb::object current_stream)
    : storages_object_(std::move(storages)),
      memory_object_(std::move(memory)),
      storages_(nb::cast<Storages&>(storages_object_)),
      memory_(nb::cast<DeviceMemory&>(memory_object_)),
      acquire_(lock.attr("acquire")),
      release_(lock.attr("release")),
      prefetches_(std::move(prefetches)),
      unpinned_(std::move(unpinned)),
      types_(std::move(types)),
      set_compiler_(std::move(set_compiler)),
      current_stream_(std::move(current_stream)) {}

// -- steps --------------------------------------------------------------------------------------------------

void KernelClock::begin_step(nb::object schedule) {
  ++step;
  kernels = operators = 0;
  clock_s = 0;
  numbered_.clear();
  seen_.clear();
  in_step = true;
  follow(std::move(schedule));
  left_s = now_s();
}

void KernelClock::follow(nb::object schedule) {
  schedule_ = std::move(schedule);
  if (schedule_.is_none()) return;
  names_ = schedule_.attr("names");
  known_ = schedule_.attr("known");
  before_ = schedule_.attr("before");
  needs_ = schedule_.attr("needs_bytes");
  pieces_ = schedule_.attr("pieces");
  sizes_ = schedule_.attr("tensor_bytes");
  variants_ = schedule_.attr("variants");
}

nb::object KernelClock::tensor(std::int64_t index) const {
  if (index < 0 || static_cast<std::size_t>(index) >= numbered_.size()) return nb::none();
  return numbered_[static_cast<std::size_t>(index)];
}

std::int64_t KernelClock::touched_bytes() const {
  std::int64_t total = 0;
  for (const auto& managed : numbered_) total += nb::inst_ptr<ManagedStorage>(managed)->size_bytes;
  return total;
}

// -- every operator -----------------------------------------------------------------------------------------

Operator& KernelClock::know(nb::handle clock, nb::handle torch_operator) {
  if (const auto found = operators_.find(torch_operator.ptr()); found != operators_.end()) return found->second;
  Operator known;
  known.facts = clock.attr("_describe")(torch_operator);
  known.torch_operator = nb::borrow(torch_operator);
  // What an overload's own __call__ does, without its frame.
  const bool is_overload = torch_operator.type().is(types_.overload);
  known.callee = is_overload ? nb::object(torch_operator.attr("_op")) : known.torch_operator;
  known.name = known.facts.attr("name");
  known.is_kernel = nb::cast<bool>(known.facts.attr("is_kernel"));
  known.records_stream = std::string_view(nb::str(torch_operator).c_str()) == "aten.record_stream.default";
  known.is_repeatable = nb::cast<bool>(known.facts.attr("is_repeatable"));
  known.is_opaque = nb::cast<bool>(known.facts.attr("is_opaque"));
  known.takes_lists = nb::cast<bool>(known.facts.attr("takes_lists"));
  known.is_elementwise = nb::cast<bool>(known.facts.attr("is_elementwise"));
  known.reads_shapes = nb::cast<bool>(known.facts.attr("reads_shapes"));
  known.is_collective = nb::cast<bool>(known.facts.attr("is_collective"));
  known.resizes = nb::cast<bool>(known.facts.attr("resizes"));
  for (const auto argument : known.facts.attr("written"))
    known.written.emplace_back(nb::cast<Py_ssize_t>(argument[0]), nb::object(argument[1]));
  return operators_.emplace(torch_operator.ptr(), std::move(known)).first->second;
}

nb::object KernelClock::call(const Operator& facts, nb::handle args, nb::handle kwargs) const {
  PyObject* named = kwargs.is_none() ? nullptr : kwargs.ptr();
  PyObject* result = PyObject_Call(facts.callee.ptr(), args.ptr(), named);
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

// The name of what the kernel is to run as; None: as it is.
nb::object KernelClock::planned_variant(std::int64_t kernel) const {
  if (!in_step || schedule_.is_none() || kernel >= PyTuple_Size(variants_.ptr())) return nb::none();
  const auto name = nb::borrow(PyTuple_GetItem(variants_.ptr(), static_cast<Py_ssize_t>(kernel)));
  return is_empty(name) ? nb::none() : nb::object(name);
}

nb::object KernelClock::dispatch(nb::handle clock, nb::handle torch_operator, nb::handle types, nb::handle args,
                                 nb::handle kwargs) {
  const WithoutCompiler guard(set_compiler_);
  auto& facts = know(clock, torch_operator);
  if (!entered || makes_fakes(clock)) return call(facts, args, kwargs);
  if (!facts.is_kernel) {
    if (storages_.part_bytes != 0) divide_viewed(clock, args);
    return views_need_bytes ? view(clock, facts, args, kwargs) : call(facts, args, kwargs);
  }
  for (const auto kind : nb::borrow<nb::iterable>(types))
    if (!kind.is(types_.tensor) && !kind.is(types_.parameter) && !kind.is(types_.buffer))
      return nb::borrow(Py_NotImplemented);  // a tensor of another kind does it with operators on plain ones
  if (facts.takes_lists || (facts.is_elementwise && storages_.has_divided() && uses_parts(args)))
    return clock.attr("_run_parts")(torch_operator, args, kwargs);
  return run(clock, facts, args, kwargs);
}

// What happens in a fake mode is none of a run's business: nothing is read, written, or made.
bool KernelClock::makes_fakes(nb::handle clock) const {
  return nb::cast<std::int64_t>(types_.modes_below()) != 0 && nb::cast<bool>(clock.attr("_makes_fakes")());
}

// torch refuses a view of a storage that is empty.
nb::object KernelClock::view(nb::handle clock, const Operator& facts, nb::handle args, nb::handle kwargs) {
  Pins used(*this);
  {
    const Section section(*this);
    storages_.remove_dead();
    collect(clock, args, used, Track::kKnown);
    std::erase_if(used.storages, [](auto* managed) {
      if (managed->movable) return false;
      Py_DECREF(managed->self);
      return true;
    });
    for (auto* managed : used.storages) ++managed->pins;
    try {
      if (std::ranges::any_of(used.storages, [](const auto* managed) { return managed->state > kLeaving; }))
        clock.attr("_bring")(to_list(used.storages));
      if (facts.records_stream) clock.attr("_record_stream")(to_list(used.storages), args[1]);
    } catch (...) {
      for (auto* managed : used.storages) --managed->pins;
      kernel_over(clock);
      throw;
    }
  }
  const auto over = [&] {  // pins may end without the lock
    for (auto* managed : used.storages) --managed->pins;
    if (is_empty(prefetches_) && is_empty(unpinned_)) return;
    const Section section(*this);
    kernel_over(clock);
  };
  nb::object result;
  try {
    result = call(facts, args, kwargs);
  } catch (...) {
    over();
    throw;
  }
  over();
  return result;
}

nb::object KernelClock::run(nb::handle clock, nb::handle torch_operator, nb::handle args, nb::handle kwargs) {
  return run(clock, know(clock, torch_operator), args, kwargs);
}

nb::object KernelClock::run(nb::handle clock, Operator& facts, nb::handle args, nb::handle kwargs) {
  const double entered_s = now_s();
  excluded_s = 0;
  Pins used(*this), written(*this), made(*this), spare(*this);
  std::int64_t need_bytes = 0, kernel = 0;
  bool inferred = false;
  nb::object stream;  // that the kernel runs on
  keeps_recipe = false;

  bool launching = false;
  const auto over = [&] {
    if (std::exchange(launching, false)) clock.attr("_launch_failed")();
    for (auto* managed : used.storages) {
      --managed->pins;
      managed->in_kernel = false;
      storages_.move_to_end(*managed);
    }
#ifdef __linux__
    if (memory_.in_arena) {
      const auto most_bytes = static_cast<std::int64_t>(installed_arena()->kernel_over());
      // A trace knows better of a kernel that is recorded: it may run as several algorithms then.
      if (!is_recording) least_bytes = std::max(least_bytes, most_bytes + memory_.unmanaged_bytes);
    }
#endif
    memory_.reserved_bytes = 0;
    kernel_over(clock);
  };

  {
    const Section section(*this);
    storages_.remove_dead();
    if (!facts.reads_shapes) collect_all(clock, args, kwargs, used);
    if (in_flight) clock.attr("_release_done")(to_list(used.storages));
    kernel = kernels;
    if (in_step) {
      number(used.storages, false);
      if (!schedule_.is_none()) act(clock, facts);
    }
    for (auto* managed : used.storages) {
      ++managed->pins;
      managed->in_kernel = true;
    }
    try {
      bool moved = false;
      try {
        moved = memory_.in_arena ? touch(used.storages) : is_on_another_stream();
      } catch (nb::python_error& error) {
        clock.attr("_cannot_use")(error.value());
        throw;
      }
      if (moved) clock.attr("_begin_kernel")();
      if (!memory_.in_arena) stream = stream_;
      bool away = false, asks = false;
      for (const auto* managed : used.storages) away |= managed->state > kLeaving;
      if (facts.is_opaque && views_need_bytes) {  // it may write any of them, and nobody else would notice
        const nb::object told = clock.attr("_told")(args);
        if (told.is_none()) {
          for (auto* managed : used.storages) written.add(managed);
        } else {
          collect(clock, told.attr("written"), written);
          collect(clock, told.attr("spare"), spare);
        }
      } else {
        for (const auto& [position, name] : facts.written) {
          if (position < PyTuple_Size(args.ptr()))
            collect(clock, PyTuple_GetItem(args.ptr(), position), written);
          else if (!kwargs.is_none())
            if (PyObject* value = PyDict_GetItemWithError(kwargs.ptr(), name.ptr())) collect(clock, value, written);
        }
      }
      for (const auto* managed : written.storages)
        asks |= managed->clean || managed->guarded || managed->recipes != 0 || managed->state != kResident ||
                managed->writing_packed;
      const bool planned = in_step && !schedule_.is_none();
      inferred = asks_needs && (facts.reads_shapes || !planned || !has_planned_sizes(used.storages));
      if (inferred)
        need_bytes = nb::cast<std::int64_t>(clock.attr("_infer_need")(facts.torch_operator, args, kwargs));
      else
        need_bytes = planned ? integer_at(needs_, kernel) : std::min(facts.need_bytes, memory_.budget_bytes / 4);
      bool short_of_room = false;
      nb::object pieces = nb::none();
      if (need_bytes != 0 || away) {
        const auto wanted_bytes = in_use_bytes(clock) + need_bytes;
        short_of_room = away || wanted_bytes > memory_.budget_bytes;
        if (!short_of_room) memory_.reserved_bytes = wanted_bytes;
        if (planned && !memory_.in_arena) {
          pieces = nb::borrow(PyTuple_GetItem(pieces_.ptr(), static_cast<Py_ssize_t>(kernel)));
          if (memory_.segment != nullptr) short_of_room |= !has_holes(pieces);
        }
      }
      if (away || asks || short_of_room)
        clock.attr("_make_ready")(to_list(used.storages), away, to_list(written.storages), need_bytes, pieces);
      if (facts.resizes && !written.storages.empty()) clock.attr("_wait_until_unused")(to_list(written.storages), true);
      if (!memory_.in_arena && !facts.is_repeatable && need_bytes != 0)
        clock.attr("_make_room_for_kernel")(need_bytes, pieces);
      if (facts.is_collective) {
        launching = true;
        clock.attr("_before_launch")(to_list(used.storages), to_list(written.storages));
      }
    } catch (...) {
      over();
      throw;
    }
  }

  const bool noted = keeps_recipe;
  const nb::object before = noted ? clock.attr("_state_before")(facts.facts, args, kwargs) : nb::none();
  const double launched_s = now_s();
  double begun_s = launched_s;
  nb::object result;
#ifdef __linux__
  if (facts.is_collective && memory_.in_arena) installed_arena()->hold_new(true);  // until the kernel is over
#endif
  bool varies = false;  // it runs as another algorithm
  while (!result.is_valid()) {
    // Again where it ran out of memory: what that took is not its own.
    if (is_recording) clock.attr("_begin_measuring")();
    begun_s = now_s();
    try {
      const auto variant = planned_variant(kernel);
      varies = !variant.is_none();
      result = variant.is_none() ? call(facts, args, kwargs)
                                 : clock.attr("_run_variant")(variant, facts.torch_operator, args, kwargs);
    } catch (nb::python_error& error) {
      bool again = false;
      try {
        again = facts.is_repeatable && nb::cast<bool>(clock.attr("_frees_enough")(error.value(), need_bytes));
        if (!again) result = clock.attr("_retry_with_alternative")(facts.torch_operator, args, kwargs, error.value());
      } catch (...) {
        const Section section(*this);
        over();
        throw;
      }
      if (again) continue;
      varies = true;
      if (!result.is_none()) break;
      {
        const Section section(*this);
        over();
      }
      clock.attr("_kernel_failed")(error.value(), need_bytes);
      throw;
    }
  }
  const double ended_s = now_s();
  if (is_recording) {
    clock.attr("_end_measuring")();
    try {
      clock.attr("_try_variants")(facts.torch_operator, args, kwargs, result);
    } catch (...) {
      const Section section(*this);
      over();
      throw;
    }
  }

  const Section section(*this);
  std::int64_t taken_bytes = 0, workspace_bytes = 0;
  try {
    storages_.remove_dead();
    if (facts.resizes) untrack_resized(clock, written.storages, result);
    collect(clock, result, made, Track::kMade, stream);
    Pins reused(*this);
    for (auto* managed : made.storages)
      if (std::ranges::find(spare.storages, managed) != spare.storages.end()) reused.add(managed);
    if (!reused.storages.empty()) clock.attr("_invalidate_copies")(to_list(reused.storages));
    for (auto* managed : reused.storages) written.add(managed);
    for (auto* managed : made.storages) {
      if (managed->birth != kNew) continue;
      managed->birth = in_step ? kernel : -1;
      managed->kind = activation;
      taken_bytes += managed->size_bytes;
    }
    if (noted) clock.attr("_keep_recipe")(facts.torch_operator, args, kwargs, result, before, varies);
    if (facts.is_collective) {
      clock.attr("_after_launch")(facts.facts, result, to_list(used.storages), to_list(written.storages),
                              to_list(made.storages));
      launching = false;
    }
  } catch (...) {
    over();
    throw;
  }
  over();
  if (in_step) {
    number(made.storages, true);
    if (!schedule_.is_none() && integer_at(known_, kernel) != static_cast<std::int64_t>(numbered_.size()))
      schedule_ = nb::none();  // its numbers mean other tensors
    if (is_recording)
      workspace_bytes = nb::cast<std::int64_t>(clock.attr("_record")(
          facts.facts, result, to_list(used.storages), to_list(written.storages), to_list(made.storages), entered_s,
          begun_s, ended_s));
    kernels = kernel + 1;
    seen_.push_back(facts.name);
  }
  if ((inferred || (is_recording && asks_needs)) && (is_on_device(used.storages) || is_on_device(made.storages)))
    clock.attr("_note_need")(facts.torch_operator, taken_bytes, workspace_bytes);
  facts.need_bytes = taken_bytes + workspace_bytes;
  ++operators;
  left_s = now_s();
  clock_s += launched_s - entered_s + left_s - ended_s - excluded_s;
  return result;
}

// Whether the arena has moved something by itself since it was last asked.
bool KernelClock::touch(const Used& used) {
  std::vector<std::uintptr_t>& addresses = addresses_;
  addresses.clear();
  for (const auto* managed : used)
    if (managed->movable && managed->address != 0) addresses.push_back(managed->address);
  return touch_blocks(addresses) != 0;
}

bool KernelClock::is_on_another_stream() {
  const nb::object now = current_stream_();
  if (now.is(stream_) || now.equal(stream_)) return false;
  stream_ = now;
  return true;
}

// Whether all of these are as large as in the trace, which has no sizes of what is on other devices.
bool KernelClock::has_planned_sizes(const Used& used) const {
  const auto count = PyTuple_Size(sizes_.ptr());
  return std::ranges::all_of(used, [&](const auto* managed) {
    return managed->elsewhere_bytes <= kNegligibleBytes && managed->index < count &&
           integer_at(sizes_, managed->index) == managed->size_bytes;
  });
}

std::int64_t KernelClock::in_use_bytes(nb::handle clock) {
  if (memory_.in_arena || memory_.segment != nullptr || memory_.recount_in-- > 0) return memory_.in_use_bytes();
  return nb::cast<std::int64_t>(clock.attr("_in_memory_bytes")());
}

// Whether the allocator has memory for what the kernel makes, in as many pieces.
bool KernelClock::has_holes(const nb::object& pieces) const {
  const auto count = PyTuple_Size(pieces.ptr());
  if (count == 0) return true;
  std::vector<std::int64_t> sizes;
  for (Py_ssize_t i = 0; i < count; ++i) sizes.push_back(integer_at(pieces, i));
  return memory_.segment->fits(sizes);
}

// With the lock. What waits for the end of a kernel is Python's.
void KernelClock::kernel_over(nb::handle clock) {
  if (!is_empty(prefetches_) || !is_empty(unpinned_)) clock.attr("_kernel_over")();
}

void KernelClock::collect_all(nb::handle clock, nb::handle args, nb::handle kwargs, Pins& found) {
  collect(clock, args, found);
  if (kwargs.is_none() || PyDict_Size(kwargs.ptr()) == 0) return;
  Py_ssize_t position = 0;
  PyObject *name = nullptr, *value = nullptr;
  while (PyDict_Next(kwargs.ptr(), &position, &name, &value) != 0) collect(clock, value, found);
}

// Of one of torch's own types.
bool KernelClock::is_tensor(PyObject* object) const {
  auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return kind == types_.tensor.ptr() || kind == types_.parameter.ptr() || kind == types_.buffer.ptr();
}

// Not valid where the tensor has none: it is sparse, or opaque.
nb::object KernelClock::storage_of(PyObject* tensor) const {
  PyObject* arguments[] = {tensor};
  nb::object storage = nb::steal(PyObject_Vectorcall(types_.untyped_storage.ptr(), arguments, 1, nullptr));
  if (!storage.is_valid()) {
    if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) throw nb::python_error();  // NotImplementedError is one
    PyErr_Clear();
  }
  return storage;
}

void KernelClock::collect(nb::handle clock, nb::handle value, Pins& found, Track which, nb::handle owner_stream) {
  PyObject* object = value.ptr();
  auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(object));
  const auto track = [&](PyObject* storage, PyObject* tensor = nullptr) {
    storages_.remove_dead();  // garbage collection may have freed one whose place this one has taken
    auto* managed = storages_.find(storage);
    if (managed == nullptr) {
      if (which == Track::kKnown) return;
      managed = storages_.track(storage, which == Track::kMade, owner_stream);
      if (which == Track::kMade)
        for (auto* part = managed; part != nullptr; part = part->next) part->birth = kNew;
    }
    if (kind == types_.parameter.ptr()) divide(clock, *managed);
    if (managed->is_part)
      add_parts(clock, tensor, managed, found);
    else
      found.add(managed);
  };
  if (is_tensor(object)) {
    if (const nb::object storage = storage_of(object); storage.is_valid()) {
      track(storage.ptr(), object);
      return;
    }
  } else if (is_atom(object)) {
    return;
  } else if (views_need_bytes && kind == types_.storage.ptr()) {  // set_ gives a tensor the storage's size
    track(object);
    return;
  } else if (PyTuple_CheckExact(object)) {
    const auto size = PyTuple_Size(object);
    for (Py_ssize_t i = 0; i < size; ++i) collect(clock, PyTuple_GetItem(object, i), found, which, owner_stream);
    return;
  } else if (PyList_CheckExact(object)) {
    for (Py_ssize_t i = 0; i < PyList_Size(object); ++i) {
      const nb::object item = nb::borrow(PyList_GetItem(object, i));
      collect(clock, item, found, which, owner_stream);
    }
    return;
  } else if (PyTuple_Check(object) == 0 && PyList_Check(object) == 0 && PyDict_Check(object) == 0 &&
             PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(types_.tensor.ptr())) == 0) {
    return;
  }
  for (const auto storage : clock.attr("_storages_in")(value)) track(storage.ptr());
}

// Of a divided storage: those that hold elements of the tensor, or all.
void KernelClock::add_parts(nb::handle clock, PyObject* tensor, ManagedStorage* first, Pins& found) {
  std::int64_t begin = 0, end = std::numeric_limits<std::int64_t>::max();
  if (tensor != nullptr) {
    const nb::object extent = clock.attr("_extent")(nb::handle(tensor));
    begin = integer_at(extent, 0);
    end = integer_at(extent, 1);
  }
  for (auto* part = first; part != nullptr; part = part->next)
    if (begin < part->offset_bytes + part->size_bytes && part->offset_bytes < end) found.add(part);
}

// Kernels may see views of a weight only.
void KernelClock::divide_viewed(nb::handle clock, nb::handle args) {
  if (PyTuple_Size(args.ptr()) == 0) return;
  PyObject* viewed = PyTuple_GetItem(args.ptr(), 0);
  if (reinterpret_cast<PyObject*>(Py_TYPE(viewed)) != types_.parameter.ptr()) return;
  const nb::object storage = storage_of(viewed);
  if (!storage.is_valid()) return;
  const auto* known = storages_.find(storage.ptr());
  if (known != nullptr ? !storages_.is_divisible(*known)
                       : nb::cast<std::int64_t>(storage.attr("nbytes")()) < storages_.divisible_bytes)
    return;
  const Section section(*this);
  storages_.remove_dead();
  divide(clock, *storages_.track(storage.ptr(), false));
}

// Large weights are divided when a step, or a kernel outside of steps, uses them first.
void KernelClock::divide(nb::handle clock, ManagedStorage& weight) {
  if (!storages_.is_divisible(weight) || !weight.movable) return;
  if (in_step && weight.step == step) return;  // it has a number in this step
  clock.attr("_divide")(nb::handle(weight.self));
  weight.stays_whole = !weight.is_part;
}

bool KernelClock::uses_parts(nb::handle args) const {
  const auto size = PyTuple_Size(args.ptr());
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* object = PyTuple_GetItem(args.ptr(), i);
    if (!is_tensor(object)) continue;
    const nb::object storage = storage_of(object);
    if (!storage.is_valid()) continue;
    const auto* managed = storages_.find(storage.ptr());
    if (managed != nullptr && managed->is_part) return true;
  }
  return false;
}

// A storage that the kernel has given other memory is met as one that it made.
void KernelClock::untrack_resized(nb::handle clock, const Used& written, nb::handle result) {
  Pins known(*this);
  for (auto* managed : written) known.add(managed);
  collect(clock, result, known, Track::kKnown);  // set_ gives a tensor a storage, and resizes that
  for (const auto* managed : known.storages) {
    if (managed->reference.is_none()) continue;
    const nb::object storage = managed->reference();
    if (storage.is_none()) continue;
    std::vector<ManagedStorage*> parts;
    for (auto* part = storages_.find(storage.ptr()); part != nullptr; part = part->next) parts.push_back(part);
    if (parts.empty()) continue;
    const auto& last = *parts.back();
    const auto size_bytes = last.offset_bytes + last.size_bytes + last.elsewhere_bytes;
    if (nb::cast<std::int64_t>(storage.attr("nbytes")()) == size_bytes) continue;
    // What set_ was given may be leaving: its slot is freed once nothing is written there.
    clock.attr("_wait_until_unused")(to_list(parts), false);
    storages_.untrack(storage.ptr());
  }
}

// Number what this step touches for the first time, as the trace does.
void KernelClock::number(const Used& touched, bool made) {
  for (auto* managed : touched) {
    if (managed->step == step) continue;
    managed->step = step;
    managed->index = static_cast<std::int64_t>(numbered_.size());
    if (!made && managed->kind == activation) managed->kind = -1;  // made in another step, or between steps
    numbered_.push_back(nb::borrow(managed->self));
  }
}

void KernelClock::act(nb::handle clock, const Operator& facts) {
  PyObject* planned = kernels < PyTuple_Size(names_.ptr()) ? PyTuple_GetItem(names_.ptr(), kernels) : nullptr;
  if (planned == facts.name.ptr() || (planned != nullptr && PyUnicode_Compare(planned, facts.name.ptr()) == 0)) {
    if (PyTuple_Size(PyTuple_GetItem(before_.ptr(), kernels)) == 0) return;
  } else {
    clock.attr("_change")(facts.name);
    if (schedule_.is_none()) return;
  }
  clock.attr("_act")(kernels);
}

int KernelClock::traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  Py_VISIT(nb::inst_ptr<KernelClock>(self)->storages_object_.ptr());
  return 0;
}

}  // namespace penstock
