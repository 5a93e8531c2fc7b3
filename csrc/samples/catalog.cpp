#include "catalog.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <utility>

namespace penstock::samples {

namespace {

constexpr std::uint64_t kMostBegin = std::uint64_t{1} << 62;

void check(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

void check_partition(const Partition& partition) {
  const auto grid = partition.chunk_bytes;
  check(grid >= kBlockBytes && grid <= kLargestChunkBytes && grid % kBlockBytes == 0,
        "chunk_bytes must be a multiple of 4096, up to 1 GiB");
  check(partition.sums.size() == partition.directory.size(), "there must be a sum for each sample");
  std::uint64_t samples = 0, chunks = 0;
  for (const auto& file : partition.data_files) {
    check(file.size_bytes <= kDataFileBytes, "a data file holds at most 2^40 bytes");
    check(file.chunks == std::max<std::uint64_t>(1, (file.size_bytes + grid - 1) / grid),
          "the chunks of a data file must be those of its size");
    check(file.samples <= partition.directory.size() - samples, "data files have more samples than the directory");
    check(file.buffered_file >= 0 || file.remote() || (file.fetched && file.held.empty()),
          "each data file needs an open file");
    check(file.held.empty() || file.held.size() == file.chunks, "what is held must be said of each chunk");
    check(file.direct_file < 0 || std::has_single_bit(file.alignment_bytes),
          "an alignment must be a power of two");
    check(file.begin <= kMostBegin, "a data file begins too far into its target");
    samples += file.samples;
    chunks += file.chunks;
  }
  check(samples == partition.directory.size(), "data files have fewer samples than the directory");
  check(chunks == partition.chunks.size(), "there must be a record for each chunk");
}

}  // namespace

Catalog::Catalog(std::vector<Partition> partitions) : partitions_(std::move(partitions)) {
  for (const auto& partition : partitions_) {
    check_partition(partition);
    first_samples_.push_back(samples_);
    first_chunks_.push_back(chunks_);
    samples_ += partition.directory.size();
    chunks_ += partition.chunks.size();
    largest_chunk_bytes_ = std::max(largest_chunk_bytes_, partition.chunk_bytes);
    auto& firsts = first_chunks_of_files_.emplace_back();
    std::uint64_t first = 0;
    for (const auto& file : partition.data_files) {
      firsts.push_back(first);
      first += file.chunks;
      size_bytes_ += file.size_bytes;
    }
  }
}

// The last that begins at or before the number. Empty ones begin where the next does.
std::size_t Catalog::search(const std::vector<std::uint64_t>& firsts, std::uint64_t number) {
  return static_cast<std::size_t>(std::ranges::upper_bound(firsts, number) - firsts.begin()) - 1;
}

bool Catalog::find(std::uint64_t sample, Extent& extent) const {
  const auto number = partition_of(sample);
  const auto& partition = partitions_[number];
  const auto index = sample - first_samples_[number];
  const auto entry = partition.directory[index];  // read once: the file may change meanwhile
  extent = {static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(entry.data_file()), entry.offset(),
            entry.length()};
  if (extent.size_bytes == kLargeLength) {
    const auto found = std::ranges::lower_bound(partition.large, index, {}, &Large::index);
    if (found == partition.large.end() || found->index != index) return false;
    extent.size_bytes = found->size_bytes;
  }
  if (extent.data_file >= partition.data_files.size()) return false;
  const auto limit = partition.data_files[extent.data_file].size_bytes;
  return extent.offset <= limit && extent.size_bytes <= limit - extent.offset;
}

bool Catalog::body(std::uint64_t chunk, Body& body) const {
  const auto number = search(first_chunks_, chunk);
  const auto& partition = partitions_[number];
  const auto index = chunk - first_chunks_[number];
  const auto& firsts = first_chunks_of_files_[number];
  const auto file = search(firsts, index);
  const auto record = partition.chunks[index];
  const auto samples = partition.directory.size();
  const auto end = index + 1 < partition.chunks.size() ? partition.chunks[index + 1].first : samples;
  const auto begin = (index - firsts[file]) * partition.chunk_bytes;
  body = {{static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(file), begin, 0},
          first_samples_[number] + record.first, 0, record.crc32c};
  if (record.first > end || end > samples) return false;
  body.count = end - record.first;
  if (body.count == 0) return true;
  Extent first, last;
  if (!find(body.first, first) || !find(body.first + body.count - 1, last)) return false;
  if (first.data_file != file || last.data_file != file || first.offset < begin || last.offset < first.offset)
    return false;
  auto body_end = last.offset + last.size_bytes;
  const auto chunk_end = begin + partition.chunk_bytes, edge = long_edge_bytes(partition.chunk_bytes);
  if (body_end > chunk_end && last.size_bytes >= edge) body_end = last.offset;
  if (last.offset > chunk_end || body_end > chunk_end + edge) return false;
  body.extent.offset = first.offset;
  body.extent.size_bytes = body_end - first.offset;
  return true;
}

bool Catalog::contiguous(const Body& body) const {
  const auto& partition = partitions_[body.extent.partition];
  const auto* entries = partition.directory.data() + (body.first - first_samples_[body.extent.partition]);
  const auto place = std::uint64_t{body.extent.data_file};
  auto end = body.extent.offset;
  for (std::uint64_t i = 0; i < body.count; ++i) {
    const auto entry = entries[i];
    if (entry.data_file() != place || entry.offset() != end) return false;
    if (entry.length() == kLargeLength) {
      Extent extent;
      if (!find(body.first + i, extent)) return false;
      end += extent.size_bytes;
    } else {
      end += entry.length();
    }
  }
  return end >= body.extent.offset + body.extent.size_bytes;
}

std::uint64_t Catalog::chunk_of(const Extent& extent) const {
  const auto& partition = partitions_[extent.partition];
  const auto last = partition.data_files[extent.data_file].chunks - 1;
  const auto chunk = std::min(extent.offset / partition.chunk_bytes, last);
  return first_chunks_[extent.partition] + first_chunks_of_files_[extent.partition][extent.data_file] + chunk;
}

}  // namespace penstock::samples
