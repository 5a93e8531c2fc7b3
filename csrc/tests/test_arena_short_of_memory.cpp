// The arena where the system gives no memory for its lists: an allocation of a tensor may be refused, nothing else
// changes, and everything can be given back.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <vector>

#include "arena/arena.hpp"
#include "check.hpp"
#include "failing_new.hpp"

using namespace penstock;
using namespace penstock::test;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

struct TemporaryFile {
  TemporaryFile() {
    char path[] = "/tmp/penstock_short_XXXXXX";
    number = mkstemp(path);
    unlink(path);
  }
  ~TemporaryFile() { close(number); }
  int number;
};

// Calls of the arena's, each of which may be refused.
template <class Call>
void may_fail(Call call) {
  try {
    call();
  } catch (const std::bad_alloc&) {
  }
}

void scenario(FailingNew& memory) {
  TemporaryFile swap, slots;
  Arena arena(std::size_t{1} << 30);
  CHECK(arena.set_swap_file(-1, swap.number, 64 * kMiB));
  arena.set_limits(kUnlimited, 3 * kMiB);
  struct Held {
    char* address;
    std::size_t size;
    char value;
  };
  std::vector<Held> held;
  held.reserve(64);
  int error = 0;
  memory.begin();
  for (int round = 0; round < 12; ++round) {
    const std::size_t sizes[] = {8192, 700'000, kMiB};
    const auto size = sizes[round % 3];
    void* address = nullptr;
    may_fail([&] {
      std::size_t out = 0;
      arena.touch({}, &out);
      if (arena.allocate(size, &address) != Arena::Outcome::kDone) address = nullptr;
    });
    if (address == nullptr) continue;
    const auto value = static_cast<char>(round + 1);
    std::memset(address, value, size);
    held.push_back({static_cast<char*>(address), size, value});
    auto* const block = static_cast<char*>(address);
    if (round % 2 == 0) {  // leaves by its owner's copy, and comes by a staging area
      bool away = false;
      may_fail([&] {
        if (arena.guard(block) != Arena::Answer::kYes) return;
        const auto loan = arena.lend(block);
        const bool whole = write_fully(-1, slots.number, block, size, 0) == 0;
        if (!arena.lent_back(loan) || !whole) return;
        away = arena.leave(block, {{slots.number, 0, 0, size}}, &error) == Arena::Answer::kYes;
      });
      char* staging = nullptr;
      if (away) may_fail([&] { arena.stage(block, false, &staging); });
      if (staging != nullptr) {
        const std::vector<Segment> segments = [&] {
          const Spared spared;
          return std::vector<Segment>{{slots.number, 0, 0, size}};
        }();
        CHECK_EQUAL(read_segments(segments, -1, slots.number, staging, nullptr), 0);
        try {
          CHECK(arena.arrive(staging, true, &error) == Arena::Answer::kYes);
        } catch (const std::bad_alloc&) {
          CHECK(arena.unstage(staging) == Arena::Answer::kYes);
        }
      }
      // Its place in the file is for the next one.
      bool in = false;
      while (!in) may_fail([&] { in = arena.unguard(block, &error) == Arena::Answer::kYes || error == ENOMEM; });
      if (error == ENOMEM) break;
    }
    if (round % 4 == 3) {
      CHECK(arena.release(held.front().address));  // never refused
      held.erase(held.begin());
    }
    may_fail([&] { arena.events(); });
  }
  memory.end();
  arena.set_limits(kUnlimited, kUnlimited);
  CHECK_EQUAL(arena.bring_in_all(), 0);
  for (const auto& [address, size, value] : held) {
    for (std::size_t i = 0; i < size; i += 4096) CHECK(address[i] == value);
    CHECK(address[size - 1] == value);
    CHECK(arena.release(address));
  }
  const auto stats = arena.stats();
  CHECK_EQUAL(stats.in_memory_bytes, 0u);
  CHECK_EQUAL(stats.out_bytes, 0u);
  CHECK_EQUAL(stats.in_use_bytes, 0u);
  CHECK_EQUAL(stats.swap_used_bytes, 0u);
  CHECK(arena.is_at_rest());
}

}  // namespace

TEST(one_allocation_fails) { CHECK(fail_each_allocation(scenario) > 50); }

TEST(a_hundred_allocations_fail) { CHECK(fail_each_allocation(scenario, Whose::everybody, 100) > 50); }
