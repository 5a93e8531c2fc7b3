#include "arena/swap.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "arena/event.hpp"
#include "arena/pages.hpp"
#include "nvme/waiting.hpp"
#include "sync.hpp"

namespace penstock {

bool SwapFile::set(Handle direct, Handle buffered, std::size_t capacity_bytes, std::size_t begin) {
  if (used_bytes_ > 0) return false;
  if (buffered >= 0 && buffered != last_) quarantined_.clear();  // they were of another drive
  if (buffered >= 0) last_ = buffered;
  direct_ = buffered < 0 ? -1 : direct;
  buffered_ = buffered;
  free_ = {};
  const auto whole = capacity_bytes / kPageBytes * kPageBytes;
  if (!usable() || whole == 0) return true;
  free_.give(begin, whole);
  for (const auto& [offset, place] : quarantined_)
    if (offset >= begin && offset + place.size_bytes <= begin + whole) free_.take(offset, place.size_bytes);
  return true;
}

std::optional<std::size_t> SwapFile::take(std::size_t size_bytes) {
  if (!usable()) return std::nullopt;
  if (!quarantined_.empty()) release_quarantined();
  for (const auto& [offset, size] : free_.by_offset()) {
    if (size < size_bytes) continue;
    const auto found = offset;
    free_.take(found, size_bytes);
    used_bytes_ += size_bytes;
    return found;
  }
  return std::nullopt;
}

void SwapFile::give(std::size_t offset, std::size_t size_bytes) {
  used_bytes_ -= size_bytes;
  const auto place = quarantined_.find(offset);
  if (place == quarantined_.end())
    free_.give(offset, size_bytes);
  else
    place->second.given = true;
}

void SwapFile::quarantine(std::size_t offset, std::size_t size_bytes, double seconds) {
  quarantined_[offset] = {size_bytes, now_ns() + static_cast<std::int64_t>(seconds * 1e9), false};
}

// Gives back what nothing can land on any more.
void SwapFile::release_quarantined() {
  const auto now = now_ns();
  std::erase_if(quarantined_, [&](const auto& entry) {
    const auto& [offset, place] = entry;
    if (now < place.until_ns) return false;
    if (place.given) free_.give(offset, place.size_bytes);
    return true;
  });
}

namespace {

constexpr std::size_t kBounceBytes = std::size_t{1} << 20;

// Through a file in memory: the kernel copies what may be taken away meanwhile, and says so.
int write_remotely(Handle handle, const char* data, std::size_t size_bytes, std::uint64_t offset, double* may_land_s) {
  nvme::StillInUse in_use;
  const int file = memfd_create("penstock-swap", MFD_CLOEXEC);
  if (file < 0) return errno;
  const auto length = std::min(size_bytes, kBounceBytes);
  auto* const bounce = ftruncate(file, static_cast<off_t>(length)) == 0
                           ? mmap(nullptr, length, PROT_READ, MAP_SHARED, file, 0)
                           : MAP_FAILED;
  int error = bounce == MAP_FAILED ? errno : 0;
  while (size_bytes > 0 && error == 0) {
    const auto wanted = std::min(size_bytes, length);
    std::size_t copied = 0;
    while (copied < wanted && error == 0) {
      const auto count = syscall(SYS_pwrite64, file, data + copied, wanted - copied, static_cast<off_t>(copied));
      if (count > 0)
        copied += static_cast<std::size_t>(count);
      else if (count == 0)
        error = EIO;
      else if (errno != EINTR && errno != EAGAIN)
        error = errno;
    }
    if (error == 0) error = nvme::move_and_wait(true, handle, static_cast<std::byte*>(bounce), wanted, offset, &in_use);
    data += wanted;
    offset += wanted;
    size_bytes -= wanted;
  }
  if (bounce != MAP_FAILED && !in_use.abandoned) munmap(bounce, length);  // who reads on finds nothing of others
  close(file);
  if (may_land_s != nullptr) *may_land_s = in_use.may_land_s;
  return error;
}

}  // namespace

int write_fully(Handle direct, Handle buffered, const char* data, std::size_t size_bytes, std::uint64_t offset,
                double* may_land_s) {
  if (is_namespace(buffered)) return write_remotely(buffered, data, size_bytes, offset, may_land_s);
  int file = static_cast<int>(direct >= 0 ? direct : buffered);
  while (size_bytes > 0) {
    const auto count = io_write(file, data, size_bytes, offset);
    if (count < 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      if (file == buffered || errno != EINVAL) return errno;
      file = static_cast<int>(buffered);
      continue;
    }
    if (count == 0) return EIO;
    // What is left of a short direct write need not be aligned.
    if (static_cast<std::size_t>(count) < size_bytes) file = static_cast<int>(buffered);
    data += count;
    offset += static_cast<std::uint64_t>(count);
    size_bytes -= static_cast<std::size_t>(count);
  }
  return 0;
}

namespace {

// In pieces that start and end at a page of the file, through a buffer that does in memory.
int read_unaligned(int file, char* data, std::size_t size_bytes, std::uint64_t offset) {
  char* bounce = map_scratch(kBounceBytes);
  if (bounce == nullptr) return errno;
  int error = 0;
  while (size_bytes > 0 && error == 0) {
    const auto skipped = static_cast<std::size_t>(offset % kPageBytes);
    const auto wanted = std::min(size_bytes, kBounceBytes - skipped);
    const auto count =
        pread(file, bounce, round_up(skipped + wanted, kPageBytes), static_cast<off_t>(offset - skipped));
    if (count < 0) {
      if (errno != EINTR && errno != EAGAIN) error = errno;
      continue;
    }
    const auto got = static_cast<std::size_t>(count);
    if (got <= skipped) {
      error = EIO;  // the file ends before the segment does
      continue;
    }
    const auto used = std::min(got - skipped, wanted);
    std::memcpy(data, bounce + skipped, used);
    data += used;
    offset += used;
    size_bytes -= used;
  }
  unmap_scratch(bounce, kBounceBytes);
  return error;
}

int read_fully(int file, char* data, std::size_t size_bytes, std::uint64_t offset) {
  while (size_bytes > 0) {
    const auto count = io_read(file, data, size_bytes, offset);
    if (count < 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      if (errno == EINVAL) return read_unaligned(file, data, size_bytes, offset);
      return errno;
    }
    if (count == 0) return EIO;  // the file ends before the segment does
    data += count;
    offset += static_cast<std::uint64_t>(count);
    size_bytes -= static_cast<std::size_t>(count);
  }
  return 0;
}

}  // namespace

int read_segments(const std::vector<Segment>& segments, Handle direct, Handle buffered, char* destination,
                  const Segment** failed, bool* abandoned) {
  nvme::StillInUse in_use;
  for (const auto& segment : segments) {
    const auto file = direct >= 0 && segment.file == buffered ? direct : segment.file;
    auto* const data = destination + segment.begin;
    const int error = is_namespace(file)
                          ? nvme::move_and_wait(false, file, reinterpret_cast<std::byte*>(data), segment.size_bytes,
                                                segment.file_offset, &in_use)
                          : read_fully(static_cast<int>(file), data, segment.size_bytes, segment.file_offset);
    if (error == 0) continue;
    if (failed != nullptr) *failed = &segment;
    if (abandoned != nullptr) *abandoned = in_use.abandoned;
    return error;
  }
  return 0;
}

}  // namespace penstock
