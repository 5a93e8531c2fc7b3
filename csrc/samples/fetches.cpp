#include "fetches.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <tuple>
#include <utility>

#include "checksum.hpp"

namespace penstock::samples {

namespace {

std::tuple<std::uint32_t, std::uint32_t, std::uint64_t> place_of(const Extent& extent) {
  return {extent.partition, extent.data_file, extent.offset};
}

// Others write to it meanwhile.
std::uint8_t load(const std::uint8_t& held) { return __atomic_load_n(&held, __ATOMIC_RELAXED); }

}  // namespace

// A read of what was kept here. Where that is not what it should be, it is fetched like what is not here.
class Fetches::Checked final : public Target {
 public:
  Checked(std::shared_ptr<Fetches> fetches, Waiting waiting)
      : fetches_(std::move(fetches)), waiting_(std::move(waiting)) {}

  void arrived(std::uint64_t, int error) override {
    const auto& read = waiting_.read;
    const auto& piece = waiting_.piece;
    if (error == ECANCELED || (error == 0 && fetches_->right(read, piece))) {
      read.target->arrived(read.number, error);
      return;
    }
    const auto& file = fetches_->catalog_.data_file(read.extent);
    // Not through the mapping: a disk that fails would end the process.
    const auto left = static_cast<std::uint8_t>(load(file.held[piece.chunk]) & ~piece.bit);
    [[maybe_unused]] const auto done = pwrite(file.held_file, &left, 1, static_cast<off_t>(piece.chunk));
    waiting_.damaged_here = true;
    fetches_->add(waiting_);
  }

 private:
  const std::shared_ptr<Fetches> fetches_;
  Waiting waiting_;
};

// Of a read of a chunk, or of a sample. A sample that comes with its chunk's body is a part of that.
Piece Fetches::piece_of(const Read& read) const {
  Piece piece;
  piece.chunk = read.extent.offset / catalog_.chunk_bytes(read.extent);
  Body body;
  if (catalog_.body(catalog_.chunk_of(read.extent), body)) piece.extent = body.extent;
  piece.wanted = piece.extent;
  if (read.sample != kWholeChunk) {
    piece.wanted = read.extent;
    if (!piece.extent.contains(read.extent)) {
      piece.extent = read.extent;
      piece.bit = kEdgeHeld;
    }
  }
  return piece;
}

bool Fetches::right(const Read& read, const Piece& piece) const {
  const auto* bytes = read.address + (piece.wanted.offset - read.extent.offset);
  const auto sum = crc32c(0, bytes, piece.wanted.size_bytes);
  if (read.sample != kWholeChunk) return sum == catalog_.sum(read.sample);
  Body body;
  return catalog_.body(catalog_.chunk_of(read.extent), body) && sum == body.crc32c;
}

bool Fetches::is_here(const Waiting& waiting) const {
  const auto& held = catalog_.data_file(waiting.read.extent).held;
  const auto& [chunk, bit, extent, wanted] = waiting.piece;
  return !waiting.damaged_here && chunk < held.size() && (load(held[chunk]) & bit) != 0;
}

Read Fetches::checked(Waiting waiting) {
  auto read = waiting.read;
  read.target = std::make_shared<Checked>(shared_from_this(), std::move(waiting));
  return read;
}

std::vector<Read> Fetches::sort_out(std::vector<Read> reads) {
  std::vector<Read> here;
  for (auto& read : reads) {
    const auto& file = catalog_.data_file(read.extent);
    if (!file.fetched) {
      here.push_back(std::move(read));
      continue;
    }
    Waiting waiting{std::move(read), {}};
    waiting.piece = piece_of(waiting.read);
    if (is_here(waiting)) {
      here.push_back(checked(std::move(waiting)));
    } else {
      add(std::move(waiting));
    }
  }
  return here;
}

void Fetches::add(Waiting waiting) {
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      waiting_.push_back(std::move(waiting));
      changed_.notify_one();
      return;
    }
  }
  waiting.read.target->arrived(waiting.read.number, ECANCELED);
}

void Fetches::hasten(std::span<const Extent> extents) {
  std::vector<decltype(place_of({}))> wanted;
  for (const auto& extent : extents) wanted.push_back(place_of(extent));
  std::ranges::sort(wanted);
  const std::lock_guard lock(mutex_);
  std::ranges::stable_partition(waiting_, [&](const Waiting& waiting) {
    return std::ranges::binary_search(wanted, place_of(waiting.piece.extent));
  });
}

bool Fetches::take(std::size_t most, Clock::time_point until, std::vector<Fetch>& fetches, std::vector<Read>& here) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, until, [this] { return closed_ || !waiting_.empty(); });
  for (; !waiting_.empty() && fetches.size() < most; waiting_.pop_front()) {
    if (is_here(waiting_.front())) {
      here.push_back(checked(std::move(waiting_.front())));
      continue;
    }
    fetches.push_back({++tickets_, waiting_.front().piece});
    taken_.emplace(tickets_, std::move(waiting_.front()));
  }
  return !closed_;
}

bool Fetches::remove(std::uint64_t ticket, Waiting& removed) {
  const std::lock_guard lock(mutex_);
  const auto found = taken_.find(ticket);
  if (found == taken_.end()) return false;
  removed = std::move(found->second);
  taken_.erase(found);
  return true;
}

std::uint64_t Fetches::give(std::uint64_t ticket, std::uint64_t begin, std::span<const std::byte> bytes,
                            int direct_file) {
  Waiting waiting;
  if (!remove(ticket, waiting)) return 0;
  const auto& read = waiting.read;
  const auto& wanted = waiting.piece.wanted;
  const auto end = begin + bytes.size();
  if (wanted.offset < begin || wanted.offset + wanted.size_bytes > end) {
    read.target->arrived(read.number, EIO);
    return 0;
  }
  // All that there is room for: of a chunk whole blocks, which is how they can be written past the page cache.
  const auto from = std::max(begin, read.extent.offset);
  const auto until = std::min(end, read.extent.offset + read.extent.size_bytes);
  auto* const to = read.address + (from - read.extent.offset);
  std::memcpy(to, bytes.data() + (from - begin), until - from);
  std::uint64_t written = 0;
  if (direct_file >= 0 && from == begin && until == end && read.sample == kWholeChunk)
    while (written < bytes.size()) {
      const auto moved = pwrite(direct_file, to + written, bytes.size() - written, static_cast<off_t>(begin + written));
      if (moved < 0 && errno == EINTR) continue;
      if (moved <= 0) break;  // the caller tries the rest, and learns why
      written += static_cast<std::uint64_t>(moved);
    }
  read.target->arrived(read.number, 0);
  return written;
}

void Fetches::fail(std::uint64_t ticket, int error) {
  Waiting waiting;
  if (remove(ticket, waiting)) waiting.read.target->arrived(waiting.read.number, error);
}

void Fetches::close() {
  std::vector<Waiting> left;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (auto& waiting : waiting_) left.push_back(std::move(waiting));
    for (auto& [ticket, waiting] : taken_) left.push_back(std::move(waiting));
    waiting_.clear();
    taken_.clear();
    changed_.notify_all();
  }
  for (const auto& each : left) each.read.target->arrived(each.read.number, ECANCELED);
}

}  // namespace penstock::samples
