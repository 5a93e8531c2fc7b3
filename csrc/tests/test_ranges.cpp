// Free ranges against a map of every unit: disjoint, joined, and the same in both orders.
#include "check.hpp"
#include "arena/ranges.hpp"

using penstock::Ranges;
using penstock::test::Random;

namespace {

constexpr std::size_t kUnits = 200;

void check_agrees(const Ranges& ranges, const std::vector<bool>& free) {
  std::vector<bool> found(free.size());
  std::size_t last_end = 0;
  bool first = true;
  for (const auto& [offset, size] : ranges.by_offset()) {
    CHECK(size > 0);
    CHECK(first || offset > last_end);  // a gap: neighbours would have been joined
    CHECK(ranges.by_size().count({size, offset}) == 1);
    for (auto i = offset; i < offset + size; ++i) found[i] = true;
    last_end = offset + size;
    first = false;
  }
  CHECK(found == free);
  CHECK_EQUAL(ranges.by_size().size(), ranges.by_offset().size());
}

}  // namespace

TEST(neighbours_are_joined_on_both_sides) {
  Ranges ranges;
  ranges.give(0, 10);
  ranges.give(20, 10);
  CHECK_EQUAL(ranges.by_offset().size(), 2u);
  ranges.give(10, 10);
  CHECK_EQUAL(ranges.by_offset().size(), 1u);
  CHECK(*ranges.by_size().begin() == Ranges::Range(30, 0));
}

TEST(a_range_is_taken_from_the_middle_the_ends_or_whole) {
  Ranges ranges;
  ranges.give(0, 30);
  ranges.take(10, 10);
  CHECK(ranges.by_offset() == (Ranges::ByOffset{{0, 10}, {20, 10}}));
  ranges.take(0, 4);
  ranges.take(26, 4);
  CHECK(ranges.by_offset() == (Ranges::ByOffset{{4, 6}, {20, 6}}));
  ranges.take(4, 6);
  CHECK(ranges.by_offset() == (Ranges::ByOffset{{20, 6}}));
}

TEST(random_gives_and_takes_agree_with_a_map_of_every_unit) {
  Random random(1);
  for (int round = 0; round < 20; ++round) {
    Ranges ranges;
    std::vector<bool> free(kUnits);
    for (int step = 0; step < 300; ++step) {
      const auto start = random(0, kUnits - 1);
      auto end = start;  // a stretch of units that are all free, or all taken
      const auto longest = start + random(1, 20);
      while (end < kUnits && end < longest && free[end] == free[start]) ++end;
      if (free[start])
        ranges.take(start, end - start);
      else
        ranges.give(start, end - start);
      const bool now_free = !free[start];
      for (auto i = start; i < end; ++i) free[i] = now_free;
      check_agrees(ranges, free);
    }
  }
}
