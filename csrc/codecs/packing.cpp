#include "codecs/packing.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "codecs/bitmask.hpp"

namespace penstock {

namespace {

constexpr std::size_t kBatch = 256;
constexpr std::uint32_t kInfinity = 0x7f800000;

// No branch depends on the data, so that compilers make vectors of it.
std::uint16_t to_fp16(std::uint32_t bits) {
  const std::uint32_t sign = bits >> 16 & 0x8000, value = bits & 0x7fffffff;
  // Adding 0.5 leaves the bits of a subnormal half, rounded, at the end.
  const auto small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(value) + 0.5f) - 0x3f000000;
  const std::uint32_t normal = (value + 0xc8000fff + (value >> 13 & 1)) >> 13;
  std::uint32_t half = value < 0x38800000 ? small : normal;
  half = value >= 0x477fe000 ? 0x7bff : half;  // 65504 and more
  half = value == kInfinity ? 0x7c00 : half;
  half = value > kInfinity ? 0x7e00 | (value >> 13 & 0x3ff) : half;
  return static_cast<std::uint16_t>(sign | half);
}

std::uint32_t from_fp16(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t{half} << 16 & 0x80000000, value = std::uint32_t{half} << 13 & 0x0fffe000;
  // 2^112: a half's exponent counts from another number.
  const auto scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(value) * std::bit_cast<float>(0x77800000u));
  return sign | ((half & 0x7c00) == 0x7c00 ? value | kInfinity : scaled);
}

std::uint16_t to_bf16(std::uint32_t bits) {
  const auto rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<std::uint16_t>((bits & 0x7fffffff) > kInfinity ? bits >> 16 | 0x40 : rounded);
}

std::uint32_t from_bf16(std::uint16_t half) { return std::uint32_t{half} << 16; }

template <auto convert, class From, class To>
void convert_all(const void* from, void* to, std::size_t count) {
  std::array<From, kBatch> source;
  std::array<To, kBatch> target;
  for (std::size_t begin = 0; begin < count; begin += kBatch) {
    const auto size = std::min(kBatch, count - begin);
    // All that is read of a batch is read before it is written: the two may overlap.
    std::memcpy(source.data(), static_cast<const char*>(from) + begin * sizeof(From), size * sizeof(From));
    for (std::size_t i = 0; i < size; ++i) target[i] = convert(source[i]);
    std::memcpy(static_cast<char*>(to) + begin * sizeof(To), target.data(), size * sizeof(To));
  }
}

bool widen(const Packing& packing, const void* packed, void* data) {
  if (packing.itemsize != 4 || packing.packed_bytes != packing.elements * 2) return false;
  if (packing.codec == Codec::kFp16)
    convert_all<from_fp16, std::uint16_t, std::uint32_t>(packed, data, packing.elements);
  else
    convert_all<from_bf16, std::uint16_t, std::uint32_t>(packed, data, packing.elements);
  return true;
}

}  // namespace

std::size_t packed_size(Codec codec, const void* data, std::size_t elements, std::size_t itemsize) {
  if (codec == Codec::kCsr) return bitmask_head_bytes(elements) + count_kept(data, elements, itemsize) * itemsize;
  return itemsize == 4 ? elements * 2 : 0;
}

bool pack(const Packing& packing, const void* data, void* packed) {
  const auto count = packing.elements;
  if (packing.codec == Codec::kCsr)
    return bitmask_encode(data, count, packing.itemsize, packed, packing.packed_bytes) == packing.packed_bytes;
  if (packing.codec == Codec::kFp16)
    convert_all<to_fp16, std::uint32_t, std::uint16_t>(data, packed, count);
  else
    convert_all<to_bf16, std::uint32_t, std::uint16_t>(data, packed, count);
  return true;
}

bool unpack(const Packing& packing, const void* packed, void* data) {
  if (packing.codec != Codec::kCsr) return widen(packing, packed, data);
  return bitmask_decode(packed, packing.packed_bytes, data, packing.elements, packing.itemsize);
}

bool unpack_in_place(const Packing& packing, void* data, std::size_t capacity_bytes, void* head) {
  if (packing.codec == Codec::kCsr)
    return bitmask_expand(data, capacity_bytes, packing.elements, packing.itemsize, packing.packed_bytes, head);
  // What is written never overtakes what is read: 4 bytes an element from the start, 2 to the end.
  if (packing.elements * 4 > capacity_bytes || packing.packed_bytes > capacity_bytes) return false;
  return widen(packing, static_cast<char*>(data) + capacity_bytes - packing.packed_bytes, data);
}

std::size_t head_bytes(const Packing& packing) {
  return packing.codec == Codec::kCsr ? bitmask_head_bytes(packing.elements) : 0;
}

}  // namespace penstock
