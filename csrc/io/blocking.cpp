#include "io/blocking.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace penstock {

namespace {

[[maybe_unused]] constexpr int kPopulateRead = 22, kPopulateWrite = 23;  // Linux 5.14

int move_mapped(const Operation& operation) {
  const auto file = static_cast<int>(operation.handle);
  struct stat status;
  if (fstat(file, &status) != 0) return -errno;
  // Touching a page of a mapping that the file does not reach would end the process.
  if (static_cast<std::uint64_t>(status.st_size) < operation.offset + operation.size_bytes) return -EIO;
  const auto page_bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const auto skipped = operation.offset % page_bytes;
  const auto length = skipped + operation.size_bytes;
  auto* const mapping = mmap(nullptr, length, operation.write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED,
                             file, static_cast<off_t>(operation.offset - skipped));
  if (mapping == MAP_FAILED) return -errno;
  int moved = static_cast<int>(operation.size_bytes);
#ifdef __linux__
  // All pages by one call, which gives an error where the disk fails, or is full: touching them would end the process.
  if (madvise(mapping, length, operation.write ? kPopulateWrite : kPopulateRead) != 0 &&
      errno != EINVAL)  // a kernel that does not know it
    moved = errno == EFAULT ? -EIO : -errno;
#endif
  if (moved > 0) {
    auto* const bytes = static_cast<std::byte*>(mapping) + skipped;
    if (operation.write) {
      std::memcpy(bytes, operation.address, operation.size_bytes);
    } else {
      std::memcpy(operation.address, bytes, operation.size_bytes);
    }
  }
  munmap(mapping, length);
  return moved;
}

// Leaves the caches to the kernels: these bytes are not read again soon.
void copy_past_caches(std::byte* to, const std::byte* from, std::size_t size_bytes) {
#ifdef __SSE2__
  constexpr std::size_t kLine = 64, kAhead = 1024;
  if (reinterpret_cast<std::uintptr_t>(to) % kLine == 0 && reinterpret_cast<std::uintptr_t>(from) % kLine == 0) {
    const auto whole = size_bytes / kLine * kLine;
    for (std::size_t at = 0; at < whole; at += kLine) {
      const auto* const source = reinterpret_cast<const __m128i*>(from + at);
      auto* const target = reinterpret_cast<__m128i*>(to + at);
      _mm_prefetch(reinterpret_cast<const char*>(from + at + kAhead), _MM_HINT_NTA);
      const auto a = _mm_load_si128(source), b = _mm_load_si128(source + 1), c = _mm_load_si128(source + 2),
                 d = _mm_load_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
    std::memcpy(to + whole, from + whole, size_bytes - whole);
    return;
  }
#endif
  std::memcpy(to, from, size_bytes);
}

}  // namespace

int move(const Operation& operation) {
  io_step("move");
  if (operation.mapped) return move_mapped(operation);
  if (is_memory(operation.handle)) {
    auto* const memory = reinterpret_cast<std::byte*>(operation.handle) + operation.offset;
    if (operation.write)
      copy_past_caches(memory, operation.address, operation.size_bytes);
    else
      copy_past_caches(operation.address, memory, operation.size_bytes);
    return static_cast<int>(operation.size_bytes);
  }
  const auto file = static_cast<int>(operation.handle);
  const auto offset = static_cast<off_t>(operation.offset);
  const auto moved = operation.write ? pwrite(file, operation.address, operation.size_bytes, offset)
                                     : pread(file, operation.address, operation.size_bytes, offset);
  const int result = moved < 0 ? -errno : static_cast<int>(moved);
  io_step("moved");
  return result;
}

void BlockingIo::wait() {
  if (prepared_) {
    moved_ = move(*prepared_);
    prepared_.reset();
    return;
  }
  std::unique_lock lock(mutex_);
  woken_up_.wait(lock, [this] { return woken_; });
  woken_ = false;
}

bool BlockingIo::next(Result& result) {
  if (!moved_) return false;
  result = {tag_, *moved_};
  moved_.reset();
  return true;
}

void BlockingIo::wake() {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  woken_up_.notify_one();  // who wakes up need not wait for the lock
}

int move_at_once(const Operation& operation) {
  if (operation.write) return move(operation);
#ifdef RWF_NOWAIT
  const iovec memory{operation.address, operation.size_bytes};
  const auto moved = preadv2(static_cast<int>(operation.handle), &memory, 1, static_cast<off_t>(operation.offset),
                             RWF_NOWAIT);
  return moved < 0 ? -errno : static_cast<int>(moved);
#else
  return -EAGAIN;
#endif
}

}  // namespace penstock
