// However a request is cut: its bytes are moved once each, and no others but where that is allowed.
#include "check.hpp"
#include "io/pieces.hpp"

using namespace penstock;

namespace {

constexpr std::uint64_t kAlignment = 8, kPiece = 32, kSlot = 16;

Transfer request(bool write, Method method, bool padded, std::uint64_t offset, std::uintptr_t address,
                std::uint64_t size) {
  return {1, write, method, padded, {3, 4, kAlignment}, offset, reinterpret_cast<std::byte*>(address), size};
}

void check_pieces(const Transfer& asked) {
  const auto begin = asked.offset, end = asked.offset + asked.size_bytes;
  auto reached = begin;
  for (const auto& piece : cut(asked, kPiece, kSlot)) {
    CHECK(piece.data_begin == reached && piece.data_end > reached);
    reached = piece.data_end;
    CHECK(piece.begin <= piece.data_begin && piece.data_end <= piece.end);
    CHECK(piece.end - piece.begin <= (piece.method == Method::staged ? kSlot : kPiece));
    if (piece.method == Method::buffered) {
      CHECK(piece.begin == piece.data_begin && piece.end == piece.data_end);
      continue;
    }
    CHECK(piece.begin % kAlignment == 0 && piece.end % kAlignment == 0);
    CHECK(piece.data_begin - piece.begin < kAlignment && piece.end - piece.data_end < kAlignment);
    const bool odd = piece.begin != piece.data_begin || piece.end != piece.data_end;
    CHECK(!odd || piece.method == Method::staged);
    CHECK(!odd || !asked.write || asked.padded);
    if (piece.method == Method::direct) {
      const auto address = reinterpret_cast<std::uintptr_t>(asked.address) + (piece.begin - begin);
      CHECK(asked.method == Method::direct && address % kAlignment == 0);
    }
  }
  CHECK(reached == end);
}

}  // namespace

TEST(every_byte_is_moved_once) {
  for (const bool write : {false, true}) {
    for (const auto method : {Method::direct, Method::staged, Method::buffered}) {
      for (const bool padded : {false, true}) {
        for (std::uint64_t offset = 0; offset < 2 * kAlignment; ++offset) {
          for (std::uintptr_t address = 0; address < kAlignment; ++address) {
            for (std::uint64_t size = 1; size < 3 * kPiece; ++size) {
              auto asked = request(write, method, padded, offset, address, size);
              check_pieces(asked);
              asked.target.direct = -1;
              check_pieces(asked);
            }
          }
        }
      }
    }
  }
}

TEST(bounds_that_are_no_multiple_of_the_alignment_are_rounded) {
  for (const auto method : {Method::direct, Method::staged}) {
    for (const auto& piece : cut(request(true, method, true, 0, 0, 4 * kPiece), kPiece + 3, kSlot + 5)) {
      CHECK(piece.begin % kAlignment == 0 && piece.end % kAlignment == 0);
      CHECK(piece.end - piece.begin <= (method == Method::staged ? kSlot : kPiece));
    }
  }
}

TEST(no_request_is_cut_more_often_than_its_size_wants) {
  constexpr std::uint64_t piece = 4 << 20;
  for (const std::uint64_t offset : {0, 1, 3, 5, 7}) {
    CHECK_EQUAL(cut(request(true, Method::direct, true, offset << 20, 0, 3 << 20), piece, kSlot).size(), 1u);
    CHECK_EQUAL(cut(request(true, Method::direct, true, offset << 20, 0, 12 << 20), piece, kSlot).size(), 3u);
  }
}

TEST(what_is_aligned_goes_straight_to_the_disk) {
  for (const auto& piece : cut(request(true, Method::direct, false, 0, 0, 4 * kPiece), kPiece, kSlot)) {
    CHECK(piece.method == Method::direct && piece.end - piece.begin == kPiece);
  }
}

TEST(writes_to_a_namespace_are_staged_where_they_are_to_be) {
  auto asked = request(true, Method::staged, true, 3 * kAlignment, 0, 4 * kPiece + 1);
  asked.target = {-1, kFirstNamespace, kAlignment};
  check_pieces(asked);
  for (const auto& piece : cut(asked, kPiece, kSlot)) CHECK(piece.method == Method::staged);
  asked.write = false;
  for (const auto& piece : cut(asked, kPiece, kSlot)) CHECK(piece.method == Method::direct);
}
