// The storages of a program: how large each is, where its bytes are, and who uses it now. Python sees them as
// penstock.runtime.storages; all calls hold the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <list>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/device_segment.hpp"

namespace penstock {

namespace nb = nanobind;

enum StorageState : int { kResident, kLeaving, kAway, kComing, kDropped };

// A storage, or a part of a divided one: these leave and come back one by one.
struct ManagedStorage {
  nb::object reference;         // weak, to torch's storage; None when it is another one now
  std::uintptr_t key = 0;       // torch's storage object
  std::uintptr_t address = 0;   // where the arena keeps it; 0: it does not
  std::int64_t size_bytes = 0;       // on the device
  std::int64_t elsewhere_bytes = 0;  // on another one: then it has none there
  std::int64_t offset_bytes = 0;     // in torch's storage
  ManagedStorage* next = nullptr;      // part of the same storage, while that lives
  bool is_part = false, stays_whole = false;
  std::int64_t pins = 0;     // who uses it now: kernels, and what runs beside them
  bool in_kernel = false;   // the clock's kernel that runs uses it
  std::int64_t recipes = 0;  // that hold only while it is not written
  std::int64_t index = -1, step = -1, birth = -1;
  int state = kResident;
  int kind = -1;
  std::int64_t freeing_bytes = 0;  // when its copy is complete; 0: it stays
  std::int64_t packed_bytes = 0;   // on the device while it is away; 0: none
  bool clean = false, guarded = false, keeps_copy = true, queued = false;
  bool copy_invalid = false;    // the copy under way: the bytes were written meanwhile
  bool writing_packed = false;  // its packed bytes are being written, or wait for it
  bool movable = false, persistent = false;
  bool swapped_out = false;  // by the arena, which has the only copy
  bool reports_freed = false;  // the device is told of its death
  bool copy_pending = false;  // a copy to or from it has not begun, as far as is known: until then it may move
  bool fixed_in_segment = false;  // where its memory is, as others use that too
  std::uintptr_t segment_address = 0;  // in the device's segment; 0: it does not
  nb::object slot = nb::none(), owner_stream = nb::none();
  nb::object kept_alive = nb::none();  // torch's storage, while it is copied

  PyObject* self = nullptr;  // the Python object that this is part of
  std::uint64_t mark = 0;    // of the call that has listed it last
  bool in_use_order = false;
  std::list<ManagedStorage*>::iterator use;
};

// Bytes of the device, as kernels see them.
struct DeviceMemory {
  std::int64_t budget_bytes = 0;
  std::int64_t reserved_bytes = 0;   // in use when the kernel began, and what it takes
  std::int64_t managed_bytes = 0;    // in use by storages that can leave; 0 if they are in the arena
  std::int64_t unmanaged_bytes = 0;  // in use otherwise, less what in the arena belongs to others
  std::int64_t recount_in = 0;       // after so many kernels Python asks the device again what unmanaged_bytes is
  bool in_arena = false;
  DeviceSegment* segment = nullptr;  // that the large blocks of the device are in; null: there is none

  std::int64_t in_use_bytes() const;
};

class Storages {
 public:
  // first_serial   storages in blocks of the arena from this one on are movable, and `adopt` is not asked; 0: none
  // device         storages on others have no bytes on it; None: there are no others
  Storages(nb::object adopt, nb::object on_freed, std::int64_t smallest_bytes, std::uint64_t first_serial,
           nb::object device);

  // Null where it was not met before. Of a divided one the first part, here and below.
  ManagedStorage* find(PyObject* storage) const;
  // owner_stream: the stream of the kernel that has made it; none where it is not known, or made by none.
  ManagedStorage* track(PyObject* storage, bool made, nb::handle owner_stream = {});
  // Makes parts of it, where it is at rest in the arena. Others of its size are divided when they are met first: what
  // is as large as a weight is its gradient, or the optimizer's.
  void divide(ManagedStorage& whole);
  std::int64_t part_bytes = 0;      // 0: nothing is divided
  std::int64_t divisible_bytes = 0;  // the smallest that is
  bool is_divisible(const ManagedStorage& whole) const {
    return part_bytes != 0 && whole.size_bytes >= divisible_bytes && !whole.is_part && !whole.stays_whole;
  }
  bool has_divided() const { return !divided_sizes_.empty(); }
  // Null where none lies there.
  ManagedStorage* at(std::uintptr_t address) const;
  // The arena no longer keeps it.
  void clear_address(ManagedStorage& managed);
  // It was used now.
  void move_to_end(ManagedStorage& managed) {
    if (managed.in_use_order) use_.splice(use_.end(), use_, managed.use);
  }
  // The storage's memory is another one now: to the run it is another storage.
  void untrack(PyObject* storage);
  void remove_dead() {
    while (has_dead()) remove_one_dead();
  }
  bool has_dead() const;

  std::vector<nb::object> all() const;
  // Movable ones, the least recently used first.
  std::vector<nb::object> by_use() const;
  bool all_resident() const;
  std::size_t size() const { return by_storage_.size(); }

  // What kernels make on the device is adopted from now on without asking, and counts in this memory.
  void adopt_results(DeviceMemory& memory) { memory_ = &memory; }

  bool reports_all = true;  // `on_freed` is called for those, too, that have no copy, and do not report it

  static nb::object make(nb::handle storage, std::int64_t size_bytes, nb::handle died);
  static int traverse(PyObject* self, visitproc visit, void* arg);
  static int clear(PyObject* self);

 private:
  struct Owned {
    nb::object object;
    ManagedStorage* managed = nullptr;
  };

  void remove_one_dead();
  void remove(nb::object reference);
  ManagedStorage* add(PyObject* storage, std::int64_t size_bytes);
  void add_parts(ManagedStorage& whole, PyObject* storage, bool made, const std::vector<std::uintptr_t>& starts);
  void use_last(ManagedStorage& managed);
  bool adopts(ManagedStorage& managed, PyObject* storage, bool made, nb::handle owner_stream);
  void enter_address(ManagedStorage& managed);

  bool is_on_device(nb::handle storage) const {
    return device_.is_none() || storage.attr("device").equal(device_);
  }

  nb::object adopt_, on_freed_, device_;
  DeviceMemory* memory_ = nullptr;  // null: `adopt` is asked
  const std::int64_t smallest_bytes_;
  const std::uint64_t first_serial_;
  nb::object dead_;  // a deque of weak references: filled anywhere, on any thread, by a call nothing can interrupt
  nb::object died_, pop_dead_;
  std::unordered_map<PyObject*, ManagedStorage*> by_storage_;
  std::unordered_map<PyObject*, Owned> by_reference_;  // until it is removed
  std::unordered_map<std::uintptr_t, ManagedStorage*> by_address_;
  std::list<ManagedStorage*> use_;
  std::set<std::int64_t> divided_sizes_;
};

}  // namespace penstock
