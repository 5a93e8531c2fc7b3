// Chunks against a model of what is touched, and against what memory itself holds.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "check.hpp"
#include "chunks.hpp"

using namespace penstock;
using penstock::test::Random;

namespace {

constexpr std::size_t kChunks = 16;

std::size_t touched(const Chunks& chunks) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < chunks.size_bytes() / kChunkBytes; ++i) count += chunks.touched(i);
  return count * kChunkBytes;
}

}  // namespace

TEST(chunks_start_at_a_huge_page) {
  const Chunks chunks(kChunks * kChunkBytes);
  CHECK(chunks.base() != nullptr);
  CHECK_EQUAL(chunks.size_bytes(), kChunks * kChunkBytes);
  CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(chunks.base()) % kChunkBytes, 0u);
  CHECK_EQUAL(chunks.touched_bytes(), 0u);
}

TEST(too_few_chunks_are_none) { CHECK(Chunks(3 * kChunkBytes).base() == nullptr); }

TEST(addresses_that_the_system_refuses_are_halved) {
  const Chunks chunks(std::size_t{1} << 60);  // more than any address space
  CHECK(chunks.base() != nullptr);
  CHECK(chunks.size_bytes() < std::size_t{1} << 60);
}

TEST(occupied_memory_can_be_written_and_counts_whole_chunks) {
  Chunks chunks(kChunks * kChunkBytes);
  CHECK_EQUAL(chunks.untouched_bytes(kChunkBytes - kPageBytes, 2 * kPageBytes), 2 * kChunkBytes);
  CHECK(chunks.occupy(kChunkBytes - kPageBytes, 2 * kPageBytes));
  for (std::size_t i = 0; i < 2 * kPageBytes; ++i) chunks.base()[kChunkBytes - kPageBytes + i] = 'x';
  CHECK_EQUAL(chunks.touched_bytes(), 2 * kChunkBytes);
  CHECK(chunks.live(0) && chunks.live(1) && !chunks.live(2));
  CHECK_EQUAL(chunks.untouched_bytes(0, 3 * kChunkBytes), kChunkBytes);
}

TEST(a_purged_chunk_reads_zero_and_a_kept_one_its_bytes) {
  Chunks chunks(kChunks * kChunkBytes);
  CHECK(chunks.occupy(0, 3 * kChunkBytes));
  for (std::size_t i = 0; i < 3; ++i) chunks.base()[i * kChunkBytes] = 'x';
  chunks.vacate(0, 3 * kChunkBytes);
  CHECK_EQUAL(chunks.purge(0, 3 * kChunkBytes, 1), kChunkBytes);  // the highest goes first
  CHECK(chunks.touched(0) && chunks.touched(1) && !chunks.touched(2));
  CHECK_EQUAL(chunks.base()[kChunkBytes], 'x');
  CHECK_EQUAL(chunks.base()[2 * kChunkBytes], '\0');
  CHECK_EQUAL(chunks.purge(kPageBytes, 3 * kChunkBytes - kPageBytes, 9 * kChunkBytes), kChunkBytes);
  CHECK_EQUAL(chunks.base()[0], 'x');  // not wholly in the range
  CHECK_EQUAL(chunks.touched_bytes(), kChunkBytes);
}

TEST(decommitted_memory_can_be_occupied_again) {
  Chunks chunks(kChunks * kChunkBytes);
  CHECK(chunks.occupy(0, 4 * kChunkBytes));
  chunks.vacate(0, 4 * kChunkBytes);
  CHECK_EQUAL(chunks.purge(0, kChunkBytes, kChunkBytes), kChunkBytes);
  CHECK_EQUAL(chunks.decommit(0, 4 * kChunkBytes), 3 * kChunkBytes);
  CHECK_EQUAL(chunks.touched_bytes(), 0u);
  CHECK(chunks.occupy(kChunkBytes, 2 * kChunkBytes));
  chunks.base()[kChunkBytes] = 'x';
  chunks.base()[3 * kChunkBytes - 1] = 'y';
}

TEST(random_use_keeps_the_counts) {
  Random random(1);
  Chunks chunks(kChunks * kChunkBytes);
  constexpr auto kPages = kChunks * kChunkBytes / kPageBytes;
  std::vector<int> live(kPages);
  std::vector<std::pair<std::size_t, std::size_t>> blocks;
  for (int step = 0; step < 2000; ++step) {
    const auto first = random(0, kPages - 1), count = random(1, std::min<std::size_t>(kPages - first, 900));
    bool vacant = true;
    for (auto i = first; i < first + count; ++i) vacant = vacant && live[i] == 0;
    if (vacant) {
      const auto growth = chunks.untouched_bytes(first * kPageBytes, count * kPageBytes);
      const auto before = chunks.touched_bytes();
      CHECK(chunks.occupy(first * kPageBytes, count * kPageBytes));
      CHECK_EQUAL(chunks.touched_bytes(), before + growth);
      for (auto i = first; i < first + count; ++i) live[i] = 1;
      blocks.emplace_back(first, count);
    } else if (!blocks.empty()) {
      const auto chosen = random(0, blocks.size() - 1);
      const auto [start, size] = blocks[chosen];
      chunks.vacate(start * kPageBytes, size * kPageBytes);
      const auto before = chunks.touched_bytes();
      const auto purged = chunks.purge(start * kPageBytes, size * kPageBytes, random(0, 3) * kChunkBytes);
      CHECK_EQUAL(chunks.touched_bytes(), before - purged);
      for (auto i = start; i < start + size; ++i) live[i] = 0;
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(chosen));
    }
    CHECK_EQUAL(touched(chunks), chunks.touched_bytes());
    for (std::size_t i = 0; i < kChunks; ++i) {
      bool any = false;
      for (std::size_t page = 0; page < kChunkBytes / kPageBytes; ++page)
        any = any || live[i * kChunkBytes / kPageBytes + page] != 0;
      CHECK_EQUAL(chunks.live(i), any);
      CHECK(chunks.touched(i) || !any);
    }
  }
}
