#include "chunks.hpp"

#include <sys/mman.h>

#include <algorithm>

namespace penstock {

namespace {

std::size_t first_chunk(std::size_t offset) { return offset / kChunkBytes; }
std::size_t end_chunk(std::size_t end) { return (end + kChunkBytes - 1) / kChunkBytes; }

}  // namespace

Chunks::Chunks(std::size_t size_bytes) {
  for (; size_bytes >= 4 * kChunkBytes; size_bytes /= 2) {
    size_bytes -= size_bytes % kChunkBytes;
    void* mapping = mmap(nullptr, size_bytes + kChunkBytes, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) continue;
    mapping_ = static_cast<char*>(mapping);
    mapping_bytes_ = size_bytes + kChunkBytes;
    auto address = reinterpret_cast<std::uintptr_t>(mapping);
    base_ = mapping_ + (kChunkBytes - address % kChunkBytes) % kChunkBytes;
    size_bytes_ = size_bytes;
    chunks_.resize(size_bytes / kChunkBytes);
    madvise(base_, size_bytes_, MADV_HUGEPAGE);  // where huge pages are off, small ones serve
    return;
  }
}

Chunks::~Chunks() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

std::size_t Chunks::untouched_bytes(std::size_t offset, std::size_t size_bytes) const {
  std::size_t count = 0;
  for (auto i = first_chunk(offset); i < end_chunk(offset + size_bytes); ++i) count += !chunks_[i].touched;
  return count * kChunkBytes;
}

bool Chunks::commit(std::size_t first, std::size_t last) {
  while (first < last) {
    if (chunks_[first].committed) {
      ++first;
      continue;
    }
    auto end = first;
    while (end < last && !chunks_[end].committed) ++end;
    if (mprotect(base_ + first * kChunkBytes, (end - first) * kChunkBytes, PROT_READ | PROT_WRITE) != 0)
      return false;
    for (; first < end; ++first) chunks_[first].committed = true;
  }
  return true;
}

void Chunks::add_live(std::size_t offset, std::size_t size_bytes, int sign) {
  const auto end = offset + size_bytes;
  for (auto i = first_chunk(offset); i < end_chunk(end); ++i) {
    const auto from = std::max(offset, i * kChunkBytes);
    const auto to = std::min(end, (i + 1) * kChunkBytes);
    const auto pages = static_cast<int>((to - from) / kPageBytes);
    chunks_[i].live_pages = static_cast<std::uint16_t>(chunks_[i].live_pages + sign * pages);
  }
}

bool Chunks::occupy(std::size_t offset, std::size_t size_bytes) {
  const auto first = first_chunk(offset), last = end_chunk(offset + size_bytes);
  if (!commit(first, last)) return false;
  for (auto i = first; i < last; ++i) {
    touched_ += !chunks_[i].touched;
    chunks_[i].touched = true;
  }
  add_live(offset, size_bytes, +1);
  return true;
}

void Chunks::vacate(std::size_t offset, std::size_t size_bytes) { add_live(offset, size_bytes, -1); }

std::size_t Chunks::purge(std::size_t offset, std::size_t size_bytes, std::size_t wanted_bytes) {
  const auto first = end_chunk(offset);
  auto end = first_chunk(offset + size_bytes);
  std::size_t purged = 0;
  while (end > first && purged < wanted_bytes) {
    if (!chunks_[end - 1].touched) {
      --end;
      continue;
    }
    auto begin = end - 1;  // one call for each run of touched chunks
    while (begin > first && chunks_[begin - 1].touched && purged + (end - begin) * kChunkBytes < wanted_bytes)
      --begin;
    if (madvise(base_ + begin * kChunkBytes, (end - begin) * kChunkBytes, MADV_DONTNEED) != 0)
      break;  // locked in memory
    purged += (end - begin) * kChunkBytes;
    touched_ -= end - begin;
    while (end > begin) chunks_[--end].touched = false;
  }
  return purged;
}

std::size_t Chunks::decommit(std::size_t offset, std::size_t size_bytes) {
  const auto purged = purge(offset, size_bytes, size_bytes);
  const auto end = first_chunk(offset + size_bytes);
  for (auto i = end_chunk(offset); i < end;) {
    if (!chunks_[i].committed) {
      ++i;
      continue;
    }
    auto run = i;
    while (run < end && chunks_[run].committed) ++run;
    if (mprotect(base_ + i * kChunkBytes, (run - i) * kChunkBytes, PROT_NONE) != 0) break;
    for (; i < run; ++i) chunks_[i].committed = false;
  }
  return purged;
}

}  // namespace penstock
