// What torch asks of a device: its guard with streams and events, its hooks, page-locked memory; and the
// functions that Python calls.
#include "allocator.h"
#include "generator.h"
#include "memory.h"
#include "streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <cstring>

namespace emu {
namespace {

const c10::Device kDevice(kType, 0);

c10::Stream stream_of(int id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
int id_of(const c10::Stream& stream) { return static_cast<int>(stream.id()); }

// Behind torch.Event: its latest recording.
struct Event {
  Event() { counters().events++; }
  ~Event() { counters().events--; }
  MarkPtr mark;
};
MarkPtr& mark_of(void* event) { return static_cast<Event*>(event)->mark; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    setDevice(device);
    return kDevice;
  }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "emu has one device, and not ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(exchange_stream(id_of(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  bool queryStream(const c10::Stream& stream) const override { return query(emu::record(id_of(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(id_of(stream)); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize_device(); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    TORCH_CHECK(!mark_of(*event) || !mark_of(*event)->waiting,
                "emu: an event is recorded again while a thread of the host waits for it");
    mark_of(*event) = emu::record(id_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) emu::wait(id_of(stream), mark_of(event));
  }
  bool queryEvent(void* event) const override { return !event || query(mark_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(mark_of(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    for (void* event : {first, second})
      TORCH_CHECK(event && mark_of(event)->reached, "both events must have been recorded and completed");
    if (has_machine()) return 1e3 * (mark_of(second)->moment.at_s - mark_of(first)->moment.at_s);
    return mark_of(second)->time_ms - mark_of(first)->time_ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator().recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A block lives until it is released here and no copy needs it any more.
struct PageLockedAllocator final : at::HostAllocator {
  static void release(void* address) { page_unlock(address); }

  c10::DataPtr allocate(size_t size_bytes) override {
    constexpr size_t kPage = 4096;
    void* address = size_bytes ? aligned_alloc(kPage, (size_bytes + kPage - 1) / kPage * kPage) : nullptr;
    if (address) page_lock(address, size_bytes, std::shared_ptr<void>(address, &::free));
    return {address, address, &release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t size_bytes) const override {
    memcpy(target, source, size_bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // copies keep what they need
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PageLockedAllocator& page_locked_allocator() {
  static auto* instance = new PageLockedAllocator;
  return *instance;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }

  bool isPinnedPtr(const void* address) const override { return hold_page_locked(address, 1) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &page_locked_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }

  // The new memory is of the current stream, where the former content is copied, as CUDA's.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size_bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "this storage cannot be resized");
    c10::DataPtr made = allocator().allocate(size_bytes);
    size_t kept_bytes = std::min(size_bytes, impl->nbytes());
    if (kept_bytes)
      launch(current_stream(), "resize", {Cost::Kernel, 2.0 * kept_bytes}, [to = alias_of(made.get()), from = alias_of(impl->data()), kept_bytes] {
        memcpy(to, from, kept_bytes);
      });
    impl->set_data_ptr_noswap(std::move(made));
    impl->set_nbytes(size_bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::setHostAllocator(kType, &page_locked_allocator(), 1);
  return true;
}();

TORCH_LIBRARY(emu, m) {
  m.def("set_default_generator(Generator? generator) -> ()",
        [](at::Generator generator) { default_generator() = std::move(generator); });
}

}  // namespace
}  // namespace emu

extern "C" {

// nullptr, or why it was refused.
const char* emu_configure(uint64_t total_bytes, int order, uint64_t seed, int host_delay_us, int computes) {
  static thread_local std::string refused;
  try {
    emu::set_order(static_cast<emu::Order>(order), seed);
    emu::set_computes(computes);
    emu::set_host_delay(host_delay_us);
    emu::set_limit_bytes(SIZE_MAX);
    emu::set_total_bytes(total_bytes);
    emu::reset_high_water();
    return nullptr;
  } catch (const std::exception& error) {
    refused = error.what();
    return refused.c_str();
  }
}

void emu_halt() { emu::halt(); }
void emu_set_limit_bytes(uint64_t bytes) { emu::set_limit_bytes(bytes); }
void emu_reset_high_water() { emu::reset_high_water(); }
uint64_t emu_high_water_bytes() { return emu::high_water_bytes(); }
uint64_t emu_total_bytes() { return emu::total_bytes(); }
int emu_is_forked() { return emu::is_forked(); }

void emu_page_lock(uint64_t address, uint64_t size_bytes) {
  auto* begin = reinterpret_cast<void*>(address);
  emu::page_lock(begin, size_bytes, std::shared_ptr<void>(begin, [](void*) {}));
}
// Waits for the device, which may be copying.
const char* emu_page_unlock(uint64_t address) {
  static thread_local std::string raised;
  const char* result = nullptr;
  try {
    emu::synchronize_device();
  } catch (const std::exception& error) {
    raised = error.what();
    result = raised.c_str();
  }
  emu::page_unlock(reinterpret_cast<void*>(address));
  return result;
}

uint64_t emu_alias_of(uint64_t address) {
  return reinterpret_cast<uint64_t>(emu::alias_of(reinterpret_cast<void*>(address)));
}

int64_t emu_counter(int which) {
  auto& c = emu::counters();
  return std::array{&c.launched, &c.executed, &c.switches, &c.synchronized, &c.events}.at(which)->load();
}
}
