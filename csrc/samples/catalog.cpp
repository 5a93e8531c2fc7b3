#include "catalog.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <utility>

namespace penstock::samples {

namespace {

void check(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

void check_member(const Member& member) {
  const auto grid = member.chunk_bytes;
  check(grid >= kBlockBytes && grid <= kLargestChunkBytes && grid % kBlockBytes == 0,
        "chunk_bytes must be a multiple of 4096, up to 1 GiB");
  check(member.sums.size() == member.directory.size(), "there must be a sum for each sample");
  std::uint64_t samples = 0, chunks = 0;
  for (const auto& node : member.nodes) {
    check(node.size_bytes <= kNodeBytes, "a node holds at most 2^40 bytes");
    check(node.chunks == std::max<std::uint64_t>(1, (node.size_bytes + grid - 1) / grid),
          "the chunks of a node must be those of its size");
    check(node.samples <= member.directory.size() - samples, "nodes have more samples than the directory");
    check(node.buffered_file >= 0, "each node needs an open file");
    check(node.direct_file < 0 || std::has_single_bit(node.alignment_bytes),
          "an alignment must be a power of two");
    samples += node.samples;
    chunks += node.chunks;
  }
  check(samples == member.directory.size(), "nodes have fewer samples than the directory");
  check(chunks == member.chunks.size(), "there must be a record for each chunk");
}

}  // namespace

Catalog::Catalog(std::vector<Member> members) : members_(std::move(members)) {
  for (const auto& member : members_) {
    check_member(member);
    first_samples_.push_back(samples_);
    first_chunks_.push_back(chunks_);
    samples_ += member.directory.size();
    chunks_ += member.chunks.size();
    largest_chunk_bytes_ = std::max(largest_chunk_bytes_, member.chunk_bytes);
    auto& firsts = first_chunks_of_nodes_.emplace_back();
    std::uint64_t first = 0;
    for (const auto& node : member.nodes) {
      firsts.push_back(first);
      first += node.chunks;
      size_bytes_ += node.size_bytes;
    }
  }
}

// The last that begins at or before the number. Empty ones begin where the next does.
std::size_t Catalog::search(const std::vector<std::uint64_t>& firsts, std::uint64_t number) {
  return static_cast<std::size_t>(std::ranges::upper_bound(firsts, number) - firsts.begin()) - 1;
}

bool Catalog::find(std::uint64_t sample, Extent& extent) const {
  const auto number = member_of(sample);
  const auto& member = members_[number];
  const auto index = sample - first_samples_[number];
  const auto entry = member.directory[index];  // read once: the file may change meanwhile
  extent = {static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(entry.node()), entry.offset(),
            entry.length()};
  if (extent.size_bytes == kLargeLength) {
    const auto found = std::ranges::lower_bound(member.large, index, {}, &Large::index);
    if (found == member.large.end() || found->index != index) return false;
    extent.size_bytes = found->size_bytes;
  }
  if (extent.node >= member.nodes.size()) return false;
  const auto limit = member.nodes[extent.node].size_bytes;
  return extent.offset <= limit && extent.size_bytes <= limit - extent.offset;
}

bool Catalog::body(std::uint64_t chunk, Body& body) const {
  const auto number = search(first_chunks_, chunk);
  const auto& member = members_[number];
  const auto index = chunk - first_chunks_[number];
  const auto& firsts = first_chunks_of_nodes_[number];
  const auto node = search(firsts, index);
  const auto record = member.chunks[index];
  const auto samples = member.directory.size();
  const auto end = index + 1 < member.chunks.size() ? member.chunks[index + 1].first : samples;
  const auto begin = (index - firsts[node]) * member.chunk_bytes;
  body = {{static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(node), begin, 0},
          first_samples_[number] + record.first, 0, record.crc32c};
  if (record.first > end || end > samples) return false;
  body.count = end - record.first;
  if (body.count == 0) return true;
  Extent first, last;
  if (!find(body.first, first) || !find(body.first + body.count - 1, last)) return false;
  if (first.node != node || last.node != node || first.offset < begin || last.offset < first.offset)
    return false;
  auto body_end = last.offset + last.size_bytes;
  const auto chunk_end = begin + member.chunk_bytes, edge = long_edge_bytes(member.chunk_bytes);
  if (body_end > chunk_end && last.size_bytes >= edge) body_end = last.offset;
  if (last.offset > chunk_end || body_end > chunk_end + edge) return false;
  body.extent.offset = first.offset;
  body.extent.size_bytes = body_end - first.offset;
  return true;
}

bool Catalog::contiguous(const Body& body) const {
  const auto& member = members_[body.extent.member];
  const auto* entries = member.directory.data() + (body.first - first_samples_[body.extent.member]);
  const auto place = std::uint64_t{body.extent.node};
  auto end = body.extent.offset;
  for (std::uint64_t i = 0; i < body.count; ++i) {
    const auto entry = entries[i];
    if (entry.node() != place || entry.offset() != end) return false;
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
  const auto& member = members_[extent.member];
  const auto chunk = std::min(extent.offset / member.chunk_bytes, member.nodes[extent.node].chunks - 1);
  return first_chunks_[extent.member] + first_chunks_of_nodes_[extent.member][extent.node] + chunk;
}

}  // namespace penstock::samples
