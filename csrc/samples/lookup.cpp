// lookup.bin, made and checked.
#include <algorithm>
#include <bit>
#include <cstring>

#include "samples/names.hpp"

namespace penstock::samples {

namespace {

constexpr std::uint64_t kIndexMask = (std::uint64_t{1} << kIndexBits) - 1;
constexpr std::size_t kAhead = 32;          // how far ahead memory is asked for
constexpr std::uint64_t kFewWords = 24;     // so many are compared each with each

// A stable counting sort. The counts are taken one bucket further on: they become where each bucket
// begins, then, while words come in, where it ends, which is where the next one begins.
template <class Start>
void sort_into_buckets(std::span<const Entry> directory, const LookupShape& shape, std::byte* lookup) {
  auto* const words = reinterpret_cast<std::uint64_t*>(lookup);
  auto* const starts = reinterpret_cast<Start*>(lookup + 8 * directory.size());
  auto* const cursors = starts + 1;  // 2^bits of them
  const auto last = (std::uint64_t{1} << shape.bits) - 1;
  const auto count = directory.size();
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) prefetch(&cursors[shape.bucket(directory[i + kAhead].key())]);
    const auto bucket = shape.bucket(directory[i].key());
    if (bucket < last) ++cursors[bucket + 1];
  }
  for (std::uint64_t bucket = 1; bucket <= last; ++bucket)
    cursors[bucket] = static_cast<Start>(cursors[bucket] + cursors[bucket - 1]);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + 2 * kAhead < count) prefetch(&cursors[shape.bucket(directory[i + 2 * kAhead].key())]);
    if (i + kAhead < count) prefetch(&words[cursors[shape.bucket(directory[i + kAhead].key())]]);
    const auto key = directory[i].key();
    words[cursors[shape.bucket(key)]++] = key << kIndexBits | i;
  }
}

// Two samples of one name among the words of a bucket. Names chosen so that their keys fall together must not
// take for ever: many are sorted.
Twins twins_in(std::span<const std::uint64_t> words, std::span<const Entry> directory, const NameTable& names) {
  const auto key = [&](std::uint64_t index) { return directory[index].key(); };
  const auto same = [&](std::uint64_t a, std::uint64_t b) {
    return key(a) == key(b) && names.name(a) == names.name(b);
  };
  if (words.size() <= kFewWords) {
    for (std::size_t i = 0; i < words.size(); ++i)
      for (auto j = i + 1; j < words.size(); ++j) {
        if ((words[i] ^ words[j]) > kIndexMask) continue;  // other keys
        const auto a = words[i] & kIndexMask, b = words[j] & kIndexMask;
        if (same(a, b)) return std::pair{a, b};
      }
    return {};
  }
  std::vector<std::uint64_t> indices;
  for (const auto word : words) indices.push_back(word & kIndexMask);
  std::ranges::sort(indices, [&](std::uint64_t a, std::uint64_t b) {
    if (key(a) != key(b)) return key(a) < key(b);
    const auto order = names.name(a).compare(names.name(b));
    return order != 0 ? order < 0 : a < b;
  });
  const auto found = std::ranges::adjacent_find(indices, same);
  if (found == indices.end()) return {};
  return std::pair{found[0], found[1]};
}

template <class Start>
Twins twins_in_buckets(std::span<const Entry> directory, const NameTable& names, const LookupShape& shape,
                       const std::byte* lookup) {
  const auto* const words = reinterpret_cast<const std::uint64_t*>(lookup);
  const auto* const starts = reinterpret_cast<const Start*>(lookup + 8 * shape.samples);
  for (std::uint64_t bucket = 0; bucket < std::uint64_t{1} << shape.bits; ++bucket) {
    const auto begin = starts[bucket], end = starts[bucket + 1];
    if (const auto twins = twins_in({words + begin, words + end}, directory, names)) return twins;
  }
  return {};
}

}  // namespace

LookupShape::LookupShape(std::uint64_t samples)
    : samples(samples), bits(static_cast<unsigned>(std::max(3, static_cast<int>(std::bit_width(samples))) - 3)),
      start_bytes(samples < std::uint64_t{1} << 32 ? 4 : 8),
      size_bytes(8 * samples + ((std::uint64_t{1} << bits) + 1) * start_bytes) {}

void write_lookup(std::span<const Entry> directory, std::byte* lookup) {
  const LookupShape shape(directory.size());
  if (shape.start_bytes == 4)
    sort_into_buckets<std::uint32_t>(directory, shape, lookup);
  else
    sort_into_buckets<std::uint64_t>(directory, shape, lookup);
}

Twins find_twins(std::span<const Entry> directory, const NameTable& names, const std::byte* lookup) {
  const LookupShape shape(directory.size());
  return shape.start_bytes == 4 ? twins_in_buckets<std::uint32_t>(directory, names, shape, lookup)
                                : twins_in_buckets<std::uint64_t>(directory, names, shape, lookup);
}

}  // namespace penstock::samples
