// Memory in parts of a frame, for the ends of blocks that are not whole chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "arena/bookkeeping.hpp"
#include "arena/pages.hpp"
#include "arena/sparse_table.hpp"

namespace penstock {

inline constexpr std::size_t kGrainBytes = std::size_t{32} << 10;  // the smallest part

// Frames cut into grains. Each cut frame has a home, a chunk of addresses that no block uses, and lends
// grains to the tail of a block: mremap moves their pages there and back, so that pages of one frame stay
// together, join again into a frame when all are back, and are one mapping of the kernel's at home. There
// they can be neither read nor written: no limit on the process's data counts what is lent twice.
//
// A tail starts at its address and is written without gaps. Tails are known by that address. Not thread
// safe.
class Tails {
 public:
  // Reserves homes for at most `homes` frames; for none if the system refuses.
  explicit Tails(std::size_t homes);
  ~Tails();
  Tails(const Tails&) = delete;
  Tails& operator=(const Tails&) = delete;

  std::size_t held_bytes() const { return (lent_ + free_ + loose_) * kGrainBytes; }
  std::size_t free_bytes() const { return free_ * kGrainBytes; }
  // Frames of which no grain is lent.
  std::size_t whole_frames() const { return whole_; }

  // Where a frame can be moved to; null if there is no room. add_frame says that it is there, whatever its
  // protection. False if the system refuses to protect it.
  char* vacant_home();
  bool add_frame();
  // The frame of a home goes to `to`, a chunk without memory. False if there is none.
  bool take_frame(char* to);

  // Writable memory for a tail from one home. False if no home has as much together.
  bool lend(char* tail, std::size_t size_bytes);
  // From as many homes as it takes, and what they lack from the system. False if the system refuses.
  bool gather(char* tail, std::size_t size_bytes);
  // The memory of a tail goes home, and no access to its addresses is allowed. False if some stayed behind.
  bool give_back(char* tail);
  // The memory of a tail goes to the addresses of another. False if the system refuses: then neither has
  // any.
  bool move(char* tail, char* to);
  // The memory of a tail goes back to the system.
  void drop(char* tail);
  // Whoever calls gives it back. Its size.
  std::size_t lose(char* tail);
  bool has(char* tail) const { return loans_.contains(tail); }

  // Gives free grains back to the system, until `wanted_bytes` are; with `keep_frames`, none of whole
  // frames. Gives the bytes given back.
  std::size_t purge(std::size_t wanted_bytes, bool keep_frames);

 private:
  using Grains = std::uint64_t;  // of one frame, a bit each
  struct Home {
    Grains free, lent;
  };
  struct Loan {
    std::uint32_t home;  // or kLoose: memory that has none
    std::uint8_t first, count;
  };
  static constexpr std::uint32_t kLoose = ~std::uint32_t{0};

  char* address_of(std::uint32_t home) const { return base_ + home * kChunkBytes; }
  void set(std::uint32_t home, Home value);
  bool borrow(std::uint32_t home, unsigned first, unsigned count, char* to);
  bool go_home(Loan loan, char* from);

  char* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  char* base_ = nullptr;
  std::size_t homes_ = 0;
  SparseTable<Home> table_;
  std::uint32_t used_ = 0;              // homes from here on were never used
  std::vector<std::uint32_t> vacant_;   // homes before that are not in use
  using FreeHome = std::pair<int, std::uint32_t>;  // free grains, home
  std::set<FreeHome, std::less<>, Bookkeeping<FreeHome>> by_free_;  // of those that have any
  using Loans = std::vector<Loan, Bookkeeping<Loan>>;
  std::map<char*, Loans, std::less<>, Bookkeeping<std::pair<char* const, Loans>>> loans_;  // by tail
  std::size_t lent_ = 0, free_ = 0, loose_ = 0;  // grains
  std::size_t whole_ = 0;
};

}  // namespace penstock
