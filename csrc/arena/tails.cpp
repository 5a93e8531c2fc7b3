#include "arena/tails.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>

namespace penstock {

namespace {

constexpr unsigned kGrains = kChunkBytes / kGrainBytes;
constexpr std::uint64_t kAll = ~std::uint64_t{0};
static_assert(kGrains == 64, "a bit for each grain of a frame");

std::uint64_t bits(unsigned first, unsigned count) { return (count == kGrains ? kAll : (1ULL << count) - 1) << first; }

// The first grain of a run of `count`; kGrains if there is none.
unsigned find_run(std::uint64_t grains, unsigned count) {
  for (unsigned have = 1; have < count && grains != 0;) {
    const auto step = std::min(have, count - have);
    grains &= grains >> step;
    have += step;
  }
  return grains == 0 ? kGrains : static_cast<unsigned>(std::countr_zero(grains));
}

}  // namespace

Tails::Tails(std::size_t homes) : table_(homes) {
  if (homes == 0 || !table_.usable()) return;
  mapping_bytes_ = (homes + 1) * kChunkBytes;
  void* mapping = mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return;
  mapping_ = static_cast<char*>(mapping);
  base_ = mapping_ + (kChunkBytes - reinterpret_cast<std::uintptr_t>(mapping_) % kChunkBytes) % kChunkBytes;
  homes_ = homes;
  vacant_.reserve(homes);  // addresses, until they are used
}

Tails::~Tails() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

void Tails::set(std::uint32_t home, Home value) {
  auto& entry = table_[home];
  const auto count = [](Grains grains) { return static_cast<std::size_t>(std::popcount(grains)); };
  if (entry.free != 0) by_free_.erase({std::popcount(entry.free), home});
  free_ += count(value.free) - count(entry.free);
  lent_ += count(value.lent) - count(entry.lent);
  whole_ += (value.free == kAll) - static_cast<std::size_t>(entry.free == kAll);
  if ((value.free | value.lent) == 0 && (entry.free | entry.lent) != 0) vacant_.push_back(home);
  entry = value;
  if (value.free != 0) by_free_.emplace(std::popcount(value.free), home);
}

char* Tails::vacant_home() {
  if (!vacant_.empty()) return address_of(vacant_.back());
  return used_ < homes_ && table_.open(used_, used_ + 1) ? address_of(used_) : nullptr;
}

bool Tails::add_frame() {
  if (!protect(vacant_home(), kChunkBytes, PROT_NONE)) return false;
  auto home = used_;
  if (vacant_.empty()) {
    ++used_;
  } else {
    home = vacant_.back();
    vacant_.pop_back();
  }
  set(home, {kAll, 0});
  return true;
}

bool Tails::take_frame(char* to) {
  if (whole_ == 0) return false;
  const auto home = by_free_.rbegin()->second;
  const bool moved = move_memory(address_of(home), to, kChunkBytes, kGrainBytes) == kChunkBytes &&
                     protect(to, kChunkBytes, PROT_READ | PROT_WRITE);
  map_nothing(address_of(home), kChunkBytes);
  if (moved)
    make_huge(to, kChunkBytes);  // its parts came back as small pages
  else
    map_nothing(to, kChunkBytes);  // what had moved
  set(home, {0, 0});
  return moved;
}

// What stays behind at home is a part of the home's mapping: it costs nothing, and its place is kept.
bool Tails::borrow(std::uint32_t home, unsigned first, unsigned count, char* to) {
  const auto size = count * kGrainBytes;
  const auto grains = bits(first, count);
  auto value = table_[home];
  value.free &= ~grains;
  if (move_memory(address_of(home) + first * kGrainBytes, to, size, kGrainBytes) == size &&
      protect(to, size, PROT_READ | PROT_WRITE)) {
    value.lent |= grains;
    set(home, value);
    return true;
  }
  map_nothing(to, size);
  map_nothing(address_of(home) + first * kGrainBytes, size);
  set(home, value);
  return false;
}

bool Tails::lend(char* tail, std::size_t size_bytes) {
  const auto wanted = static_cast<unsigned>(size_bytes / kGrainBytes);
  for (auto entry = by_free_.lower_bound({static_cast<int>(wanted), 0}); entry != by_free_.end(); ++entry) {
    const auto home = entry->second;
    const auto first = find_run(table_[home].free, wanted);
    if (first == kGrains) continue;
    if (!borrow(home, first, wanted, tail)) return false;
    loans_[tail] = {{home, static_cast<std::uint8_t>(first), static_cast<std::uint8_t>(wanted)}};
    return true;
  }
  return false;
}

bool Tails::gather(char* tail, std::size_t size_bytes) {
  auto wanted = static_cast<unsigned>(size_bytes / kGrainBytes);
  auto& loans = loans_[tail];
  auto* to = tail;
  while (wanted > 0 && !by_free_.empty()) {
    const auto home = by_free_.rbegin()->second;
    const auto first = static_cast<unsigned>(std::countr_zero(table_[home].free));
    const auto count = std::min(wanted, static_cast<unsigned>(std::countr_one(table_[home].free >> first)));
    if (!borrow(home, first, count, to)) break;
    loans.push_back({home, static_cast<std::uint8_t>(first), static_cast<std::uint8_t>(count)});
    to += count * kGrainBytes;
    wanted -= count;
  }
  if (wanted == 0) return true;
  if (by_free_.empty() && map_fresh(to, wanted * kGrainBytes)) {
    loans.push_back({kLoose, 0, static_cast<std::uint8_t>(wanted)});
    loose_ += wanted;
    return true;
  }
  give_back(tail);
  map_nothing(tail, size_bytes);  // what stayed behind too
  return false;
}

bool Tails::go_home(Loan loan, char* from) {
  const auto size = loan.count * kGrainBytes;
  if (loan.home == kLoose) {
    loose_ -= loan.count;
    auto* home = vacant_home();
    if (home == nullptr || !add_frame()) {
      map_nothing(from, size);
      return true;
    }
    loan.home = static_cast<std::uint32_t>((home - base_) / static_cast<std::ptrdiff_t>(kChunkBytes));
    set(loan.home, {0, bits(0, loan.count)});
  }
  const auto grains = bits(loan.first, loan.count);
  auto* to = address_of(loan.home) + loan.first * kGrainBytes;
  auto value = table_[loan.home];
  value.lent &= ~grains;
  const bool moved = move_memory(from, to, size, kGrainBytes) == size;
  if (moved)
    value.free |= grains;
  else
    map_nothing(to, size);
  set(loan.home, value);
  return moved;
}

bool Tails::give_back(char* tail) {
  const auto found = loans_.find(tail);
  if (found == loans_.end()) return true;
  std::size_t size = 0;
  for (const auto loan : found->second) size += loan.count * kGrainBytes;
  if (size > 0 && !protect(tail, size, PROT_NONE)) {
    drop(tail);
    return true;
  }
  auto* from = tail;
  bool all = true;
  for (const auto loan : found->second) {
    all &= go_home(loan, from);
    from += loan.count * kGrainBytes;
  }
  loans_.erase(found);
  return all;
}

bool Tails::move(char* tail, char* to) {
  const auto found = loans_.find(tail);
  if (found == loans_.end()) return false;
  std::size_t at = 0;
  for (const auto loan : found->second) {
    const auto size = loan.count * kGrainBytes;
    if (move_memory(tail + at, to + at, size, kGrainBytes) != size) {
      map_nothing(to, at + size);
      drop(tail);
      return false;
    }
    at += size;
  }
  auto node = loans_.extract(found);
  node.key() = to;
  loans_.insert(std::move(node));
  return true;
}

void Tails::drop(char* tail) {
  if (const auto size_bytes = lose(tail)) map_nothing(tail, size_bytes);
}

std::size_t Tails::lose(char* tail) {
  const auto found = loans_.find(tail);
  if (found == loans_.end()) return 0;
  std::size_t size = 0;
  for (const auto loan : found->second) {
    size += loan.count * kGrainBytes;
    if (loan.home == kLoose) {
      loose_ -= loan.count;
      continue;
    }
    auto value = table_[loan.home];
    value.lent &= ~bits(loan.first, loan.count);
    set(loan.home, value);
  }
  loans_.erase(found);
  return size;
}

std::size_t Tails::purge(std::size_t wanted_bytes, bool keep_frames) {
  std::size_t purged = 0;
  while (purged < wanted_bytes && !by_free_.empty()) {
    const auto home = keep_frames ? by_free_.begin()->second : by_free_.rbegin()->second;
    auto value = table_[home];
    if (keep_frames && value.free == kAll) break;
    if (value.lent == 0) {
      if (!map_nothing(address_of(home), kChunkBytes)) break;
      purged += static_cast<std::size_t>(std::popcount(value.free)) * kGrainBytes;
      set(home, {0, 0});
      continue;
    }
    const auto first = static_cast<unsigned>(std::countr_zero(value.free));
    const auto count = static_cast<unsigned>(std::countr_one(value.free >> first));
    if (!map_nothing(address_of(home) + first * kGrainBytes, count * kGrainBytes)) break;
    value.free &= ~bits(first, count);
    purged += count * kGrainBytes;
    set(home, value);
  }
  return purged;
}

}  // namespace penstock
