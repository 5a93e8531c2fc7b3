// Every kernel of CRC-32C that this machine can run, against the definition.
#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>

#include "check.hpp"
#include "checksum.hpp"

using namespace penstock;
using penstock::test::Random;

namespace {

std::uint32_t bitwise(std::uint32_t crc, const char* data, std::size_t size_bytes) {
  auto state = ~crc;
  for (std::size_t i = 0; i < size_bytes; ++i) {
    state ^= static_cast<unsigned char>(data[i]);
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ (state & 1 ? 0x82F63B78u : 0u);
  }
  return ~state;
}

// Memory that ends where the bytes do: a sanitizer sees every byte read or written beside them.
struct Exact {
  Exact(const char* data, std::size_t size_bytes) : bytes(new char[size_bytes]) {
    std::memcpy(bytes.get(), data, size_bytes);
  }
  std::unique_ptr<char[]> bytes;
};

void check_copy(const Crc32cKernel& kernel, const std::vector<char>& data, std::size_t to, std::size_t at) {
  const auto size_bytes = data.size() - at;
  const std::unique_ptr<char[]> target(new char[to + size_bytes]);
  std::memset(target.get(), 0x5A, to);
  const auto crc = kernel.copy(target.get() + to, data.data() + at, size_bytes, 77);
  CHECK_EQUAL(crc, kernel.checksum(77, data.data() + at, size_bytes));
  CHECK(std::memcmp(target.get() + to, data.data() + at, size_bytes) == 0);
  for (std::size_t i = 0; i < to; ++i) CHECK_EQUAL(target[i], 0x5A);
}

}  // namespace

TEST(the_portable_kernel_is_always_there) {
  CHECK_EQUAL(std::string(crc32c_kernels().back().name), "slicing by 8");
}

TEST(vectors_of_rfc_3720_appendix_b_4) {
  char bytes[32];
  for (const auto& kernel : crc32c_kernels()) {
    std::memset(bytes, 0, 32);
    CHECK_EQUAL(kernel.checksum(0, bytes, 32), 0x8A9136AAu);
    std::memset(bytes, 0xFF, 32);
    CHECK_EQUAL(kernel.checksum(0, bytes, 32), 0x62A8AB43u);
    for (int i = 0; i < 32; ++i) bytes[i] = static_cast<char>(i);
    CHECK_EQUAL(kernel.checksum(0, bytes, 32), 0x46DD794Eu);
    std::reverse(bytes, bytes + 32);
    CHECK_EQUAL(kernel.checksum(0, bytes, 32), 0x113FDB5Cu);
  }
}

TEST(every_size_up_to_a_few_steps_of_every_kernel) {
  Random random(1);
  const auto data = random.bytes(1700);
  auto expected = std::uint32_t{5};
  for (std::size_t size_bytes = 0; size_bytes < data.size(); ++size_bytes) {
    const Exact memory(data.data(), size_bytes);
    for (const auto& kernel : crc32c_kernels())
      CHECK_EQUAL(kernel.checksum(5, memory.bytes.get(), size_bytes), expected);
    expected = bitwise(expected, &data[size_bytes], 1);
  }
}

TEST(large_sizes_at_every_address_within_a_cache_line) {
  Random random(2);
  const auto data = random.bytes(20'000);
  for (std::size_t at = 0; at < 64; ++at) {
    const auto size_bytes = random(10'000, data.size() - at);
    const auto expected = bitwise(9, &data[at], size_bytes);
    for (const auto& kernel : crc32c_kernels())
      CHECK_EQUAL(kernel.checksum(9, &data[at], size_bytes), expected);
  }
}

TEST(copies_write_their_bytes_and_no_others) {
  Random random(3);
  for (const std::size_t size_bytes : {0, 1, 63, 64, 255, 256, 257, 1535, 1536, 6144, 6145, 70'001}) {
    const auto data = random.bytes(size_bytes + 9);
    for (const auto& kernel : crc32c_kernels())
      for (const std::size_t to : {0, 1, 8, 33, 64}) check_copy(kernel, data, to, random(0, 9));
  }
}

TEST(copies_past_the_cache_write_their_bytes_and_no_others) {
  Random random(4);
  constexpr std::size_t kLarge = std::size_t{256} << 10;
  for (const auto size_bytes : {kLarge - 1, kLarge, kLarge + 1, 3 * kLarge + 555}) {
    const auto data = random.bytes(size_bytes + 9);
    const auto expected = crc32c_kernels().back().checksum(0, data.data(), data.size());
    for (const auto& kernel : crc32c_kernels()) {
      CHECK_EQUAL(kernel.checksum(0, data.data(), data.size()), expected);
      for (const std::size_t to : {0, 1, 8, 33}) check_copy(kernel, data, to, random(0, 9));
    }
  }
}

TEST(combining_is_the_checksum_of_both) {
  Random random(5);
  const auto data = random.bytes(3000);
  const auto whole = bitwise(0, data.data(), data.size());
  for (std::size_t cut = 0; cut <= data.size(); cut += random(1, 40)) {
    const auto first = crc32c(0, data.data(), cut);
    CHECK_EQUAL(crc32c(first, data.data() + cut, data.size() - cut), whole);
    const auto second = crc32c(0, data.data() + cut, data.size() - cut);
    CHECK_EQUAL(crc32c_combine(first, second, data.size() - cut), whole);
  }
}

TEST(nothing_may_be_at_no_address) {
  CHECK_EQUAL(crc32c(5, nullptr, 0), 5u);
  CHECK_EQUAL(copy_crc32c(nullptr, nullptr, 0, 5), 5u);
}

TEST(threads_use_them_side_by_side) {
  Random random(6);
  const auto data = random.bytes(300'000);
  std::vector<std::uint32_t> results(4);
  std::vector<std::thread> threads;
  for (auto& result : results) {
    threads.emplace_back([&] {
      std::vector<char> target(data.size());
      result = copy_crc32c(target.data(), data.data(), data.size(), 0);
    });
  }
  for (auto& thread : threads) thread.join();
  const auto expected = crc32c_kernels().back().checksum(0, data.data(), data.size());
  for (const auto result : results) CHECK_EQUAL(result, expected);
}
