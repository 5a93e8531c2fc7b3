#include "io/blocking.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

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

}  // namespace

int move(const Operation& operation) {
  io_step("move");
  if (operation.mapped) return move_mapped(operation);
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
