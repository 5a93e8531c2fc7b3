// The file that an arena writes blocks to, and reads of copies wherever they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "arena/block.hpp"
#include "arena/ranges.hpp"

namespace penstock {

// Space in one file, or on a namespace from `begin` on, given out by first fit. The handles are the caller's. Not thread safe.
class SwapFile {
 public:
  // False if space of the present file is in use.
  bool set(Handle direct, Handle buffered, std::size_t capacity_bytes, std::size_t begin = 0);
  bool usable() const { return buffered_ >= 0; }
  std::size_t used_bytes() const { return used_bytes_; }
  Handle direct() const { return direct_; }
  Handle buffered() const { return buffered_; }

  std::optional<std::size_t> take(std::size_t size_bytes);
  void give(std::size_t offset, std::size_t size_bytes);
  // A write there was lost on its way to a remote drive, and may land for so long yet: until then nobody gets the place.
  void quarantine(std::size_t offset, std::size_t size_bytes, double seconds);

 private:
  Handle direct_ = -1, buffered_ = -1;
  Handle last_ = -1;  // buffered_, or what it was
  void release_quarantined();

  std::size_t used_bytes_ = 0;
  Ranges free_;
  struct Quarantined {
    std::size_t size_bytes = 0;
    std::int64_t until_ns = 0;
    bool given = false;  // nobody's but for this
  };
  std::map<std::size_t, Quarantined> quarantined_;  // by offset
};

// All of these block, and give 0 or an errno. `direct` may be -1, and is not used where the system
// refuses it.
// `may_land_s`, if not null, gets how long the place of a write may be written to yet.
int write_fully(Handle direct, Handle buffered, const char* data, std::size_t size_bytes, std::uint64_t offset,
                double* may_land_s = nullptr);
// Into `destination`, the start of a block. The file may be one for direct I/O: what is not aligned is
// read in aligned pieces. `failed`, if not null, gets the segment that could not be read, and `abandoned` whether the
// destination may be written to for ever.
int read_segments(const std::vector<Segment>& segments, Handle direct, Handle buffered, char* destination,
                  const Segment** failed, bool* abandoned = nullptr);

}  // namespace penstock
