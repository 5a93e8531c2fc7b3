// Reads of what this machine does not have, or not yet: who can bring it takes them from here.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "catalog.hpp"
#include "reads.hpp"

namespace penstock::samples {

// What is kept of a data file is kept whole: a chunk's body, or the long edge that begins in the chunk. Which of them
// are here is a byte for each chunk.
inline constexpr std::uint8_t kBodyHeld = 1, kEdgeHeld = 2;

struct Piece {
  std::uint64_t chunk = 0;  // of its data file
  std::uint8_t bit = kBodyHeld;
  Extent extent;  // file bytes
  Extent wanted;  // of them
};

struct Fetch {
  std::uint64_t ticket;
  Piece piece;
};

class Fetches : public std::enable_shared_from_this<Fetches> {
 public:
  explicit Fetches(const Catalog& catalog) : catalog_(catalog) {}

  // Takes out those of files that are fetched, but for what is here: its read is checked when it has ended.
  std::vector<Read> sort_out(std::vector<Read> reads);
  // What begins there is wanted before all else that waits.
  void hasten(std::span<const Extent> extents);
  // At most so many, waiting for one until then: empty where none came. False once closed. Those whose pieces have
  // come meanwhile are reads of what is `here`.
  bool take(std::size_t most, Clock::time_point until, std::vector<Fetch>& fetches, std::vector<Read>& here);
  // The bytes of the file from `begin` on, which hold what was wanted. What is not under way any more is ignored.
  // How many were also written to `direct_file`, past the page cache: those of a chunk, where it is a descriptor.
  std::uint64_t give(std::uint64_t ticket, std::uint64_t begin, std::span<const std::byte> bytes,
                     int direct_file = -1);
  void fail(std::uint64_t ticket, int error);
  // Ends all of them.
  void close();

 private:
  struct Waiting {
    Read read;
    Piece piece;
    bool damaged_here = false;
  };
  class Checked;
  Piece piece_of(const Read& read) const;
  bool is_here(const Waiting& waiting) const;
  Read checked(Waiting waiting);
  bool right(const Read& read, const Piece& piece) const;
  void add(Waiting waiting);
  bool remove(std::uint64_t ticket, Waiting& removed);

  const Catalog& catalog_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Waiting> waiting_;
  std::unordered_map<std::uint64_t, Waiting> taken_;
  std::uint64_t tickets_ = 0;
  bool closed_ = false;
};

}  // namespace penstock::samples
