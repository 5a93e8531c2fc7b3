#include "reads.hpp"

#include <sys/uio.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "fetches.hpp"
#include "io/blocking.hpp"
#include "io/ring.hpp"
#include "nvme/nvme_io.hpp"
#include "threads.hpp"

namespace penstock::samples {

namespace {

constexpr std::uint64_t kPieceBytes = 4U << 20;
constexpr unsigned kBlockingThreads = 4;

bool ring_works() {
  try {
    const Ring ring(1);
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

}  // namespace

void leave_behind(std::shared_ptr<void> what) {
  static std::mutex mutex;
  static auto* const all = new std::vector<std::shared_ptr<void>>;  // not even the end of the process ends it
  const std::lock_guard lock(mutex);
  all->push_back(std::move(what));
}

ReadQueue::ReadQueue(Transfers::MakeIo make_io, const Limits& limits)
    : state_(std::make_shared<State>(std::move(make_io), limits)) {
  // The thread keeps what it works with: it may have to be left behind.
  thread_ = std::thread([state = state_] { learn(*state); });
}

void ReadQueue::submit(const Catalog& catalog, bool direct, std::vector<Read> reads) {
  std::vector<Transfer> requests;
  std::vector<std::unique_ptr<Read>> held;  // theirs who learn of their end, once they have begun
  for (auto& read : reads) {
    const auto& file = catalog.data_file(read.extent);
    const bool by_direct = file.remote() || (direct && file.direct_file >= 0);
    held.push_back(std::make_unique<Read>(std::move(read)));
    const auto& one = *held.back();
    requests.push_back({reinterpret_cast<std::uintptr_t>(&one), false, by_direct ? Method::direct : Method::buffered,
                        true, {file.buffered_file, file.direct_file, file.alignment_bytes},
                        file.begin + one.extent.offset,
                        one.address, one.extent.size_bytes});
  }
  const auto remove = [&] {
    const std::lock_guard lock(state_->mutex);
    for (const auto& read : held) state_->under_way.erase(read.get());
    if (state_->under_way.empty()) state_->emptied.notify_all();
  };
  bool begun;
  try {
    {
      const std::lock_guard lock(state_->mutex);
      for (const auto& read : held) state_->under_way.insert(read.get());
    }
    begun = state_->transfers.submit(requests);
  } catch (...) {
    remove();
    throw;
  }
  const int broken = begun ? 0 : state_->transfers.broken();
  for (auto& read : held) {
    if (begun) {
      read.release();
    } else {
      end(*state_, read.release(), broken != 0 ? broken : ECANCELED, false);
    }
  }
}

void ReadQueue::end(State& state, Read* read, int error, bool abandoned) {
  // Memory that the kernel may still write to is never given back.
  if (abandoned) leave_behind(read->target);
  read->target->arrived(read->number, error);
  const std::unique_ptr<Read> last(read);
  const std::lock_guard lock(state.mutex);
  state.under_way.erase(read);
  if (state.under_way.empty()) state.emptied.notify_all();
}

void ReadQueue::learn(State& state) {
  begin_thread("penstock-reads");
  while (true) {
    const auto finished = state.transfers.wait();
    if (finished.empty()) return;
    for (const auto& one : finished)
      end(state, reinterpret_cast<Read*>(one.token), one.error, one.abandoned);
  }
}

bool ReadQueue::close(Clock::time_point deadline) {
  if (!thread_.joinable()) return !stuck_;
  std::vector<std::uint64_t> tokens;
  {
    const std::lock_guard lock(state_->mutex);
    for (auto* read : state_->under_way) tokens.push_back(reinterpret_cast<std::uintptr_t>(read));
  }
  state_->transfers.cancel(tokens);
  {
    std::unique_lock lock(state_->mutex);
    if (!state_->emptied.wait_until(lock, deadline, [this] { return state_->under_way.empty(); })) {
      leave_behind(state_);  // nothing else may end its threads
      thread_.detach();
      stuck_ = true;
      return false;
    }
  }
  state_->transfers.close();
  thread_.join();
  return true;
}

Reads::Reads(const Catalog& catalog, bool direct, bool ring, unsigned depth, MakeIo make_io)
    : catalog_(catalog), direct_(direct), ring_(ring), depth_(depth), make_io_(std::move(make_io)),
      fetches_(catalog.anything(&DataFile::fetched) ? std::make_shared<Fetches>(catalog) : nullptr) {}

std::unique_ptr<ReadQueue> Reads::make_queue(Traffic traffic) {
  Limits limits{depth_, kPieceBytes, 64U << 10, 1};  // chunks are aligned: they need no staging
  if (traffic == Traffic::samples && direct_) limits = {depth_, kPieceBytes, 256U << 10, 16};
  if (make_io_) return std::make_unique<ReadQueue>([this] { return make_io_(depth_); }, limits);
  if (catalog_.anything(&DataFile::remote)) {
    uses_ring_ = ring_ && ring_works();
    return std::make_unique<ReadQueue>(
        [depth = depth_, ring = ring_] { return nvme::make_nvme_io(depth, ring); }, limits);
  }
  if (ring_ && uses_ring_ != 0) {
    try {
      auto queue = std::make_unique<ReadQueue>([depth = depth_] { return std::make_unique<Ring>(depth); }, limits);
      uses_ring_ = 1;
      return queue;
    } catch (const std::system_error&) {  // refused: counters() say so
    }
  }
  uses_ring_ = 0;
  limits.depth = 1;
  limits.threads = kBlockingThreads;
  return std::make_unique<ReadQueue>([] { return std::make_unique<BlockingIo>(); }, limits);
}

ReadQueue& Reads::queue_of(Traffic traffic) {
  auto& queue = queues_[static_cast<int>(traffic)];
  if (!queue) queue = make_queue(traffic);
  return *queue;
}

void Reads::submit(Traffic traffic, std::vector<Read> reads) {
  if (reads.empty()) return;
  for (const auto& read : reads) bytes_ += read.extent.size_bytes;
  counts_[static_cast<int>(traffic)] += reads.size();
  if (fetches_ != nullptr) reads = fetches_->sort_out(std::move(reads));
  carry_out(traffic, std::move(reads));
}

void Reads::carry_out(Traffic traffic, std::vector<Read> reads) {
  if (reads.empty()) return;
  std::unique_lock lock(mutex_);
  if (closed_) {
    lock.unlock();
    for (const auto& read : reads) read.target->arrived(read.number, ECANCELED);
    return;
  }
  auto& queue = queue_of(traffic);
  lock.unlock();  // queues stay as long as this object
  queue.submit(catalog_, direct_, std::move(reads));
}

bool Reads::take(std::size_t most, Clock::time_point until, std::vector<Fetch>& fetches) {
  std::vector<Read> here;
  const bool open = fetches_->take(most, until, fetches, here);
  for (const auto& read : here) {
    try {
      carry_out(read.sample == kWholeChunk ? Traffic::chunks : Traffic::samples, {read});
    } catch (...) {  // no memory, no thread
      read.target->arrived(read.number, ENOMEM);
    }
  }
  return open;
}

bool Reads::read_cached(const Extent& extent, std::byte* to) {
  const auto& file = catalog_.data_file(extent);
  if (file.remote() || file.fetched || (direct_ && file.direct_file >= 0) || never_cached_) return false;
  const iovec room{to, extent.size_bytes};
  const auto moved = preadv2(static_cast<int>(file.buffered_file), &room, 1,
                             static_cast<off_t>(file.begin + extent.offset), RWF_NOWAIT);
  if (moved < 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) never_cached_ = true;
  if (moved != static_cast<ssize_t>(extent.size_bytes)) return false;
  bytes_ += extent.size_bytes;
  ++counts_[static_cast<int>(Traffic::samples)];
  return true;
}

bool Reads::close(Clock::time_point deadline) {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  bool whole = true;
  for (auto& queue : queues_)
    if (queue) whole = queue->close(deadline) && whole;
  if (fetches_ != nullptr) fetches_->close();
  return whole;
}

}  // namespace penstock::samples
