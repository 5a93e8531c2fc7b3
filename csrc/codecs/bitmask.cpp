#include "codecs/bitmask.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

namespace penstock {

namespace {

constexpr std::size_t kWord = 64;

// Where the parts of the head are, which need not be aligned.
struct Head {
  explicit Head(std::size_t elements)
      : total(bitmask_rows(elements) * 4), masks(total + 4) {}
  std::size_t total, masks;
};

template <class T>
T load(const unsigned char* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
void store(unsigned char* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

// Writes every element of `count` where the next kept one goes, and keeps some: one more than are kept may be
// written. No branch depends on the data.
template <class T>
unsigned char* compact(const unsigned char* data, std::size_t count, unsigned char* out, std::uint64_t& mask) {
  mask = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto value = load<T>(data + i * sizeof(T));
    const bool kept = value != 0;
    store(out, value);
    mask |= std::uint64_t{kept} << i;
    out += kept * sizeof(T);
  }
  return out;
}

// The reverse: one more than are kept may be read.
template <class T>
void spread(const unsigned char* kept, std::uint64_t mask, unsigned char* data, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto bit = mask >> i & 1;
    store(data + i * sizeof(T), static_cast<T>(load<T>(kept) & static_cast<T>(-static_cast<T>(bit))));
    kept += bit * sizeof(T);
  }
}

std::size_t mask_bytes(std::size_t count) { return (count + 7) / 8; }

template <class T>
std::optional<std::size_t> encode(const unsigned char* data, std::size_t elements, unsigned char* packed,
                                  std::size_t capacity_bytes) {
  const auto head_bytes = bitmask_head_bytes(elements);
  if (capacity_bytes < head_bytes) return std::nullopt;
  const Head parts(elements);
  auto* out = packed + head_bytes;
  const auto* const end = packed + capacity_bytes;
  std::uint32_t kept = 0;
  unsigned char word[(kWord + 1) * sizeof(T)];
  for (std::size_t begin = 0; begin < elements; begin += kWord) {
    if (begin % kRowElements == 0) store(packed + begin / kRowElements * 4, kept);
    const auto count = std::min(kWord, elements - begin);
    const auto* from = data + begin * sizeof(T);
    const bool has_room = static_cast<std::size_t>(end - out) >= (kWord + 1) * sizeof(T);
    auto* const to = has_room ? out : word;
    std::uint64_t mask = 0;
    const auto taken_bytes = static_cast<std::size_t>(compact<T>(from, count, to, mask) - to);
    if (!has_room) {
      if (taken_bytes > static_cast<std::size_t>(end - out)) return std::nullopt;
      std::memcpy(out, word, taken_bytes);
    }
    out += taken_bytes;
    kept += static_cast<std::uint32_t>(taken_bytes / sizeof(T));
    std::memcpy(packed + parts.masks + begin / 8, &mask, mask_bytes(count));
  }
  store(packed + parts.total, kept);
  return static_cast<std::size_t>(out - packed);
}

template <class T>
bool decode(const unsigned char* head, const unsigned char* values, std::size_t values_bytes, unsigned char* data,
            std::size_t elements) {
  const Head parts(elements);
  const auto* from = values;
  const auto* const end = values + values_bytes;
  unsigned char word[(kWord + 1) * sizeof(T)] = {};
  for (std::size_t begin = 0; begin < elements; begin += kWord) {
    const auto before = static_cast<std::size_t>(from - values);
    if (begin % kRowElements == 0 && load<std::uint32_t>(head + begin / kRowElements * 4) != before / sizeof(T))
      return false;
    const auto count = std::min(kWord, elements - begin);
    std::uint64_t mask = 0;
    std::memcpy(&mask, head + parts.masks + begin / 8, mask_bytes(count));
    if (count < kWord && mask >> count != 0) return false;
    const auto left_bytes = static_cast<std::size_t>(end - from);
    const auto kept_bytes = static_cast<std::size_t>(std::popcount(mask)) * sizeof(T);
    if (kept_bytes > left_bytes) return false;
    if (kept_bytes + sizeof(T) <= left_bytes) {
      spread<T>(from, mask, data + begin * sizeof(T), count);
    } else {
      std::memcpy(word, from, kept_bytes);
      spread<T>(word, mask, data + begin * sizeof(T), count);
    }
    from += kept_bytes;
  }
  return from == end && load<std::uint32_t>(head + parts.total) == values_bytes / sizeof(T);
}

template <class T>
std::size_t count(const unsigned char* data, std::size_t elements) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < elements; ++i) kept += load<T>(data + i * sizeof(T)) != 0;
  return kept;
}

// `work` with an element of that size; `otherwise` where there is none.
template <class Work, class Result>
Result with_element(std::size_t itemsize, Work work, Result otherwise) {
  switch (itemsize) {
    case 1: return work(std::uint8_t{});
    case 2: return work(std::uint16_t{});
    case 4: return work(std::uint32_t{});
    case 8: return work(std::uint64_t{});
    default: return otherwise;
  }
}

bool decode(const unsigned char* head, const unsigned char* packed, std::size_t packed_bytes, unsigned char* data,
            std::size_t elements, std::size_t itemsize) {
  const auto head_bytes = bitmask_head_bytes(elements);
  if (elements > std::numeric_limits<std::uint32_t>::max() || packed_bytes < head_bytes) return false;
  return with_element(
      itemsize,
      [&](auto zero) {
        return decode<decltype(zero)>(head, packed + head_bytes, packed_bytes - head_bytes, data, elements);
      },
      false);
}

}  // namespace

std::optional<std::size_t> bitmask_encode(const void* data, std::size_t elements, std::size_t itemsize, void* packed,
                                          std::size_t capacity_bytes) {
  if (elements > std::numeric_limits<std::uint32_t>::max()) return std::nullopt;
  return with_element(
      itemsize,
      [&](auto zero) {
        return encode<decltype(zero)>(static_cast<const unsigned char*>(data), elements,
                                      static_cast<unsigned char*>(packed), capacity_bytes);
      },
      std::optional<std::size_t>());
}

bool bitmask_decode(const void* packed, std::size_t packed_bytes, void* data, std::size_t elements,
                    std::size_t itemsize) {
  const auto* bytes = static_cast<const unsigned char*>(packed);
  return decode(bytes, bytes, packed_bytes, static_cast<unsigned char*>(data), elements, itemsize);
}

bool bitmask_expand(void* data, std::size_t capacity_bytes, std::size_t elements, std::size_t itemsize,
                    std::size_t packed_bytes, void* head) {
  const auto head_bytes = bitmask_head_bytes(elements);
  if (packed_bytes < head_bytes || packed_bytes > capacity_bytes || elements * itemsize > capacity_bytes) return false;
  auto* bytes = static_cast<unsigned char*>(data);
  const auto* packed = bytes + capacity_bytes - packed_bytes;
  std::memcpy(head, packed, head_bytes);
  return decode(static_cast<unsigned char*>(head), packed, packed_bytes, bytes, elements, itemsize);
}

std::size_t count_kept(const void* data, std::size_t elements, std::size_t itemsize) {
  return with_element(
      itemsize,
      [&](auto zero) { return count<decltype(zero)>(static_cast<const unsigned char*>(data), elements); },
      std::size_t{0});
}

}  // namespace penstock
