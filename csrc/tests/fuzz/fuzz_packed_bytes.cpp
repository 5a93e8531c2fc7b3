// Packed bytes of any content: they are refused, or expand to the same as what packing makes of that.
#include <vector>

#include "codecs/bitmask.hpp"
#include "codecs/packing.hpp"
#include "input.hpp"

using namespace penstock;
using penstock::test::Input;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  Input input(data, size_bytes);
  const auto codec = static_cast<Codec>(input.below(3));
  const std::size_t itemsize = codec == Codec::kCsr ? std::size_t{1} << input.below(4) : 4;
  const std::size_t elements = input.below(700);
  const auto packed = input.take(input.size());
  const Packing packing{packed.size(), elements, itemsize, codec};
  if (packed.empty() || (codec == Codec::kCsr && packed.size() < bitmask_head_bytes(elements))) return 0;
  const std::vector<std::byte> from(packed.begin(), packed.end());
  std::vector<std::byte> whole(elements * itemsize);
  const bool good = unpack(packing, from.data(), whole.data());
  if (good) {
    auto smaller = packing;  // where zeros were kept
    smaller.packed_bytes = packed_size(codec, whole.data(), elements, itemsize);
    REQUIRE(smaller.packed_bytes <= packed.size());
    std::vector<std::byte> again(smaller.packed_bytes), expanded(whole.size()), once_more(smaller.packed_bytes);
    REQUIRE(pack(smaller, whole.data(), again.data()) && unpack(smaller, again.data(), expanded.data()));
    REQUIRE(expanded == whole || codec != Codec::kCsr);  // signalling NaNs become quiet
    REQUIRE(pack(smaller, expanded.data(), once_more.data()) && once_more == again);
  }
  if (packed.size() <= whole.size()) {
    auto in_place = whole;
    std::memcpy(in_place.data() + in_place.size() - packed.size(), from.data(), from.size());
    std::vector<std::byte> head(head_bytes(packing));
    REQUIRE(unpack_in_place(packing, in_place.data(), in_place.size(), head.data()) == good);
    if (good) REQUIRE(in_place == whole);
  }
  return 0;
}
