#include "io/transfers.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <new>
#include <system_error>
#include <utility>

#include "io/blocking.hpp"
#include "threads.hpp"

namespace penstock {

namespace {

constexpr int kBusyRetries = 100;
constexpr auto kBusyPause = std::chrono::milliseconds(1);

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Of the exception that is being handled.
int errno_of_exception() {
  try {
    throw;
  } catch (const std::system_error& failure) {
    return failure.code().value();
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  } catch (...) {
    return EIO;
  }
}

}  // namespace

Transfers::Transfers(MakeIo make_io, Limits limits, Deliver deliver)
    : make_io_(std::move(make_io)),
      limits_(limits),
      deliver_(std::move(deliver)),
      staging_(limits.slots, limits.slot_bytes),
      process_(getpid()) {
  try {
    // All, before one of them looks at the others.
    for (unsigned number = 0; number < limits.threads; ++number) workers_.emplace_back().number = number;
    for (auto& worker : workers_) {
      {
        const std::lock_guard lock(mutex_);
        ++running_;
      }
      try {
        worker.thread = std::thread([this, &worker] { run(worker); });
      } catch (...) {
        const std::lock_guard lock(mutex_);
        --running_;
        throw;
      }
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return started_ == limits_.threads; });
    if (start_error_ != 0) throw std::system_error(start_error_, std::generic_category(), "I/O");
  } catch (...) {
    close();
    throw;
  }
}

Transfers::~Transfers() { close(); }

// False: it has to be handed over.
bool Transfers::try_now(Transfer& transfer) const {
  if (transfer.method != Method::buffered || transfer.size_bytes > limits_.at_once_bytes) return false;
  const auto size_bytes = static_cast<std::uint32_t>(transfer.size_bytes);
  transfer.started_s = now_s();
  const auto moved =
      move_at_once({transfer.write, transfer.target.cached, transfer.offset, transfer.address, size_bytes});
  const bool whole = moved == static_cast<int>(size_bytes);
  if (!whole && (moved >= 0 || moved == -EAGAIN || moved == -EINTR || !transfer.write)) return false;
  transfer.error = whole ? 0 : -moved;
  transfer.finished_s = now_s();
  return true;
}

bool Transfers::submit(std::span<const Transfer> asked, std::list<Transfer>* at_once) {
  if (at_once != nullptr) {
    const std::lock_guard lock(mutex_);
    if (closed_) return false;
  }
  // Cut before the lock is taken: the threads go on meanwhile.
  std::list<Transfer> transfers;
  std::vector<Parts> cuts;
  std::size_t count = 0;
  for (const auto& one : asked) {
    auto& transfer = transfers.emplace_back(one);
    transfer.self = std::prev(transfers.end());
    if (at_once != nullptr && try_now(transfer)) {
      at_once->splice(at_once->end(), transfers, transfer.self);
      continue;
    }
    auto& parts = cuts.emplace_back();
    for (const auto& piece : cut(transfer, limits_.piece_bytes, limits_.slot_bytes)) {
      parts.push_back({&transfer, piece});
      parts.back().self = std::prev(parts.end());
    }
    count += transfer.pieces_left = parts.size();
  }
  const std::lock_guard lock(mutex_);
  if (closed_ || process_ != getpid()) return false;
  for (auto& parts : cuts) {
    auto& lane = lane_of(*parts.front().transfer);
    for (auto& part : parts) part.lane = &lane;
  }
  transfers_.splice(transfers_.end(), transfers);
  for (auto& parts : cuts) {
    auto& queue = queue_of(parts.front());
    queue.splice(queue.end(), parts);
  }
  wake(count);
  return true;
}

std::size_t Transfers::cancel(std::span<const std::uint64_t> tokens) {
  const std::lock_guard lock(mutex_);
  std::size_t cancelled = 0;
  for (const auto token : tokens) {
    auto* const part = waiting_part(token);
    if (part == nullptr || part->transfer->pieces_begun > 0) continue;
    auto& transfer = *part->transfer;
    drop_waiting(queue_of(*part), transfer);
    transfer.error = ECANCELED;
    transfer.started_s = now_s();
    finish(transfer);
    ++cancelled;
  }
  changed_.notify_all();
  return cancelled;
}

void Transfers::raise_priority(std::span<const std::uint64_t> tokens) {
  const std::lock_guard lock(mutex_);
  for (const auto token : tokens) {
    auto* const first = waiting_part(token);
    if (first == nullptr || first->transfer->priority == Priority::demand) continue;
    auto& from = queue_of(*first);
    first->transfer->priority = Priority::demand;
    auto& to = queue_of(*first);
    for (auto part = from.begin(); part != from.end();) {
      const auto next = std::next(part);
      if (part->transfer == first->transfer) to.splice(to.end(), from, part);
      part = next;
    }
  }
  wake(workers_.size());  // a demand may begin where others may not
}

std::list<Transfer> Transfers::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !finished_.empty() || running_ == 0; });
  return std::exchange(finished_, {});
}

int Transfers::broken() {
  const std::lock_guard lock(mutex_);
  return broken_;
}

bool Transfers::close(std::optional<std::chrono::duration<double>> timeout) {
  if (process_ != getpid()) {  // after a fork: the threads are the parent's, and here not even to be detached
    for (auto& worker : workers_)
      if (worker.thread.joinable()) new std::thread(std::move(worker.thread));
    return true;
  }
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    for (auto& worker : workers_) {
      if (worker.io != nullptr) worker.io->wake();
      if (worker.thread.get_id() == std::this_thread::get_id()) return false;
    }
    const auto ended = [this] { return running_ == 0; };
    if (!timeout) {
      changed_.wait(lock, ended);
    } else if (!changed_.wait_for(lock, *timeout, ended)) {
      return false;
    }
  }
  const std::lock_guard joining(joining_);
  for (auto& worker : workers_)
    if (worker.thread.joinable()) worker.thread.join();
  return true;
}

Transfers::Parts& Transfers::queue_of(const Part& part) {
  return part.lane->waiting[static_cast<std::size_t>(part.transfer->priority)];
}

// The first part of the transfer that has not begun. Null: there is none.
Transfers::Part* Transfers::waiting_part(std::uint64_t token) {
  for (auto& lane : lanes_) {
    for (auto& queue : lane.waiting) {
      const auto found = std::ranges::find(queue, token, [](const auto& part) { return part.transfer->token; });
      if (found != queue.end()) return &*found;
    }
  }
  return nullptr;
}

Transfers::Lane& Transfers::lane_of(const Transfer& transfer) {
  const auto remote = is_namespace(transfer.target.direct) ? transfer.target.direct : Handle{0};
  const auto found = std::ranges::find(lanes_, remote, &Lane::remote);
  if (found != lanes_.end()) return *found;
  return lanes_.emplace_back(remote, std::vector<unsigned>(limits_.threads));
}

bool Transfers::anything_waits() const {
  return std::ranges::any_of(lanes_, [](const auto& lane) {
    return std::ranges::any_of(lane.waiting, [](const auto& queue) { return !queue.empty(); });
  });
}

// As many threads as there are parts, of those that do nothing. The others look for the next by themselves; but
// one alone may also wait for what it has in flight, with room for more.
void Transfers::wake(std::size_t parts) {
  for (auto& worker : workers_) {
    if (parts == 0) return;
    if (worker.io == nullptr || !(worker.idle || workers_.size() == 1)) continue;
    worker.idle = false;
    worker.io->wake();
    --parts;
  }
}

void Transfers::drop_waiting(Parts& queue, Transfer& transfer) {
  transfer.pieces_left -=
      std::erase_if(queue, [&transfer](const auto& part) { return part.transfer == &transfer; });
}

void Transfers::finish(Transfer& transfer) {
  transfer.finished_s = now_s();
  finished_.splice(finished_.end(), transfers_, transfer.self);
}

// -- on the threads ------------------------------------------------------------------------------

void Transfers::run(Worker& worker) {
  begin_thread("penstock-io");
  std::unique_ptr<Io> io;
  int error = 0;
  try {
    io = make_io_();
    const bool registered = io->register_memory(staging_.start(), staging_.size_bytes());
    const std::lock_guard lock(mutex_);
    registered_ = registered_ && registered;
  } catch (...) {
    error = errno_of_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    worker.io = io.get();
    if (error != 0) start_error_ = error;
    ++started_;
    changed_.notify_all();
  }
  if (error == 0) {
    try {
      serve(worker, *io);
    } catch (...) {  // such as a ring that the program has closed
      error = errno_of_exception();
    }
  }
  const std::lock_guard lock(mutex_);
  worker.io = nullptr;
  if (error != 0) {
    closed_ = true;
    broken_ = error;
    while (!worker.in_flight.empty()) end_part(worker.in_flight, worker.in_flight.front(), error, true);
    for (auto& lane : lanes_)
      for (auto& queue : lane.waiting)
        while (!queue.empty()) end_part(queue, queue.front(), error, false);
  }
  for (auto& other : workers_)  // those that have nothing to wait for now
    if (other.io != nullptr) other.io->wake();
  --running_;
  changed_.notify_all();
}

void Transfers::serve(Worker& worker, Io& io) {
  while (true) {
    while (auto* part = next_part(worker)) start(io, *part);
    {
      const std::lock_guard lock(mutex_);
      if (closed_ && worker.in_flight.empty() && !anything_waits()) return;
    }
    io.wait();
    Result result;
    while (io.next(result)) {
      auto& part = *reinterpret_cast<Part*>(result.tag);
      if (advance(worker, part, result)) issue(io, part);
    }
    hand_out();
  }
}

void Transfers::hand_out() {
  std::list<Transfer> last;
  {
    const std::lock_guard lock(mutex_);
    if (finished_.empty()) return;
    if (deliver_ && in_flight_bytes_ == 0 && !anything_waits()) {
      last.swap(finished_);
    } else {
      changed_.notify_all();
    }
  }
  if (last.empty()) return;
  try {
    deliver_(last);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    finished_.splice(finished_.begin(), last);
    throw;
  }
}

// Whether the first part of those of this priority may.
bool Transfers::may_begin(const Worker& worker, const Lane& lane, std::size_t priority) const {
  if (lane.in_flight[worker.number] >= limits_.depth) return false;
  const auto& part = lane.waiting[priority].front();
  const auto size_bytes = part.piece.end - part.piece.begin;
  const bool demanded = part.transfer->priority == Priority::demand;
  if (!demanded && lane.in_flight_bytes > 0 && lane.in_flight_bytes + size_bytes > limits_.background_bytes)
    return false;
  return part.piece.method != Method::staged || !staging_.empty();
}

// The next part that may begin now: the most urgent of all targets', each in its turn. None: what is submitted
// from then on, by whoever gets the lock next, wakes the thread up if nothing else will.
Transfers::Part* Transfers::next_part(Worker& worker) {
  const std::lock_guard lock(mutex_);
  auto best = lanes_.end();
  std::size_t best_priority = kPriorities;
  for (auto lane = lanes_.begin(); lane != lanes_.end(); ++lane) {
    std::size_t priority = 0;
    while (priority < best_priority && lane->waiting[priority].empty()) ++priority;
    if (priority >= best_priority || !may_begin(worker, *lane, priority)) continue;
    best = lane;
    best_priority = priority;
  }
  worker.idle = best == lanes_.end() && worker.in_flight.empty();
  if (best == lanes_.end()) return nullptr;
  lanes_.splice(lanes_.end(), lanes_, best);
  auto& queue = best->waiting[best_priority];
  auto& part = queue.front();
  auto& transfer = *part.transfer;
  const auto size_bytes = part.piece.end - part.piece.begin;
  if (part.piece.method == Method::staged) part.slot = staging_.take();
  worker.in_flight.splice(worker.in_flight.end(), queue, part.self);
  in_flight_bytes_ += size_bytes;
  best->in_flight_bytes += size_bytes;
  ++best->in_flight[worker.number];
  part.worker = &worker;
  if (transfer.pieces_begun++ == 0) transfer.started_s = now_s();
  return &part;
}

void Transfers::start(Io& io, Part& part) {
  const auto& piece = part.piece;
  const auto& transfer = *part.transfer;
  if (piece.method == Method::staged && transfer.write) {
    io.submit();  // what is prepared need not wait for the copy
    const auto before = piece.data_begin - piece.begin, size = piece.data_end - piece.data_begin;
    std::memset(part.slot, 0, before);  // no other transfer's bytes go into the padding
    std::memcpy(part.slot + before, transfer.address + (piece.data_begin - transfer.offset), size);
    std::memset(part.slot + before + size, 0, piece.end - piece.data_end);
  }
  issue(io, part);
}

// What is left of the part.
void Transfers::issue(Io& io, const Part& part) {
  io_step("issue");
  const auto& piece = part.piece;
  const auto& transfer = *part.transfer;
  const bool staged = piece.method == Method::staged, mapped = piece.method == Method::mapped;
  const auto begin = piece.begin + part.done_bytes;
  auto* address = staged ? part.slot + part.done_bytes : transfer.address + (begin - transfer.offset);
  const auto& target = transfer.target;
  io.prepare({transfer.write, mapped || piece.method == Method::buffered ? target.cached : target.direct, begin,
              address, static_cast<std::uint32_t>(piece.end - begin), staged && registered_, mapped},
             reinterpret_cast<std::uint64_t>(&part));
}

// Short moves, interrupted and busy ones are dealt with here, and nowhere else. Whether the part has to go on.
bool Transfers::advance(Worker& worker, Part& part, const Result& result) {
  io_step("advance");
  const auto moved = result.moved;
  part.may_land = part.may_land || result.may_land;
  const auto& piece = part.piece;
  const auto& transfer = *part.transfer;
  if (moved == -EINTR || moved == -EAGAIN) {
    if (++part.retries > kBusyRetries) {
      finish_part(worker, part, EAGAIN);
      return false;
    }
    if (part.retries > 1) std::this_thread::sleep_for(kBusyPause);
    return true;
  }
  if (moved < 0) {
    finish_part(worker, part, -moved);
    return false;
  }
  const auto reached = piece.begin + part.done_bytes + static_cast<std::uint64_t>(moved);
  // A file may end inside its last block: what was asked for of it has been read.
  if (reached >= piece.end || (!transfer.write && reached >= piece.data_end)) {
    if (piece.method == Method::staged && !transfer.write) {
      std::memcpy(transfer.address + (piece.data_begin - transfer.offset),
                  part.slot + (piece.data_begin - piece.begin), piece.data_end - piece.data_begin);
    }
    finish_part(worker, part, 0);
    return false;
  }
  auto step = static_cast<std::uint64_t>(moved);
  if (piece.method == Method::direct || piece.method == Method::staged)
    step -= step % transfer.target.alignment_bytes;
  if (step == 0) {  // the file ends here, or the device gave up
    finish_part(worker, part, EIO);
    return false;
  }
  part.done_bytes += step;
  return true;
}

void Transfers::finish_part(Worker& worker, Part& part, int error) {
  const std::lock_guard lock(mutex_);
  end_part(worker.in_flight, part, error, false);
  if (workers_.size() > 1 && anything_waits()) wake(1);  // there is room for one more now
}

void Transfers::end_part(Parts& parts, Part& part, int error, bool abandoned) {
  auto& transfer = *part.transfer;
  const bool begun = part.worker != nullptr;
  if (begun) {
    in_flight_bytes_ -= part.piece.end - part.piece.begin;
    part.lane->in_flight_bytes -= part.piece.end - part.piece.begin;
    --part.lane->in_flight[part.worker->number];
  }
  if (part.slot != nullptr && !abandoned) staging_.give(part.slot);
  transfer.abandoned = transfer.abandoned || abandoned;
  transfer.may_land = transfer.may_land || part.may_land;
  if (error != 0 && transfer.error == 0) {
    transfer.error = error;
    if (begun) drop_waiting(queue_of(part), transfer);  // the rest is not worth the effort
  }
  parts.erase(part.self);
  if (--transfer.pieces_left == 0) finish(transfer);
}

}  // namespace penstock
