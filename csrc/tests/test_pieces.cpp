// However a request is cut: its bytes are moved once each, and no others but where that is allowed.
#include "check.hpp"
#include "pieces.hpp"

using namespace penstock;

namespace {

constexpr std::uint64_t kAlignment = 8, kPiece = 32, kSlot = 16;

Request request(bool write, Way way, bool padded, std::uint64_t offset, std::uintptr_t address,
                std::uint64_t size) {
  return {1, write, way, padded, 3, 4, kAlignment, offset, reinterpret_cast<std::byte*>(address), size};
}

void check_pieces(const Request& asked) {
  const auto begin = asked.offset, end = asked.offset + asked.size_bytes;
  auto reached = begin;
  for (const auto& piece : cut(asked, kPiece, kSlot)) {
    CHECK(piece.data_begin == reached && piece.data_end > reached);
    reached = piece.data_end;
    CHECK(piece.begin <= piece.data_begin && piece.data_end <= piece.end);
    CHECK(piece.end - piece.begin <= (piece.way == Way::staged ? kSlot : kPiece));
    if (piece.way == Way::buffered) {
      CHECK(piece.begin == piece.data_begin && piece.end == piece.data_end);
      continue;
    }
    CHECK(piece.begin % kAlignment == 0 && piece.end % kAlignment == 0);
    CHECK(piece.data_begin - piece.begin < kAlignment && piece.end - piece.data_end < kAlignment);
    const bool odd = piece.begin != piece.data_begin || piece.end != piece.data_end;
    CHECK(!odd || piece.way == Way::staged);
    CHECK(!odd || !asked.write || asked.padded);
    if (piece.way == Way::direct) {
      const auto address = reinterpret_cast<std::uintptr_t>(asked.address) + (piece.begin - begin);
      CHECK(asked.way == Way::direct && address % kAlignment == 0);
    }
  }
  CHECK(reached == end);
}

}  // namespace

TEST(every_byte_is_moved_once) {
  for (const bool write : {false, true}) {
    for (const auto way : {Way::direct, Way::staged, Way::buffered}) {
      for (const bool padded : {false, true}) {
        for (std::uint64_t offset = 0; offset < 2 * kAlignment; ++offset) {
          for (std::uintptr_t address = 0; address < kAlignment; ++address) {
            for (std::uint64_t size = 1; size < 3 * kPiece; ++size) {
              auto asked = request(write, way, padded, offset, address, size);
              check_pieces(asked);
              asked.direct_file = -1;
              check_pieces(asked);
            }
          }
        }
      }
    }
  }
}

TEST(what_is_aligned_goes_straight_to_the_disk) {
  for (const auto& piece : cut(request(true, Way::direct, false, 0, 0, 4 * kPiece), kPiece, kSlot)) {
    CHECK(piece.way == Way::direct && piece.end - piece.begin == kPiece);
  }
}
