// What a fuzz target is made of: one function that takes any bytes, and REQUIRE.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>

#define REQUIRE(condition)                                                         \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes);

namespace penstock::test {

// Numbers and bytes, from the beginning of the input on; zeros once it has ended.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size_bytes)
      : left_(reinterpret_cast<const std::byte*>(data), size_bytes) {}

  bool empty() const { return left_.empty(); }
  std::size_t size() const { return left_.size(); }

  template <class T>
  T number() {
    T value{};
    copy(take(sizeof value), &value);
    return value;
  }
  // Less than `most`.
  std::uint32_t below(std::uint32_t most) { return number<std::uint16_t>() % most; }
  bool flag() { return (number<std::uint8_t>() & 1) != 0; }
  static void copy(std::span<const std::byte> from, void* to) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
  }
  // So many, or what there is.
  std::span<const std::byte> take(std::size_t size_bytes) {
    const auto taken = left_.first(std::min(size_bytes, left_.size()));
    left_ = left_.subspan(taken.size());
    return taken;
  }

 private:
  std::span<const std::byte> left_;
};

}  // namespace penstock::test
