// The arena as torch would use it: blocks that keep their bytes, and memory that goes back to the system.
#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <thread>
#include <tuple>
#include <utility>

#include "arena/arena.hpp"
#include "check.hpp"

using namespace penstock;
using penstock::test::Random;

namespace {

constexpr std::size_t kReserveBytes = std::size_t{512} << 20;
constexpr std::size_t kMiB = std::size_t{1} << 20;

void* allocate(Arena& arena, std::size_t size_bytes) {
  void* address = nullptr;
  CHECK(arena.allocate(size_bytes, &address) == Arena::Outcome::kDone);
  return address;
}

// Random blocks, each full of a byte of its own from end to end, until all are released.
void use(Arena& arena, unsigned seed, int steps) {
  Random random(seed);
  std::map<char*, std::pair<std::size_t, char>> blocks;
  const auto release = [&](auto block) {
    const auto [address, content] = *block;
    const auto [size, byte] = content;
    CHECK(std::all_of(address, address + size, [byte = byte](char found) { return found == byte; }));
    CHECK(arena.release(address));
    blocks.erase(block);
  };
  for (int step = 0; step < steps; ++step) {
    if (blocks.size() == 12 || (!blocks.empty() && random(0, 2) == 0))
      release(std::next(blocks.begin(), static_cast<std::ptrdiff_t>(random(0, blocks.size() - 1))));
    const auto size = random(0, 3) == 0 ? random(0, 2 * kMiB) : random(0, 50'000);
    auto* address = static_cast<char*>(allocate(arena, size));
    CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(address) % kPageBytes, 0u);
    const auto byte = static_cast<char>(random(1, 100));
    std::memset(address, byte, size);
    blocks.emplace(address, std::pair(size, byte));
  }
  while (!blocks.empty()) release(blocks.begin());
}

}  // namespace

TEST(blocks_keep_their_bytes_whatever_the_limit) {
  for (const std::size_t limit : {std::size_t{0}, 8 * kMiB, std::size_t{1} << 40}) {
    Arena arena(kReserveBytes);
    arena.set_limits(limit, kUnlimited);
    use(arena, 1, 300);
    CHECK_EQUAL(arena.stats().in_use_bytes, 0u);
    CHECK(arena.stats().peak_new_bytes > 0);
  }
}

TEST(what_was_there_before_is_no_part_of_the_new_peak) {
  Arena arena(kReserveBytes);
  auto* before = allocate(arena, 3 * kMiB);
  arena.reset_peak();
  auto* workspace = allocate(arena, 2 * kMiB);
  auto* result = allocate(arena, kMiB);
  arena.release(workspace);
  arena.release(before);
  CHECK_EQUAL(arena.stats().new_bytes, kMiB);
  CHECK_EQUAL(arena.stats().peak_new_bytes, 3 * kMiB);
  CHECK_EQUAL(arena.stats().in_use_bytes, kMiB);
  arena.reset_peak();
  arena.release(result);
  CHECK_EQUAL(arena.stats().new_bytes, 0u);
  CHECK_EQUAL(arena.stats().peak_new_bytes, 0u);
}

TEST(a_kernel_is_told_how_much_it_had_at_once) {
  Arena arena(kReserveBytes);
  auto* used = allocate(arena, 2 * kMiB);
  allocate(arena, 8 * kMiB);
  const std::uintptr_t addresses[] = {reinterpret_cast<std::uintptr_t>(used), reinterpret_cast<std::uintptr_t>(used) + 1};
  std::size_t out = 0;
  arena.touch(addresses, &out);
  auto* workspace = allocate(arena, 3 * kMiB);
  arena.release(workspace);
  allocate(arena, kMiB);
  CHECK_EQUAL(arena.kernel_over(), 5 * kMiB);
  allocate(arena, kMiB);
  arena.touch(std::span(addresses).first(1), &out);
  arena.release(used);
  CHECK_EQUAL(arena.kernel_over(), 2 * kMiB);
}

TEST(threads_share_an_arena) {
  Arena arena(kReserveBytes);
  arena.set_limits(16 * kMiB, kUnlimited);
  std::vector<std::thread> threads;
  std::vector<std::string> failures(3);
  for (unsigned i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      try {
        use(arena, 10 + i, 100);
      } catch (const std::exception& error) {
        failures[i] = error.what();
      }
    });
  }
  for (int i = 0; i < 200; ++i) {  // what other threads ask meanwhile
    arena.stats();
    arena.trim();
    arena.reset_peak();
    arena.set_limits((i % 2 == 0 ? 1 : 64) * kMiB, kUnlimited);
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) CHECK_EQUAL(failure, "");
  CHECK_EQUAL(arena.stats().in_use_bytes, 0u);
}

TEST(free_memory_goes_back_when_the_limit_asks) {
  Arena arena(kReserveBytes);
  auto* kept = allocate(arena, 10 * kMiB);
  auto* released = allocate(arena, 20 * kMiB);
  CHECK(arena.stats().resident_bytes >= 30 * kMiB);
  CHECK(arena.release(released));
  CHECK(arena.stats().resident_bytes >= 30 * kMiB);
  arena.set_limits(16 * kMiB, kUnlimited);
  CHECK(arena.stats().resident_bytes <= 16 * kMiB);
  arena.trim();
  CHECK(arena.stats().resident_bytes == 10 * kMiB);
  CHECK(arena.stats().purged_bytes >= 18 * kMiB);
  CHECK(arena.release(kept));
  arena.trim();
  CHECK_EQUAL(arena.stats().resident_bytes, 0u);
}

TEST(a_limit_below_what_is_in_use_fails_nothing_and_is_reported) {
  Arena arena(kReserveBytes);
  arena.set_limits(4 * kMiB, kUnlimited);
  auto* block = allocate(arena, 10 * kMiB);
  CHECK(arena.stats().over_limit_bytes >= 6 * kMiB);
  CHECK(arena.release(block));
  arena.trim();
  arena.reset_peak();
  CHECK_EQUAL(arena.stats().over_limit_bytes, 0u);
  CHECK_EQUAL(arena.stats().peak_resident_bytes, 0u);
}

TEST(large_blocks_have_addresses_of_their_own_and_smaller_ones_share) {
  Arena arena(kReserveBytes);
  auto* first = static_cast<char*>(allocate(arena, 3 * kMiB));
  auto* second = static_cast<char*>(allocate(arena, kMiB / 4));
  CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(first) % kChunkBytes, 0u);
  CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(second) % kChunkBytes, 0u);
  auto* third = static_cast<char*>(allocate(arena, kMiB / 8));
  CHECK(allocate(arena, kMiB / 8) == third + kMiB / 8);
}

TEST(memory_is_what_blocks_need_not_whole_huge_pages) {
  Arena arena(kReserveBytes);
  if (!arena.paging_problem().empty()) return;
  std::vector<void*> blocks;
  std::size_t requested = 0;
  for (int i = 0; i < 10; ++i) {
    for (const auto size : {kMiB, 3 * kMiB, kMiB / 2, kMiB + 20'000}) {
      blocks.push_back(allocate(arena, size));
      std::memset(blocks.back(), 'x', size);
      requested += size;
    }
  }
  CHECK(arena.stats().resident_bytes <= requested + requested / 50 + 2 * kMiB);
  for (std::size_t i = 1; i < blocks.size(); i += 2) CHECK(arena.release(blocks[i]));
  const auto held = arena.stats().resident_bytes;
  for (int i = 0; i < 10; ++i) std::memset(allocate(arena, 3 * kMiB + 500'000), 'y', 3 * kMiB + 500'000);
  CHECK(arena.stats().resident_bytes <= held + 8 * kMiB);  // of the 40 MiB that were free
  arena.trim();
  CHECK(arena.stats().resident_bytes <= 56 * kMiB);
}

TEST(free_memory_moves_to_where_it_is_needed) {
  Arena arena(kReserveBytes);
  if (!arena.paging_problem().empty()) return;
  std::vector<void*> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(allocate(arena, 2 * kMiB));
  for (int i = 0; i < 16; i += 2) CHECK(arena.release(blocks[static_cast<std::size_t>(i)]));
  auto* scattered = static_cast<char*>(allocate(arena, 16 * kMiB));
  std::memset(scattered, 'x', 16 * kMiB);
  CHECK_EQUAL(arena.stats().peak_resident_bytes, 32 * kMiB);
}

TEST(a_block_is_found_by_every_address_inside_it) {
  Arena arena(kReserveBytes);
  auto* first = static_cast<char*>(allocate(arena, 5000));
  auto* second = static_cast<char*>(allocate(arena, 3 * kMiB));
  using Block = std::tuple<char*, std::size_t, unsigned>;
  for (const auto& [start, size, serial] : {Block(first, 8192, 1), Block(second, 3 * kMiB, 2)}) {
    for (const auto* inside : {start, start + 1, start + size - 1}) {
      const auto block = arena.block(inside);
      CHECK(block.has_value());
      CHECK_EQUAL(block->start, reinterpret_cast<std::uintptr_t>(start));
      CHECK_EQUAL(block->capacity_bytes, size);
      CHECK_EQUAL(block->serial, serial);
    }
    CHECK(!arena.block(start + size).has_value());
  }
  int outside = 0;
  CHECK(!arena.contains(&outside));
  CHECK(!arena.block(&outside).has_value());
}

TEST(what_is_not_a_block_is_not_released) {
  Arena arena(kReserveBytes);
  auto* block = static_cast<char*>(allocate(arena, 9000));
  CHECK(!arena.release(block + 4096));
  CHECK(arena.release(block));
  CHECK(!arena.release(block));
}

TEST(a_full_arena_says_so_and_serves_again_after_a_release) {
  Arena arena(16 * kChunkBytes);
  void* address = nullptr;
  CHECK(arena.allocate(17 * kChunkBytes, &address) == Arena::Outcome::kNoAddresses);
  auto* block = allocate(arena, 14 * kChunkBytes);
  CHECK(arena.allocate(kChunkBytes, &address) == Arena::Outcome::kNoAddresses);
  CHECK(arena.release(block));
  CHECK(arena.release(allocate(arena, 14 * kChunkBytes)));
}
