#include "runtime/storages.hpp"

#include <utility>

#ifdef __linux__
#include "arena/arena.hpp"
#include "arena/hooks.hpp"
#endif

namespace penstock {

nb::object Storages::make(nb::handle storage, std::int64_t size_bytes, nb::handle died) {
  nb::object object = nb::inst_alloc(nb::type<ManagedStorage>());
  auto* managed = new (nb::inst_ptr<ManagedStorage>(object)) ManagedStorage;
  nb::inst_mark_ready(object);
  managed->self = object.ptr();
  managed->key = reinterpret_cast<std::uintptr_t>(storage.ptr());
  managed->size_bytes = size_bytes;
  managed->reference = nb::steal(PyWeakref_NewRef(storage.ptr(), died.ptr()));
  if (!managed->reference.is_valid()) throw nb::python_error();
  return object;
}

Storages::Storages(nb::object adopt, nb::object on_freed, std::int64_t smallest_bytes, std::uint64_t first_serial,
                   nb::object device)
    : adopt_(std::move(adopt)),
      on_freed_(std::move(on_freed)),
      device_(std::move(device)),
      smallest_bytes_(smallest_bytes),
      first_serial_(first_serial),
      dead_(nb::module_::import_("collections").attr("deque")()),
      died_(dead_.attr("append")),
      pop_dead_(dead_.attr("popleft")) {}

bool Storages::has_dead() const { return PyObject_Size(dead_.ptr()) > 0; }

ManagedStorage* Storages::find(PyObject* storage) const {
  const auto found = by_storage_.find(storage);
  return found == by_storage_.end() ? nullptr : found->second;
}

ManagedStorage* Storages::add(PyObject* storage, std::int64_t size_bytes) {
  nb::object object = make(storage, size_bytes, died_);
  auto* managed = nb::inst_ptr<ManagedStorage>(object);
  by_reference_.insert_or_assign(managed->reference.ptr(), Owned{object, managed});
  return managed;
}

void Storages::use_last(ManagedStorage& managed) {
  managed.movable = true;
  managed.use = use_.insert(use_.end(), &managed);
  managed.in_use_order = true;
}

ManagedStorage* Storages::track(PyObject* storage, bool made, nb::handle owner_stream) {
  if (auto* known = find(storage)) return known;
  const auto size_bytes = nb::cast<std::int64_t>(nb::handle(storage).attr("nbytes")());
  auto* managed = add(storage, size_bytes);
  by_storage_.insert_or_assign(storage, managed);
  std::vector<std::uintptr_t> parts;
#ifdef __linux__
  const bool is_large = part_bytes != 0 && size_bytes >= divisible_bytes;
  if (const auto* arena = installed_arena(); is_large && arena != nullptr) {
    const auto address = nb::cast<std::uintptr_t>(nb::handle(storage).attr("data_ptr")());
    parts = arena->parts(reinterpret_cast<const void*>(address));
    if (parts.size() > 1) managed->size_bytes = static_cast<std::int64_t>(parts[1] - parts[0]);
  }
#endif
  const bool adopted = size_bytes >= smallest_bytes_ && adopts(*managed, storage, made, owner_stream);
  managed->size_bytes = size_bytes;
  if (!adopted) {
    if (!is_on_device(storage)) std::swap(managed->size_bytes, managed->elsewhere_bytes);
    return managed;
  }
  use_last(*managed);
  if (parts.size() > 1)  // by an earlier run
    add_parts(*managed, storage, made, parts);
  else if (divided_sizes_.contains(size_bytes))
    divide(*managed);
  return managed;
}

void Storages::divide(ManagedStorage& whole) {
#ifdef __linux__
  auto* const arena = installed_arena();
  if (arena == nullptr || whole.address == 0 || !is_divisible(whole)) return;
  const nb::object storage = whole.reference();
  if (storage.is_none()) return;
  const auto starts = arena->divide(reinterpret_cast<void*>(whole.address), static_cast<std::size_t>(part_bytes));
  if (starts.size() >= 2) add_parts(whole, storage.ptr(), true, starts);
#endif
}

// Of a storage whose block the arena has divided: the record of the whole becomes that of its first part.
void Storages::add_parts(ManagedStorage& whole, PyObject* storage, bool made,
                         const std::vector<std::uintptr_t>& starts) {
  const auto size_bytes = whole.size_bytes;
  divided_sizes_.insert(size_bytes);
  auto* last = &whole;
  for (std::size_t i = 0; i < starts.size(); ++i) {
    auto* part = &whole;
    const auto offset_bytes = static_cast<std::int64_t>(starts[i] - starts[0]);
    const auto end = i + 1 < starts.size() ? static_cast<std::int64_t>(starts[i + 1] - starts[0]) : size_bytes;
    if (i == 0) {
      part->size_bytes = end;
    } else {
      part = add(storage, end - offset_bytes);
      part->key = starts[i];
      part->offset_bytes = offset_bytes;
      part->kind = whole.kind;
      part->persistent = whole.persistent;
      part->birth = whole.birth;
      if (adopts(*part, storage, made, {})) use_last(*part);
      last->next = part;
    }
    part->is_part = true;
    last = part;
  }
}

bool Storages::adopts(ManagedStorage& managed, PyObject* storage, bool made, nb::handle owner_stream) {
#ifdef __linux__
  if (first_serial_ != 0) {
    const auto address = nb::cast<std::uintptr_t>(nb::handle(storage).attr("data_ptr")()) +
                         static_cast<std::uintptr_t>(managed.offset_bytes);
    if (const auto* arena = installed_arena(); arena != nullptr) {
      const auto block = arena->block(reinterpret_cast<const void*>(address));
      if (block && block->start == address && block->serial >= first_serial_) {
        managed.address = address;
        enter_address(managed);
        return true;
      }
    }
  }
#endif
  if (owner_stream.is_valid() && memory_ != nullptr && managed.size_bytes > 0 && is_on_device(storage) &&
      nb::cast<bool>(nb::handle(storage).attr("resizable")())) {
    managed.owner_stream = nb::borrow(owner_stream);
    memory_->managed_bytes += managed.size_bytes;
    if (memory_->segment != nullptr && managed.size_bytes > DeviceSegment::kUndivided)
      memory_->segment->put(managed, nb::cast<std::uintptr_t>(nb::handle(storage).attr("data_ptr")()));
    return true;
  }
  const nb::object held = nb::borrow(managed.self);
  const bool adopted = nb::cast<bool>(adopt_(held, nb::handle(storage), made));
  if (adopted) enter_address(managed);
  return adopted;
}

void Storages::enter_address(ManagedStorage& managed) {
  if (managed.address != 0) by_address_.insert_or_assign(managed.address, &managed);
}

ManagedStorage* Storages::at(std::uintptr_t address) const {
  const auto found = by_address_.find(address);
  return found == by_address_.end() ? nullptr : found->second;
}

void Storages::clear_address(ManagedStorage& managed) {
  if (const auto found = by_address_.find(managed.address);
      found != by_address_.end() && found->second == &managed)
    by_address_.erase(found);
  managed.address = 0;
}

void Storages::remove_one_dead() { remove(nb::object(pop_dead_())); }

void Storages::untrack(PyObject* storage) {
  for (auto* managed = find(storage); managed != nullptr;) {
    auto* const next = managed->next;
    const nb::object reference = std::exchange(managed->reference, nb::none());
    remove(reference);
    managed = next;
  }
}

void Storages::remove(nb::object reference) {
  const auto found = by_reference_.find(reference.ptr());
  if (found == by_reference_.end()) return;
  const Owned owned = std::move(found->second);
  by_reference_.erase(found);
  auto& managed = *owned.managed;
  const auto met = by_storage_.find(reinterpret_cast<PyObject*>(managed.key));
  if (met != by_storage_.end() && met->second == &managed) by_storage_.erase(met);
  if (managed.in_use_order) {
    use_.erase(managed.use);
    managed.in_use_order = false;
  }
  clear_address(managed);
  if (managed.segment_address != 0) memory_->segment->take(managed);
  if (reports_all || managed.reports_freed || managed.recipes != 0 || !managed.slot.is_none())
    on_freed_(owned.object);
  else if (managed.movable && memory_ != nullptr)
    memory_->managed_bytes -= managed.size_bytes;
}

std::vector<nb::object> Storages::all() const {
  std::vector<nb::object> found;
  found.reserve(by_storage_.size());
  for (const auto& [_, managed] : by_storage_) found.push_back(nb::borrow(managed->self));
  return found;
}

std::vector<nb::object> Storages::by_use() const {
  std::vector<nb::object> found;
  found.reserve(use_.size());
  for (const auto* managed : use_) found.push_back(nb::borrow(managed->self));
  return found;
}

bool Storages::all_resident() const {
  for (const auto* managed : use_)
    if (managed->state != kResident) return false;
  return true;
}

int Storages::traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  auto* storages = nb::inst_ptr<Storages>(self);
  Py_VISIT(storages->adopt_.ptr());
  Py_VISIT(storages->on_freed_.ptr());
  return 0;
}

int Storages::clear(PyObject* self) {
  auto* storages = nb::inst_ptr<Storages>(self);
  storages->adopt_.reset();
  storages->on_freed_.reset();
  return 0;
}

}  // namespace penstock
