// Bitmask-CSR (FlashNeuron, section 3.2): elements in rows of 128, of which those are kept that are not zero.
//
//   4 bytes a row, and 4 more   how many are kept before the row; of all rows after the last one
//   a bit an element            whether it is kept
//   the kept ones
//
// "Zero" is of all bits: -0.0 and every NaN are kept, and come back as they were. In this machine's byte order.
#pragma once

#include <cstddef>
#include <optional>

namespace penstock {

constexpr std::size_t kRowElements = 128;

constexpr std::size_t bitmask_rows(std::size_t elements) { return (elements + kRowElements - 1) / kRowElements; }

// What comes before the kept elements.
constexpr std::size_t bitmask_head_bytes(std::size_t elements) {
  return (bitmask_rows(elements) + 1) * 4 + (elements + 7) / 8;
}

// Bytes written to `packed`; none where more than `capacity_bytes` would be. Elements of 1, 2, 4 or 8 bytes, fewer
// than 2^32 of them.
std::optional<std::size_t> bitmask_encode(const void* data, std::size_t elements, std::size_t itemsize, void* packed,
                                          std::size_t capacity_bytes);

// Whether `packed` holds so many elements as bitmask_encode writes them, zeros among the kept ones allowed; otherwise
// `data` holds anything.
bool bitmask_decode(const void* packed, std::size_t packed_bytes, void* data, std::size_t elements,
                    std::size_t itemsize);

// The same where the packed bytes are the last ones of `data`, which is `capacity_bytes` long. Their head is copied to
// `head`, which has room for it; the rest is expanded in place: what is written never overtakes what is read.
bool bitmask_expand(void* data, std::size_t capacity_bytes, std::size_t elements, std::size_t itemsize,
                    std::size_t packed_bytes, void* head);

// How many elements are not zero.
std::size_t count_kept(const void* data, std::size_t elements, std::size_t itemsize);

}  // namespace penstock
