#include "allocator.h"

#include "memory.h"
#include "streams.h"

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

namespace emu {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kMiB = 1 << 20;
constexpr size_t kRound = 512;
constexpr size_t kSmall = kMiB;  // up to this, blocks come from segments of the small pool
constexpr size_t kSmallSegment = 2 * kMiB;
constexpr size_t kMinLarge = 10 * kMiB;  // up to this, from segments of kLargeSegment
constexpr size_t kLargeSegment = 20 * kMiB;
constexpr int kPoisonNew = 0xFF;    // NaN in all types of floating point, -1 as an integer
constexpr int kPoisonFreed = 0xFE;  // large, negative

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

struct Block {
  char* address;
  size_t size_bytes;
  int stream;
  bool is_small;
  size_t requested_bytes = 0;
  bool is_free = false;
  Block* before = nullptr;  // in the segment
  Block* after = nullptr;
  std::set<int> used_on;        // other streams
  std::vector<MarkPtr> until;  // these streams are there, after it was freed

  bool is_split() const { return before || after; }
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    if (a->size_bytes != b->size_bytes) return a->size_bytes < b->size_bytes;
    return a->address < b->address;
  }
};

// In the order of the stream that owns the memory: who uses it without having waited reads this.
void poison(const Block* block, int value) {
  if (!computes()) return;
  void* alias = alias_of(block->address);
  launch(block->stream, "poison", {}, [alias, value, size_bytes = block->size_bytes] { memset(alias, value, size_bytes); });
}

void free_block(void* context);

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size_bytes) override {
    c10::Device device(kType, 0);
    if (!size_bytes) return {nullptr, nullptr, &free_block, device};
    Block* block = take(size_bytes, current_stream());
    return {block->address, block, &free_block, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* target, const void* source, std::size_t size_bytes) const override {
    launch(current_stream(), "copy_data", {Cost::Kernel, 2.0 * size_bytes}, [to = alias_of(target), from = alias_of(source), size_bytes] {
      memcpy(to, from, size_bytes);
    });
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    release_cached();
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (!pointer.get()) return;
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto* block = static_cast<Block*>(pointer.get_context());
    if (stream.id() != block->stream) block->used_on.insert(static_cast<int>(stream.id()));
  }

  DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return stats_;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {
    each([](auto& stat) { stat.reset_accumulated(); });
    stats_.num_alloc_retries = stats_.num_ooms = 0;
  }

  void resetPeakStats(c10::DeviceIndex) override {
    each([](auto& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return {total_ - reserved_, total_};
  }

  void set_total(size_t bytes) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (bytes < reserved_) release_cached();
    TORCH_CHECK(bytes >= reserved_, "emu: ", reserved_, " bytes are in use, more than the ", bytes, " asked for");
    total_ = bytes;
  }

  size_t total() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return total_;
  }

  void set_limit(size_t bytes) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    limit_ = bytes;
  }

  void reset_high_water() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    high_water_ = reserved_;
  }

  size_t high_water() {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return high_water_;
  }

  void free(Block* block) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    count(&DeviceStats::allocation, block, -1);
    count(&DeviceStats::allocated_bytes, block, -int64_t(block->size_bytes));
    count(&DeviceStats::requested_bytes, block, -int64_t(block->requested_bytes));
    if (block->used_on.empty()) return give(block);
    for (int stream : block->used_on) block->until.push_back(record(stream));
    block->used_on.clear();
    pending_.push_back(block);
  }

 private:
  using Field = c10::CachingAllocator::StatArray DeviceStats::*;

  template <typename Change>
  void each(Change change) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (Field field : {&DeviceStats::allocation, &DeviceStats::segment, &DeviceStats::active,
                        &DeviceStats::inactive_split, &DeviceStats::allocated_bytes, &DeviceStats::reserved_bytes,
                        &DeviceStats::active_bytes, &DeviceStats::inactive_split_bytes,
                        &DeviceStats::requested_bytes})
      for (auto& stat : stats_.*field) change(stat);
  }

  void count(Field field, const Block* block, int64_t amount) {
    for (size_t i : {size_t(0), size_t(block->is_small ? 1 : 2)}) {
      auto& stat = (stats_.*field)[i];
      if (amount >= 0)
        stat.increase(amount);
      else
        stat.decrease(-amount);
    }
  }

  // Blocks that other streams have used are free once these streams were seen to get there.
  void give_pending(bool waits) {
    for (size_t i = 0; i < pending_.size();) {
      Block* block = pending_[i];
      if (waits)
        for (auto& mark : block->until) synchronize(mark);
      if (!std::all_of(block->until.begin(), block->until.end(), [](auto& mark) { return is_over(mark); })) {
        i++;
        continue;
      }
      block->until.clear();
      pending_.erase(pending_.begin() + i);
      give(block);
    }
  }

  void give(Block* block) {
    count(&DeviceStats::active, block, -1);
    count(&DeviceStats::active_bytes, block, -int64_t(block->size_bytes));
    poison(block, kPoisonFreed);
    for (Block* other : {block->before, block->after})
      if (other && other->is_free) merge(block, other);
    put_into_pool(block);
  }

  void put_into_pool(Block* block) {
    block->is_free = true;
    pools_[block->is_small].insert(block);
    if (!block->is_split()) return;
    count(&DeviceStats::inactive_split, block, 1);
    count(&DeviceStats::inactive_split_bytes, block, block->size_bytes);
  }

  void take_from_pool(Block* block) {
    block->is_free = false;
    pools_[block->is_small].erase(block);
    if (!block->is_split()) return;
    count(&DeviceStats::inactive_split, block, -1);
    count(&DeviceStats::inactive_split_bytes, block, -int64_t(block->size_bytes));
  }

  void merge(Block* block, Block* other) {
    take_from_pool(other);
    if (other == block->before) {
      block->address = other->address;
      block->before = other->before;
      if (block->before) block->before->after = block;
    } else {
      block->after = other->after;
      if (block->after) block->after->before = block;
    }
    block->size_bytes += other->size_bytes;
    delete other;
  }

  Block* find(size_t size_bytes, int stream, bool is_small) {
    Block key{nullptr, size_bytes, stream, is_small};
    auto found = pools_[is_small].lower_bound(&key);
    if (found == pools_[is_small].end() || (*found)->stream != stream) return nullptr;
    Block* block = *found;
    take_from_pool(block);
    return block;
  }

  static size_t segment_for(size_t size_bytes, bool is_small) {
    return is_small ? kSmallSegment : size_bytes < kMinLarge ? kLargeSegment : round_up(size_bytes, kSmallSegment);
  }

  Block* new_segment(size_t size_bytes, int stream, bool is_small) {
    const size_t segment_bytes = segment_for(size_bytes, is_small);
    if (reserved_ + segment_bytes > std::min(limit_, total_)) return nullptr;
    char* address = map_segment(segment_bytes);
    if (!address) return nullptr;
    reserved_ += segment_bytes;
    high_water_ = std::max(high_water_, reserved_);
    auto* block = new Block{address, segment_bytes, stream, is_small};
    stats_.num_device_alloc++;
    count(&DeviceStats::segment, block, 1);
    count(&DeviceStats::reserved_bytes, block, segment_bytes);
    return block;
  }

  // Waits for the device, as cudaFree does.
  void release_cached() {
    WaitsForRoom waits;
    give_pending(true);
    synchronize_device();
    for (auto& pool : pools_)
      for (auto i = pool.begin(); i != pool.end();) {
        Block* block = *i;
        if (block->is_split()) {
          ++i;
          continue;
        }
        i = pool.erase(i);
        unmap_segment(block->address, block->size_bytes);
        reserved_ -= block->size_bytes;
        stats_.num_device_free++;
        count(&DeviceStats::segment, block, -1);
        count(&DeviceStats::reserved_bytes, block, -int64_t(block->size_bytes));
        delete block;
      }
  }

  Block* take(size_t requested_bytes, int stream) {
    refuse_if_forked();
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    give_pending(false);
    size_t size_bytes = round_up(requested_bytes, kRound);
    bool is_small = size_bytes <= kSmall;
    Block* block = find(size_bytes, stream, is_small);
    if (!block) block = new_segment(size_bytes, stream, is_small);
    if (!block) {
      release_cached();
      stats_.num_alloc_retries++;
      block = new_segment(size_bytes, stream, is_small);  // as CUDA's: the pool is not looked at again
    }
    if (!block) {
      stats_.num_ooms++;
      // It says what the segment would take, as CUDA's does.
      TORCH_CHECK_WITH(OutOfMemoryError, false, "emu out of memory: tried to allocate ",
                       c10::CachingAllocator::format_size(segment_for(size_bytes, is_small)), "; ",
                       c10::CachingAllocator::format_size(reserved_), " of ",
                       c10::CachingAllocator::format_size(std::min(limit_, total_)), " are reserved");
    }
    split(block, size_bytes);
    block->requested_bytes = requested_bytes;
    count(&DeviceStats::allocation, block, 1);
    count(&DeviceStats::active, block, 1);
    count(&DeviceStats::allocated_bytes, block, block->size_bytes);
    count(&DeviceStats::active_bytes, block, block->size_bytes);
    count(&DeviceStats::requested_bytes, block, requested_bytes);
    poison(block, kPoisonNew);
    return block;
  }

  void split(Block* block, size_t size_bytes) {
    size_t left_bytes = block->size_bytes - size_bytes;
    if (block->is_small ? left_bytes < kRound : left_bytes <= kSmall) return;
    auto* rest = new Block{block->address + size_bytes, left_bytes, block->stream, block->is_small};
    rest->before = block;
    rest->after = block->after;
    if (rest->after) rest->after->before = rest;
    block->after = rest;
    block->size_bytes = size_bytes;
    put_into_pool(rest);
  }

  // Recursive: what waits for the device may raise, and unwinding frees tensors.
  std::recursive_mutex mutex_;
  std::set<Block*, BySize> pools_[2];
  std::vector<Block*> pending_;
  DeviceStats stats_;
  size_t reserved_ = 0;
  size_t high_water_ = 0;
  size_t total_ = 4096 * kMiB;
  size_t limit_ = SIZE_MAX;
};

// Never destroyed: tensors may die later.
Allocator& instance() {
  static auto* made = new Allocator;
  return *made;
}

void free_block(void* context) {
  if (context && !is_forked()) instance().free(static_cast<Block*>(context));
}

const bool registered = [] {
  c10::SetAllocator(kType, &instance());
  return true;
}();

}  // namespace

c10::DeviceAllocator& allocator() { return instance(); }
void set_total_bytes(size_t bytes) { instance().set_total(bytes); }
size_t total_bytes() { return instance().total(); }
void set_limit_bytes(size_t bytes) { instance().set_limit(bytes); }
void reset_high_water() { instance().reset_high_water(); }
size_t high_water_bytes() { return instance().high_water(); }

}  // namespace emu
