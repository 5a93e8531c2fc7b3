// Parts of frames: lent, given back and joined again, against what memory itself holds.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "arena/frames.hpp"
#include "arena/tails.hpp"
#include "check.hpp"

using namespace penstock;
using penstock::test::Random;

namespace {

constexpr std::size_t kHomes = 8;
constexpr auto kG = kGrainBytes;
constexpr auto kC = kChunkBytes;

// Chunks of addresses without memory, for tails.
struct Places {
  explicit Places(std::size_t count) : size_bytes((count + 1) * kC), mapping(map_scratch(size_bytes)) {
    base = mapping + (kC - reinterpret_cast<std::uintptr_t>(mapping) % kC) % kC;
    CHECK(map_nothing(base, count * kC));
  }
  ~Places() { munmap(mapping, size_bytes); }
  char* operator[](std::size_t i) const { return base + i * kC; }
  std::size_t size_bytes;
  char *mapping, *base;
};

void add_frame(Tails& tails) {
  auto* home = tails.vacant_home();
  CHECK(home != nullptr);
  CHECK(map_fresh(home, kC));
  std::memset(home, 'h', kC);
  CHECK(tails.add_frame());
}

}  // namespace

TEST(parts_of_a_frame_join_again) {
  Tails tails(kHomes);
  const Places places(3);
  CHECK(!tails.lend(places[0], kG));
  add_frame(tails);
  CHECK(tails.lend(places[0], 40 * kG));
  CHECK(!tails.lend(places[1], 40 * kG));
  CHECK(tails.lend(places[1], 24 * kG));
  CHECK_EQUAL(tails.free_bytes(), 0u);
  CHECK_EQUAL(tails.held_bytes(), kC);
  CHECK(std::all_of(places[0], places[0] + 40 * kG, [](char byte) { return byte == 'h'; }));
  std::memset(places[1], 'b', 24 * kG);
  CHECK(map_nothing(places[2], kC));
  CHECK(tails.move(places[1], places[2]));
  CHECK(!tails.has(places[1]) && tails.has(places[2]));
  CHECK_EQUAL(places[2][24 * kG - 1], 'b');
  tails.give_back(places[0]);
  CHECK_EQUAL(tails.whole_frames(), 0u);
  tails.give_back(places[2]);
  CHECK_EQUAL(tails.whole_frames(), 1u);
  CHECK(tails.take_frame(places[0]));
  CHECK_EQUAL(places[0][0], 'h');
  CHECK_EQUAL(places[0][kC - 1], 'b');
  CHECK_EQUAL(tails.held_bytes(), 0u);
}

TEST(a_tail_is_gathered_from_what_is_free) {
  Tails tails(kHomes);
  const Places places(4);
  add_frame(tails);
  CHECK(tails.lend(places[0], 10 * kG));
  CHECK(tails.lend(places[1], 10 * kG));
  CHECK(tails.lend(places[2], 40 * kG));
  tails.give_back(places[0]);
  CHECK(!tails.lend(places[3], 12 * kG));
  CHECK(tails.gather(places[3], 20 * kG));  // 10 from the beginning, 4 from the end, 6 from the system
  CHECK_EQUAL(tails.held_bytes(), kC + 6 * kG);
  std::memset(places[3], 'g', 20 * kG);
  tails.give_back(places[3]);
  CHECK_EQUAL(tails.free_bytes(), 20 * kG);
  CHECK_EQUAL(tails.purge(kC, true), 20 * kG);
  CHECK_EQUAL(tails.held_bytes(), 50 * kG);
  tails.drop(places[1]);
  CHECK_EQUAL(tails.held_bytes(), 40 * kG);
}

TEST(random_tails_keep_their_bytes_and_the_counts) {
  Random random(5);
  Frames frames(64 * kC);
  std::map<std::size_t, std::pair<std::size_t, char>> blocks;  // chunk: size, content
  std::size_t live = 0, most = 0;
  for (int step = 0; step < 1500; ++step) {
    const auto chunk = random(0, 15) * 4;
    const auto found = blocks.find(chunk);
    auto* start = frames.base() + chunk * kC;
    if (found == blocks.end()) {
      const auto size = random(1, 3 * 64) * kG;
      const auto before = frames.held_bytes(), growth = frames.block_growth_bytes(chunk * kC, size);
      CHECK(frames.occupy_block(chunk * kC, size, random(0, 1) == 0));
      CHECK(frames.held_bytes() >= before + growth);
      CHECK(frames.held_bytes() <= before + round_up(growth, kC));
      const auto content = static_cast<char>(random(1, 100));
      for (std::size_t i = 0; i < size; i += 512) start[i] = content;
      blocks[chunk] = {size, content};
      live += size;
    } else {
      const auto [size, content] = found->second;
      for (std::size_t i = 0; i < size; i += 512) CHECK_EQUAL(start[i], content);
      const auto action = random(0, 4);
      if (action == 0) {
        frames.discard_block(chunk * kC, size);
        frames.vacate_block(chunk * kC, size);
      } else if (action == 1) {
        CHECK(protect(start, size, PROT_NONE));
        frames.withdraw_block(chunk * kC, size, std::nullopt);
        frames.vacate_block(chunk * kC, size);
      } else {
        frames.vacate_block(chunk * kC, size);
      }
      blocks.erase(found);
      live -= size;
      if (random(0, 9) == 0) frames.purge_grains(random(1, 64) * kG);
    }
    CHECK_EQUAL(frames.held_bytes() - frames.free_bytes(), live);
    most = std::max(most, live);
  }
  CHECK(frames.held_bytes() <= most + 8 * kC);
  for (const auto& [chunk, block] : blocks) frames.vacate_block(chunk * kC, block.first);
  frames.purge(64 * kC);
  CHECK_EQUAL(frames.held_bytes(), 0u);
}
