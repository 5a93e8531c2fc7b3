#include "transfers.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <system_error>
#include <utility>

namespace penstock {

namespace {

constexpr int kBusyRetries = 100;
constexpr auto kBusyPause = std::chrono::milliseconds(1);

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Transfers::Transfers(const std::function<std::unique_ptr<Io>()>& make_io, Limits limits, Deliver deliver)
    : limits_(limits),
      deliver_(std::move(deliver)),
      staging_(limits.slots, limits.slot_bytes),
      process_(getpid()) {
  thread_ = std::thread([this, make_io] { run(make_io); });
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return started_; });
  if (start_error_ != 0) {
    lock.unlock();
    thread_.join();
    throw std::system_error(start_error_, std::generic_category(), "io_uring");
  }
}

Transfers::~Transfers() { close(); }

bool Transfers::submit(std::span<const Request> requests) {
  // Cut before the lock is taken: the thread goes on meanwhile.
  std::vector<std::unique_ptr<Transfer>> transfers;
  std::vector<std::unique_ptr<Part>> parts;
  for (const auto& request : requests) {
    const auto pieces = cut(request, limits_.piece_bytes, limits_.slot_bytes);
    transfers.push_back(std::make_unique<Transfer>(Transfer{request, pieces.size()}));
    for (const auto& piece : pieces)
      parts.push_back(std::make_unique<Part>(Part{transfers.back().get(), piece}));
  }
  const std::lock_guard lock(mutex_);
  if (closed_ || process_ != getpid()) return false;
  for (auto& transfer : transfers) transfers_.emplace(transfer->request.token, std::move(transfer));
  for (auto& part : parts) queue_of(*part->transfer).push_back(std::move(part));
  if (io_ != nullptr) io_->wake();
  return true;
}

std::size_t Transfers::cancel(std::span<const std::uint64_t> tokens) {
  const std::lock_guard lock(mutex_);
  std::vector<Transfer*> cancelled;
  for (const auto token : tokens) {
    const auto found = transfers_.find(token);
    if (found != transfers_.end() && found->second->pieces_begun == 0)
      cancelled.push_back(found->second.get());
  }
  for (auto* transfer : cancelled) {
    std::erase_if(queue_of(*transfer), [transfer](const auto& part) { return part->transfer == transfer; });
    transfer->started_s = now_s();
    finish_locked(*transfer, ECANCELED);
  }
  changed_.notify_all();
  return cancelled.size();
}

void Transfers::hurry(std::span<const std::uint64_t> tokens) {
  const std::lock_guard lock(mutex_);
  for (const auto token : tokens) {
    const auto found = transfers_.find(token);
    if (found == transfers_.end() || found->second->request.priority == Priority::demand) continue;
    auto& transfer = *found->second;
    auto& from = queue_of(transfer);
    const auto first = std::stable_partition(
        from.begin(), from.end(), [&transfer](const auto& part) { return part->transfer != &transfer; });
    transfer.request.priority = Priority::demand;
    std::move(first, from.end(), std::back_inserter(queue_of(transfer)));
    from.erase(first, from.end());
  }
  if (io_ != nullptr) io_->wake();  // a demand may begin where others may not
}

std::vector<Finished> Transfers::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !finished_.empty() || ended_; });
  return std::exchange(finished_, {});
}

bool Transfers::close(std::optional<std::chrono::duration<double>> timeout) {
  if (process_ != getpid()) {  // after a fork: the thread is the parent's
    if (thread_.joinable()) thread_.detach();
    return true;
  }
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    if (io_ != nullptr) io_->wake();
    if (thread_.get_id() == std::this_thread::get_id()) return false;
    const auto ended = [this] { return ended_; };
    if (!timeout) {
      changed_.wait(lock, ended);
    } else if (!changed_.wait_for(lock, *timeout, ended)) {
      return false;
    }
  }
  const std::lock_guard joining(joining_);
  if (thread_.joinable()) thread_.join();
  return true;
}

Transfers::Queue& Transfers::queue_of(const Transfer& transfer) {
  return waiting_[static_cast<std::size_t>(transfer.request.priority)];
}

bool Transfers::anything_waits() const {
  return std::any_of(waiting_.begin(), waiting_.end(), [](const auto& queue) { return !queue.empty(); });
}

// -- on the thread -------------------------------------------------------------------------------

void Transfers::run(const std::function<std::unique_ptr<Io>()>& make_io) {
  sigset_t all;
  sigfillset(&all);
  sigdelset(&all, SIGSEGV);  // the arena serves accesses to what is out, whoever touches it
  pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are for the program's own threads
  pthread_setname_np(pthread_self(), "penstock-ring");
  std::unique_ptr<Io> io;
  int error = 0;
  try {
    io = make_io();
    registered_ = io->register_memory(staging_.start(), staging_.size_bytes());
  } catch (const std::system_error& failure) {
    error = failure.code().value();
  } catch (const std::bad_alloc&) {
    error = ENOMEM;
  }
  {
    const std::lock_guard lock(mutex_);
    io_ = io.get();
    start_error_ = error;
    started_ = true;
    changed_.notify_all();
  }
  if (error == 0) {
    try {
      serve(*io);
    } catch (const std::system_error& failure) {  // such as a ring that the program has closed
      error = failure.code().value();
    } catch (const std::bad_alloc&) {
      error = ENOMEM;
    }
  }
  const std::lock_guard lock(mutex_);
  io_ = nullptr;
  closed_ = ended_ = true;
  for (auto& queue : waiting_) queue.clear();
  while (!transfers_.empty()) {
    auto& transfer = *transfers_.begin()->second;
    finish_locked(transfer, error, transfer.pieces_begun > 0);
  }
  changed_.notify_all();
}

void Transfers::serve(Io& io) {
  std::unique_ptr<Part> part;
  while (true) {
    while (next_part(part)) start(io, std::move(part));
    {
      const std::lock_guard lock(mutex_);
      if (closed_ && in_flight_.empty() && !anything_waits()) return;
    }
    io.wait();
    Result result;
    while (io.next(result)) {
      part = advance(take_back(result.tag), result.moved);
      if (part) issue(io, std::move(part));
    }
    hand_out();
  }
}

void Transfers::hand_out() {
  std::vector<Finished> last;
  {
    const std::lock_guard lock(mutex_);
    if (finished_.empty()) return;
    if (deliver_ && in_flight_.empty() && !anything_waits()) {
      last = std::exchange(finished_, {});
    } else {
      changed_.notify_all();
    }
  }
  if (!last.empty()) deliver_(last);
}

// The next part that may begin now.
bool Transfers::next_part(std::unique_ptr<Part>& part) {
  if (in_flight_.size() >= limits_.depth) return false;
  const std::lock_guard lock(mutex_);
  const auto queue =
      std::find_if(waiting_.begin(), waiting_.end(), [](const auto& each) { return !each.empty(); });
  if (queue == waiting_.end()) return false;
  auto& first = queue->front();
  const auto size_bytes = first->piece.end - first->piece.begin;
  const bool demanded = first->transfer->request.priority == Priority::demand;
  if (!demanded && !in_flight_.empty() && in_flight_bytes_ + size_bytes > limits_.background_bytes)
    return false;
  if (first->piece.way == Way::staged && (first->slot = staging_.take()) == nullptr) return false;
  part = std::move(first);
  queue->pop_front();
  if (part->transfer->pieces_begun++ == 0) part->transfer->started_s = now_s();
  return true;
}

void Transfers::start(Io& io, std::unique_ptr<Part> part) {
  const auto& piece = part->piece;
  const auto& request = part->transfer->request;
  const bool copies = piece.way == Way::staged && request.write;
  if (copies) {
    io.submit();  // what is prepared need not wait for the copy
    const auto before = piece.data_begin - piece.begin, size = piece.data_end - piece.data_begin;
    std::memset(part->slot, 0, before);  // no other request's bytes go into the padding
    std::memcpy(part->slot + before, request.address + (piece.data_begin - request.offset), size);
    std::memset(part->slot + before + size, 0, piece.end - piece.data_end);
  }
  issue(io, std::move(part));
}

// What is left of the part.
void Transfers::issue(Io& io, std::unique_ptr<Part> part) {
  const auto& piece = part->piece;
  const auto& request = part->transfer->request;
  const auto begin = piece.begin + part->done_bytes;
  auto* address =
      piece.way == Way::staged ? part->slot + part->done_bytes : request.address + (begin - request.offset);
  io.prepare(
      {request.write, piece.way == Way::buffered ? request.buffered_file : request.direct_file, begin,
       address, static_cast<std::uint32_t>(piece.end - begin), piece.way == Way::staged && registered_},
      reinterpret_cast<std::uint64_t>(part.get()));
  auto* tag = part.get();
  in_flight_bytes_ += piece.end - piece.begin;
  in_flight_.emplace(tag, std::move(part));
}

std::unique_ptr<Transfers::Part> Transfers::take_back(std::uint64_t tag) {
  auto part = std::move(in_flight_.extract(reinterpret_cast<Part*>(tag)).mapped());
  in_flight_bytes_ -= part->piece.end - part->piece.begin;
  return part;
}

// Short moves, interrupted and busy ones are dealt with here, and nowhere else. Gives the part back
// if it has to go on.
std::unique_ptr<Transfers::Part> Transfers::advance(std::unique_ptr<Part> part, int moved) {
  const auto& piece = part->piece;
  const auto& request = part->transfer->request;
  if (moved == -EINTR || moved == -EAGAIN) {
    if (++part->retries > kBusyRetries) {
      finish_part(std::move(part), EAGAIN);
      return nullptr;
    }
    if (part->retries > 1) std::this_thread::sleep_for(kBusyPause);
    return part;
  }
  if (moved < 0) {
    finish_part(std::move(part), -moved);
    return nullptr;
  }
  const auto reached = piece.begin + part->done_bytes + static_cast<std::uint64_t>(moved);
  // A file may end inside its last block: what was asked for of it has been read.
  if (reached >= piece.end || (!request.write && reached >= piece.data_end)) {
    if (piece.way == Way::staged && !request.write) {
      std::memcpy(request.address + (piece.data_begin - request.offset),
                  part->slot + (piece.data_begin - piece.begin), piece.data_end - piece.data_begin);
    }
    finish_part(std::move(part), 0);
    return nullptr;
  }
  auto step = static_cast<std::uint64_t>(moved);
  if (piece.way != Way::buffered) step -= step % request.alignment_bytes;
  if (step == 0) {  // the file ends here, or the device gave up
    finish_part(std::move(part), EIO);
    return nullptr;
  }
  part->done_bytes += step;
  return part;
}

void Transfers::finish_part(std::unique_ptr<Part> part, int error) {
  if (part->slot != nullptr) staging_.give(part->slot);
  const std::lock_guard lock(mutex_);
  auto& transfer = *part->transfer;
  if (transfer.error == 0) transfer.error = error;
  if (--transfer.pieces_left == 0) finish_locked(transfer, transfer.error);
}

void Transfers::finish_locked(Transfer& transfer, int error, bool abandoned) {
  finished_.push_back({transfer.request.token, error, transfer.started_s, now_s(), abandoned});
  transfers_.erase(transfer.request.token);
}

}  // namespace penstock
