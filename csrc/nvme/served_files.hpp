// The bytes of a namespace that is served: files of a store, each at its place, and zeros between them.
#pragma once

#include <sys/stat.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace penstock::nvme::served {

inline constexpr std::uint32_t kBlockBytes = 512;

// `size_bytes` of the namespace from `offset` on are those of a file from its beginning. The descriptor is the
// caller's, and stays open.
struct Extent {
  std::uint64_t offset, size_bytes;
  int descriptor;
};

// Any thread may read.
class Files {
 public:
  // `head`: the bytes at 0. `extents` lie behind it, in order, and do not overlap. Throws std::invalid_argument,
  // and std::system_error where a descriptor cannot be looked at.
  Files(std::vector<std::byte> head, std::vector<Extent> extents, std::uint64_t size_bytes);

  std::uint64_t size_bytes() const { return size_bytes_; }
  // False where a file cannot be read, or is no longer what it was.
  bool read(std::uint64_t offset, std::span<std::byte> into) const;
  // The first extent whose file has changed since the beginning, or whose read has failed; -1: none.
  int changed() const;

 private:
  struct Version {
    std::int64_t size_bytes, seconds, nanoseconds;
    bool operator==(const Version&) const = default;
  };
  static bool version_of(int descriptor, Version& version);
  bool read_extent(std::size_t number, std::uint64_t begin, std::span<std::byte> into) const;

  const std::vector<std::byte> head_;
  const std::vector<Extent> extents_;
  const std::uint64_t size_bytes_;
  std::vector<Version> versions_;
  mutable std::atomic<int> failed_ = -1;
};

}  // namespace penstock::nvme::served
