#include "feed.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <system_error>
#include <utility>

#include "threads.hpp"

namespace penstock::samples {

namespace {

// To wake a thread takes as long as to copy a hundred small samples: who waits is given several batches.
constexpr std::size_t kBatchesAtOnce = 8;
constexpr std::uint64_t kBytesAtOnce = 1U << 20;
constexpr auto kLongestPatience = std::chrono::milliseconds(1);

// The drive cannot be reached, or is another one by now; a disk's own errors are others.
bool is_lost(const Failure& failure) {
  if (failure.fault != Fault::read) return false;
  const auto error = failure.error;
  return error == ETIMEDOUT || error == ECONNRESET || error == ESTALE || error == ENODEV || error == EBADF;
}

}  // namespace

Feed::Feed(std::shared_ptr<Reader> reader, std::shared_ptr<Order> order, const FeedOptions& options)
    : reader_(std::move(reader)),
      options_(options),
      assembler_(*reader_, order, options.ahead, stop_, signal_),
      begun_at_(order->taken()),
      taken_(begun_at_) {
  reader_->blocks().keep(options.prefetch_bytes);
  thread_ = std::thread([this] { run(); });
}

Feed::~Feed() { close(); }

void Feed::close() {
  {
    const std::lock_guard lock(signal_->mutex);
    stop_ = true;
    signal_->changed.notify_all();
  }
  reader_->cache().notify();
  const std::lock_guard lock(closing_);
  if (thread_.joinable()) thread_.join();
  assembler_.close();  // what comes next may use the room, however long this object is kept
}

// -- the thread ----------------------------------------------------------------------------------

void Feed::run() {
  begin_thread("penstock-feed");
  while (true) {
    std::size_t samples;
    {
      std::unique_lock lock(signal_->mutex);
      sleeps_ = true;
      signal_->changed.wait(lock, [this] { return stop_ || has_room(); });
      sleeps_ = false;
      if (stop_) return;
      samples = wanted_;
    }
    std::shared_ptr<SampleBatch> batch;
    std::optional<Failure> failure;
    try {
      batch = assembler_.next(samples);
    } catch (const std::system_error& error) {  // no thread, no ring
      failure = Failure{Fault::read, {}, -1, error.code().value()};
    } catch (const std::exception&) {  // no memory
      failure = Failure{Fault::read, {}, -1, ENOMEM};
    }
    const std::lock_guard lock(signal_->mutex);
    if (batch) {
      ended_ = batch->size() < samples;
      ready_bytes_ += batch->size_bytes();
      ready_samples_ += batch->size();
      ready_.push_back({std::move(batch)});
    } else {
      ended_ = true;
      if (failure && !failure_) final_failure_ = failure;
    }
    if (ended_ || ready_samples_ >= enough_ || ready_bytes_ >= kBytesAtOnce || !has_room())
      signal_->changed.notify_all();
    if (ended_) return;
  }
}

// At least one batch is made ahead; more, while they fit.
bool Feed::has_room() const {
  if (ready_samples_ < wanted_) return true;
  if (ready_.empty()) return false;
  return ready_bytes_ + ready_.back().batch->size_bytes() <= options_.prefetch_bytes;
}

// -- whoever takes -------------------------------------------------------------------------------

// Whether so many samples are there, or all that are left.
bool Feed::has(std::size_t samples) const {
  std::size_t count = 0;
  for (const auto& [batch, taken] : ready_) {
    if (batch->under_way()) return false;
    count += batch->size() - taken;
    if (count >= samples) return true;
  }
  return ended_;
}

Feed::Outcome Feed::take(std::size_t samples, Clock::time_point until, std::shared_ptr<SampleBatch>& batch) {
  std::unique_lock lock(signal_->mutex);
  if (failure_) throw Failed(*failure_);
  if (wanted_ != samples) {
    wanted_ = samples;
    signal_->changed.notify_all();
  }
  if (!stop_ && !has(samples)) {
    ++reader_->waits;
    if (taken_ > begun_at_) {  // the first batch is given at once
      enough_ = kBatchesAtOnce * samples;
      signal_->changed.wait_until(lock, std::min(until, Clock::now() + kLongestPatience), [&] {
        const bool enough = ready_samples_ >= enough_ || ready_bytes_ >= kBytesAtOnce || !has_room();
        return stop_ || (has(samples) && (ended_ || enough));
      });
    }
    enough_ = 0;
    if (!signal_->changed.wait_until(lock, until, [&] { return stop_ || has(samples); }))
      return Outcome::late;
  }
  if (stop_) throw Failed({});
  if (ready_.empty()) {
    if (final_failure_) fail(*final_failure_);
    return Outcome::end;
  }
  batch = cut(samples);
  if (sleeps_ && has_room()) signal_->changed.notify_all();
  return Outcome::batch;
}

void Feed::fail(const Failure& failure) {
  failure_ = failure;
  throw Failed(failure);
}

// The next samples from what is ready: a whole batch as it is, where that is what is wanted, else a copy.
std::shared_ptr<SampleBatch> Feed::cut(std::size_t samples) {
  std::vector<std::uint64_t> skipped;
  const auto runs = find_good(samples, skipped);
  const bool whole = runs.size() == 1 && runs[0].begin == 0 && runs[0].end == runs[0].batch->size();
  auto result = whole ? runs[0].batch : join(runs);
  remove(samples);
  skipped_.insert(skipped_.end(), skipped.begin(), skipped.end());
  reader_->delivered += result->size();
  return result;
}

// Which of the next samples can be handed out. Throws Failed for a damaged one, unless these are skipped, and for
// one whose drive cannot be reached, which says nothing of the sample.
std::vector<Feed::Run> Feed::find_good(std::size_t samples, std::vector<std::uint64_t>& skipped) {
  std::vector<Run> runs;
  for (const auto& ready : ready_) {
    if (samples == 0) break;
    const auto& batch = ready.batch;
    auto begin = ready.taken;
    const auto end = begin + std::min(samples, batch->size() - begin);
    samples -= end - begin;
    for (const auto& bad : batch->bad()) {
      if (bad.position < begin || bad.position >= end) continue;
      if (!options_.skip_damaged || is_lost(bad.failure)) fail(bad.failure);
      if (begin < bad.position) runs.push_back({batch, begin, bad.position});
      skipped.push_back(static_cast<std::uint64_t>(batch->indices()[bad.position]));
      begin = bad.position + 1;
    }
    if (begin < end) runs.push_back({batch, begin, end});
  }
  return runs;
}

std::shared_ptr<SampleBatch> Feed::join(const std::vector<Run>& runs) const {
  std::size_t samples = 0;
  std::int64_t bytes = 0;
  for (const auto& [batch, begin, end] : runs) {
    samples += end - begin;
    bytes += batch->offsets()[end] - batch->offsets()[begin];
  }
  auto result = reader_->make_batch(samples, static_cast<std::uint64_t>(bytes), signal_);
  std::size_t at = 0;
  for (const auto& [batch, begin, end] : runs) {
    const auto* offsets = batch->offsets();
    std::memcpy(result->data() + result->offsets()[at], batch->data() + offsets[begin],
                static_cast<std::size_t>(offsets[end] - offsets[begin]));
    for (auto i = begin; i < end; ++i, ++at)
      result->set(at, static_cast<std::uint64_t>(batch->indices()[i]),
                  static_cast<std::uint64_t>(offsets[i + 1] - offsets[i]));
  }
  return result;
}

void Feed::remove(std::size_t samples) {
  while (!ready_.empty() && samples > 0) {
    auto& [batch, taken] = ready_.front();
    const auto step = std::min(samples, batch->size() - taken);
    taken += step;
    samples -= step;
    taken_ += step;
    ready_samples_ -= step;
    if (taken < batch->size()) break;
    ready_bytes_ -= batch->size_bytes();
    ready_.pop_front();
  }
}

Failure Feed::late() {
  const std::lock_guard lock(signal_->mutex);
  for (const auto& [batch, taken] : ready_)
    if (batch->under_way()) return {Fault::timeout, batch->waits_for(), -1, 0};
  return {Fault::timeout, assembler_.waits_for(), -1, 0};
}

std::uint64_t Feed::taken() {
  const std::lock_guard lock(signal_->mutex);
  return taken_;
}

std::vector<std::uint64_t> Feed::skipped() {
  const std::lock_guard lock(signal_->mutex);
  return std::exchange(skipped_, {});
}

}  // namespace penstock::samples
