// lookup.bin, made and checked.
#include <algorithm>
#include <bit>
#include <cstring>

#include "samples/names.hpp"
#include "samples/prefetch.hpp"

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

// Looks for two samples of one name in one bucket.
class TwinSearch {
 public:
  TwinSearch(std::span<const Entry> directory, const NameTable& names) : directory_(directory), names_(names) {}

  Twins in(std::span<const std::uint64_t> words) {
    return words.size() <= kFewWords ? among_few(words) : among_many(words);
  }

 private:
  std::uint64_t key(std::uint64_t index) const { return directory_[index].key(); }

  Twins among_few(std::span<const std::uint64_t> words) const {
    for (std::size_t i = 0; i < words.size(); ++i) {
      for (auto j = i + 1; j < words.size(); ++j) {
        if ((words[i] ^ words[j]) > kIndexMask) continue;  // other keys
        const auto a = words[i] & kIndexMask, b = words[j] & kIndexMask;
        if (key(a) == key(b) && names_.name(a) == names_.name(b)) return std::pair{a, b};
      }
    }
    return {};
  }

  // Names chosen so that their keys fall together must not take for ever.
  Twins among_many(std::span<const std::uint64_t> words) {
    indices_.clear();
    for (const auto word : words) indices_.push_back(word & kIndexMask);
    std::ranges::sort(indices_, [this](std::uint64_t a, std::uint64_t b) {
      if (key(a) != key(b)) return key(a) < key(b);
      const auto order = names_.name(a).compare(names_.name(b));
      return order != 0 ? order < 0 : a < b;
    });
    for (std::size_t i = 0; i + 1 < indices_.size(); ++i) {
      const auto a = indices_[i], b = indices_[i + 1];
      if (key(a) == key(b) && names_.name(a) == names_.name(b)) return std::pair{a, b};
    }
    return {};
  }

  const std::span<const Entry> directory_;
  const NameTable& names_;
  std::vector<std::uint64_t> indices_;
};

template <class Start>
Twins twins_in_buckets(TwinSearch search, const LookupShape& shape, const std::byte* lookup) {
  const auto* const words = reinterpret_cast<const std::uint64_t*>(lookup);
  const auto* const starts = reinterpret_cast<const Start*>(lookup + 8 * shape.samples);
  for (std::uint64_t bucket = 0; bucket < std::uint64_t{1} << shape.bits; ++bucket) {
    const auto begin = starts[bucket], end = starts[bucket + 1];
    if (const auto twins = search.in({words + begin, words + end})) return twins;
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
  const TwinSearch search(directory, names);
  return shape.start_bytes == 4 ? twins_in_buckets<std::uint32_t>(search, shape, lookup)
                                : twins_in_buckets<std::uint64_t>(search, shape, lookup);
}

}  // namespace penstock::samples
