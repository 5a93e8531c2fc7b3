// Swap on a remote drive: what a read or a write leaves behind that was lost on its way. The drive is in memory, and
// its moves are scripted.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <vector>

#include "arena/arena.hpp"
#include "check.hpp"
#include "nvme/waiting.hpp"

using namespace penstock;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kDiskBytes = 64 * kMiB;
constexpr double kForLongS = 3600;

struct Place {
  char* address;
  std::size_t size_bytes;
};

struct Drive {
  std::vector<char> disk = std::vector<char>(kDiskBytes);
  bool abandons_read = false;  // the next one
  std::optional<double> loses_write_s{};  // the next one is carried out, and an older one may land for so long
  std::vector<Place> abandoned;   // may be written to for ever
  std::vector<std::pair<std::uint64_t, std::size_t>> lost;  // where what was lost may land

  // Whether the bytes of a place may be another's than who abandoned it.
  bool is_abandoned(const char* address, std::size_t size_bytes) const {
    for (const auto& place : abandoned)
      if (address < place.address + place.size_bytes && place.address < address + size_bytes) return true;
    return false;
  }
  // As the system writes: addresses that are gone are no error of this program's.
  void write_late() const {
    const int file = memfd_create("late", MFD_CLOEXEC);
    for (const auto& [address, size_bytes] : abandoned) {
      const std::vector<char> late(size_bytes, 'L');
      CHECK_EQUAL(pwrite(file, late.data(), size_bytes, 0), static_cast<ssize_t>(size_bytes));
      if (pread(file, address, size_bytes, 0) < 0) CHECK_EQUAL(errno, EFAULT);
    }
    close(file);
  }
  void land_late() {
    for (const auto& [offset, size_bytes] : lost) std::memset(disk.data() + offset, 'L', size_bytes);
  }
};

Drive* drive = nullptr;

char* allocate(Arena& arena, std::size_t size_bytes, char value) {
  void* address = nullptr;
  CHECK(arena.allocate(size_bytes, &address) == Arena::Outcome::kDone);
  std::memset(address, value, size_bytes);
  return static_cast<char*>(address);
}

bool holds(const char* block, std::size_t size_bytes, char value) {
  for (std::size_t i = 0; i < size_bytes; ++i)
    if (block[i] != value) return false;
  return true;
}

bool is_out(Arena& arena, char* block) {
  Arena::State state{};
  CHECK(arena.state(block, &state) == Arena::Answer::kYes);
  return state == Arena::State::kOut;
}

void send_out(Arena& arena, char* block, std::size_t size_bytes) {
  arena.set_limits(kUnlimited, size_bytes);
  CHECK(arena.make_room(size_bytes, {}));
  arena.set_limits(kUnlimited, kDiskBytes);
  CHECK(is_out(arena, block));
}

}  // namespace

int nvme::move_and_wait(bool write, Handle, std::byte* address, std::size_t size_bytes, std::uint64_t offset,
                        StillInUse* in_use) {
  auto* const memory = reinterpret_cast<char*>(address);
  if (!write && drive->is_abandoned(memory, size_bytes)) return EFAULT;  // that would be torn
  if (!write && std::exchange(drive->abandons_read, false)) {
    drive->abandoned.push_back({memory, size_bytes});
    if (in_use != nullptr) in_use->abandoned = true;
    return EBADF;
  }
  if (write && drive->loses_write_s) {
    drive->lost.emplace_back(offset, size_bytes);
    in_use->may_land_s = *std::exchange(drive->loses_write_s, {});
  }
  if (write)
    std::memcpy(drive->disk.data() + offset, memory, size_bytes);
  else
    std::memcpy(memory, drive->disk.data() + offset, size_bytes);
  return 0;
}

TEST(nobody_gets_the_memory_of_a_read_that_was_abandoned) {
  for (const std::size_t size : {std::size_t{5000}, std::size_t{700'000}, 2 * kMiB}) {
    Drive own;
    drive = &own;
    Arena arena(std::size_t{1} << 30);
    CHECK(arena.set_swap_file(-1, kFirstNamespace, kDiskBytes));
    auto* const block = allocate(arena, size, 'a');
    send_out(arena, block, size);
    own.abandons_read = true;
    int error = 0;
    CHECK(arena.bring_in(block, &error) == Arena::Answer::kError);
    CHECK_EQUAL(error, EBADF);
    CHECK_EQUAL(own.abandoned.size(), 1u);
    CHECK_EQUAL(arena.stats().in_memory_bytes, 0u);
    auto* const other = allocate(arena, size, 'b');
    CHECK(arena.bring_in(block, &error) == Arena::Answer::kYes);
    own.write_late();
    CHECK(holds(block, size, 'a'));
    CHECK(holds(other, size, 'b'));
    CHECK(arena.release(block) && arena.release(other));
    CHECK_EQUAL(arena.stats().in_memory_bytes, 0u);
  }
}

TEST(nothing_is_written_where_an_older_write_may_land) {
  constexpr std::size_t size = kMiB;
  Drive own;
  drive = &own;
  Arena arena(std::size_t{1} << 30);
  CHECK(arena.set_swap_file(-1, kFirstNamespace, kDiskBytes));
  auto* const block = allocate(arena, size, 'a');
  own.loses_write_s = kForLongS;
  send_out(arena, block, size);
  int error = 0;
  CHECK(arena.unguard(block, &error) == Arena::Answer::kYes);  // its place is nobody's now
  CHECK_EQUAL(arena.stats().swap_used_bytes, 0u);
  std::memset(block, 'b', size);
  send_out(arena, block, size);
  own.land_late();
  CHECK(arena.bring_in(block, &error) == Arena::Answer::kYes);
  CHECK(holds(block, size, 'b'));
}

TEST(quarantined_space_is_given_out_when_its_time_is_over) {
  SwapFile swap;
  CHECK(swap.set(-1, kFirstNamespace, 2 * kPageBytes));
  // Used on by who has it, and by nobody after.
  for (const double seconds : {kForLongS, 0.0}) {
    const auto place = swap.take(kPageBytes);
    CHECK(place.has_value());
    swap.quarantine(*place, kPageBytes, seconds);
    swap.give(*place, kPageBytes);
  }
  CHECK_EQUAL(swap.used_bytes(), 0u);
  CHECK(!swap.take(2 * kPageBytes).has_value());
  CHECK_EQUAL(swap.take(kPageBytes).value_or(0), kPageBytes);  // the second one's time is over
  CHECK(!swap.take(kPageBytes).has_value());
  swap.give(kPageBytes, kPageBytes);
  // Another size of the same drive changes nothing; another drive has no such places.
  CHECK(swap.set(-1, kFirstNamespace, 3 * kPageBytes));
  CHECK_EQUAL(swap.take(kPageBytes).value_or(0), kPageBytes);
  swap.give(kPageBytes, kPageBytes);
  CHECK(swap.set(-1, -1, 0));
  CHECK(swap.set(-1, kFirstNamespace, 3 * kPageBytes));
  CHECK_EQUAL(swap.take(kPageBytes).value_or(0), kPageBytes);
  swap.give(kPageBytes, kPageBytes);
  CHECK(swap.set(-1, kFirstNamespace + 1, kPageBytes));
  CHECK_EQUAL(swap.take(kPageBytes).value_or(kPageBytes), 0u);
}

TEST(space_that_is_quarantined_while_it_is_used_is_free_when_given_after_its_time) {
  SwapFile swap;
  CHECK(swap.set(-1, kFirstNamespace, 2 * kPageBytes));
  const auto place = swap.take(kPageBytes);
  CHECK_EQUAL(place.value_or(1), 0u);
  swap.quarantine(*place, kPageBytes, 0);
  CHECK_EQUAL(swap.take(kPageBytes).value_or(0), kPageBytes);  // the first is its holder's still
  CHECK(!swap.take(kPageBytes).has_value());
  swap.give(*place, kPageBytes);
  CHECK_EQUAL(swap.take(kPageBytes).value_or(1), 0u);
}
