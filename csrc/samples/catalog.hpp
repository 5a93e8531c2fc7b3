// Where the samples of mounted stores lie. The files that say so are mapped, and not trusted: whatever they
// hold, an extent that is given out lies in its data file.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <vector>

#include "io/io.hpp"
#include "layout.hpp"

namespace penstock::samples {

struct DataFile {
  std::uint64_t samples, chunks, size_bytes;
  Handle buffered_file, direct_file;  // -1: there is none; a namespace is a direct one
  std::uint32_t alignment_bytes;      // of the direct one: a power of two
  std::uint64_t begin = 0;            // where it begins in what the handles name
  bool fetched = false;               // only what `held` says can be read here
  std::span<const std::uint8_t> held = {};  // of each chunk what is here; empty: nothing ever is. See fetches.hpp
  int held_file = -1;                       // what `held` is a mapping of

  bool remote() const { return is_namespace(direct_file); }
};

// One store. Its arrays are the caller's, and outlive the reader.
struct Partition {
  std::span<const Entry> directory;
  std::span<const std::uint32_t> sums;
  std::span<const ChunkRecord> chunks;
  std::span<const Large> large;  // by index
  std::uint64_t chunk_bytes;
  std::vector<DataFile> data_files;
};

struct Extent {
  std::uint32_t partition = 0, data_file = 0;
  std::uint64_t offset = 0, size_bytes = 0;

  bool contains(const Extent& inner) const {
    return inner.partition == partition && inner.data_file == data_file && inner.offset >= offset &&
           inner.offset + inner.size_bytes <= offset + size_bytes;
  }
};

// What one read takes of a chunk: its samples, but for a long edge.
struct Body {
  Extent extent;
  std::uint64_t first, count;  // the chunk's samples, numbered over all partitions
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
  // Throws std::invalid_argument where the partitions contradict themselves.
  explicit Catalog(std::vector<Partition> partitions);

  std::uint64_t samples() const { return samples_; }
  std::uint64_t chunks() const { return chunks_; }
  std::uint64_t size_bytes() const { return size_bytes_; }  // of all samples
  std::uint64_t largest_chunk_bytes() const { return largest_chunk_bytes_; }
  // Whether some data file is `what`: remote, or fetched.
  template <class What>
  bool anything(What DataFile::*what) const {
    return std::ranges::any_of(partitions_, [what](const auto& partition) {
      return std::ranges::any_of(partition.data_files, what);
    });
  }
  std::uint64_t chunk_bytes(const Extent& extent) const { return partitions_[extent.partition].chunk_bytes; }
  const DataFile& data_file(const Extent& extent) const {
    return partitions_[extent.partition].data_files[extent.data_file];
  }

  // False: the directory contradicts itself. The extent is then what can be said. sample < samples().
  bool find(std::uint64_t sample, Extent& extent) const;
  void prefetch(std::uint64_t sample) const {
    const auto partition = partition_of(sample);
    __builtin_prefetch(partitions_[partition].directory.data() + (sample - first_samples_[partition]));
  }
  // The same for the body of a chunk. chunk < chunks().
  bool body(std::uint64_t chunk, Body& body) const;
  // Whether the samples of a body lie one after the other in it, as they must, a long edge aside.
  bool contiguous(const Body& body) const;
  // The chunk in which a sample begins that has this extent.
  std::uint64_t chunk_of(const Extent& extent) const;
  std::uint32_t sum(std::uint64_t sample) const {
    const auto partition = partition_of(sample);
    return partitions_[partition].sums[sample - first_samples_[partition]];
  }

 private:
  std::size_t partition_of(std::uint64_t sample) const {
    std::size_t partition = 0;
    if (partitions_.size() > 1) partition = search(first_samples_, sample);
    return partition;
  }
  static std::size_t search(const std::vector<std::uint64_t>& firsts, std::uint64_t number);

  std::vector<Partition> partitions_;
  std::vector<std::uint64_t> first_samples_, first_chunks_;        // of each partition
  std::vector<std::vector<std::uint64_t>> first_chunks_of_files_;  // of each of its data files, in the partition
  std::uint64_t samples_ = 0, chunks_ = 0, size_bytes_ = 0, largest_chunk_bytes_ = kBlockBytes;
};

}  // namespace penstock::samples
