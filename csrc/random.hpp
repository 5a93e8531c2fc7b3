// Numbers that look random and are a pure function of what they are for: see penstock.samples.order.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

namespace penstock::samples {

inline constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;

// The finaliser of splitmix64 (Stafford's variant 13): one to one, and each bit of x moves every bit.
inline std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

// One number for several: `key` and a word, or words alone.
inline std::uint64_t key_of(std::uint64_t key, std::uint64_t word) { return mix((key + kGolden) ^ word); }
inline std::uint64_t key_of(std::initializer_list<std::uint64_t> words) {
  std::uint64_t key = 0;
  for (const auto word : words) key = key_of(key, word);
  return key;
}

// The counter-th number of a key: the sequence of splitmix64 that begins with the key.
inline std::uint64_t draw(std::uint64_t key, std::uint64_t counter) {
  return mix(key + (counter + 1) * kGolden);
}

// 32 random bits, as a number below `below`, which is at most 2^32.
inline std::uint64_t scaled(std::uint64_t bits, std::uint64_t below) { return bits * below >> 32; }

// A permutation of [0, size) that takes no memory: a Feistel network over the next power of two, walked
// until it comes back into [0, size).
class Permutation {
 public:
  Permutation(std::uint64_t size, std::uint64_t key) : size_(size) {
    const unsigned bits = std::max(kLeastBits, static_cast<unsigned>(std::bit_width(size - (size > 0))));
    low_bits_ = bits / 2;
    low_mask_ = (std::uint64_t{1} << low_bits_) - 1;
    high_mask_ = (std::uint64_t{1} << (bits - low_bits_)) - 1;
    for (std::size_t round = 0; round < kRounds; ++round) keys_[round] = draw(key, round);
  }

  std::uint64_t operator()(std::uint64_t position) const {
    do {
      position = network(position);
    } while (position >= size_);
    return position;
  }

  // In place. Faster than one by one: numbers do not wait for each other.
  void apply(std::span<std::uint64_t> positions) const {
    for (auto& position : positions) position = network(position);
    for (auto& position : positions)
      while (position >= size_) position = network(position);
  }

 private:
  static constexpr unsigned kLeastBits = 8;  // a smaller network knows too few permutations
  static constexpr std::size_t kRounds = 6;

  std::uint64_t network(std::uint64_t x) const {
    std::uint64_t low = x & low_mask_, high = x >> low_bits_;
    for (std::size_t round = 0; round < kRounds; round += 2) {
      high ^= mix(low ^ keys_[round]) & high_mask_;
      low ^= mix(high ^ keys_[round + 1]) & low_mask_;
    }
    return high << low_bits_ | low;
  }

  std::uint64_t size_, low_mask_, high_mask_;
  unsigned low_bits_;
  std::array<std::uint64_t, kRounds> keys_;
};

}  // namespace penstock::samples
