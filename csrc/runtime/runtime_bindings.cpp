// What Python sees of the runtime's native part.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "runtime/dispatch.hpp"
#ifdef __linux__
#include "runtime/rank_progress.hpp"
#endif
#include "runtime/storages.hpp"

namespace penstock {

namespace {

nb::object found(const ManagedStorage* managed) {
  return managed == nullptr ? nb::none() : nb::borrow(managed->self);
}

// This one, and those that follow it in a divided storage.
nb::list parts(const ManagedStorage* first) {
  nb::list all;
  for (; first != nullptr; first = first->next) all.append(nb::borrow(first->self));
  return all;
}

PyType_Slot storages_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&Storages::traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(&Storages::clear)},
                                {0, nullptr}};
PyType_Slot clock_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&KernelClock::traverse)}, {0, nullptr}};

auto returns(const char* signature) { return nb::for_getter(nb::sig(signature)); }

void bind_storages(nb::module_& module) {
  nb::class_<ManagedStorage>(module, "ManagedStorage", nb::is_weak_referenceable())
      .def(nb::new_([](nb::handle storage, std::int64_t size_bytes, nb::handle died) {
             return Storages::make(storage, size_bytes, died);
           }),
           nb::arg("storage"), nb::arg("size_bytes"), nb::arg("died"))
      .def_ro("key", &ManagedStorage::key)
      .def_rw("address", &ManagedStorage::address)
      .def_ro("size_bytes", &ManagedStorage::size_bytes)
      .def_ro("offset_bytes", &ManagedStorage::offset_bytes)
      .def_ro("is_part", &ManagedStorage::is_part)
      .def_rw("state", &ManagedStorage::state)
      .def_rw("clean", &ManagedStorage::clean)
      .def_rw("guarded", &ManagedStorage::guarded)
      .def_rw("keeps_copy", &ManagedStorage::keeps_copy)
      .def_rw("freeing_bytes", &ManagedStorage::freeing_bytes)
      .def_rw("packed_bytes", &ManagedStorage::packed_bytes)
      .def_rw("writing_packed", &ManagedStorage::writing_packed)
      .def_rw("copy_invalid", &ManagedStorage::copy_invalid)
      .def_rw("queued", &ManagedStorage::queued)
      .def_rw("copy_pending", &ManagedStorage::copy_pending)
      .def_rw("movable", &ManagedStorage::movable)
      .def_rw("persistent", &ManagedStorage::persistent)
      .def_rw("swapped_out", &ManagedStorage::swapped_out)
      .def_rw("reports_freed", &ManagedStorage::reports_freed)
      .def_rw("fixed_in_segment", &ManagedStorage::fixed_in_segment)
      .def_ro("segment_address", &ManagedStorage::segment_address)
      .def_rw("pins", &ManagedStorage::pins)
      .def_ro("in_kernel", &ManagedStorage::in_kernel)
      .def_rw("recipes", &ManagedStorage::recipes)
      .def_rw("index", &ManagedStorage::index)
      .def_rw("step", &ManagedStorage::step)
      .def_rw("birth", &ManagedStorage::birth)
      .def_rw("kind", &ManagedStorage::kind)
      .def_rw("slot", &ManagedStorage::slot, nb::arg().none(), returns("def slot(self) -> typing.Any"))
      .def_rw("kept_alive", &ManagedStorage::kept_alive, nb::arg().none(),
              returns("def kept_alive(self) -> typing.Any"))
      .def_rw("owner_stream", &ManagedStorage::owner_stream, nb::arg().none(),
              returns("def owner_stream(self) -> typing.Any"))
      .def(
          "parts", [](const ManagedStorage& managed) { return parts(&managed); },
          nb::sig("def parts(self) -> list[ManagedStorage]"))
      .def(
          "storage",
          [](const ManagedStorage& managed) {
            return managed.reference.is_none() ? nb::object(nb::none()) : managed.reference();
          },
          nb::sig("def storage(self) -> typing.Any"));

  nb::class_<Storages>(module, "Storages", nb::type_slots(storages_slots))
      .def(nb::init<nb::object, nb::object, std::int64_t, std::uint64_t, nb::object>(), nb::arg("adopt"),
           nb::arg("on_freed"), nb::arg("smallest_bytes"), nb::arg("first_serial") = 0,
           nb::arg("device") = nb::none())
      .def_rw("reports_all", &Storages::reports_all)
      .def_rw("part_bytes", &Storages::part_bytes)
      .def_prop_ro("has_divided", &Storages::has_divided)
      .def_rw("divisible_bytes", &Storages::divisible_bytes)
      .def(
          "find", [](const Storages& storages, nb::handle storage) { return found(storages.find(storage.ptr())); },
          nb::sig("def find(self, storage: object) -> ManagedStorage | None"))
      .def(
          "track",
          [](Storages& storages, nb::handle storage, bool made) { return found(storages.track(storage.ptr(), made)); },
          nb::arg("storage"), nb::arg("made") = false,
          nb::sig("def track(self, storage: object, made: bool = False) -> ManagedStorage"))
      .def("divide", [](Storages& storages, ManagedStorage& managed) { storages.divide(managed); }, nb::arg("managed"))
      .def("adopt_results", &Storages::adopt_results, nb::arg("memory"), nb::keep_alive<1, 2>())
      .def(
          "at", [](const Storages& storages, std::uintptr_t address) { return found(storages.at(address)); },
          nb::sig("def at(self, address: int) -> ManagedStorage | None"))
      .def("move_to_end", &Storages::move_to_end, nb::arg("managed"))
      .def("clear_address", &Storages::clear_address, nb::arg("managed"))
      .def("remove_dead", &Storages::remove_dead)
      .def("untrack", [](Storages& storages, nb::handle storage) { storages.untrack(storage.ptr()); })
      .def("all", &Storages::all, nb::sig("def all(self) -> list[ManagedStorage]"))
      .def("by_use", &Storages::by_use, nb::sig("def by_use(self) -> list[ManagedStorage]"))
      .def("all_resident", &Storages::all_resident)
      .def("__len__", &Storages::size);
}

void bind_segment(nb::module_& module) {
  const auto listed = [](const std::vector<ManagedStorage*>& storages) {
    nb::list list;
    for (const auto* managed : storages) list.append(nb::borrow(managed->self));
    return list;
  };
  nb::enum_<Leaves>(module, "Leaves")
      .value("nothing", Leaves::kNone)
      .value("leaving", Leaves::kLeaving)
      .value("anything", Leaves::kAny);
  nb::class_<DeviceSegment>(module, "DeviceSegment")
      .def(nb::init<std::uintptr_t, std::int64_t>(), nb::arg("address"), nb::arg("size_bytes"))
      .def("clear", &DeviceSegment::clear)
      .def("put", &DeviceSegment::put, nb::arg("managed"), nb::arg("address"))
      .def("take", &DeviceSegment::take, nb::arg("managed"))
      .def("hold", &DeviceSegment::hold, nb::arg("address"), nb::arg("size_bytes"))
      .def("give_up", &DeviceSegment::give_up, nb::arg("address"))
      .def("free_at", &DeviceSegment::free_at, nb::arg("address"))
      .def("fits", &DeviceSegment::fits, nb::arg("sizes"))
      .def(
          "obstacles",
          [listed](const DeviceSegment& segment, std::int64_t size_bytes, Leaves leaves) -> nb::object {
            const auto found = segment.obstacles(size_bytes, leaves);
            if (!found) return nb::none();
            nb::list free;
            for (const auto& [address, free_bytes] : found->free) free.append(nb::make_tuple(address, free_bytes));
            return nb::make_tuple(listed(found->move), listed(found->leave), free);
          },
          nb::arg("size_bytes"), nb::arg("leaves"),
          nb::sig("def obstacles(self, size_bytes: int, leaves: Leaves) -> "
                  "tuple[list[ManagedStorage], list[ManagedStorage], list[tuple[int, int]]] | None"))
      .def_prop_ro("free_bytes", &DeviceSegment::free_bytes)
      .def_prop_ro("largest_free_bytes", &DeviceSegment::largest_free_bytes);
}

#ifdef __linux__
void bind_rank_progress(nb::module_& module) {
  nb::enum_<RankProgress::Stage>(module, "Stage")
      .value("filled", RankProgress::kFilled)
      .value("summed", RankProgress::kSummed);
  nb::class_<RankProgress>(module, "RankProgress")
      .def(nb::init<std::uintptr_t, std::size_t, std::size_t, std::vector<int>>(), nb::arg("address"),
           nb::arg("ranks"), nb::arg("rank"), nb::arg("watched"))
      .def_static("bytes", &RankProgress::bytes, nb::arg("ranks"))
      .def_prop_ro_static("depth", [](nb::handle) { return RankProgress::kDepth; })
      .def("mark", &RankProgress::mark, nb::arg("stage"), nb::arg("pieces"), nb::arg("what") = 0)
      .def("what", &RankProgress::what, nb::arg("rank"), nb::arg("piece"))
      .def("fail", &RankProgress::fail)
      .def(
          "wait",
          [](const RankProgress& progress, RankProgress::Stage stage, std::uint64_t pieces, double timeout_s) {
            const auto missing = progress.wait(stage, pieces, timeout_s);
            return std::pair(missing.rank, missing.reason);
          },
          nb::arg("stage"), nb::arg("pieces"), nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>());
}
#endif

}  // namespace

void bind_runtime(nb::module_& module) {
  bind_storages(module);
  bind_segment(module);
#ifdef __linux__
  bind_rank_progress(module);
#endif

  nb::class_<DeviceMemory>(module, "DeviceMemory")
      .def(nb::init<>())
      .def_rw("budget_bytes", &DeviceMemory::budget_bytes)
      .def_rw("reserved_bytes", &DeviceMemory::reserved_bytes)
      .def_rw("managed_bytes", &DeviceMemory::managed_bytes)
      .def_rw("unmanaged_bytes", &DeviceMemory::unmanaged_bytes)
      .def_rw("recount_in", &DeviceMemory::recount_in)
      .def_rw("in_arena", &DeviceMemory::in_arena)
      .def_prop_rw(
          "segment", [](const DeviceMemory& memory) { return memory.segment; },
          [](DeviceMemory& memory, DeviceSegment* segment) { memory.segment = segment; }, nb::rv_policy::reference,
          nb::for_setter(nb::arg("segment").none()))
      .def("in_use_bytes", &DeviceMemory::in_use_bytes);

  nb::class_<KernelClock>(module, "KernelClock", nb::type_slots(clock_slots))
      .def(
          "__init__",
          [](KernelClock* clock, nb::object storages, nb::object memory, nb::object lock, nb::object prefetches,
             nb::object unpinned, nb::object tensor, nb::object parameter, nb::object buffer, nb::object storage,
             nb::object overload, nb::object untyped_storage, nb::object modes_below, nb::object set_compiler,
             nb::object current_stream) {
            new (clock) KernelClock(std::move(storages), std::move(memory), std::move(lock), std::move(prefetches),
                                    std::move(unpinned),
                                    {std::move(tensor), std::move(parameter), std::move(buffer), std::move(storage),
                                     std::move(overload), std::move(untyped_storage), std::move(modes_below)},
                                    std::move(set_compiler), std::move(current_stream));
          },
          nb::kw_only(), nb::arg("storages"), nb::arg("memory"), nb::arg("lock"), nb::arg("prefetches"),
          nb::arg("unpinned"), nb::arg("tensor"), nb::arg("parameter"), nb::arg("buffer"), nb::arg("storage"),
          nb::arg("overload"), nb::arg("untyped_storage"), nb::arg("modes_below"), nb::arg("set_compiler"),
          nb::arg("current_stream").none())
      .def(
          "__call__",
          [](KernelClock& kernels, nb::handle clock, nb::handle torch_operator, nb::handle types, nb::handle args,
             nb::handle kwargs) { return kernels.dispatch(clock, torch_operator, types, args, kwargs); },
          nb::arg("clock"), nb::arg("torch_operator"), nb::arg("types"), nb::arg("args") = nb::make_tuple(),
          nb::arg("kwargs").none() = nb::none())
      .def("run",
           [](KernelClock& kernels, nb::handle clock, nb::handle torch_operator, nb::handle args, nb::handle kwargs) {
             return kernels.run(clock, torch_operator, args, kwargs);
           })
      .def("divide", &KernelClock::divide, nb::arg("clock"), nb::arg("weight"))
      .def("begin_step", &KernelClock::begin_step, nb::arg("schedule").none())
      .def("follow", &KernelClock::follow, nb::arg("schedule").none())
      .def("tensor", &KernelClock::tensor, nb::sig("def tensor(self, index: int) -> ManagedStorage | None"))
      .def("numbered", &KernelClock::numbered, nb::arg("first") = 0,
           nb::sig("def numbered(self, first: int = 0) -> list[ManagedStorage]"))
      .def("seen", &KernelClock::seen, nb::sig("def seen(self) -> list[str]"))
      .def("touched_bytes", &KernelClock::touched_bytes)
      .def_prop_ro("schedule", &KernelClock::schedule, returns("def schedule(self) -> typing.Any"))
      .def_rw("entered", &KernelClock::entered)
      .def_rw("in_step", &KernelClock::in_step)
      .def_rw("views_need_bytes", &KernelClock::views_need_bytes)
      .def_rw("asks_needs", &KernelClock::asks_needs)
      .def_rw("is_recording", &KernelClock::is_recording)
      .def_rw("keeps_recipe", &KernelClock::keeps_recipe)
      .def_rw("in_flight", &KernelClock::in_flight)
      .def_rw("excluded_s", &KernelClock::excluded_s)
      .def_rw("activation", &KernelClock::activation)
      .def_ro("step", &KernelClock::step)
      .def_ro("kernels", &KernelClock::kernels)
      .def_ro("operators", &KernelClock::operators)
      .def_ro("least_bytes", &KernelClock::least_bytes)
      .def_ro("clock_s", &KernelClock::clock_s)
      .def_ro("left_s", &KernelClock::left_s);
}

}  // namespace penstock
