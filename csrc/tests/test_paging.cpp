// Blocks that leave memory and come back: by hand, by the budget and by accesses that nobody planned.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <atomic>
#include <map>
#include <thread>

#include "arena/arena.hpp"
#include "arena/faults.hpp"
#include "check.hpp"
#include "codecs/bitmask.hpp"

using namespace penstock;
using penstock::test::Random;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kReserveBytes = std::size_t{2} << 30;

class UnnamedFile {
 public:
  UnnamedFile() {
    char path[] = "/tmp/penstock_paging_XXXXXX";
    number_ = mkstemp(path);
    unlink(path);
  }
  UnnamedFile(const UnnamedFile&) = delete;
  UnnamedFile& operator=(const UnnamedFile&) = delete;
  ~UnnamedFile() { close(number_); }
  operator int() const { return number_; }

 private:
  int number_;
};

// From here on what exceeds the budget goes to the file.
void swap_to(Arena& arena, int file, std::size_t budget_bytes) {
  CHECK(arena.set_swap_file(-1, file, std::size_t{1} << 30));
  arena.set_limits(kUnlimited, budget_bytes);
}

char* allocate(Arena& arena, std::size_t size_bytes) {
  void* address = nullptr;
  CHECK(arena.allocate(size_bytes, &address) == Arena::Outcome::kDone);
  return static_cast<char*>(address);
}

void fill(char* block, std::size_t size_bytes, unsigned seed) {
  for (std::size_t i = 0; i < size_bytes; i += 64) block[i] = static_cast<char>(seed + i / 64 * 7);
}

bool holds(const char* block, std::size_t size_bytes, unsigned seed) {
  for (std::size_t i = 0; i < size_bytes; i += 64)
    if (block[i] != static_cast<char>(seed + i / 64 * 7)) return false;
  return true;
}

Arena::State state(Arena& arena, char* block) {
  Arena::State found{};
  CHECK(arena.state(block, &found) == Arena::Answer::kYes);
  return found;
}

// As a careful program would: guard, write, leave.
bool leave(Arena& arena, char* block, std::size_t size_bytes, int file, std::uint64_t offset) {
  CHECK(arena.guard(block) == Arena::Answer::kYes);
  CHECK_EQUAL(write_fully(-1, file, block, size_bytes, offset), 0);
  int error = 0;
  return arena.leave(block, {{file, offset, 0, size_bytes}}, &error) == Arena::Answer::kYes;
}

bool come_back(Arena& arena, char* block, std::size_t size_bytes, int file, std::uint64_t offset) {
  char* staging = nullptr;
  if (arena.stage(block, false, &staging) != Arena::Answer::kYes) return false;
  CHECK_EQUAL(read_segments({{file, offset, 0, size_bytes}}, -1, file, staging, nullptr), 0);
  int error = 0;
  return arena.arrive(staging, true, &error) == Arena::Answer::kYes;
}

// One for the whole process: the handler serves it for good.
Arena& served_arena() {
  static auto* arena = new Arena(kReserveBytes);
  CHECK(serve_faults(*arena));
  return *arena;
}

}  // namespace

TEST(bytes_leave_and_come_back_at_their_address) {
  Arena arena(kReserveBytes);
  const UnnamedFile file;
  for (const std::size_t size : {std::size_t{4096}, std::size_t{5000}, 700'001 * std::size_t{1}, kMiB, 3 * kMiB + 5,
                                 16 * kMiB, 64 * kMiB}) {
    auto* block = allocate(arena, size);
    fill(block, size, 3);
    CHECK(leave(arena, block, size, file, 0));
    CHECK(state(arena, block) == Arena::State::kOut);
    CHECK_EQUAL(arena.stats().in_memory_bytes, 0u);
    CHECK_EQUAL(arena.stats().out_bytes, size);
    auto* other = allocate(arena, size);  // gets the memory that became free
    std::memset(other, 'x', size);
    CHECK(come_back(arena, block, size, file, 0));
    CHECK(state(arena, block) == Arena::State::kGuarded);
    CHECK(holds(block, size, 3));
    int error = 0;
    CHECK(arena.unguard(block, &error) == Arena::Answer::kYes);
    fill(block, size, 4);
    CHECK(std::all_of(other, other + size, [](char byte) { return byte == 'x'; }));
    CHECK(arena.release(block) && arena.release(other));
    CHECK_EQUAL(arena.stats().in_memory_bytes, 0u);
  }
}

TEST(what_was_written_since_guard_does_not_leave) {
  Arena arena(kReserveBytes);
  auto* block = allocate(arena, 2 * kMiB);
  int error = 0;
  CHECK(arena.leave(block, {{0, 0, 0, 2 * kMiB}}, &error) == Arena::Answer::kNo);
  CHECK(arena.guard(block) == Arena::Answer::kYes);
  CHECK(arena.written(block) == Arena::Answer::kNo);
  CHECK(arena.unguard(block, &error) == Arena::Answer::kYes);
  CHECK(arena.written(block) == Arena::Answer::kYes);
  CHECK(arena.leave(block, {{0, 0, 0, 2 * kMiB}}, &error) == Arena::Answer::kNo);
  CHECK(arena.guard(block) == Arena::Answer::kYes);
  CHECK(arena.leave(block, {{0, 0, 0, kMiB}}, &error) == Arena::Answer::kError);  // half of it
  CHECK_EQUAL(error, EINVAL);
  CHECK(arena.guard(block + kPageBytes) == Arena::Answer::kUnknown);
}

TEST(what_was_staged_for_an_older_copy_is_dropped) {
  Arena arena(kReserveBytes);
  const UnnamedFile file;
  auto* block = allocate(arena, 4 * kMiB);
  fill(block, 4 * kMiB, 1);
  CHECK(leave(arena, block, 4 * kMiB, file, 0));
  char* staging = nullptr;
  CHECK(arena.stage(block, false, &staging) == Arena::Answer::kYes);
  int error = 0;
  CHECK(arena.bring_in(block, &error) == Arena::Answer::kYes);
  CHECK(arena.unguard(block, &error) == Arena::Answer::kYes);
  fill(block, 4 * kMiB, 2);
  CHECK(leave(arena, block, 4 * kMiB, file, 4 * kMiB));
  CHECK(arena.arrive(staging, true, &error) == Arena::Answer::kNo);
  CHECK(state(arena, block) == Arena::State::kOut);
  CHECK(arena.bring_in(block, &error) == Arena::Answer::kYes);
  CHECK(holds(block, 4 * kMiB, 2));
  CHECK_EQUAL(arena.stats().in_memory_bytes, 4 * kMiB);
}

TEST(what_is_staged_gives_up_its_memory_before_an_allocation_is_refused) {
  for (const std::size_t size : {64 * kPageBytes, 3 * kMiB}) {
    Arena arena(kReserveBytes);
    const UnnamedFile file, swap;
    arena.set_limits(64 * kMiB, 2 * size);
    CHECK(arena.set_swap_file(-1, swap, 64 * kMiB));
    auto *ahead = allocate(arena, size), *used = allocate(arena, size);
    fill(ahead, size, 1);
    fill(used, size, 2);
    CHECK(leave(arena, ahead, size, file, 0));
    int error = 0;
    CHECK(arena.hold(used, 1, false, &error));
    char* staging = nullptr;
    CHECK(arena.stage(ahead, false, &staging) == Arena::Answer::kYes);
    auto* block = allocate(arena, size);
    fill(block, size, 3);
    CHECK_EQUAL(arena.stats().in_memory_bytes, 2 * size);
    CHECK_EQUAL(read_segments({{file, 0, 0, size}}, -1, file, staging, nullptr), 0);  // who reads is not disturbed
    CHECK(arena.arrive(staging, true, &error) == Arena::Answer::kAsk);
    CHECK(state(arena, ahead) == Arena::State::kOut);
    CHECK(arena.arrive(staging, true, &error) == Arena::Answer::kUnknown);
    CHECK(holds(block, size, 3) && holds(used, size, 2));
    CHECK(arena.release(block));
    CHECK(come_back(arena, ahead, size, file, 0));
    CHECK(holds(ahead, size, 1));
    CHECK_EQUAL(arena.stats().in_memory_bytes, 2 * size);
  }
}

TEST(the_budget_holds_over_random_use_and_every_byte_is_kept) {
  for (unsigned seed = 0; seed < 6; ++seed) {
    Random random(seed);
    Arena arena(kReserveBytes);
    const UnnamedFile file, swap;
    CHECK(arena.set_swap_file(-1, swap, std::size_t{1} << 30));
    const auto budget = random(20, 40) * kMiB;
    arena.set_limits(seed % 2 == 0 ? kUnlimited : 2 * budget, budget);
    struct Content {
      std::size_t size;
      unsigned seed;
      std::uint64_t at;
    };
    std::map<char*, Content> blocks;
    for (unsigned step = 0; step < 300; ++step) {
      int error = 0;
      std::size_t out = 0;
      if (blocks.size() < 12 || random(0, 2) == 0) {
        arena.touch({}, &out);
        const auto size = random(0, 1) == 0 ? random(4096, 900'000) : random(kMiB, 9 * kMiB);
        void* address = nullptr;
        CHECK(arena.allocate(size, &address) == Arena::Outcome::kDone);
        fill(static_cast<char*>(address), size, step);
        blocks[static_cast<char*>(address)] = {size, step, step * 16 * kMiB};
      } else {
        auto found = std::next(blocks.begin(), static_cast<std::ptrdiff_t>(random(0, blocks.size() - 1)));
        auto* block = found->first;
        auto& content = found->second;
        const std::uintptr_t used[] = {reinterpret_cast<std::uintptr_t>(block)};
        if (state(arena, block) == Arena::State::kOut && random(0, 1) == 0 &&
            arena.stats().swap_used_bytes == 0)
          come_back(arena, block, content.size, file, content.at);
        arena.touch(used, &out);
        CHECK(arena.bring_in(block, &error) == Arena::Answer::kYes);
        CHECK(holds(block, content.size, content.seed));
        const auto action = random(0, 3);
        if (action == 0) {
          CHECK(arena.release(block));
          blocks.erase(found);
        } else if (action == 1) {
          CHECK(arena.unguard(block, &error) == Arena::Answer::kYes);
          content.seed = step;
          fill(block, content.size, step);
        } else if (action == 2) {
          CHECK(leave(arena, block, content.size, file, content.at));
        }
      }
      CHECK(arena.stats().peak_in_memory_bytes <= budget);
    }
    arena.set_limits(kUnlimited, kUnlimited);
    for (const auto& [block, content] : blocks) {
      int error = 0;
      CHECK(arena.bring_in(block, &error) == Arena::Answer::kYes);
      CHECK(holds(block, content.size, content.seed));
      CHECK(arena.release(block));
    }
    CHECK_EQUAL(arena.stats().swap_used_bytes, 0u);
    CHECK_EQUAL(arena.stats().in_memory_bytes, 0u);
    CHECK_EQUAL(arena.stats().out_bytes, 0u);
    CHECK_EQUAL(arena.stats().over_budget_bytes, 0u);
  }
}

TEST(the_parts_of_a_divided_block_leave_one_by_one_and_end_together) {
#ifdef __SANITIZE_THREAD__
  constexpr unsigned kSeeds = 1, kSteps = 60;  // it keeps memory of its own for each address that was ever used
#else
  constexpr unsigned kSeeds = 6, kSteps = 200;
#endif
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    Random random(seed);
    Arena arena(kReserveBytes / 4);
    const UnnamedFile file, swap;
    swap_to(arena, swap, 24 * kMiB);
    struct Part {
      char* start;
      std::size_t size;
      unsigned seed;
      std::uint64_t at;
    };
    std::map<char*, std::vector<Part>> blocks;  // by their first part
    std::uint64_t at = 0;
    for (unsigned step = 0; step < kSteps; ++step) {
      std::size_t out = 0;
      int error = 0;
      arena.touch({}, &out);
      if (blocks.size() < 4 || (blocks.size() < 8 && random(0, 3) == 0)) {
        const auto size = random(kMiB, 7 * kMiB);
        auto* const block = allocate(arena, size);
        const auto divided = arena.divide(block, 2 * kMiB);
        CHECK_EQUAL(divided.size(), std::max<std::size_t>(size / (2 * kMiB), 1));
        CHECK_EQUAL(arena.parts(block).size(), divided.size());
        auto left = size;
        for (std::size_t i = 0; i < divided.size(); ++i) {
          auto* const start = reinterpret_cast<char*>(divided[i]);
          CHECK(start == block + i * 2 * kMiB);
          const auto part_size = i + 1 < divided.size() ? 2 * kMiB : left;
          fill(start, part_size, step);
          blocks[block].push_back({start, part_size, step, at});
          left -= part_size;
          at += 16 * kMiB;
        }
        continue;
      }
      const auto found = std::next(blocks.begin(), static_cast<std::ptrdiff_t>(random(0, blocks.size() - 1)));
      auto& part = found->second[random(0, found->second.size() - 1)];
      if (random(0, 5) == 0) {  // in whatever states its parts are
        if (found->second.size() > 1) CHECK(!arena.release(found->second[1].start));
        CHECK(arena.release(found->first));
        blocks.erase(found);
        continue;
      }
      const std::uintptr_t used[] = {reinterpret_cast<std::uintptr_t>(part.start)};
      arena.touch(used, &out);
      CHECK(arena.bring_in(part.start, &error) == Arena::Answer::kYes);
      CHECK(holds(part.start, part.size, part.seed));
      if (random(0, 1) == 0) {
        CHECK(leave(arena, part.start, part.size, file, part.at));
        CHECK(state(arena, part.start) == Arena::State::kOut);
      } else {
        CHECK(arena.unguard(part.start, &error) == Arena::Answer::kYes);
        part.seed = step;
        fill(part.start, part.size, step);
      }
      CHECK_EQUAL(arena.divide(found->first, 2 * kMiB).size(), found->second.size());  // once
      CHECK(arena.stats().peak_in_memory_bytes <= 24 * kMiB);
    }
    arena.set_limits(kUnlimited, kUnlimited);
    for (const auto& [block, parts] : blocks) {
      for (const auto& part : parts) {
        int error = 0;
        CHECK(arena.bring_in(part.start, &error) == Arena::Answer::kYes);
        CHECK(holds(part.start, part.size, part.seed));
      }
      CHECK(arena.release(block));
    }
    const auto stats = arena.stats();
    CHECK_EQUAL(stats.in_memory_bytes + stats.out_bytes + stats.in_use_bytes + stats.swap_used_bytes, 0u);
    arena.trim();
    CHECK_EQUAL(arena.stats().resident_bytes, 0u);
  }
}

TEST(a_block_that_is_copied_or_away_stays_whole) {
  Arena arena(kReserveBytes);
  const UnnamedFile file, swap;
  swap_to(arena, swap, 64 * kMiB);
  auto* const block = allocate(arena, 8 * kMiB);
  fill(block, 8 * kMiB, 1);
  const auto loan = arena.lend(block);
  CHECK_EQUAL(arena.divide(block, 2 * kMiB).size(), 1u);
  CHECK(arena.lent_back(loan));
  CHECK(leave(arena, block, 8 * kMiB, file, 0));
  CHECK_EQUAL(arena.divide(block, 2 * kMiB).size(), 1u);
  CHECK(come_back(arena, block, 8 * kMiB, file, 0));
  CHECK_EQUAL(arena.divide(block, 2 * kMiB).size(), 1u);  // it is guarded
  int error = 0;
  CHECK(arena.unguard(block, &error) == Arena::Answer::kYes);
  CHECK_EQUAL(arena.divide(block, 2 * kMiB).size(), 4u);
  CHECK(holds(block, 8 * kMiB, 1));
  CHECK_EQUAL(arena.divide(block + 2 * kMiB, 2 * kMiB).size(), 0u);
  CHECK(arena.release(block));
}

TEST(what_cannot_fit_is_refused_and_pinned_blocks_stay) {
  Arena arena(kReserveBytes);
  const UnnamedFile swap;
  swap_to(arena, swap, 10 * kMiB);
  std::size_t out = 0;
  arena.touch({}, &out);
  auto* block = allocate(arena, 6 * kMiB);
  void* address = nullptr;
  CHECK(arena.allocate(6 * kMiB, &address) == Arena::Outcome::kNoMemory);  // the first one is pinned
  CHECK_EQUAL(arena.stats().refused_bytes, 6 * kMiB);
  CHECK_EQUAL(arena.stats().refused_at_bytes, 12 * kMiB);
  CHECK(state(arena, block) == Arena::State::kIn);
  arena.touch({}, &out);
  CHECK(arena.allocate(11 * kMiB, &address) == Arena::Outcome::kNoMemory);
  CHECK(state(arena, block) == Arena::State::kIn);
  auto* second = allocate(arena, 6 * kMiB);
  CHECK(state(arena, block) == Arena::State::kOut);
  const auto events = arena.events();
  CHECK_EQUAL(events.size(), 1u);
  CHECK_EQUAL(events[0].first, reinterpret_cast<std::uintptr_t>(block));
  CHECK(events[0].second == Block::Event::kOut);
  CHECK(!arena.set_swap_file(-1, -1, 0));
  CHECK(arena.release(block) && arena.release(second));
  CHECK(arena.set_swap_file(-1, -1, 0));
}

TEST(what_is_held_stays_when_its_kernel_is_over) {
  Arena arena(kReserveBytes);
  const UnnamedFile swap;
  swap_to(arena, swap, 10 * kMiB);
  std::size_t out = 0;
  auto* block = allocate(arena, 4 * kMiB);
  arena.touch({}, &out);
  arena.hold_new(true);
  auto* made = allocate(arena, 2 * kMiB);  // by the kernel: it has a hold
  CHECK(arena.hold(block, +1) && arena.hold(block, +1));
  CHECK(!arena.hold(reinterpret_cast<char*>(block) + 1, +1));
  arena.kernel_over();
  void* address = nullptr;
  CHECK(arena.allocate(6 * kMiB, &address) == Arena::Outcome::kNoMemory);
  CHECK(arena.hold(block, -1));
  CHECK(arena.allocate(6 * kMiB, &address) == Arena::Outcome::kNoMemory);  // another one is left
  CHECK(arena.hold(block, -1));
  auto* other = allocate(arena, 6 * kMiB);
  CHECK(state(arena, block) == Arena::State::kOut && state(arena, made) == Arena::State::kIn);
  CHECK(arena.hold(made, -1));
  auto* last = allocate(arena, 4 * kMiB);
  CHECK(state(arena, made) == Arena::State::kOut || state(arena, other) == Arena::State::kOut);
  for (auto* each : {block, made, other, last}) CHECK(arena.release(each));
  CHECK(arena.set_swap_file(-1, -1, 0));
}

TEST(a_full_disk_refuses_and_loses_nothing) {
  Arena arena(kReserveBytes);
  const int full = open("/dev/full", O_RDWR);
  const UnnamedFile swap;
  CHECK(full >= 0);
  CHECK(arena.set_swap_file(-1, full, std::size_t{1} << 30));
  arena.set_limits(kUnlimited, 10 * kMiB);
  auto* block = allocate(arena, 6 * kMiB);
  fill(block, 6 * kMiB, 1);
  void* address = nullptr;
  CHECK(arena.allocate(6 * kMiB, &address) == Arena::Outcome::kNoMemory);
  CHECK(state(arena, block) == Arena::State::kIn);
  CHECK(holds(block, 6 * kMiB, 1));
  fill(block, 6 * kMiB, 2);  // writable as before
  CHECK_EQUAL(arena.stats().swap_used_bytes, 0u);
  CHECK(arena.set_swap_file(-1, swap, std::size_t{1} << 30));
  auto* second = allocate(arena, 6 * kMiB);
  int error = 0;
  CHECK(arena.release(second));
  CHECK(arena.bring_in(block, &error) == Arena::Answer::kYes);
  CHECK(holds(block, 6 * kMiB, 2));
  CHECK(arena.release(block));
  close(full);
}

TEST(a_copy_that_cannot_be_read_is_named) {
  Arena arena(kReserveBytes);
  const UnnamedFile file;
  auto* block = allocate(arena, 3 * kMiB);
  fill(block, 3 * kMiB, 1);
  CHECK(leave(arena, block, 3 * kMiB, file, 0));
  CHECK_EQUAL(ftruncate(file, kMiB), 0);
  char problem[512] = {};
  FaultHistory history;
  CHECK(arena.serve_fault(block, false, history, problem, sizeof(problem)) == Arena::Answer::kError);
  CHECK(std::strstr(problem, "cannot be read back from offset 0 of /tmp/penstock_paging_") != nullptr);
  int error = 0;
  CHECK(arena.bring_in(block, &error) == Arena::Answer::kError);
  CHECK_EQUAL(error, EIO);
  CHECK(state(arena, block) == Arena::State::kOut);
  CHECK_EQUAL(arena.stats().in_memory_bytes, 0u);
  CHECK(arena.release(block));
}

TEST(a_copy_that_is_written_over_is_none) {
  Arena arena(kReserveBytes);
  const UnnamedFile file, swap;
  auto* block = allocate(arena, 6 * kMiB);
  fill(block, 6 * kMiB, 1);
  CHECK(leave(arena, block, 6 * kMiB, file, 0));
  int error = 0;
  CHECK(arena.bring_in(block, &error) == Arena::Answer::kYes);
  // It is copied to the same place again, and leaves while that is under way: what is written there may be of whoever
  // has its memory by then.
  swap_to(arena, swap, 10 * kMiB);
  CHECK(arena.guard(block) == Arena::Answer::kYes);
  auto* other = allocate(arena, 6 * kMiB);
  fill(other, 6 * kMiB, 2);
  CHECK(state(arena, block) == Arena::State::kOut);
  CHECK_EQUAL(write_fully(-1, file, other, 6 * kMiB, 0), 0);
  CHECK(arena.release(other));
  CHECK(arena.bring_in(block, &error) == Arena::Answer::kYes);
  CHECK(holds(block, 6 * kMiB, 1));
  CHECK(arena.release(block));
  CHECK(arena.set_swap_file(-1, -1, 0));
}

TEST(what_the_arena_has_written_is_not_read_from_an_older_copy) {
  Arena arena(kReserveBytes);
  const UnnamedFile file, swap;
  auto* block = allocate(arena, 6 * kMiB);
  fill(block, 6 * kMiB, 1);
  CHECK(leave(arena, block, 6 * kMiB, file, 0));
  int error = 0;
  CHECK(arena.unguard(block, &error) == Arena::Answer::kYes);  // as a write to it does
  fill(block, 6 * kMiB, 2);
  swap_to(arena, swap, 10 * kMiB);
  auto* other = allocate(arena, 6 * kMiB);
  CHECK(state(arena, block) == Arena::State::kOut);
  arena.set_limits(kUnlimited, 20 * kMiB);
  CHECK(!come_back(arena, block, 6 * kMiB, file, 0));
  CHECK(arena.bring_in(block, &error) == Arena::Answer::kYes);
  CHECK(holds(block, 6 * kMiB, 2));
  CHECK(arena.release(block) && arena.release(other));
  CHECK(arena.set_swap_file(-1, -1, 0));
}

TEST(threads_allocate_within_a_budget) {
  Arena arena(kReserveBytes);
  const UnnamedFile swap;
  swap_to(arena, swap, 16 * kMiB);
  std::vector<std::thread> threads;
  std::vector<std::string> failures(3);
  for (unsigned i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      try {
        Random random(i);
        std::vector<std::pair<char*, std::size_t>> mine;
        for (int step = 0; step < 60; ++step) {
          std::size_t out = 0;
          arena.touch({}, &out);
          void* address = nullptr;
          const auto size = random(4096, 3 * kMiB);
          if (arena.allocate(size, &address) == Arena::Outcome::kDone)
            mine.emplace_back(static_cast<char*>(address), size);
          if (mine.size() > 8) {
            CHECK(arena.release(mine.front().first));
            mine.erase(mine.begin());
          }
          if (!mine.empty()) {
            int error = 0;
            const auto answer = arena.bring_in(mine[random(0, mine.size() - 1)].first, &error);
            CHECK(answer == Arena::Answer::kYes || error == ENOMEM);
          }
        }
        for (const auto& [block, size] : mine) CHECK(arena.release(block));
      } catch (const std::exception& error) {
        failures[i] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) CHECK_EQUAL(failure, "");
  CHECK_EQUAL(arena.stats().in_memory_bytes, 0u);
  CHECK_EQUAL(arena.stats().swap_used_bytes, 0u);
  CHECK(arena.stats().peak_in_memory_bytes <= 16 * kMiB);
}

TEST(a_compressed_copy_comes_back_whole_or_not_at_all) {
  auto& arena = served_arena();
  const UnnamedFile file;
  for (const std::size_t size : {std::size_t{8192}, std::size_t{20'000}, 5 * kMiB}) {
    const auto elements = size / 4;
    auto* block = allocate(arena, size);
    std::memset(block, 0, size);
    for (std::size_t i = 0; i < elements; i += 3) block[4 * i + 1] = static_cast<char>(i | 1);
    const std::vector<char> expected(block, block + size);
    std::vector<char> packed(bitmask_head_bytes(elements) + count_kept(block, elements, 4) * 4);
    const Packing packing{packed.size(), elements, 4};
    const auto begin = round_up(size, kPageBytes) - packed.size();
    CHECK(arena.guard(block) == Arena::Answer::kYes);
    CHECK(bitmask_encode(block, elements, 4, packed.data(), packed.size()) == packed.size());
    CHECK_EQUAL(pwrite(file, packed.data(), packed.size(), 0), static_cast<ssize_t>(packed.size()));
    int error = 0;
    for (const Packing& wrong : {Packing{packed.size(), elements - 1, 4}, Packing{size + 2 * kPageBytes, elements, 4}}) {
      CHECK(arena.leave(block, {{file, 0, begin, packed.size()}}, &error, wrong) == Arena::Answer::kError);
      CHECK_EQUAL(error, EINVAL);
    }
    CHECK(arena.leave(block, {{file, 0, 0, packed.size()}}, &error, packing) == Arena::Answer::kError);
    CHECK(arena.leave(block, {{file, 0, begin, packed.size()}}, &error, packing) == Arena::Answer::kYes);
    CHECK_EQUAL(pwrite(file, "damaged!", 8, 0), 8);
    CHECK(arena.bring_in(block, &error) == Arena::Answer::kError);
    CHECK_EQUAL(error, EBADMSG);
    CHECK(state(arena, block) == Arena::State::kOut);
    CHECK_EQUAL(pwrite(file, packed.data(), 8, 0), 8);
    std::vector<std::thread> threads;
    std::atomic<int> right{0};
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&] { right += std::memcmp(block, expected.data(), size) == 0; });
    for (auto& thread : threads) thread.join();
    CHECK_EQUAL(right.load(), 4);
    CHECK(arena.release(block));
  }
}

TEST(an_access_that_nobody_planned_waits_and_finds_its_bytes) {
  auto& arena = served_arena();
  const UnnamedFile file;
  for (const std::size_t size : {std::size_t{5000}, 5 * kMiB}) {
    auto* block = allocate(arena, size);
    fill(block, size, 9);
    CHECK(leave(arena, block, size, file, 0));
    const auto before = arena.stats().faults;
    std::vector<std::thread> threads;
    std::atomic<int> right{0};
    for (int i = 0; i < 4; ++i) threads.emplace_back([&] { right += holds(block, size, 9); });
    for (auto& thread : threads) thread.join();
    CHECK_EQUAL(right.load(), 4);
    CHECK(arena.stats().faults > before);
    CHECK(arena.guard(block) == Arena::Answer::kYes);
    block[64] = 'w';
    CHECK(arena.written(block) == Arena::Answer::kYes);
    CHECK(leave(arena, block, size, file, 0));
    block[128] = 'v';  // brings it in and makes it writable
    CHECK(state(arena, block) == Arena::State::kIn);
    CHECK_EQUAL(block[64], 'w');
    CHECK(arena.release(block));
  }
}

TEST(faults_in_quick_succession_keep_the_budget) {
  auto& arena = served_arena();
  const UnnamedFile swap;
  CHECK(arena.set_swap_file(-1, swap, std::size_t{1} << 30));
  for (const std::size_t size : {std::size_t{90'000}, kMiB}) {
    arena.set_limits(kUnlimited, 2 * size);
    arena.reset_peak();
    std::vector<char*> blocks;
    std::size_t out = 0;
    for (unsigned i = 0; i < 12; ++i) {
      arena.touch({}, &out);
      blocks.push_back(allocate(arena, size));
      fill(blocks.back(), size, i);
    }
    arena.touch({}, &out);
    for (int pass = 0; pass < 8; ++pass)
      for (unsigned i = 0; i < 12; ++i) CHECK(holds(blocks[i], size, i));
    // Of two pinned ones, one makes room: nothing else can.
    const std::uintptr_t used[] = {reinterpret_cast<std::uintptr_t>(blocks[10]),
                                   reinterpret_cast<std::uintptr_t>(blocks[11])};
    arena.touch(used, &out);
    CHECK(holds(blocks[0], size, 0));
    CHECK(holds(blocks[1], size, 1));
    CHECK((state(arena, blocks[10]) == Arena::State::kOut) != (state(arena, blocks[11]) == Arena::State::kOut));
    CHECK_EQUAL(arena.stats().peak_in_memory_bytes, 2 * size);
    CHECK_EQUAL(arena.stats().over_budget_bytes, 0u);
    arena.kernel_over();
    for (auto* block : blocks) CHECK(arena.release(block));
    arena.set_limits(kUnlimited, kUnlimited);
    arena.reset_peak();
  }
  CHECK(arena.set_swap_file(-1, -1, 0));
}

#if defined(__x86_64__)
TEST(an_instruction_that_needs_more_than_fits_exceeds_the_budget) {
  auto& arena = served_arena();
  const UnnamedFile swap;
  swap_to(arena, swap, kMiB + kMiB / 2);
  arena.reset_peak();
  std::size_t out = 0;
  char* pairs[2][2];  // of source and target, for a thread each
  for (auto& pair : pairs) {
    for (auto*& block : pair) {
      arena.touch({}, &out);
      block = allocate(arena, kMiB);
      fill(block, kMiB, block == pair[0] ? 5 : 6);
    }
  }
  arena.touch({}, &out);
  CHECK_EQUAL(arena.stats().over_budget_bytes, 0u);
  std::vector<std::thread> threads;
  for (auto& pair : pairs) {
    threads.emplace_back([&pair] {
      const char* from = pair[0];
      char* to = pair[1];
      std::size_t count = kMiB;
      asm volatile("rep movsb" : "+S"(from), "+D"(to), "+c"(count) : : "memory");
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(arena.stats().over_budget_bytes >= kMiB / 2);
  for (auto& pair : pairs) {
    CHECK(holds(pair[1], kMiB, 5));
    CHECK(arena.release(pair[0]) && arena.release(pair[1]));
  }
  arena.set_limits(kUnlimited, kUnlimited);
  arena.reset_peak();
  CHECK(arena.set_swap_file(-1, -1, 0));
}
#endif

TEST(a_child_refuses_what_its_parent_has_overwritten) {
  Arena arena(kReserveBytes);
  const UnnamedFile file;
  auto* kept = allocate(arena, 3 * kMiB);
  auto* changed = allocate(arena, 3 * kMiB);
  fill(kept, 3 * kMiB, 4);
  fill(changed, 3 * kMiB, 5);
  CHECK(leave(arena, kept, 3 * kMiB, file, 0));
  CHECK(leave(arena, changed, 3 * kMiB, file, 4 * kMiB));
  int go[2];
  CHECK_EQUAL(pipe(go), 0);
  arena.lock();
  const auto child = fork();
  if (child == 0) {
    arena.unlock_in_child();
    char byte = 0;
    int error = 0;
    const bool told = read(go[0], &byte, 1) == 1;
    const bool reads = arena.bring_in(kept, &error) == Arena::Answer::kYes && holds(kept, 3 * kMiB, 4);
    char problem[512] = {};
    FaultHistory history;
    const bool refuses = arena.bring_in(changed, &error) == Arena::Answer::kError && error == ESTALE &&
                         arena.serve_fault(changed, false, history, problem, sizeof(problem)) == Arena::Answer::kError &&
                         std::strstr(problem, "fork") != nullptr;
    _exit(told && reads && refuses ? 0 : 1);
  }
  arena.unlock_in_parent();
  CHECK(arena.release(changed));
  auto* other = allocate(arena, 3 * kMiB);
  fill(other, 3 * kMiB, 6);
  CHECK(leave(arena, other, 3 * kMiB, file, 4 * kMiB));
  CHECK_EQUAL(write(go[1], "g", 1), 1);
  int status = -1;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK_EQUAL(status, 0);
  CHECK(arena.release(kept) && arena.release(other));
  for (const int end : go) close(end);
}

TEST(a_child_reads_what_is_out) {
  auto& arena = served_arena();
  const UnnamedFile file;
  auto* block = allocate(arena, 5 * kMiB);
  auto* small = allocate(arena, 9000);
  fill(block, 5 * kMiB, 2);
  fill(small, 9000, 3);
  CHECK(leave(arena, block, 5 * kMiB, file, 0));
  CHECK(leave(arena, small, 9000, file, 8 * kMiB));
  arena.lock();
  const auto child = fork();
  if (child == 0) {
    serve_faults_in_child();
    arena.unlock_in_child();
    _exit(holds(block, 5 * kMiB, 2) && holds(small, 9000, 3) ? 0 : 1);
  }
  arena.unlock_in_parent();
  int status = -1;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK_EQUAL(status, 0);
  CHECK(state(arena, block) == Arena::State::kOut);
  CHECK(arena.release(block) && arena.release(small));
}

TEST(a_dropped_block_gets_the_memory_of_another) {
  Arena arena(kReserveBytes);
  Random random(11);
  for (int round = 0; round < 300; ++round) {
    const auto size = round % 2 ? random(4096, 300'000) : random(256 << 10, 7 * kMiB);
    auto* block = allocate(arena, size);
    fill(block, size, 1);
    const auto before = arena.stats();
    CHECK(arena.drop(block) == Arena::Answer::kYes);
    CHECK(state(arena, block) == Arena::State::kDropped);
    CHECK_EQUAL(arena.in_memory_bytes(), before.in_memory_bytes - size);
    CHECK(arena.drop(block) == Arena::Answer::kNo);
    int error = 0;
    CHECK(arena.bring_in(block, &error) == Arena::Answer::kError);
    CHECK_EQUAL(error, ENODATA);
    char* staging = nullptr;
    CHECK(arena.stage(block, false, &staging) == Arena::Answer::kNo);
    if (round % 5 == 0) {  // nobody needs it any more
      CHECK(arena.release(block));
      continue;
    }
    const bool guarded = round % 3 == 0;
    if (guarded) CHECK(arena.keep_for(block, +1, &error) == Arena::Answer::kYes);
    auto* made = allocate(arena, size);
    fill(made, size, round);
    CHECK(arena.take(block, made, &error) == Arena::Answer::kYes);
    CHECK(arena.take(block, made, &error) == Arena::Answer::kNo);
    CHECK(arena.release(made));
    CHECK(holds(block, size, round));
    CHECK(state(arena, block) == (guarded ? Arena::State::kGuarded : Arena::State::kIn));
    CHECK_EQUAL(arena.in_memory_bytes(), before.in_memory_bytes);
    if (!guarded) fill(block, size, 5);
    CHECK(arena.release(block));
  }
  CHECK_EQUAL(arena.in_memory_bytes(), 0u);
  CHECK_EQUAL(arena.stats().out_bytes, 0u);
  CHECK_EQUAL(arena.stats().in_use_bytes, 0u);
}

TEST(a_block_keeps_its_memory_for_one_of_another_size) {
  Arena arena(kReserveBytes);
  auto* block = allocate(arena, kMiB);
  auto* other = allocate(arena, 2 * kMiB);
  fill(other, 2 * kMiB, 3);
  int error = 0;
  CHECK(arena.take(block, other, &error) == Arena::Answer::kNo);  // it was not dropped
  CHECK(arena.drop(block) == Arena::Answer::kYes);
  CHECK(arena.take(block, other, &error) == Arena::Answer::kNo);
  CHECK(holds(other, 2 * kMiB, 3));
  CHECK(arena.release(block) && arena.release(other));
}

namespace {

constexpr Interpreter kNoInterpreter{[] { return false; }, []() -> void* { return nullptr; }, [](void*) {}};

// Answers accesses as the owner of blocks does: what was dropped is made again, and what was to stay as it is
// may be written.
class Owner {
 public:
  explicit Owner(Arena& arena) : arena_(arena) {
    set_interpreter(&kNoInterpreter);
    thread_ = std::thread([this] { serve(); });
  }
  ~Owner() {
    ends_ = true;
    set_interpreter(nullptr);
    thread_.join();
  }

  void knows(char* block, std::size_t size_bytes) { block_ = block, size_bytes_ = size_bytes; }
  std::atomic<int> reads{0}, writes{0};

 private:
  void serve() {
    while (!ends_) {
      const auto question = next_question(1.0);
      if (!question) continue;
      int error = 0;
      if (question->is_write && state(arena_, block_) != Arena::State::kDropped) {
        ++writes;
      } else {
        ++reads;
        auto* made = allocate(arena_, size_bytes_);
        fill(made, size_bytes_, 7);
        CHECK(arena_.take(block_, made, &error) == Arena::Answer::kYes);
        CHECK(arena_.release(made));
      }
      if (question->is_write) CHECK(arena_.keep_for(block_, -1, &error) == Arena::Answer::kYes);
      answer_question(question->number, true);
    }
  }

  Arena& arena_;
  std::atomic<char*> block_{nullptr};
  std::atomic<std::size_t> size_bytes_{0};
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

}  // namespace

TEST(an_access_to_what_was_dropped_waits_for_its_owner) {
  auto& arena = served_arena();
  Owner owner(arena);
  for (const auto size : {std::size_t{9000}, 3 * kMiB + 5000}) {
    auto* block = allocate(arena, size);
    owner.knows(block, size);
    int error = 0;
    CHECK(arena.keep_for(block, +1, &error) == Arena::Answer::kYes);
    CHECK(arena.drop(block) == Arena::Answer::kYes);
    const int reads = owner.reads, writes = owner.writes;
    std::vector<std::thread> readers;
    std::atomic<int> right{0};
    readers.emplace_back([&] { right += holds(block, size, 7); });
    for (auto& reader : readers) reader.join();
    CHECK_EQUAL(right.load(), 1);
    CHECK_EQUAL(owner.reads - reads, 1);
    CHECK_EQUAL(owner.writes - writes, 0);
    std::thread([&] { fill(block, size, 9); }).join();
    CHECK_EQUAL(owner.writes - writes, 1);
    CHECK(holds(block, size, 9));
    CHECK(state(arena, block) == Arena::State::kIn);
    CHECK(arena.release(block));
  }
}
