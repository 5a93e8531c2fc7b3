#include "cache.hpp"

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "checksum.hpp"

namespace penstock::samples {

namespace {

std::uint64_t block_begin(std::uint64_t offset) { return offset / kBlockBytes * kBlockBytes; }
std::uint64_t block_end(std::uint64_t offset) { return block_begin(offset + kBlockBytes - 1); }

}  // namespace

// -- a chunk -------------------------------------------------------------------------------------

void Chunk::arrived(std::uint64_t, int error) {
  try {
    verify(error);
  } catch (const std::bad_alloc&) {  // no room for a list of what is damaged
    error_ = ENOMEM;
    damaged_ = true;
  }
  const std::lock_guard lock(cache_.mutex_);
  state_.store(State::held, std::memory_order_release);
  if (users_ == 0) cache_.make_idle(this);
  cache_.changed_.notify_all();
}

void Chunk::verify(int error) {
  error_ = error;
  damaged_ = error != 0;
  if (error != 0 || !cache_.verify_) return;
  const auto& catalog = cache_.catalog_;
  if (crc32c(0, at(body_.extent.offset), body_.extent.size_bytes) == body_.crc32c &&
      catalog.contiguous(body_))
    return;
  const auto end = body_.extent.offset + body_.extent.size_bytes;
  for (auto sample = body_.first; sample < body_.first + body_.count; ++sample) {
    Extent extent;
    if (!catalog.find(sample, extent) || extent.offset < body_.extent.offset || extent.offset > end) continue;
    if (extent.size_bytes > end - extent.offset) continue;  // a long edge, or found out when it is picked
    if (crc32c(0, at(extent.offset), extent.size_bytes) != catalog.sum(sample))
      bad_samples_.push_back(sample);
  }
  damaged_ = !bad_samples_.empty();
}

bool Chunk::good(std::uint64_t sample, Failure& failure) const {
  if (error_ != 0) {
    failure = {Fault::read, body_.extent, -1, error_};
    return false;
  }
  if (!std::ranges::binary_search(bad_samples_, sample)) return true;
  Extent extent;
  cache_.catalog_.find(sample, extent);
  failure = {Fault::checksum, extent, static_cast<std::int64_t>(sample), 0};
  return false;
}

// -- all of them ---------------------------------------------------------------------------------

ChunkCache::ChunkCache(const Catalog& catalog, Reads& reads, std::size_t buffers, bool verify)
    : catalog_(catalog),
      reads_(reads),
      buffers_(std::min<std::size_t>(buffers, catalog.chunks())),
      buffer_bytes_(buffer_bytes(catalog.largest_chunk_bytes())),
      verify_(verify) {}

void ChunkCache::grow(std::size_t buffers) {
  const auto area = std::make_shared<Staging>(buffers, buffer_bytes_);
  for (std::size_t i = 0; i < buffers; ++i) {
    all_.push_back(std::make_shared<Chunk>(*this, area, area->start() + i * buffer_bytes_));
    auto* chunk = all_.back().get();
    idle_.push_back(chunk);
    chunk->place_ = std::prev(idle_.end());
  }
}

void ChunkCache::reserve(std::size_t buffers) {
  const std::lock_guard lock(mutex_);
  reserved_ += buffers;
  const auto wanted = std::max(reserved_, buffers_);
  if (wanted > all_.size()) grow(wanted - all_.size());
}

void ChunkCache::unreserve(std::size_t buffers) {
  const std::lock_guard lock(mutex_);
  reserved_ -= buffers;
}

void ChunkCache::add_user(Chunk* chunk) {
  if (chunk->users_++ == 0 && chunk->place_ != idle_.end()) {
    idle_.erase(chunk->place_);
    chunk->place_ = idle_.end();
  }
}

void ChunkCache::make_idle(Chunk* chunk) {
  if (chunk->damaged_) {  // to be read again, should it be wanted again
    by_number_.erase(chunk->number_);
    chunk->state_ = Chunk::State::idle;
  }
  chunk->place_ = idle_.insert(idle_.end(), chunk);
}

// What is reserved may be taken for a moment by single samples that are being copied, and by reads that
// nobody waits for any more.
Chunk* ChunkCache::free_chunk(std::unique_lock<std::mutex>& lock, const std::atomic<bool>& stop) {
  changed_.wait(lock, [&] { return !idle_.empty() || stop; });
  if (idle_.empty()) return nullptr;
  auto* chunk = idle_.back();  // let go last: the likeliest to be in the processor's cache
  add_user(chunk);
  if (chunk->state_ != Chunk::State::idle) by_number_.erase(chunk->number_);
  return chunk;
}

Chunk* ChunkCache::use(std::uint64_t number, const Body& body, const std::atomic<bool>& stop) {
  Chunk* chunk;
  {
    std::unique_lock lock(mutex_);
    const auto found = by_number_.find(number);
    if (found != by_number_.end()) {
      add_user(found->second);
      return found->second;
    }
    chunk = free_chunk(lock, stop);
    if (chunk == nullptr) return nullptr;
    by_number_.emplace(number, chunk);
    chunk->number_ = number;
    chunk->body_ = body;
    chunk->damaged_ = false;
    chunk->error_ = 0;
    chunk->bad_samples_.clear();
    chunk->read_begin_ = block_begin(body.extent.offset);
    chunk->state_ = Chunk::State::loading;
  }
  // Whole blocks: data files are padded, and direct reads want them.
  auto extent = body.extent;
  extent.size_bytes = block_end(extent.offset + extent.size_bytes) - chunk->read_begin_;
  extent.offset = chunk->read_begin_;
  try {
    std::vector<Read> reads;
    reads.push_back({extent, chunk->memory_, chunk->shared_from_this(), 0});
    reads_.submit(Traffic::chunks, std::move(reads));
  } catch (...) {  // no memory, no thread: it will not arrive, and others may wait for it
    chunk->arrived(0, ENOMEM);
    let_go(chunk);
    throw;
  }
  return chunk;
}

Chunk* ChunkCache::use_held(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = by_number_.find(number);
  if (found == by_number_.end()) return nullptr;
  auto* chunk = found->second;
  if (chunk->state_ != Chunk::State::held || chunk->damaged_) return nullptr;
  add_user(chunk);
  return chunk;
}

void ChunkCache::let_go(Chunk* chunk) {
  const std::lock_guard lock(mutex_);
  if (--chunk->users_ > 0 || chunk->loading()) return;
  make_idle(chunk);
  changed_.notify_all();
}

void ChunkCache::wait(const Chunk* chunk, const std::atomic<bool>& stop) {
  if (!chunk->loading()) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !chunk->loading() || stop; });
}

void ChunkCache::notify() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

}  // namespace penstock::samples
