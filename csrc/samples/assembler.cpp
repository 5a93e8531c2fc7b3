#include "assembler.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "fetches.hpp"

namespace penstock::samples {

namespace {

constexpr std::size_t kFoundAhead = 16;       // directory entries that are fetched before they are read
constexpr std::size_t kFetchedAhead = 6;      // samples that are fetched before they are copied
constexpr std::uint64_t kFetchedBytes = 512;  // of each; further on the processor sees the pattern itself
constexpr std::size_t kLoadedAtOnce = 8;  // chunks: each time wakes a thread
// Samples of at least so many bytes are read as fast by themselves, straight into the batch: a copy less.
constexpr std::uint64_t kAloneBytes = 128U << 10;
constexpr std::size_t kOverAtOnce = 4;            // chunks that are let go together, where threads copy
constexpr std::uint64_t kPartBytes = 64U << 10;  // of a copy: a smaller one is not worth waking a thread

// Whether a sample comes with a body. The chunk's checksum speaks for its own samples only: the entry of
// another one that leads into it is damaged.
bool holds(const Body& body, std::uint64_t sample, const Extent& extent) {
  return sample - body.first < body.count && body.extent.contains(extent);
}

}  // namespace

Assembler::Assembler(Reader& reader, std::shared_ptr<Order> order, std::size_t ahead,
                     const std::atomic<bool>& stop, std::shared_ptr<Signal> signal)
    : reader_(reader), order_(std::move(order)), stop_(stop), signal_(std::move(signal)),
      left_(order_->size() - order_->taken()),
      copiers_(reader.copy_threads()) {
  const auto chunks = reader.catalog().chunks();
  if (order_->slots() > 0) {
    from_ = From::items;
    used_up_ = order_->used_up();
    sources_.resize((used_up_.size() + kTogether - 1) / kTogether);
    room_ = std::min<std::size_t>(order_->slots() + ahead, used_up_.size());
    at_once_ = std::clamp<std::size_t>(ahead / 2, 1, kLoadedAtOnce);
  } else if (reader.cache().holds_all()) {
    from_ = From::chunks;
    sources_.resize((chunks + kTogether - 1) / kTogether);
    room_ = chunks;
  } else {
    from_ = From::samples;
    room_ = 0;
  }
  reader.cache().reserve(room_);
}

Assembler::~Assembler() { close(); }

void Assembler::close() {
  for (auto& sources : sources_)
    if (sources != nullptr)
      for (auto& source : sources->each) let_go(source);
  reader_.cache().unreserve(std::exchange(room_, 0));
}

std::shared_ptr<SampleBatch> Assembler::next(std::size_t samples) {
  if (!plan(samples)) return nullptr;
  auto batch = reader_.make_batch(planned_.size(), planned_bytes_, signal_);
  for (std::size_t i = 0; i < planned_.size(); ++i)
    batch->set(i, picks_[i].sample, planned_[i].extent.size_bytes);
  for (const auto& [position, failure] : bad_) batch->add_bad(position, failure);
  if (from_ == From::items) load_ahead();
  if (reader_.reads().fetches() != nullptr) hasten();
  if (alone_ > 0) read_alone(*batch);
  if (!copy(*batch)) return nullptr;
  batch->assembled();
  return batch;
}

// Draws so many samples, and finds out where they lie. False at the end.
bool Assembler::plan(std::size_t samples) {
  draw(samples);
  planned_.clear();
  bad_.clear();
  planned_bytes_ = alone_ = 0;
  const auto& catalog = reader_.catalog();
  for (std::size_t i = 0; i < picks_.size(); ++i) {
    const auto& pick = picks_[i];
    if (i + kFoundAhead < picks_.size()) catalog.prefetch(picks_[i + kFoundAhead].sample);
    auto& planned = planned_.emplace_back(Extent{}, nullptr, pick.last);  // not copied: the copy would wait
    // Samples of an epoch are different ones: together they are no larger than the store.
    const bool found = catalog.find(pick.sample, planned.extent) &&
                       planned.extent.size_bytes <= catalog.size_bytes() - planned_bytes_;
    if (!found || planned.extent.size_bytes == 0) check_empty(i, found, planned.extent);
    if (from_ == From::items) {
      planned.source = &source_of(pick.item);
      body_of(*planned.source, order_->items()[pick.item].chunk);
    } else if (from_ == From::chunks && found) {
      const auto chunk = catalog.chunk_of(planned.extent);
      planned.source = &source_of(chunk);
      if (body_of(*planned.source, chunk).extent.size_bytes > 0) load(*planned.source, chunk);
    }
    planned.alone = planned.extent.size_bytes > 0 &&
                    (planned.source == nullptr || !holds(planned.source->body, pick.sample, planned.extent));
    alone_ += planned.alone;
    planned_bytes_ += planned.extent.size_bytes;
  }
  return !planned_.empty();
}

// A sample of no bytes: is it one, and may it be?
void Assembler::check_empty(std::size_t position, bool found, Extent& extent) {
  const auto sample = picks_[position].sample;
  extent.size_bytes = 0;
  if (found && (!reader_.verify() || reader_.catalog().sum(sample) == 0)) return;
  bad_.push_back({position,
                  {found ? Fault::checksum : Fault::directory, extent, static_cast<std::int64_t>(sample), 0}});
}

void Assembler::draw(std::size_t samples) {
  picks_.resize(std::min<std::uint64_t>(samples, left_));
  picks_.resize(order_->take(picks_));
  left_ -= picks_.size();
}

Assembler::Source& Assembler::source_of(std::uint64_t number) {
  auto& sources = sources_[number / kTogether];
  if (sources == nullptr) {
    const auto begin = number / kTogether * kTogether;
    sources = std::make_unique<Sources>();
    if (from_ == From::items) {
      const auto end = std::min<std::size_t>(begin + kTogether, used_up_.size());
      for (auto i = begin; i < end; ++i) sources->left += !used_up_[i];
    }
  }
  return sources->each[number % kTogether];
}

// An item that has given its last sample.
void Assembler::use_up(std::uint64_t number) {
  let_go(source_of(number));
  --loaded_;
  auto& sources = sources_[number / kTogether];
  if (--sources->left == 0) sources.reset();
}

const Body& Assembler::body_of(Source& source, std::uint64_t chunk) {
  if (!source.known) {
    source.known = true;
    auto& [extent, first, count, crc] = source.body;
    source.usable = reader_.catalog().body(chunk, source.body) && extent.size_bytes > 0;
    if (from_ == From::items && extent.size_bytes >= kAloneBytes * count) source.usable = false;
    if (!source.usable) extent.size_bytes = 0;  // each sample by itself
  }
  return source.body;
}

void Assembler::load(Source& source, std::uint64_t chunk) {
  if (!source.usable || source.chunk != nullptr) return;
  source.chunk = reader_.cache().use(chunk, source.body, stop_);
  if (source.chunk == nullptr) return;
  const auto& held = source.chunk->body().extent;
  if (held.contains(source.body.extent)) {
    source.memory = source.chunk->at(source.body.extent.offset);
  } else {  // the directory has changed since the chunk was read
    let_go(source);
    source.usable = false;
    source.body.extent.size_bytes = 0;
  }
}

// What the order has under way is always loaded: `at_once_` is less than what is read ahead of it.
void Assembler::load_ahead() {
  const auto items = order_->items();
  if (room_ - loaded_ < at_once_) return;
  for (; next_load_ < items.size() && loaded_ < room_ && !stop_; ++next_load_) {
    if (used_up_[next_load_]) continue;
    ++loaded_;
    auto& source = source_of(next_load_);
    body_of(source, items[next_load_].chunk);
    load(source, items[next_load_].chunk);
  }
}

// Of what is to be fetched, what this batch waits for comes first.
void Assembler::hasten() {
  std::vector<Extent> extents;
  for (const auto& planned : planned_)
    if (const auto* source = planned.source; source != nullptr && source->chunk != nullptr && source->chunk->loading())
      extents.push_back(source->body.extent);
  if (!extents.empty()) reader_.reads().fetches()->hasten(extents);
}

// What no chunk's body has: long edges, and in full order everything.
void Assembler::read_alone(SampleBatch& batch) {
  std::vector<Read> reads;
  for (std::size_t i = 0; i < planned_.size(); ++i)
    if (planned_[i].alone) reader_.read_into(batch, i, planned_[i].extent, reads);
  reader_.reads().submit(Traffic::samples, std::move(reads));
}

// The rest, from chunks; those that are used up make room for others. False where `stop` came first.
bool Assembler::copy(SampleBatch& batch) {
  if (from_ == From::samples) return true;
  const auto most_over = copiers_.size() > 0 ? kOverAtOnce : 1;
  copied_ = 0;
  for (std::size_t i = 0; i < planned_.size(); ++i) {
    auto& planned = planned_[i];
    auto* source = planned.source;
    if (source == nullptr) continue;
    if (planned.extent.size_bytes > 0 && !planned.alone && !source->whole && !await(batch, i)) return false;
    if (!planned.last) continue;
    over_.push_back(picks_[i].item);
    if (over_.size() >= most_over) copy_until(batch, i + 1);
  }
  copy_until(batch, planned_.size());
  return true;
}

// Sees that the chunk of this sample is there. A sample that does not come from it is from then on alone.
bool Assembler::await(SampleBatch& batch, std::size_t position) {
  auto& planned = planned_[position];
  auto& source = *planned.source;
  if (source.chunk == nullptr) copy_until(batch, position);  // what is used up makes room for it
  if (source.chunk == nullptr) load(source, reader_.catalog().chunk_of(source.body.extent));
  if (source.chunk == nullptr) {
    if (stop_) return false;
    planned.alone = true;
    std::vector<Read> reads;
    reads.push_back(batch.read(position, planned.extent));
    reader_.reads().submit(Traffic::samples, std::move(reads));
    return true;
  }
  if (source.chunk->loading()) {
    copy_until(batch, position);  // meanwhile
    ++reader_.waits;
    set_waits_for(source.body.extent);
    reader_.cache().wait(source.chunk, stop_);
    set_waits_for({});
  }
  if (stop_) return false;
  source.whole = !source.chunk->damaged();
  Failure failure;
  if (!source.whole && !source.chunk->good(picks_[position].sample, failure)) {
    planned.alone = true;
    batch.add_bad(position, failure);
  }
  return true;
}

// Copies what comes from chunks, from where the last call ended; then lets go of those that are used up.
void Assembler::copy_until(SampleBatch& batch, std::size_t end) {
  const auto begin = std::exchange(copied_, end);
  const auto bytes = static_cast<std::uint64_t>(batch.offsets()[end] - batch.offsets()[begin]);
  const auto parts = std::min<std::uint64_t>({bytes / kPartBytes, copiers_.size() * 2 + 1, end - begin});
  if (copiers_.size() > 0 && parts > 1) {
    copiers_.run(parts, [&](std::size_t part) {
      copy_range(batch, begin + (end - begin) * part / parts, begin + (end - begin) * (part + 1) / parts);
    });
  } else {
    copy_range(batch, begin, end);
  }
  for (const auto number : over_) use_up(number);
  if (!over_.empty()) load_ahead();
  over_.clear();
}

void Assembler::copy_range(const SampleBatch& batch, std::size_t begin, std::size_t end) const {
  auto* to = batch.data();
  const auto* offsets = batch.offsets();
  for (auto i = begin; i < end; ++i) {
    if (i + kFetchedAhead < end) fetch(planned_[i + kFetchedAhead]);
    const auto& [extent, source, last, alone] = planned_[i];
    if (alone || extent.size_bytes == 0) continue;
    std::memcpy(to + offsets[i], source->memory + (extent.offset - source->body.extent.offset),
                extent.size_bytes);
  }
}

void Assembler::fetch(const Planned& planned) {
  if (planned.alone || planned.extent.size_bytes == 0) return;
  const auto* from = planned.source->memory + (planned.extent.offset - planned.source->body.extent.offset);
  for (std::uint64_t at = 0; at < std::min(planned.extent.size_bytes, kFetchedBytes); at += 64)
    __builtin_prefetch(from + at);
}

void Assembler::let_go(Source& source) {
  if (source.chunk != nullptr) reader_.cache().let_go(source.chunk);
  source.chunk = nullptr;
  source.memory = nullptr;
  source.whole = false;
}

void Assembler::set_waits_for(const Extent& extent) {
  const std::lock_guard lock(mutex_);
  waits_for_ = extent;
}

Extent Assembler::waits_for() {
  const std::lock_guard lock(mutex_);
  return waits_for_;
}

}  // namespace penstock::samples
