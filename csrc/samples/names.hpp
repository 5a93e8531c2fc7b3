// Finds samples by name, in a store's files as they are. Whatever is read from them is checked first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "samples/layout.hpp"

namespace penstock::samples {

// Asks for a cache line without waiting for it. Any address may be given.
inline void prefetch(const void* address) {
#ifdef __GNUC__  // clang defines it too
  __builtin_prefetch(address);
  asm volatile("" : : "r"(address));  // GCC leaves out calls of functions that do nothing else
#else
  (void)address;
#endif
}

// names.bin and anchors.bin. Borrows them; throws std::invalid_argument where they contradict themselves.
class NameTable {
 public:
  NameTable(std::uint64_t samples, std::string_view names, std::span<const std::uint64_t> anchors);

  std::uint64_t samples() const { return samples_; }
  std::string_view name(std::uint64_t index) const { return at(position(index)); }
  // Whether this is the index's name, which has the same key in the lookup.
  bool is(std::uint64_t index, std::string_view name) const;
  // Where an index's name begins in names.bin.
  std::uint64_t position(std::uint64_t index) const;
  // The name that begins there; the next one begins where it ends.
  std::string_view at(std::uint64_t position) const;

  // Asks for memory that is() will read, without waiting for it: the anchor; when it is there, the name.
  void prefetch_anchor(std::uint64_t index) const;
  void prefetch_name(std::uint64_t index, std::uint64_t name_bytes) const;
  // Both at once: the name where it is if all names have one length.
  void prefetch_guess(std::uint64_t index) const;

 private:
  // Names that share an anchor are bytes [begin, end).
  struct Group {
    std::uint64_t begin, end, names;
    // On average; or else no neighbour's length has to be looked at to know where a name begins. One that
    // is found there is this index's: chance does not put it there and make the keys equal.
    bool all_have(std::uint64_t name_bytes) const { return end - begin == names * (2 + name_bytes); }
  };

  Group group_of(std::uint64_t index) const;
  bool has_length(std::uint64_t position) const;
  std::uint64_t length(std::uint64_t position) const;
  [[noreturn]] void no_sample(std::uint64_t index) const;
  [[noreturn]] void bad_name(std::uint64_t position) const;

  const std::uint64_t samples_;
  const std::string_view names_;
  const std::span<const std::uint64_t> anchors_;
  const double mean_bytes_;
};

// The sizes of lookup.bin, which follow from the number of samples.
struct LookupShape {
  explicit LookupShape(std::uint64_t samples);

  std::uint64_t bucket(std::uint64_t key) const { return key >> (kKeyBits - bits); }

  std::uint64_t samples;
  unsigned bits;  // of a key, that choose its bucket
  unsigned start_bytes;
  std::uint64_t size_bytes;
};

// Writes lookup.bin for a directory to `lookup`, which has LookupShape::size_bytes zeros, aligned to words.
void write_lookup(std::span<const Entry> directory, std::byte* lookup);

// Borrows everything. Throws std::invalid_argument where the files contradict themselves.
class Names {
 public:
  Names(const NameTable& table, std::string_view lookup);

  const NameTable& table() const { return table_; }
  // -1: no sample has this name.
  std::int64_t find(std::string_view name) const;
  // Of names side by side, of which the i-th ends at ends[i].
  void find_many(std::string_view names, std::span<const std::int64_t> ends, std::int64_t* found) const;

 private:
  struct Probe;

  std::uint64_t start(std::uint64_t bucket) const;
  std::uint64_t word(std::uint64_t at) const;
  void open_bucket(Probe& probe) const;
  bool next_candidate(Probe& probe) const;
  std::int64_t finish(Probe& probe) const;

  const NameTable table_;
  const LookupShape shape_;
  const char* const words_;
  const char* const starts_;
};

}  // namespace penstock::samples
