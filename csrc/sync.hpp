// Synchronization points: mutexes, waits, and the beginning and end of I/O. Built with PENSTOCK_SEAMS, a test decides
// at each of them which thread goes on: see Interleaver. Otherwise they are the standard library's.
#pragma once

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>

#ifdef PENSTOCK_SEAMS
#include <atomic>
#endif

namespace penstock {

// pwrite() and pread() of the kernel, which the thread sanitizer does not see: memory may be released, and taken away,
// while it is written or read. Then what was moved is of no use, and nobody looks at it.
inline long raw_write(int file, const char* data, std::size_t size_bytes, std::uint64_t offset) {
  return syscall(SYS_pwrite64, file, data, size_bytes, static_cast<off_t>(offset));
}
inline long raw_read(int file, char* data, std::size_t size_bytes, std::uint64_t offset) {
  return syscall(SYS_pread64, file, data, size_bytes, static_cast<off_t>(offset));
}

#ifndef PENSTOCK_SEAMS

using Mutex = std::mutex;
using Condition = std::condition_variable;

inline void io_step(const char*) {}
inline long io_write(int file, const char* data, std::size_t size_bytes, std::uint64_t offset) {
  return raw_write(file, data, size_bytes, offset);
}
inline long io_read(int file, char* data, std::size_t size_bytes, std::uint64_t offset) {
  return raw_read(file, data, size_bytes, offset);
}
inline pthread_t this_thread() { return pthread_self(); }

#else

class Mutex;

// Called at each point where another thread may go on. The calls in place of a lock or a wait must carry it out.
class Interleaver {
 public:
  virtual ~Interleaver() = default;
  virtual void lock(Mutex& mutex) = 0;
  virtual void unlock(Mutex& mutex) = 0;
  // Until `word` is not `seen` any more, or for so long (negative: without end); as futex_wait it may return early.
  virtual void wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t timeout_ns) = 0;
  virtual void notify(std::atomic<std::uint32_t>& word) = 0;
  // I/O is about to begin, goes on, or is over: `what` names it, for reports.
  virtual void io_step(const char* what) = 0;
  virtual long write(int file, const char* data, std::size_t size_bytes, std::uint64_t offset) {
    io_step("write");
    const auto count = raw_write(file, data, size_bytes, offset);
    io_step("write");
    return count;
  }
  virtual long read(int file, char* data, std::size_t size_bytes, std::uint64_t offset) {
    io_step("read");
    const auto count = raw_read(file, data, size_bytes, offset);
    io_step("read");
    return count;
  }
  virtual pthread_t this_thread() { return pthread_self(); }
  virtual std::int64_t now_ns(std::int64_t now_ns) { return now_ns; }
};

inline std::atomic<Interleaver*> interleaver{nullptr};

class Mutex {
 public:
  void lock() {
    if (auto* chooser = interleaver.load()) chooser->lock(*this);
    else real.lock();
  }
  void unlock() {
    if (auto* chooser = interleaver.load()) chooser->unlock(*this);
    else real.unlock();
  }

  std::mutex real;
  bool held = false;  // an interleaver's that runs all on one thread
};

using Condition = std::condition_variable_any;

inline void io_step(const char* what) {
  if (auto* chooser = interleaver.load()) chooser->io_step(what);
}
inline long io_write(int file, const char* data, std::size_t size_bytes, std::uint64_t offset) {
  auto* chooser = interleaver.load();
  return chooser != nullptr ? chooser->write(file, data, size_bytes, offset) : raw_write(file, data, size_bytes, offset);
}
inline long io_read(int file, char* data, std::size_t size_bytes, std::uint64_t offset) {
  auto* chooser = interleaver.load();
  return chooser != nullptr ? chooser->read(file, data, size_bytes, offset) : raw_read(file, data, size_bytes, offset);
}
inline pthread_t this_thread() {
  auto* chooser = interleaver.load();
  return chooser != nullptr ? chooser->this_thread() : pthread_self();
}

#endif

}  // namespace penstock
