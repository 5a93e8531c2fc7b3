// Where the samples of mounted stores lie. The files that say so are mapped, and not trusted: whatever they
// hold, an extent that is given out lies in its data file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <vector>

#include "layout.hpp"

namespace penstock::samples {

struct DataFile {
  std::uint64_t samples, chunks, size_bytes;
  int buffered_file, direct_file;  // -1: there is none
  std::uint32_t alignment_bytes;   // of the direct one: a power of two
};

// One store. Its arrays are the caller's, and outlive the reader.
struct Member {
  std::span<const Entry> directory;
  std::span<const std::uint32_t> sums;
  std::span<const ChunkRecord> chunks;
  std::span<const Large> large;  // by index
  std::uint64_t chunk_bytes;
  std::vector<DataFile> nodes;
};

struct Extent {
  std::uint32_t member = 0, node = 0;
  std::uint64_t offset = 0, size_bytes = 0;
};

// What one read takes of a chunk: its samples, but for a long edge.
struct Body {
  Extent extent;
  std::uint64_t first, count;  // the chunk's samples, numbered over all members
  std::uint32_t crc32c;
};

enum class Fault { read, checksum, timeout, directory, closed };

struct Failure {
  Fault fault = Fault::closed;
  Extent extent;
  std::int64_t sample = -1;  // several
  int error = 0;             // of a read: the errno
};

class Failed : public std::exception {
 public:
  explicit Failed(const Failure& failure) : failure(failure) {}
  const char* what() const noexcept override { return "samples cannot be read"; }
  const Failure failure;
};

class Catalog {
 public:
  // Throws std::invalid_argument where the members contradict themselves.
  explicit Catalog(std::vector<Member> members);

  std::uint64_t samples() const { return samples_; }
  std::uint64_t chunks() const { return chunks_; }
  std::uint64_t size_bytes() const { return size_bytes_; }  // of all samples
  std::uint64_t largest_chunk_bytes() const { return largest_chunk_bytes_; }
  const DataFile& node(const Extent& extent) const { return members_[extent.member].nodes[extent.node]; }

  // False: the directory contradicts itself. The extent is then what can be said. sample < samples().
  bool find(std::uint64_t sample, Extent& extent) const;
  void prefetch(std::uint64_t sample) const {
    const auto member = member_of(sample);
    __builtin_prefetch(members_[member].directory.data() + (sample - first_samples_[member]));
  }
  // The same for the body of a chunk. chunk < chunks().
  bool body(std::uint64_t chunk, Body& body) const;
  // Whether the samples of a body lie one after the other in it, as they must, a long edge aside.
  bool contiguous(const Body& body) const;
  // The chunk in which a sample begins that has this extent.
  std::uint64_t chunk_of(const Extent& extent) const;
  std::uint32_t sum(std::uint64_t sample) const {
    const auto member = member_of(sample);
    return members_[member].sums[sample - first_samples_[member]];
  }

 private:
  std::size_t member_of(std::uint64_t sample) const {
    std::size_t member = 0;
    if (members_.size() > 1) member = search(first_samples_, sample);
    return member;
  }
  static std::size_t search(const std::vector<std::uint64_t>& firsts, std::uint64_t number);

  std::vector<Member> members_;
  std::vector<std::uint64_t> first_samples_, first_chunks_;       // of each member
  std::vector<std::vector<std::uint64_t>> first_chunks_of_nodes_;  // of each member's nodes, in the member
  std::uint64_t samples_ = 0, chunks_ = 0, size_bytes_ = 0, largest_chunk_bytes_ = kBlockBytes;
};

}  // namespace penstock::samples
