#include "runtime/device_segment.hpp"

#include <algorithm>
#include <limits>
#include <tuple>

#include "runtime/storages.hpp"

namespace penstock {
namespace {

// What it costs to have a byte elsewhere, beside a copy within the device: what is leaving keeps kernels waiting, and
// what has to leave takes both links.
constexpr double kMoveCost = 1, kLeavingCost = 20, kLeaveCost = 80;
constexpr double kNever = std::numeric_limits<double>::infinity();

// Places of least cost that are looked at.
constexpr std::size_t kTried = 64;

// Where nothing makes a block that is large enough at once, one is made that is larger than all that are free, by so
// many parts of what is missing.
constexpr std::int64_t kParts = 8;

// Blocks of at least so large a part of the segment hardly ever move. They go where they leave most room for another.
constexpr std::int64_t kLargePart = 12;

std::int64_t rounded(std::int64_t size_bytes) {
  return (size_bytes + DeviceSegment::kRound - 1) / DeviceSegment::kRound * DeviceSegment::kRound;
}

bool is_leaving(const ManagedStorage& managed) {
  return managed.state == kLeaving && managed.freeing_bytes > 0 && !managed.copy_invalid;
}

// What leaves does not: its copy, and those behind it, would wait for what is done to its memory now.
bool moves(const ManagedStorage& managed) {
  return managed.state == kComing ? managed.copy_pending : managed.state == kResident;
}

// It need not stay on the device, if it cannot move.
bool may_go(const ManagedStorage& managed, Leaves leaves) {
  if (managed.state == kComing || leaves == Leaves::kNone) return false;
  if (managed.state == kResident && !managed.kept_alive.is_none()) return false;  // its packed bytes are being written
  return leaves == Leaves::kAny || is_leaving(managed);
}

double cost(const ManagedStorage* managed, Leaves leaves) {
  if (managed == nullptr || !managed->movable || managed->fixed_in_segment || managed->pins > 0) return kNever;
  if (moves(*managed)) return kMoveCost;
  if (managed->state != kLeaving || !may_go(*managed, leaves)) return kNever;
  return is_leaving(*managed) ? kLeavingCost : kLeaveCost;
}

}  // namespace

DeviceSegment::DeviceSegment(std::uintptr_t address, std::int64_t size_bytes)
    : begin_(address), end_(address + static_cast<std::uintptr_t>(size_bytes)) {
  enter_free(address, size_bytes);
}

void DeviceSegment::let_go() noexcept {
  for (auto& [_, block] : blocks_)
    if (block.managed != nullptr) block.managed->segment_address = 0;
}

void DeviceSegment::clear() {
  let_go();
  blocks_.clear();
  free_.clear();
  free_bytes_ = 0;
  enter_free(begin_, static_cast<std::int64_t>(end_ - begin_));
}

void DeviceSegment::enter_free(std::uintptr_t address, std::int64_t size_bytes) {
  blocks_[address] = Block{size_bytes};
  free_.emplace(size_bytes, address);
  free_bytes_ += size_bytes;
}

DeviceSegment::Blocks::iterator DeviceSegment::remove_free(Blocks::iterator block) {
  free_.erase({block->second.size_bytes, block->first});
  free_bytes_ -= block->second.size_bytes;
  return blocks_.erase(block);
}

void DeviceSegment::vacate(Blocks::iterator block) {
  if (block->second.managed != nullptr) block->second.managed->segment_address = 0;
  auto address = block->first;
  auto size_bytes = block->second.size_bytes;
  auto next = blocks_.erase(block);
  if (next != blocks_.end() && next->second.is_free) {
    size_bytes += next->second.size_bytes;
    next = remove_free(next);
  }
  if (next != blocks_.begin()) {
    if (const auto before = std::prev(next); before->second.is_free) {
      address = before->first;
      size_bytes += before->second.size_bytes;
      remove_free(before);
    }
  }
  enter_free(address, size_bytes);
}

void DeviceSegment::occupy(std::uintptr_t address, std::int64_t size_bytes, ManagedStorage* managed) {
  if (address < begin_ || address >= end_) return;
  const auto wanted = std::min(rounded(size_bytes), static_cast<std::int64_t>(end_ - address));
  const auto wanted_end = address + static_cast<std::uintptr_t>(wanted);
  // What was thought to lie there does so no more: the program had memory that nobody told of.
  for (auto block = std::prev(blocks_.upper_bound(address)); block != blocks_.end() && block->first < wanted_end;) {
    if (block->second.is_free) {
      ++block;
    } else {
      vacate(block);
      block = std::prev(blocks_.upper_bound(address));
    }
  }
  auto block = std::prev(blocks_.upper_bound(address));
  const auto free_begin = block->first;
  const auto free_bytes = block->second.size_bytes;
  remove_free(block);
  const auto before_bytes = static_cast<std::int64_t>(address - free_begin);
  if (before_bytes > 0) enter_free(free_begin, before_bytes);
  const auto rest_bytes = free_bytes - before_bytes - wanted;
  const bool divides = rest_bytes > kUndivided;
  blocks_[address] = Block{divides ? wanted : wanted + rest_bytes, managed, false};
  if (divides) enter_free(wanted_end, rest_bytes);
  if (managed != nullptr) managed->segment_address = address;
}

void DeviceSegment::put(ManagedStorage& managed, std::uintptr_t address) {
  take(managed);
  occupy(address, managed.size_bytes, &managed);
}

void DeviceSegment::take(ManagedStorage& managed) {
  if (managed.segment_address != 0) give_up(managed.segment_address);
}

void DeviceSegment::give_up(std::uintptr_t address) {
  const auto block = blocks_.find(address);
  if (block != blocks_.end() && !block->second.is_free) vacate(block);
}

std::int64_t DeviceSegment::free_at(std::uintptr_t address) const {
  const auto block = blocks_.find(address);
  return block == blocks_.end() || !block->second.is_free ? 0 : block->second.size_bytes;
}

bool DeviceSegment::fits(const std::vector<std::int64_t>& sizes) const {
  std::int64_t sum_bytes = 0;
  for (const auto size_bytes : sizes) sum_bytes += rounded(size_bytes);
  if (largest_free_bytes() >= sum_bytes) return true;
  if (sizes.size() == 1) return false;
  BySize left = free_;
  for (const auto size_bytes : sizes) {
    const auto wanted = rounded(size_bytes);
    const auto found = left.lower_bound({wanted, 0});
    if (found == left.end()) return false;
    const auto [block_bytes, address] = *found;
    left.erase(found);
    if (block_bytes - wanted > kUndivided)
      left.emplace(block_bytes - wanted, address + static_cast<std::uintptr_t>(wanted));
  }
  return true;
}

std::optional<Obstacles> DeviceSegment::obstacles(std::int64_t size_bytes, Leaves leaves) const {
  if (leaves == Leaves::kAny) return place_for(size_bytes, leaves);
  std::optional<Obstacles> found;
  if (leaves == Leaves::kLeaving && is_large(size_bytes)) found = place_for(size_bytes, leaves);
  if (!found) found = place_for(size_bytes, Leaves::kNone);
  const auto least = largest_free_bytes();
  for (auto part = kParts - 1; part > 0 && !found && size_bytes > least; --part)
    found = place_for(least + (size_bytes - least) * part / kParts, Leaves::kNone);
  return found;
}

std::optional<Obstacles> DeviceSegment::place_for(std::int64_t size_bytes, Leaves leaves) const {
  const bool for_large = leaves == Leaves::kLeaving;
  struct Place {
    std::int64_t span;
    double cost;
    Blocks::const_iterator first, last;
  };
  const auto wanted = rounded(size_bytes);
  std::vector<Place> places;
  std::int64_t held_bytes = 0;
  double sum = 0;
  auto first = blocks_.begin();
  const auto block_cost = [&, largest_bytes = largest_free_bytes()](const Block& block) -> double {
    if (block.is_free) return 0;
    double each = cost(block.managed, leaves);
    if (each == kMoveCost && rounded(block.managed->size_bytes) > largest_bytes)
      each = may_go(*block.managed, leaves) ? kLeaveCost : kNever;
    return each == kNever ? kNever : each * static_cast<double>(block.size_bytes);
  };
  for (auto next = blocks_.begin(); next != blocks_.end();) {
    const double added = block_cost(next->second);
    held_bytes += next->second.size_bytes;
    ++next;
    if (added == kNever) {
      first = next;
      held_bytes = 0;
      sum = 0;
      continue;
    }
    sum += added;
    // Without its first block it is large enough, too.
    while (first != next && held_bytes - first->second.size_bytes >= wanted) {
      held_bytes -= first->second.size_bytes;
      sum -= block_cost(first->second);
      ++first;
    }
    if (held_bytes >= wanted) places.push_back({for_large ? span_beside(first->first, wanted) : 0, sum, first, next});
  }
  const auto tried = std::min(places.size(), kTried);
  std::partial_sort(places.begin(), places.begin() + static_cast<std::ptrdiff_t>(tried), places.end(),
                    [](const Place& a, const Place& b) { return std::tie(b.span, a.cost) < std::tie(a.span, b.cost); });
  places.resize(tried);
  std::optional<Obstacles> best;
  double least = kNever;
  for (const auto& place : places) {
    if (place.cost >= least) break;
    // With the free blocks beside it: what is freed in between joins none outside, and can be held.
    auto begin = place.first, end = place.last;
    if (begin != blocks_.begin() && std::prev(begin)->second.is_free) --begin;
    if (end != blocks_.end() && end->second.is_free) ++end;
    auto found = sorted(begin, end);
    if (!std::ranges::all_of(found.leave, [&](const auto* managed) { return may_go(*managed, leaves); }))
      continue;
    if (for_large) return found;
    double total = 0;
    for (const auto* managed : found.move) total += kMoveCost * static_cast<double>(managed->size_bytes);
    for (const auto* managed : found.leave)
      total += static_cast<double>(managed->size_bytes) * (is_leaving(*managed) ? kLeavingCost : kLeaveCost);
    if (total >= least) continue;
    least = total;
    best = std::move(found);
  }
  return best;
}

// The longest part of the segment in which nothing large lies, nor at this address.
std::int64_t DeviceSegment::span_beside(std::uintptr_t address, std::int64_t size_bytes) const {
  auto begin = begin_;
  std::int64_t longest = 0;
  const auto end_at = [&](std::uintptr_t taken, std::int64_t taken_bytes) {
    if (taken > begin) longest = std::max(longest, static_cast<std::int64_t>(taken - begin));
    begin = std::max(begin, taken + static_cast<std::uintptr_t>(taken_bytes));
  };
  bool is_before = true;
  for (const auto& [taken, block] : blocks_) {
    if (is_before && taken >= address) {
      end_at(address, size_bytes);
      is_before = false;
    }
    const bool is_fixed = block.managed == nullptr || !block.managed->movable || block.managed->fixed_in_segment;
    if (!block.is_free && (is_fixed || is_large(block.size_bytes))) end_at(taken, block.size_bytes);
  }
  end_at(end_, 0);
  return longest;
}

bool DeviceSegment::is_large(std::int64_t size_bytes) const {
  return size_bytes >= static_cast<std::int64_t>(end_ - begin_) / kLargePart;
}

// Which of the blocks in a place fit outside it, in the order of what the allocator does.
Obstacles DeviceSegment::sorted(Blocks::const_iterator first, Blocks::const_iterator last) const {
  Obstacles found;
  BySize outside = free_;
  for (auto block = first; block != last; ++block)
    if (block->second.is_free) {
      found.free.emplace_back(block->first, block->second.size_bytes);
      outside.erase({block->second.size_bytes, block->first});
    }
  for (auto block = first; block != last; ++block) {
    if (block->second.is_free) continue;
    auto* managed = block->second.managed;
    const auto wanted = rounded(managed->size_bytes);
    const auto fitting = moves(*managed) ? outside.lower_bound({wanted, 0}) : outside.end();
    if (fitting == outside.end()) {
      found.leave.push_back(managed);
      continue;
    }
    const auto [block_bytes, address] = *fitting;
    outside.erase(fitting);
    if (block_bytes - wanted > kUndivided)
      outside.emplace(block_bytes - wanted, address + static_cast<std::uintptr_t>(wanted));
    found.move.push_back(managed);
  }
  return found;
}

}  // namespace penstock
