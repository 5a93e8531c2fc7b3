#include "arena/frames.hpp"

#include <algorithm>
#include <cerrno>

namespace penstock {

namespace {

std::size_t first_chunk(std::size_t offset) { return offset / kChunkBytes; }
std::size_t end_chunk(std::size_t end) { return (end + kChunkBytes - 1) / kChunkBytes; }

constexpr std::size_t kLeastHomes = 64;

std::size_t body_bytes(std::size_t size_bytes) { return size_bytes / kChunkBytes * kChunkBytes; }
std::size_t tail_bytes(std::size_t size_bytes) { return size_bytes % kChunkBytes; }

// Half of `size_bytes` as often as the system refuses it.
char* reserve(std::size_t& size_bytes, std::size_t& mapping_bytes) {
  for (; size_bytes >= 4 * kChunkBytes; size_bytes /= 2) {
    size_bytes -= size_bytes % kChunkBytes;
    mapping_bytes = size_bytes + kChunkBytes;
    void* mapping = mmap(nullptr, mapping_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping != MAP_FAILED) return static_cast<char*>(mapping);
  }
  size_bytes = mapping_bytes = 0;
  return nullptr;
}

}  // namespace

Frames::Frames(std::size_t size_bytes, bool frames_move)
    : frames_move_(frames_move),
      mapping_(reserve(size_bytes, mapping_bytes_)),
      size_bytes_(size_bytes),
      chunks_(size_bytes / kChunkBytes),
      tails_(frames_move ? std::max<std::size_t>(size_bytes / kChunkBytes / 8, kLeastHomes) : 0) {
  if (mapping_ == nullptr || !chunks_.usable()) {
    size_bytes_ = 0;
    return;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
  base_ = mapping_ + (kChunkBytes - address % kChunkBytes) % kChunkBytes;
}

Frames::~Frames() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

std::size_t Frames::growth_bytes(std::size_t offset, std::size_t size_bytes) const {
  std::size_t missing = 0, own = 0;
  for (auto i = first_chunk(offset); i < end_chunk(offset + size_bytes); ++i) {
    missing += !chunks_[i].framed;
    own += chunks_[i].framed && chunks_[i].live_pages == 0;
  }
  const auto movable = frames_move_ ? free_bytes_ / kChunkBytes - own + tails_.whole_frames() : 0;
  return (missing - std::min(missing, movable)) * kChunkBytes;
}

std::size_t Frames::block_growth_bytes(std::size_t offset, std::size_t size_bytes) const {
  const auto body = body_bytes(size_bytes), tail = tail_bytes(size_bytes);
  const auto growth = growth_bytes(offset, body);
  if (tail == 0) return growth;
  if (!frames_move_) return growth + tail;
  // What the body leaves of the free memory.
  std::size_t taken = 0;
  for (auto i = first_chunk(offset); i < first_chunk(offset + body); ++i)
    taken += !chunks_[i].framed || chunks_[i].live_pages == 0 ? kChunkBytes : 0;
  const auto left = free_bytes() - std::min(free_bytes(), taken - growth);
  return growth + tail - std::min(tail, left);
}

void Frames::give_free(std::size_t first, std::size_t last) {
  free_.give(first * kChunkBytes, (last - first) * kChunkBytes);
  free_bytes_ += (last - first) * kChunkBytes;
}

void Frames::take_free(std::size_t first, std::size_t last) {
  free_.take(first * kChunkBytes, (last - first) * kChunkBytes);
  free_bytes_ -= (last - first) * kChunkBytes;
}

void Frames::set_framed(std::size_t first, std::size_t last, bool framed) {
  for (auto i = first; i < last; ++i) chunks_[i].framed = framed;
}

void Frames::add_live(std::size_t offset, std::size_t size_bytes, int sign) {
  const auto end = offset + size_bytes;
  for (auto i = first_chunk(offset); i < end_chunk(end); ++i) {
    const auto from = std::max(offset, i * kChunkBytes);
    const auto to = std::min(end, (i + 1) * kChunkBytes);
    const auto pages = static_cast<int>((to - from) / kPageBytes);
    chunks_[i].live_pages = static_cast<std::uint16_t>(chunks_[i].live_pages + sign * pages);
  }
}

void Frames::count_absent(std::size_t offset, std::size_t size_bytes, int sign) {
  for (auto page = offset / kPageBytes; page < (offset + size_bytes) / kPageBytes; ++page) {
    auto& chunk = chunks_[page * kPageBytes / kChunkBytes];
    chunk.absent_pages = static_cast<std::uint16_t>(chunk.absent_pages + sign);
    chunk.ragged = true;
  }
  absent_pages_ += static_cast<std::size_t>(sign) * (size_bytes / kPageBytes);
}

// Memory from where it lies free, the longest runs first, so that runs stay long; else from the system.
bool Frames::fill(std::size_t first, std::size_t last) {
  while (first < last) {
    const auto wanted = (last - first) * kChunkBytes;
    std::size_t moved = 0;
    if (frames_move_ && free_.by_size().empty() && tails_.take_frame(base_ + first * kChunkBytes)) {
      chunks_[first].framed = true;
      ++frames_;
      ++first;
      continue;
    }
    if (frames_move_ && !free_.by_size().empty()) {
      auto run = free_.by_size().lower_bound({wanted, 0});
      if (run == free_.by_size().end()) --run;
      const auto size = std::min(wanted, run->first);
      const auto from = run->second + run->first - size;
      moved = move_memory(base_ + from, base_ + first * kChunkBytes, size, kChunkBytes);
      if (moved > 0) {
        const auto source = from / kChunkBytes, count = moved / kChunkBytes;
        take_free(source, source + count);
        set_framed(source, source + count, false);
        set_framed(first, first + count, true);
        map_nothing(base_ + from, moved);
        first += count;
      }
    }
    if (moved == 0) {
      // A limit on the process's data refuses to move what it allows to give back and take anew.
      auto* fresh = base_ + first * kChunkBytes;
      if (!map_fresh(fresh, wanted) && (purge(wanted) == 0 || !map_fresh(fresh, wanted))) return false;
      set_framed(first, last, true);
      frames_ += last - first;
      return true;
    }
  }
  return true;
}

bool Frames::occupy(std::size_t offset, std::size_t size_bytes) {
  const auto first = first_chunk(offset), last = end_chunk(offset + size_bytes);
  if (!chunks_.open(first, last)) return false;
  for (auto i = first; i < last; ++i)
    if (chunks_[i].framed && chunks_[i].live_pages == 0) take_free(i, i + 1);
  add_live(offset, size_bytes, +1);
  for (auto i = first; i < last; ++i) {
    if (chunks_[i].framed) continue;
    auto end = i + 1;
    while (end < last && !chunks_[end].framed) ++end;
    if (!fill(i, end)) {
      vacate(offset, size_bytes);
      return false;
    }
  }
  return true;
}

void Frames::lose(std::size_t chunk) {
  auto& lost = chunks_[chunk];
  absent_pages_ -= lost.absent_pages;
  lost.absent_pages = 0;
  lost.framed = lost.ragged = false;
  --frames_;
}

void Frames::vacate(std::size_t offset, std::size_t size_bytes) {
  add_live(offset, size_bytes, -1);
  const auto last = end_chunk(offset + size_bytes);
  for (auto i = first_chunk(offset); i < last; ++i) {
    if (!chunks_[i].framed || chunks_[i].live_pages != 0) continue;
    if (chunks_[i].ragged && map_nothing(base_ + i * kChunkBytes, kChunkBytes)) {
      lose(i);
      continue;
    }
    auto end = i + 1;
    while (end < last && chunks_[end].framed && chunks_[end].live_pages == 0 && !chunks_[end].ragged) ++end;
    give_free(i, end);
    i = end - 1;
  }
}

bool Frames::cut_free_frame() {
  if (free_.by_size().empty()) return false;
  const auto [size, offset] = *free_.by_size().begin();
  return cut_frame((offset + size) / kChunkBytes - 1);
}

// A free one. Its chunk has none afterwards, even if the system refuses to move it.
bool Frames::cut_frame(std::size_t chunk) {
  auto* from = base_ + chunk * kChunkBytes;
  auto* home = tails_.vacant_home();
  const bool moved = home != nullptr && protect(from, kChunkBytes, PROT_NONE) &&
                     move_memory(from, home, kChunkBytes, kGrainBytes) == kChunkBytes && tails_.add_frame();
  map_nothing(from, kChunkBytes);
  take_free(chunk, chunk + 1);
  chunks_[chunk].framed = false;
  --frames_;
  if (!moved && home != nullptr) map_nothing(home, kChunkBytes);
  return moved;
}

// Its pages come now, so that they lie together, in one huge page where the system has one.
bool Frames::cut_new_frame() {
  auto* home = tails_.vacant_home();
  if (home == nullptr || !map_fresh(home, kChunkBytes)) return false;
  for (std::size_t at = 0; at < kChunkBytes; at += kPageBytes) static_cast<volatile char*>(home)[at] = 0;
  if (tails_.add_frame()) return true;
  map_nothing(home, kChunkBytes);
  return false;
}

bool Frames::give_tail(char* tail, std::size_t size_bytes, bool roomy) {
  if (!frames_move_) return tails_.gather(tail, size_bytes);
  if (tails_.lend(tail, size_bytes)) return true;
  if (cut_free_frame() && tails_.lend(tail, size_bytes)) return true;
  if (tails_.free_bytes() < size_bytes && roomy && cut_new_frame() && tails_.lend(tail, size_bytes)) return true;
  return tails_.gather(tail, size_bytes);
}

bool Frames::occupy_block(std::size_t offset, std::size_t size_bytes, bool roomy) {
  const auto body = body_bytes(size_bytes), tail = tail_bytes(size_bytes);
  if (!occupy(offset, body)) return false;
  if (tail == 0) return true;
  const auto last = first_chunk(offset + body);
  if (chunks_[last].framed) cut_frame(last);
  if (give_tail(base_ + offset + body, tail, roomy)) return true;
  vacate(offset, body);
  return false;
}

void Frames::vacate_block(std::size_t offset, std::size_t size_bytes) {
  const auto body = body_bytes(size_bytes), tail = tail_bytes(size_bytes);
  vacate(offset, body);
  if (tail == 0) return;
  tails_.give_back(base_ + offset + body);
  map_nothing(base_ + offset + body, tail);
}

void Frames::vacate_absent_block(std::size_t offset, std::size_t size_bytes) {
  vacate(offset, body_bytes(size_bytes));
  map_nothing(base_ + offset, size_bytes);
}

void Frames::withdraw_block(std::size_t offset, std::size_t size_bytes, std::optional<std::size_t> to) {
  const auto body = body_bytes(size_bytes);
  std::size_t moved = 0;
  bool kept = true;
  if (to && body > 0 && chunks_.open(first_chunk(*to), first_chunk(*to + body))) {
    moved = move_memory(base_ + offset, base_ + *to, body, kChunkBytes);
    const auto target = *to / kChunkBytes, count = moved / kChunkBytes;
    set_framed(first_chunk(offset), first_chunk(offset) + count, false);
    if (moved > 0 && protect(base_ + *to, moved, PROT_READ | PROT_WRITE)) {
      set_framed(target, target + count, true);
      give_free(target, target + count);
    } else if (moved > 0) {
      map_nothing(base_ + *to, moved);
      frames_ -= count;
    }
  }
  if (body < size_bytes) kept = tails_.give_back(base_ + offset + body);
  // What all has moved away from is protected as it is: its mappings last until the block is back, or ends.
  if (moved < body || !kept) discard_block(offset, size_bytes);
}

void Frames::discard_block(std::size_t offset, std::size_t size_bytes) {
  map_nothing(base_ + offset, size_bytes);
  lose_block(offset, size_bytes);
}

void Frames::empty_block(std::size_t offset, std::size_t size_bytes) {
  give_pages(base_ + offset, size_bytes);
  lose_block(offset, size_bytes);
}

void Frames::lose_block(std::size_t offset, std::size_t size_bytes) {
  const auto body = body_bytes(size_bytes);
  if (body < size_bytes) tails_.lose(base_ + offset + body);
  for (auto i = first_chunk(offset); i < first_chunk(offset + body); ++i)
    if (chunks_[i].framed) lose(i);
}

bool Frames::transfer_block(std::size_t from, std::size_t to, std::size_t size_bytes) {
  const auto body = body_bytes(size_bytes);
  const auto moved = body > 0 ? move_memory(base_ + from, base_ + to, body, kChunkBytes) : 0;
  const auto source = first_chunk(from), target = first_chunk(to), count = moved / kChunkBytes;
  set_framed(source, source + count, false);
  set_framed(target, target + count, true);
  const bool whole =
      moved == body && (body == size_bytes || tails_.move(base_ + from + body, base_ + to + body));
  const int error = errno;
  if (whole) {
    map_nothing(base_ + from, size_bytes);
    return true;
  }
  discard_block(from, size_bytes);
  discard_block(to, size_bytes);
  errno = error;
  return false;
}

bool Frames::drop_pages(std::size_t offset, std::size_t size_bytes) {
  if (!map_nothing(base_ + offset, size_bytes)) return false;
  count_absent(offset, size_bytes, +1);
  return true;
}

bool Frames::adopt_block(std::size_t offset, std::size_t size_bytes, char* scratch) {
  if (!replace_memory(scratch, base_ + offset, size_bytes)) return false;
  const auto first = first_chunk(offset), last = first_chunk(offset + body_bytes(size_bytes));
  set_framed(first, last, true);
  frames_ += last - first;
  return true;
}

bool Frames::take_pages(std::size_t offset, std::size_t size_bytes, char* scratch) {
  if (!replace_memory(scratch, base_ + offset, size_bytes)) return false;
  count_absent(offset, size_bytes, -1);
  return true;
}

bool Frames::transfer_pages(std::size_t from, std::size_t to, std::size_t size_bytes) {
  const bool whole = move_memory(base_ + from, base_ + to, size_bytes, kPageBytes) == size_bytes;
  const int error = errno;
  map_nothing(base_ + from, size_bytes);
  count_absent(from, size_bytes, +1);
  if (whole)
    count_absent(to, size_bytes, -1);
  else
    map_nothing(base_ + to, size_bytes);
  errno = error;
  return whole;
}

bool Frames::renew_pages(std::size_t offset, std::size_t size_bytes) {
  if (!map_fresh(base_ + offset, size_bytes)) return false;
  count_absent(offset, size_bytes, -1);
  return true;
}

// The longest runs go first: best fit comes back to them last.
std::size_t Frames::purge(std::size_t wanted_bytes) {
  std::size_t purged = 0;
  while (purged < wanted_bytes && !free_.by_size().empty()) {
    const auto [size, offset] = *free_.by_size().rbegin();
    const auto part = std::min(size, round_up(wanted_bytes - purged, kChunkBytes));
    const auto begin = offset + size - part;
    if (!map_nothing(base_ + begin, part)) break;
    take_free(begin / kChunkBytes, (begin + part) / kChunkBytes);
    for (auto i = begin / kChunkBytes; i < (begin + part) / kChunkBytes; ++i) lose(i);
    purged += part;
  }
  return purged < wanted_bytes ? purged + tails_.purge(wanted_bytes - purged, false) : purged;
}

}  // namespace penstock
