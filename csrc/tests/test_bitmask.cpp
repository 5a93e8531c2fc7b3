// Bitmask-CSR: what comes back is what went in, nothing is touched beside it, and damage is seen.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "check.hpp"
#include "codecs/bitmask.hpp"

using namespace penstock;
using penstock::test::Random;

namespace {

constexpr std::size_t kSizes[] = {0, 1, 7, 8, 63, 64, 65, 127, 128, 129, 1000, 4096};

// Memory that ends where the bytes do: a sanitizer sees every byte read or written beside them.
std::unique_ptr<unsigned char[]> exact(const std::vector<unsigned char>& bytes) {
  std::unique_ptr<unsigned char[]> copy(new unsigned char[bytes.size()]);
  if (!bytes.empty()) std::memcpy(copy.get(), bytes.data(), bytes.size());
  return copy;
}

// Elements of which about so many percent are not zero.
std::vector<unsigned char> values(Random& random, std::size_t elements, std::size_t itemsize, std::size_t percent) {
  std::vector<unsigned char> bytes(elements * itemsize);
  for (std::size_t i = 0; i < elements; ++i)
    if (random(0, 99) < percent) bytes[i * itemsize + random(0, itemsize - 1)] = static_cast<unsigned char>(random(1, 255));
  return bytes;
}

std::vector<unsigned char> encoded(const std::vector<unsigned char>& bytes, std::size_t elements, std::size_t itemsize) {
  const auto data = exact(bytes);
  std::vector<unsigned char> packed(bitmask_head_bytes(elements) +
                                    count_kept(data.get(), elements, itemsize) * itemsize);
  const auto target = exact(packed);
  const auto size_bytes = bitmask_encode(data.get(), elements, itemsize, target.get(), packed.size());
  CHECK(size_bytes.has_value());
  CHECK_EQUAL(*size_bytes, packed.size());
  std::memcpy(packed.data(), target.get(), packed.size());
  return packed;
}

}  // namespace

TEST(every_element_comes_back) {
  Random random(1);
  for (const std::size_t itemsize : {1, 2, 4, 8})
    for (const auto elements : kSizes)
      for (const std::size_t percent : {0, 3, 50, 97, 100}) {
        const auto bytes = values(random, elements, itemsize, percent);
        const auto packed = encoded(bytes, elements, itemsize);
        const auto source = exact(packed);
        const auto back = exact(std::vector<unsigned char>(bytes.size(), 0xA5));
        CHECK(bitmask_decode(source.get(), packed.size(), back.get(), elements, itemsize));
        CHECK(std::equal(bytes.begin(), bytes.end(), back.get()));
      }
}

TEST(every_element_comes_back_in_place) {
  Random random(4);
  for (const std::size_t itemsize : {1, 2, 4, 8})
    for (const auto elements : kSizes)
      for (const std::size_t percent : {0, 3, 50, 97}) {
        const auto bytes = values(random, elements, itemsize, percent);
        const auto packed = encoded(bytes, elements, itemsize);
        const auto capacity_bytes = std::max(bytes.size(), packed.size()) + random(0, 1) * random(0, 5000);
        std::vector<unsigned char> block(capacity_bytes - packed.size(), 0xA5);
        block.insert(block.end(), packed.begin(), packed.end());
        const auto data = exact(block), head = exact(std::vector<unsigned char>(bitmask_head_bytes(elements)));
        CHECK(bitmask_expand(data.get(), block.size(), elements, itemsize, packed.size(), head.get()));
        CHECK(std::equal(bytes.begin(), bytes.end(), data.get()));
        CHECK(!bitmask_expand(data.get(), block.size(), elements, itemsize, block.size() + 1, head.get()));
      }
}

TEST(what_does_not_fit_is_not_written) {
  Random random(2);
  for (const std::size_t itemsize : {1, 2, 4, 8})
    for (const auto elements : kSizes) {
      const auto bytes = values(random, elements, itemsize, 60);
      const auto packed = encoded(bytes, elements, itemsize);
      for (const std::size_t short_bytes : {std::size_t{1}, itemsize, packed.size()}) {
        const std::vector<unsigned char> small(packed.size() - std::min(short_bytes, packed.size()));
        const auto target = exact(small);
        CHECK(!bitmask_encode(exact(bytes).get(), elements, itemsize, target.get(), small.size()));
      }
    }
}

TEST(another_size_of_element_is_refused) {
  unsigned char bytes[64] = {};
  CHECK(!bitmask_encode(bytes, 4, 3, bytes + 32, 32));
  CHECK(!bitmask_decode(bytes, 32, bytes + 32, 4, 3));
}

TEST(damage_is_seen_or_harmless) {
  Random random(3);
  for (int round = 0; round < 3000; ++round) {
    const std::size_t itemsize = std::size_t{1} << random(0, 3), elements = random(0, 400);
    auto packed = encoded(values(random, elements, itemsize, 50), elements, itemsize);
    const auto at = random(0, packed.size() - 1);
    const auto damage = random(0, 2);
    if (damage == 0) packed[at] ^= static_cast<unsigned char>(1 << random(0, 7));
    if (damage == 1) packed.resize(at);
    if (damage == 2) packed.insert(packed.end(), random(1, 16), 0);
    const bool only_values = damage == 0 && at >= bitmask_head_bytes(elements);
    const auto source = exact(packed);
    const auto back = exact(std::vector<unsigned char>(elements * itemsize));
    CHECK_EQUAL(bitmask_decode(source.get(), packed.size(), back.get(), elements, itemsize), only_values);
  }
}
