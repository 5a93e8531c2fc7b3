#include "io/ring.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace penstock {

namespace {

// A program that closes all descriptors closes the one that wakes this thread, too: it looks by itself now and then.
constexpr __kernel_timespec kLongestWait{1, 0};
constexpr std::uint64_t kWakeTag = ~std::uint64_t{0}, kCancelTag = kWakeTag - 1;

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

void Ring::Unmap::operator()(std::byte* start) const { munmap(start, size_bytes); }

Ring::Descriptor::~Descriptor() {
  if (number >= 0) close(number);
}

Ring::Mapping Ring::map(std::size_t size_bytes, std::uint64_t what) const {
  auto* start = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_.number,
                     static_cast<off_t>(what));
  if (start == MAP_FAILED) fail(errno, "mmap of an io_uring");
  return {static_cast<std::byte*>(start), {size_bytes}};
}

Ring::Ring(unsigned depth) {
  io_uring_params parameters;
  ring_.number = setup(depth + 1, parameters);  // one more: the wait for a wake
  if (!(parameters.features & IORING_FEAT_RW_CUR_POS)) fail(ENOSYS, "io_uring of this kernel");  // 5.6
  limits_waits_ = (parameters.features & IORING_FEAT_EXT_ARG) != 0;  // 5.11
  const auto& sq = parameters.sq_off;
  const auto& cq = parameters.cq_off;
  // One mapping has both queues since 5.4.
  queues_ = map(std::max(sq.array + parameters.sq_entries * sizeof(unsigned),
                         cq.cqes + parameters.cq_entries * sizeof(io_uring_cqe)),
                IORING_OFF_SQ_RING);
  entries_ = map(parameters.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
  const auto number_at = [&](unsigned offset) { return reinterpret_cast<unsigned*>(queues_.get() + offset); };
  submission_tail_ = number_at(sq.tail);
  submission_mask_ = number_at(sq.ring_mask);
  submission_array_ = number_at(sq.array);
  completion_head_ = number_at(cq.head);
  completion_tail_ = number_at(cq.tail);
  completion_mask_ = number_at(cq.ring_mask);
  completion_entries_ = reinterpret_cast<io_uring_cqe*>(queues_.get() + cq.cqes);
  entries_of_queue_ = parameters.sq_entries;
  submission_entries_ = reinterpret_cast<io_uring_sqe*>(entries_.get());
  await_wake();
}

bool Ring::register_memory(std::byte* address, std::size_t size_bytes) {
  const iovec memory{address, size_bytes};
  return syscall(SYS_io_uring_register, ring_.number, IORING_REGISTER_BUFFERS, &memory, 1) == 0;
}

io_uring_sqe& Ring::next_entry(std::uint64_t tag) {
  if (prepared_ == entries_of_queue_) enter(0);
  const auto index = (*submission_tail_ + prepared_++) & *submission_mask_;
  submission_array_[index] = index;
  auto& entry = submission_entries_[index];
  std::memset(&entry, 0, sizeof entry);
  entry.user_data = tag;
  return entry;
}

void Ring::prepare_message(bool send, int socket, msghdr* message, std::uint64_t tag) {
  auto& entry = next_entry(tag);
  entry.fd = socket;
  entry.msg_flags = send ? MSG_NOSIGNAL : 0;
  if (message->msg_iovlen == 1) {
    entry.opcode = send ? IORING_OP_SEND : IORING_OP_RECV;
    entry.addr = reinterpret_cast<std::uintptr_t>(message->msg_iov->iov_base);
    entry.len = static_cast<unsigned>(message->msg_iov->iov_len);
  } else {
    entry.opcode = send ? IORING_OP_SENDMSG : IORING_OP_RECVMSG;
    entry.addr = reinterpret_cast<std::uintptr_t>(message);
    entry.len = 1;
  }
}

void Ring::cancel_message(std::uint64_t tag) {
  auto& entry = next_entry(kCancelTag);
  entry.opcode = IORING_OP_ASYNC_CANCEL;
  entry.fd = -1;
  entry.addr = tag;
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
  prepare({false, event_.number(), 0, reinterpret_cast<std::byte*>(&event_value_), sizeof event_value_},
          kWakeTag);
}

void Ring::enter(unsigned wait_for) {
  io_uring_getevents_arg limit{};
  limit.ts = reinterpret_cast<std::uintptr_t>(&kLongestWait);
  const bool limited = wait_for > 0 && limits_waits_;
  const unsigned flags = (wait_for > 0 ? IORING_ENTER_GETEVENTS : 0U) | (limited ? IORING_ENTER_EXT_ARG : 0U);
  std::atomic_ref<unsigned>(*submission_tail_).fetch_add(prepared_, std::memory_order_release);
  auto left = std::exchange(prepared_, 0U);
  while (left > 0 || wait_for > 0) {
    const auto taken = syscall(SYS_io_uring_enter, ring_.number, left, wait_for, flags, limited ? &limit : nullptr,
                               limited ? sizeof limit : 0);
    if (taken >= 0) {
      left -= std::min(left, static_cast<unsigned>(taken));
      if (left == 0) return;
    } else if (errno == ETIME) {
      return;
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
    if (result.tag == kCancelTag) continue;  // the message's own result says how it ended
    if (result.tag != kWakeTag) return true;
    if (result.moved < 0 && result.moved != -EINTR && result.moved != -EAGAIN)
      fail(-result.moved, "reading what wakes an io_uring");
    woken_ = false;
    await_wake();
  }
}

void Ring::wake() {
  if (!woken_.exchange(true)) event_.notify();
}

}  // namespace penstock
