// What the disk gives at most: one io_uring ring, one thread, no work but submitting and waiting.
//
// Built by limit.py as a shared library. Every function gives 0 or more, or a negative errno.

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>

namespace {

constexpr unsigned kEntries = 64;

unsigned load(const unsigned* place) { return __atomic_load_n(place, __ATOMIC_ACQUIRE); }
void store(unsigned* place, unsigned value) { __atomic_store_n(place, value, __ATOMIC_RELEASE); }

struct Mapping {
  void* address = MAP_FAILED;
  std::size_t size = 0;

  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (address != MAP_FAILED) munmap(address, size);
  }

  int map(int descriptor, std::size_t bytes, std::uint64_t what) {
    size = bytes;
    address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor,
                   static_cast<off_t>(what));
    return address == MAP_FAILED ? -errno : 0;
  }

  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(address) + offset);
  }
};

// A ring whose queues are used by one thread at a time.
class Ring {
 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  int open() {
    io_uring_params parameters{};
    parameters.flags = IORING_SETUP_COOP_TASKRUN;
    descriptor_ = static_cast<int>(syscall(SYS_io_uring_setup, kEntries, &parameters));
    if (descriptor_ < 0 && errno == EINVAL) {  // Linux before 5.19
      parameters = {};
      descriptor_ = static_cast<int>(syscall(SYS_io_uring_setup, kEntries, &parameters));
    }
    if (descriptor_ < 0) return -errno;
    const auto& sq = parameters.sq_off;
    const auto& cq = parameters.cq_off;
    int error = submissions_.map(descriptor_, sq.array + parameters.sq_entries * sizeof(unsigned),
                                 IORING_OFF_SQ_RING);
    if (!error)
      error = completions_.map(descriptor_, cq.cqes + parameters.cq_entries * sizeof(io_uring_cqe),
                               IORING_OFF_CQ_RING);
    if (!error)
      error = entries_.map(descriptor_, parameters.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    if (error) return error;
    sq_tail_ = submissions_.at<unsigned>(sq.tail);
    sq_mask_ = *submissions_.at<unsigned>(sq.ring_mask);
    sq_array_ = submissions_.at<unsigned>(sq.array);
    cq_head_ = completions_.at<unsigned>(cq.head);
    cq_tail_ = completions_.at<unsigned>(cq.tail);
    cq_mask_ = *completions_.at<unsigned>(cq.ring_mask);
    cqes_ = completions_.at<io_uring_cqe>(cq.cqes);
    return 0;
  }

  void push(bool write, int file, std::uint64_t offset, char* memory, std::uint64_t size) {
    const unsigned tail = *sq_tail_;
    io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[tail & sq_mask_];
    entry = {};
    entry.opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = file;
    entry.off = offset;
    entry.addr = reinterpret_cast<std::uintptr_t>(memory);
    entry.len = static_cast<unsigned>(size);
    entry.user_data = size;
    sq_array_[tail & sq_mask_] = tail & sq_mask_;
    store(sq_tail_, tail + 1);
    ++unsubmitted_;
  }

  // Submit what was pushed, and wait until something has completed.
  int submit_and_wait() {
    for (;;) {
      const long taken =
          syscall(SYS_io_uring_enter, descriptor_, unsubmitted_, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (taken >= 0) {
        unsubmitted_ -= static_cast<unsigned>(taken);
        return 0;
      }
      if (errno != EINTR) return -errno;
    }
  }

  // Take every completion there is: their number goes to `count`. A short one is an error here.
  int reap(unsigned& count) {
    const unsigned tail = load(cq_tail_);
    unsigned head = *cq_head_;
    int error = 0;
    for (count = 0; head != tail; ++head, ++count) {
      const io_uring_cqe& done = cqes_[head & cq_mask_];
      if (done.res < 0)
        error = done.res;
      else if (static_cast<std::uint64_t>(done.res) != done.user_data)
        error = -EIO;
    }
    store(cq_head_, head);
    return error;
  }

 private:
  int descriptor_ = -1;
  unsigned unsubmitted_ = 0;
  Mapping submissions_, completions_, entries_;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
};

}  // namespace

extern "C" {

int limit_open(void** ring) {
  auto made = std::make_unique<Ring>();
  const int error = made->open();
  if (!error) *ring = made.release();
  return error;
}

void limit_close(void* ring) { delete static_cast<Ring*>(ring); }

// Move [offset, offset + size) of the file to or from memory, in requests of `request` bytes, up to
// `depth` of them at once.
int limit_move(void* ring_, int write, int file, std::uint64_t offset, char* memory, std::uint64_t size,
               std::uint64_t request, unsigned depth) {
  Ring& ring = *static_cast<Ring*>(ring_);
  depth = std::min(depth, kEntries);
  std::uint64_t begun = 0;
  unsigned flying = 0;
  int error = 0;
  while ((begun < size && !error) || flying) {
    for (; begun < size && flying < depth && !error; ++flying) {
      const std::uint64_t part = std::min(request, size - begun);
      ring.push(write != 0, file, offset + begun, memory + begun, part);
      begun += part;
    }
    if (const int failed = ring.submit_and_wait()) return failed;
    unsigned count = 0;
    if (const int failed = ring.reap(count)) error = failed;
    flying -= count;
  }
  return error;
}

// As limit_move for `count` tensors of `size` bytes each, one after another, waiting for each.
int limit_move_each(void* ring, int write, int file, std::uint64_t offset, char* memory, std::uint64_t size,
                    unsigned count, std::uint64_t request, unsigned depth) {
  for (unsigned index = 0; index < count; ++index) {
    const std::uint64_t skipped = index * size;
    if (const int error =
            limit_move(ring, write, file, offset + skipped, memory + skipped, size, request, depth))
      return error;
  }
  return 0;
}
}
