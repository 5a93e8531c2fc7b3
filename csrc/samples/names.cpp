#include "samples/names.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace penstock::samples {

namespace {

using std::to_string;

template <class Word>
Word load(const char* from) {
  Word word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

[[noreturn]] void damaged(const std::string& what) {
  throw std::invalid_argument(what +
                              ": the store's names are damaged. Verify the store, and copy or pack it again");
}

constexpr std::size_t kAhead = 32;  // how far ahead memory is asked for

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

NameTable::NameTable(std::uint64_t samples, std::string_view names, std::span<const std::uint64_t> anchors)
    : samples_(samples), names_(names), anchors_(anchors),
      mean_bytes_(static_cast<double>(names.size()) / static_cast<double>(std::max<std::uint64_t>(1, samples))) {
  const auto expected = samples / kAnchorNames + (samples % kAnchorNames != 0);
  if (anchors.size() != expected)
    damaged(to_string(samples) + " samples have " + to_string(anchors.size()) + " anchors, not " +
            to_string(expected));
}

// Steps over names without a look at whether they end within the bytes: the next look at one says so.
std::uint64_t NameTable::position(std::uint64_t index) const {
  if (index >= samples_) [[unlikely]] no_sample(index);
  auto position = anchors_[index / kAnchorNames];
  for (auto before = index % kAnchorNames; before > 0; --before) {
    if (!has_length(position)) [[unlikely]] bad_name(position);
    position += 2 + length(position);
  }
  return position;
}

NameTable::Group NameTable::group_of(std::uint64_t index) const {
  const auto group = index / kAnchorNames;
  const bool last = group + 1 == anchors_.size();
  return {anchors_[group], last ? names_.size() : anchors_[group + 1],
          last ? samples_ - group * kAnchorNames : kAnchorNames};
}

bool NameTable::is(std::uint64_t index, std::string_view name) const {
  if (index >= samples_) [[unlikely]] no_sample(index);
  const auto group = group_of(index);
  const auto guess = group.begin + index % kAnchorNames * (2 + name.size());
  if (group.all_have(name.size()) && group.begin <= group.end && group.end <= names_.size() &&
      length(guess) == name.size() && names_.substr(guess + 2, name.size()) == name)
    return true;
  return this->name(index) == name;
}

std::string_view NameTable::at(std::uint64_t position) const {
  if (!has_length(position)) [[unlikely]] bad_name(position);
  const auto size_bytes = length(position);
  if (names_.size() - position - 2 < size_bytes) [[unlikely]] bad_name(position);
  return {names_.data() + position + 2, size_bytes};
}

bool NameTable::has_length(std::uint64_t position) const {
  return names_.size() >= 2 && position <= names_.size() - 2;
}

std::uint64_t NameTable::length(std::uint64_t position) const {
  return load<std::uint16_t>(names_.data() + position);
}

void NameTable::no_sample(std::uint64_t index) const {
  damaged("the lookup has sample " + to_string(index) + " of " + to_string(samples_));
}

void NameTable::bad_name(std::uint64_t position) const {
  damaged("no name can begin at byte " + to_string(position) + " of " + to_string(names_.size()));
}

void NameTable::prefetch_anchor(std::uint64_t index) const {
  if (index < samples_) prefetch(&anchors_[index / kAnchorNames]);
}

void NameTable::prefetch_name(std::uint64_t index, std::uint64_t name_bytes) const {
  constexpr std::uint64_t kLineBytes = 64, kMostBytes = 8 * kLineBytes;
  if (index >= samples_) return;
  const auto group = group_of(index);
  if (group.begin >= group.end || group.end > names_.size()) return;
  const auto before = index % kAnchorNames;
  auto begin = group.begin + before * (2 + name_bytes), end = begin + 2 + name_bytes;
  if (!group.all_have(name_bytes)) {  // then there are names to step over
    begin = group.begin;
    end = begin + (group.end - begin) * (before + 2) / group.names;
  }
  end = std::min({end, begin + kMostBytes, group.end});
  for (auto at = begin; at < end; at += kLineBytes) prefetch(names_.data() + at);
  prefetch(names_.data() + end - 1);
}

void NameTable::prefetch_guess(std::uint64_t index) const {
  if (index >= samples_) return;
  prefetch(&anchors_[index / kAnchorNames]);
  const auto begin = static_cast<std::uint64_t>(static_cast<double>(index) * mean_bytes_);
  const auto end = begin + static_cast<std::uint64_t>(mean_bytes_);
  prefetch(names_.data() + std::min(begin, names_.size()));
  prefetch(names_.data() + std::min(end, names_.size()));
}

// The search for one name.
struct Names::Probe {
  std::string_view name;
  std::uint64_t key = 0;
  std::uint64_t at = 0, end = 0;  // words of the bucket still to be looked at
  std::uint64_t index = 0;        // of the candidate
  bool found = false;             // there is one
};

Names::Names(const NameTable& table, std::string_view lookup)
    : table_(table), shape_(table.samples()), words_(lookup.data()),
      starts_(lookup.data() + std::min<std::uint64_t>(8 * table.samples(), lookup.size())) {
  if (lookup.size() != shape_.size_bytes)
    damaged("the lookup of " + to_string(table.samples()) + " samples has " + to_string(lookup.size()) +
            " bytes, not " + to_string(shape_.size_bytes));
}

std::uint64_t Names::start(std::uint64_t bucket) const {
  return shape_.start_bytes == 4 ? load<std::uint32_t>(starts_ + 4 * bucket)
                                 : load<std::uint64_t>(starts_ + 8 * bucket);
}

std::uint64_t Names::word(std::uint64_t at) const { return load<std::uint64_t>(words_ + 8 * at); }

void Names::open_bucket(Probe& probe) const {
  const auto bucket = shape_.bucket(probe.key);
  probe.at = start(bucket);
  probe.end = start(bucket + 1);
  if (probe.at > probe.end || probe.end > shape_.samples)
    damaged("bucket " + to_string(bucket) + " of the lookup is words " + to_string(probe.at) + " to " +
            to_string(probe.end) + " of " + to_string(shape_.samples));
}

// A candidate has the same bucket and the same low bits of the key: nearly always it is the one.
bool Names::next_candidate(Probe& probe) const {
  const auto mark = probe.key << kIndexBits >> kIndexBits;
  for (; probe.at < probe.end; ++probe.at) {
    const auto found = word(probe.at);
    if (found >> kIndexBits != mark) continue;
    ++probe.at;
    probe.index = found & ((std::uint64_t{1} << kIndexBits) - 1);
    return probe.found = true;
  }
  return probe.found = false;
}

std::int64_t Names::finish(Probe& probe) const {
  for (; probe.found; next_candidate(probe))
    if (table_.is(probe.index, probe.name)) return static_cast<std::int64_t>(probe.index);
  return -1;
}

std::int64_t Names::find(std::string_view name) const {
  Probe probe{name, key_of(name)};
  open_bucket(probe);
  if (next_candidate(probe)) table_.prefetch_guess(probe.index);
  return finish(probe);
}

// Many searches go on side by side, each a few steps behind the one before: so their waits for memory
// overlap, and never more memory is asked for at once than a processor keeps account of.
void Names::find_many(std::string_view names, std::span<const std::int64_t> ends, std::int64_t* found) const {
  constexpr std::size_t kApart = 12, kRing = 64;  // searches between two steps; at least four times as many
  std::array<Probe, kRing> ring;
  std::int64_t begin = 0;
  const auto count = ends.size();
  for (std::size_t i = 0; i < count + 4 * kApart; ++i) {
    const auto step = [&](std::size_t which, const auto& act) {
      const auto probe = i - which * kApart;
      if (probe < count) act(ring[probe % kRing], probe);  // before the first one it is a huge number
    };
    step(0, [&](Probe& probe, std::size_t at) {
      if (ends[at] < begin || static_cast<std::uint64_t>(ends[at]) > names.size())
        throw std::invalid_argument("end " + to_string(at) + " of the names is " + to_string(ends[at]) +
                                    ": ends must ascend from " + to_string(begin) + " and stay within the " +
                                    to_string(names.size()) + " bytes given");
      const auto name = names.substr(static_cast<std::size_t>(begin), static_cast<std::size_t>(ends[at] - begin));
      probe = {name, key_of(name)};
      prefetch(starts_ + shape_.start_bytes * shape_.bucket(probe.key));
      begin = ends[at];
    });
    step(1, [&](Probe& probe, std::size_t) {
      open_bucket(probe);
      if (probe.at == probe.end) return;
      prefetch(words_ + 8 * probe.at);
      prefetch(words_ + 8 * probe.end - 8);
    });
    step(2, [&](Probe& probe, std::size_t) {
      if (next_candidate(probe)) table_.prefetch_anchor(probe.index);
    });
    step(3, [&](Probe& probe, std::size_t) {
      if (probe.found) table_.prefetch_name(probe.index, probe.name.size());
    });
    step(4, [&](Probe& probe, std::size_t at) { found[at] = finish(probe); });
  }
}

}  // namespace penstock::samples
