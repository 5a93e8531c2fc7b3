// Frames against a model of what is framed, and against what memory itself holds.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "arena/frames.hpp"
#include "check.hpp"

using namespace penstock;
using penstock::test::Random;

namespace {

constexpr std::size_t kChunks = 16;
constexpr auto kC = kChunkBytes;

std::size_t framed(const Frames& frames) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < frames.size_bytes() / kC; ++i) count += frames.framed(i);
  return count * kC;
}

}  // namespace

TEST(chunks_start_at_a_huge_page) {
  const Frames frames(kChunks * kC);
  CHECK(frames.base() != nullptr);
  CHECK_EQUAL(frames.size_bytes(), kChunks * kC);
  CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(frames.base()) % kC, 0u);
  CHECK_EQUAL(frames.held_bytes(), 0u);
}

TEST(too_few_chunks_are_none) { CHECK(Frames(3 * kC).base() == nullptr); }

TEST(addresses_that_the_system_refuses_are_halved) {
  const Frames frames(std::size_t{1} << 60);  // more than any address space
  CHECK(frames.base() != nullptr);
  CHECK(frames.size_bytes() < std::size_t{1} << 60);
}

TEST(occupied_memory_can_be_written_and_counts_whole_chunks) {
  Frames frames(kChunks * kC);
  CHECK_EQUAL(frames.growth_bytes(kC - kPageBytes, 2 * kPageBytes), 2 * kC);
  CHECK(frames.occupy(kC - kPageBytes, 2 * kPageBytes));
  for (std::size_t i = 0; i < 2 * kPageBytes; ++i) frames.base()[kC - kPageBytes + i] = 'x';
  CHECK_EQUAL(frames.held_bytes(), 2 * kC);
  CHECK(frames.live(0) && frames.live(1) && !frames.live(2));
  CHECK_EQUAL(frames.growth_bytes(0, 3 * kC), kC);
}

TEST(a_purged_chunk_has_no_memory_and_can_be_occupied_again) {
  Frames frames(kChunks * kC);
  CHECK(frames.occupy(0, 3 * kC));
  for (std::size_t i = 0; i < 3; ++i) frames.base()[i * kC] = 'x';
  frames.vacate(0, 3 * kC);
  CHECK_EQUAL(frames.free_bytes(), 3 * kC);
  CHECK_EQUAL(frames.purge(1), kC);  // the highest goes first
  CHECK(frames.framed(0) && frames.framed(1) && !frames.framed(2));
  CHECK_EQUAL(frames.base()[kC], 'x');
  CHECK(frames.occupy(2 * kC, kC));
  CHECK_EQUAL(frames.purge(9 * kC), 1 * kC);
  CHECK_EQUAL(frames.held_bytes(), kC);
  frames.base()[2 * kC] = 'y';
}

TEST(free_frames_move_to_where_they_are_needed_unless_they_must_not) {
  for (const bool move : {true, false}) {
    Frames frames(kChunks * kC, move);
    CHECK(frames.occupy(0, 2 * kC));
    frames.base()[0] = 'x';
    frames.vacate(0, 2 * kC);
    CHECK_EQUAL(frames.growth_bytes(4 * kC, 3 * kC), (move ? 1 : 3) * kC);
    CHECK(frames.occupy(4 * kC, 3 * kC));
    CHECK_EQUAL(frames.held_bytes(), (move ? 3 : 5) * kC);
    for (std::size_t i = 4 * kC; i < 7 * kC; ++i) frames.base()[i] = 'z';
  }
}

TEST(withdrawn_frames_come_back_with_the_bytes_written_meanwhile) {
  Frames frames(kChunks * kC);
  CHECK(frames.occupy(0, 2 * kC));
  for (std::size_t i = 0; i < 2 * kC; ++i) frames.base()[i] = 'a';
  CHECK(protect(frames.base(), 2 * kC, PROT_NONE));
  frames.withdraw_block(0, 2 * kC, 8 * kC);
  CHECK(frames.live(0) && !frames.framed(0) && frames.framed(8));
  CHECK_EQUAL(frames.held_bytes(), 2 * kC);
  CHECK_EQUAL(frames.free_bytes(), 2 * kC);
  CHECK(frames.occupy(8 * kC, 2 * kC));
  for (std::size_t i = 0; i < 2 * kC; ++i) frames.base()[8 * kC + i] = 'b';
  CHECK(frames.transfer_block(8 * kC, 0, 2 * kC));
  CHECK(frames.framed(0) && !frames.framed(8));
  CHECK(std::all_of(frames.base(), frames.base() + 2 * kC, [](char byte) { return byte == 'b'; }));
}

TEST(random_use_keeps_the_counts) {
  Random random(1);
  Frames frames(kChunks * kC);
  constexpr auto kPages = kChunks * kC / kPageBytes;
  std::vector<int> live(kPages);
  std::vector<std::pair<std::size_t, std::size_t>> blocks;
  for (int step = 0; step < 2000; ++step) {
    const auto first = random(0, kPages - 1), count = random(1, std::min<std::size_t>(kPages - first, 900));
    bool vacant = true;
    for (auto i = first; i < first + count; ++i) vacant = vacant && live[i] == 0;
    if (vacant) {
      const auto growth = frames.growth_bytes(first * kPageBytes, count * kPageBytes);
      const auto before = frames.held_bytes();
      CHECK(frames.occupy(first * kPageBytes, count * kPageBytes));
      CHECK_EQUAL(frames.held_bytes(), before + growth);
      for (auto i = first; i < first + count; ++i) {
        live[i] = 1;
        frames.base()[i * kPageBytes] = 'x';
      }
      blocks.emplace_back(first, count);
    } else if (!blocks.empty()) {
      const auto chosen = random(0, blocks.size() - 1);
      const auto [start, size] = blocks[chosen];
      frames.vacate(start * kPageBytes, size * kPageBytes);
      const auto before = frames.held_bytes();
      const auto purged = frames.purge(random(0, 3) * kC);
      CHECK_EQUAL(frames.held_bytes(), before - purged);
      for (auto i = start; i < start + size; ++i) live[i] = 0;
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(chosen));
    }
    CHECK_EQUAL(framed(frames), frames.held_bytes());
    std::size_t free_bytes = 0;
    for (std::size_t i = 0; i < kChunks; ++i) {
      bool any = false;
      for (std::size_t page = 0; page < kC / kPageBytes; ++page) any = any || live[i * kC / kPageBytes + page] != 0;
      CHECK_EQUAL(frames.live(i), any);
      CHECK(frames.framed(i) || !any);
      free_bytes += frames.framed(i) && !any ? kC : 0;
    }
    CHECK_EQUAL(frames.free_bytes(), free_bytes);
  }
}
