#include "io/ring.hpp"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace penstock {

namespace {

constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};

[[noreturn]] void fail(int number, const char* what) {
  throw std::system_error(number, std::generic_category(), what);
}

int setup(unsigned entries, io_uring_params& parameters) {
  // One thread does everything, and completions interrupt nobody. Older kernels know less of that.
  for (const unsigned flags : {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0U}) {
    parameters = {};
    parameters.flags = flags;
    const auto ring = static_cast<int>(syscall(SYS_io_uring_setup, entries, &parameters));
    if (ring >= 0) return ring;
    if (errno != EINVAL) fail(errno, "io_uring_setup");
  }
  fail(EINVAL, "io_uring_setup");
}

}  // namespace

Ring::Mapping::Mapping(int ring, std::size_t size_bytes, std::uint64_t what) : size_bytes_(size_bytes) {
  auto* start = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
                     static_cast<off_t>(what));
  if (start == MAP_FAILED) fail(errno, "mmap of an io_uring");
  start_ = static_cast<std::byte*>(start);
}

Ring::Mapping::Mapping(Mapping&& other) noexcept { *this = std::move(other); }

Ring::Mapping& Ring::Mapping::operator=(Mapping&& other) noexcept {
  std::swap(start_, other.start_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

Ring::Mapping::~Mapping() {
  if (start_ != nullptr) munmap(start_, size_bytes_);
}

Ring::Descriptor::~Descriptor() { reset(-1); }

void Ring::Descriptor::reset(int number) {
  if (number_ >= 0) close(number_);
  number_ = number;
}

Ring::Ring(unsigned depth) {
  io_uring_params parameters;
  ring_.reset(setup(depth + 1, parameters));  // one more: the wait for a wake
  if (!(parameters.features & IORING_FEAT_RW_CUR_POS)) fail(ENOSYS, "io_uring of this kernel");  // 5.6
  event_.reset(eventfd(0, EFD_CLOEXEC));
  if (event_.get() < 0) fail(errno, "eventfd");
  const auto& sq = parameters.sq_off;
  const auto& cq = parameters.cq_off;
  submissions_ =
      Mapping(ring_.get(), sq.array + parameters.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
  completions_ =
      Mapping(ring_.get(), cq.cqes + parameters.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
  entries_ = Mapping(ring_.get(), parameters.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
  submission_tail_ = submissions_.at<unsigned>(sq.tail);
  submission_mask_ = submissions_.at<unsigned>(sq.ring_mask);
  submission_array_ = submissions_.at<unsigned>(sq.array);
  completion_head_ = completions_.at<unsigned>(cq.head);
  completion_tail_ = completions_.at<unsigned>(cq.tail);
  completion_mask_ = completions_.at<unsigned>(cq.ring_mask);
  completion_entries_ = completions_.at<io_uring_cqe>(cq.cqes);
  submission_entries_ = entries_.at<io_uring_sqe>(0);
  await_wake();
}

Ring::~Ring() = default;

bool Ring::register_memory(std::byte* address, std::size_t size_bytes) {
  const iovec memory{address, size_bytes};
  return syscall(SYS_io_uring_register, ring_.get(), IORING_REGISTER_BUFFERS, &memory, 1) == 0;
}

io_uring_sqe& Ring::next_entry(std::uint64_t tag) {
  const auto index = (*submission_tail_ + prepared_) & *submission_mask_;
  auto& entry = submission_entries_[index];
  std::memset(&entry, 0, sizeof entry);
  entry.user_data = tag;
  submission_array_[index] = index;
  ++prepared_;
  return entry;
}

void Ring::prepare(const Operation& operation, std::uint64_t tag) {
  auto& entry = next_entry(tag);
  if (operation.registered) {
    entry.opcode = operation.write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
  } else {
    entry.opcode = operation.write ? IORING_OP_WRITE : IORING_OP_READ;
  }
  entry.fd = static_cast<int>(operation.handle);
  entry.off = operation.offset;
  entry.addr = reinterpret_cast<std::uintptr_t>(operation.address);
  entry.len = operation.size_bytes;
}

void Ring::await_wake() {
  prepare({false, event_.get(), 0, reinterpret_cast<std::byte*>(&event_value_), sizeof event_value_},
          kWakeTag);
}

void Ring::enter(unsigned wait_for) {
  const unsigned flags = wait_for > 0 ? IORING_ENTER_GETEVENTS : 0;
  std::atomic_ref<unsigned>(*submission_tail_).fetch_add(prepared_, std::memory_order_release);
  auto left = std::exchange(prepared_, 0U);
  while (left > 0 || wait_for > 0) {
    const auto taken = syscall(SYS_io_uring_enter, ring_.get(), left, wait_for, flags, nullptr, 0);
    if (taken >= 0) {
      left -= std::min(left, static_cast<unsigned>(taken));
      if (left == 0) return;
    } else if (errno == EBUSY || errno == EAGAIN) {
      usleep(100);  // the kernel is short of memory for now
    } else if (errno != EINTR) {
      fail(errno, "io_uring_enter");
    }
  }
}

void Ring::wait() {
  const auto tail = std::atomic_ref<unsigned>(*completion_tail_).load(std::memory_order_acquire);
  enter(tail == *completion_head_ ? 1 : 0);
}

bool Ring::next(Result& result) {
  while (true) {
    const auto head = *completion_head_;
    if (head == std::atomic_ref<unsigned>(*completion_tail_).load(std::memory_order_acquire)) return false;
    const auto& entry = completion_entries_[head & *completion_mask_];
    result = {entry.user_data, entry.res};
    std::atomic_ref<unsigned>(*completion_head_).store(head + 1, std::memory_order_release);
    if (result.tag != kWakeTag) return true;
    woken_ = false;
    await_wake();
  }
}

void Ring::wake() {
  if (woken_.exchange(true)) return;
  const std::uint64_t one = 1;
  while (write(event_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
}

}  // namespace penstock
