// A transfer, and how it is cut into what can be read or written at once. No file, no memory is touched.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <vector>

#include "io/io.hpp"

namespace penstock {

enum class Method { direct, staged, buffered, mapped };

// What waits begins in this order.
enum class Priority { demand, prefetch, evict };
inline constexpr std::size_t kPriorities = 3;

// One write or read: asked for, under way, or over.
struct Transfer {
  std::uint64_t token;  // the requester's name for it
  bool write;
  Method method;
  bool padded;  // the target is the requester's up to multiples of the alignment
  Target target;
  std::uint64_t offset;
  std::byte* address;
  std::uint64_t size_bytes;
  Priority priority = Priority::demand;

  // How it ended.
  int error = 0;                         // 0, or an errno
  double started_s = 0, finished_s = 0;  // on the monotonic clock
  bool abandoned = false;  // its thread broke: the memory may still be read or written, for ever; so the target
  bool may_land = false;  // as of Result: what is written to that place next may be overwritten

  // Of Transfers, while it is under way.
  std::size_t pieces_left = 0, pieces_begun = 0;
  std::list<Transfer>::iterator self{};
};

// The file bytes [begin, end) are read or written; of these, [data_begin, data_end) are the transfer's.
struct Piece {
  Method method;
  std::uint64_t begin, end;
  std::uint64_t data_begin, data_end;
};

inline constexpr std::uint64_t kCutBytes = 4096;

// In order of the file. Together their data is the transfer's, once each. `slot_bytes` bounds staged pieces;
// neither bound is below the alignment.
inline std::vector<Piece> cut(const Transfer& transfer, std::uint64_t piece_bytes, std::uint64_t slot_bytes) {
  std::vector<Piece> pieces;
  const auto data_begin = transfer.offset, data_end = transfer.offset + transfer.size_bytes;
  const auto add = [&](Method method, std::uint64_t begin, std::uint64_t end) {
    const auto most_bytes = method == Method::staged ? slot_bytes : piece_bytes;
    // From its first byte on, not on a grid of the file, which would cut most transfers once more. The bounds of
    // pieces stay those of blocks.
    while (begin < end) {
      const auto next = std::min(end, begin - begin % std::min(kCutBytes, most_bytes) + most_bytes);
      pieces.push_back({method, begin, next, std::max(begin, data_begin), std::min(next, data_end)});
      begin = next;
    }
  };
  const bool remote = is_namespace(transfer.target.direct);
  const bool whole = transfer.target.alignment_bytes > 0 &&
                     (transfer.offset | transfer.size_bytes) % transfer.target.alignment_bytes == 0;
  // Reads of a namespace go to any memory, from any offset. Writes of parts of blocks are left for it to refuse:
  // nobody knows the other bytes.
  if (remote && (!transfer.write || (!transfer.padded && !whole))) {
    add(Method::direct, data_begin, data_end);
    return pieces;
  }
  if (transfer.method == Method::mapped || transfer.method == Method::buffered || transfer.target.direct < 0) {
    add(transfer.method == Method::mapped ? Method::mapped : Method::buffered, data_begin, data_end);
    return pieces;
  }
  const std::uint64_t alignment = transfer.target.alignment_bytes;
  piece_bytes -= piece_bytes % alignment;
  slot_bytes -= slot_bytes % alignment;
  const auto outer_begin = data_begin / alignment * alignment;
  const auto outer_end = (data_end + alignment - 1) / alignment * alignment;
  const auto inner_begin = std::min(data_end, (data_begin + alignment - 1) / alignment * alignment);
  const auto inner_end = std::max(inner_begin, data_end / alignment * alignment);
  const auto address = reinterpret_cast<std::uintptr_t>(transfer.address) + (inner_begin - data_begin);
  const bool direct = transfer.method == Method::direct && (remote || address % alignment == 0);
  const bool whole_blocks = !transfer.write || transfer.padded;  // edges may be moved as whole blocks
  if (!direct && whole_blocks) {
    add(Method::staged, outer_begin, outer_end);
    return pieces;
  }
  // A block that is shared with others is changed through the page cache, which knows its other bytes.
  if (data_begin < inner_begin) {
    if (whole_blocks) {
      add(Method::staged, outer_begin, outer_begin + alignment);
    } else {
      add(Method::buffered, data_begin, inner_begin);
    }
  }
  add(direct ? Method::direct : Method::staged, inner_begin, inner_end);
  if (inner_end < data_end) {
    if (whole_blocks) {
      add(Method::staged, inner_end, outer_end);
    } else {
      add(Method::buffered, inner_end, data_end);
    }
  }
  return pieces;
}

}  // namespace penstock
