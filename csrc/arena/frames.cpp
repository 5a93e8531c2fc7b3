#include "arena/frames.hpp"

#include <algorithm>

namespace penstock {

namespace {

std::size_t first_chunk(std::size_t offset) { return offset / kChunkBytes; }
std::size_t end_chunk(std::size_t end) { return (end + kChunkBytes - 1) / kChunkBytes; }

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
      chunks_(size_bytes / kChunkBytes) {
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
  const auto movable = frames_move_ ? free_bytes_ / kChunkBytes - own : 0;
  return (missing - std::min(missing, movable)) * kChunkBytes;
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
      if (!map_fresh(base_ + first * kChunkBytes, wanted)) return false;
      set_framed(first, last, true);
      frames_ += last - first;
      return true;
    }
  }
  return true;
}

bool Frames::occupy(std::size_t offset, std::size_t size_bytes) {
  const auto first = first_chunk(offset), last = end_chunk(offset + size_bytes);
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

void Frames::withdraw(std::size_t offset, std::size_t size_bytes, std::size_t to) {
  auto moved = move_memory(base_ + offset, base_ + to, size_bytes, kChunkBytes);
  const auto from = offset / kChunkBytes, target = to / kChunkBytes, count = moved / kChunkBytes;
  set_framed(from, from + count, false);
  if (moved > 0 && protect(base_ + to, moved, PROT_READ | PROT_WRITE)) {
    set_framed(target, target + count, true);
    give_free(target, target + count);
  } else if (moved > 0) {
    map_nothing(base_ + to, moved);
    frames_ -= count;
  }
  map_nothing(base_ + offset, moved);
  if (moved < size_bytes) discard(offset + moved, size_bytes - moved);
}

void Frames::discard(std::size_t offset, std::size_t size_bytes) {
  map_nothing(base_ + offset, size_bytes);
  for (auto i = first_chunk(offset); i < end_chunk(offset + size_bytes); ++i)
    if (chunks_[i].framed) lose(i);
}

bool Frames::transfer(std::size_t from, std::size_t to, std::size_t size_bytes) {
  const auto moved = move_memory(base_ + from, base_ + to, size_bytes, kChunkBytes);
  const auto source = from / kChunkBytes, target = to / kChunkBytes, count = moved / kChunkBytes;
  set_framed(source, source + count, false);
  if (moved > 0) map_nothing(base_ + from, moved);
  if (moved < size_bytes) {
    if (moved > 0) map_nothing(base_ + to, moved);
    frames_ -= count;
    return false;
  }
  set_framed(target, target + count, true);
  return true;
}

bool Frames::drop_pages(std::size_t offset, std::size_t size_bytes) {
  if (!map_nothing(base_ + offset, size_bytes)) return false;
  count_absent(offset, size_bytes, +1);
  return true;
}

bool Frames::adopt(std::size_t offset, std::size_t size_bytes, char* scratch) {
  if (!replace_memory(scratch, base_ + offset, size_bytes)) return false;
  const auto first = offset / kChunkBytes, last = (offset + size_bytes) / kChunkBytes;
  set_framed(first, last, true);
  frames_ += last - first;
  return true;
}

bool Frames::take_pages(std::size_t offset, std::size_t size_bytes, char* scratch) {
  if (!replace_memory(scratch, base_ + offset, size_bytes)) return false;
  count_absent(offset, size_bytes, -1);
  return true;
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
  return purged;
}

}  // namespace penstock
