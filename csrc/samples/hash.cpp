#include <bit>
#include <cstring>

#include "samples/layout.hpp"

namespace penstock::samples {

namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F,
                        kPrime3 = 0x165667B19E3779F9, kPrime4 = 0x85EBCA77C2B2AE63,
                        kPrime5 = 0x27D4EB2F165667C5;

template <class Word>
std::uint64_t load(const char* from) {
  Word word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

std::uint64_t round(std::uint64_t lane, std::uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

std::uint64_t merge(std::uint64_t hash, std::uint64_t lane) {
  return (hash ^ round(0, lane)) * kPrime1 + kPrime4;
}

// Takes all whole stripes of 32 bytes.
std::uint64_t stripes(const char*& at, std::size_t& left, std::uint64_t seed) {
  std::uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
  for (; left >= 32; at += 32, left -= 32)
    for (int i = 0; i < 4; ++i) lanes[i] = round(lanes[i], load<std::uint64_t>(at + 8 * i));
  auto hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
              std::rotl(lanes[3], 18);
  for (const auto lane : lanes) hash = merge(hash, lane);
  return hash;
}

}  // namespace

std::uint64_t xxh64(std::string_view bytes, std::uint64_t seed) {
  const auto* at = bytes.data();
  auto left = bytes.size();
  auto hash = (left >= 32 ? stripes(at, left, seed) : seed + kPrime5) + bytes.size();
  for (; left >= 8; at += 8, left -= 8)
    hash = std::rotl(hash ^ round(0, load<std::uint64_t>(at)), 27) * kPrime1 + kPrime4;
  if (left >= 4) {
    hash = std::rotl(hash ^ load<std::uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    at += 4, left -= 4;
  }
  for (; left > 0; ++at, --left)
    hash = std::rotl(hash ^ static_cast<unsigned char>(*at) * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

}  // namespace penstock::samples
