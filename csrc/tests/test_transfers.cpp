// Whatever the device does, every request ends once, with its bytes or with an error.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "check.hpp"
#include "io/ring.hpp"
#include "io/transfers.hpp"
#include "waking_io.hpp"

using namespace penstock;

namespace {

constexpr std::uint32_t kAlignment = 512;
constexpr std::uint64_t kPiece = 4096;
constexpr int kBuffered = 3, kDirect = 4;

// A device in memory that is short, busy and late at random.
class Device final : public test::WakingIo {
 public:
  struct Faults {
    unsigned seed = 1;
    bool short_moves = false, busy = false, late = false;
    int error = 0;        // every tenth operation fails with it
    bool breaks = false;  // the ring fails
  };
  Device(std::vector<std::byte>& file, const Faults& faults)
      : file_(file), faults_(faults), random_(faults.seed) {}

  bool register_memory(std::byte*, std::size_t) override { return faults_.seed % 2 == 0; }
  void prepare(const Operation& operation, std::uint64_t tag) override {
    prepared_.push_back({operation, tag});
  }
  void submit() override {
    for (const auto& [operation, tag] : prepared_) results_.push_back({tag, perform(operation)});
    prepared_.clear();
  }
  void wait() override {
    const bool busy = !prepared_.empty();
    submit();
    if (faults_.breaks && busy) throw std::system_error(EBADF, std::generic_category());
    WakingIo::wait();
  }
  bool next(Result& result) override {
    if (results_.empty()) return false;
    const auto which = faults_.late ? random_() % results_.size() : 0;
    result = results_[which];
    results_.erase(results_.begin() + static_cast<std::ptrdiff_t>(which));
    return true;
  }

 private:
  int perform(const Operation& operation) {
    const auto draw = random_() % 10;
    if (faults_.busy && draw < 3) return draw == 0 ? -EINTR : -EAGAIN;
    if (faults_.error != 0 && draw == 9) return -faults_.error;
    if (operation.handle == kDirect) {
      CHECK(operation.offset % kAlignment == 0 && operation.size_bytes % kAlignment == 0);
      CHECK(reinterpret_cast<std::uintptr_t>(operation.address) % kAlignment == 0);
    }
    if (operation.offset >= file_.size()) return 0;
    auto size = std::min<std::uint64_t>(operation.size_bytes, file_.size() - operation.offset);
    // Direct I/O stops at a block, but for the end of the file.
    if (faults_.short_moves && size > kAlignment) size = kAlignment + random_() % (size - kAlignment);
    if (operation.write) {
      std::memcpy(file_.data() + operation.offset, operation.address, size);
    } else {
      std::memcpy(operation.address, file_.data() + operation.offset, size);
    }
    return static_cast<int>(size);
  }

  std::vector<std::byte>& file_;
  const Faults faults_;
  std::mt19937 random_;
  std::vector<std::pair<Operation, std::uint64_t>> prepared_;
};

std::vector<std::byte> random_bytes(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::map<std::uint64_t, int> wait_for(Transfers& transfers, std::size_t count) {
  std::map<std::uint64_t, int> errors;
  while (errors.size() < count) {
    for (const auto& one : transfers.wait()) {
      CHECK(errors.emplace(one.token, one.error).second);
      CHECK(one.started_s <= one.finished_s);
    }
  }
  return errors;
}

// Requests of every kind over one file, each with room of its own.
void check_everything_moves(const Device::Faults& faults, unsigned threads = 1) {
  constexpr std::size_t kRoom = 8 * kPiece, kCount = 60;
  auto file = random_bytes(kRoom * kCount, 7);
  auto expected = file;
  auto memory = random_bytes(kRoom * kCount, 8);
  auto expected_memory = memory;
  std::mt19937 random(faults.seed);
  std::vector<Transfer> requests;
  for (std::size_t index = 0; index < kCount; ++index) {
    const auto offset = index * kRoom + random() % (2 * kAlignment), size = 1 + random() % (6 * kPiece);
    const auto place = index * kRoom + (random() % 2 != 0 ? 0 : random() % kAlignment);
    requests.push_back({index, random() % 2 == 0, static_cast<Method>(random() % 3), false,
                        {kBuffered, random() % 4 == 0 ? -1 : kDirect, kAlignment}, offset, memory.data() + place, size});
    auto& asked = requests.back();
    if (asked.write) {
      std::memcpy(expected.data() + offset, asked.address, size);
    } else {
      std::memcpy(expected_memory.data() + place, file.data() + offset, size);
    }
  }
  Transfers transfers([&] { return std::make_unique<Device>(file, faults); }, {4, kPiece, kPiece / 2, 2, threads});
  CHECK(transfers.submit(requests));
  for (const auto& [token, error] : wait_for(transfers, kCount)) {
    CHECK(error == 0 || error == faults.error);
    if (error == 0) continue;
    const auto& failed = requests[token];  // its bytes are anything
    const auto begin = token * kRoom, at = static_cast<std::size_t>(failed.address - memory.data());
    std::copy_n(file.begin() + static_cast<std::ptrdiff_t>(begin), kRoom,
                expected.begin() + static_cast<std::ptrdiff_t>(begin));
    std::copy_n(memory.begin() + static_cast<std::ptrdiff_t>(at), failed.size_bytes,
                expected_memory.begin() + static_cast<std::ptrdiff_t>(at));
  }
  transfers.close();
  CHECK(file == expected);
  CHECK(memory == expected_memory);
}

// A device that ends operations only when it is told to, in the order they began.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::uint64_t> began;  // offsets, in this order
  std::uint64_t in_flight_bytes = 0, most_bytes = 0;
  std::size_t permits = 0;
  int error = 0;  // that every operation ends with

  void let(std::size_t count) {
    const std::lock_guard lock(mutex);
    permits += count;
    changed.notify_all();
  }
  std::vector<std::uint64_t> wait_until_began(std::size_t count) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return began.size() >= count; });
    return began;
  }
};

class HeldDevice final : public Io {
 public:
  explicit HeldDevice(Gate& gate) : gate_(gate) {}
  bool register_memory(std::byte*, std::size_t) override { return false; }
  void prepare(const Operation& operation, std::uint64_t tag) override {
    const std::lock_guard lock(gate_.mutex);
    gate_.began.push_back(operation.offset);
    gate_.in_flight_bytes += operation.size_bytes;
    gate_.most_bytes = std::max(gate_.most_bytes, gate_.in_flight_bytes);
    in_flight_.push_back({tag, static_cast<int>(operation.size_bytes)});
    gate_.changed.notify_all();
  }
  void submit() override {}
  void wait() override {
    std::unique_lock lock(gate_.mutex);
    gate_.changed.wait(lock, [&] { return woken_ || (gate_.permits > 0 && !in_flight_.empty()); });
    woken_ = false;
  }
  bool next(Result& result) override {
    const std::lock_guard lock(gate_.mutex);
    if (gate_.permits == 0 || in_flight_.empty()) return false;
    --gate_.permits;
    result = in_flight_.front();
    gate_.in_flight_bytes -= static_cast<std::uint64_t>(result.moved);
    if (gate_.error != 0) result.moved = -gate_.error;
    in_flight_.pop_front();
    return true;
  }
  void wake() override {
    const std::lock_guard lock(gate_.mutex);
    woken_ = true;
    gate_.changed.notify_all();
  }

 private:
  Gate& gate_;
  std::deque<Result> in_flight_;
  bool woken_ = false;
};

// Token and place are the same number; `pieces` pieces each.
Transfer asked_of(std::uint64_t number, Priority priority, std::byte* memory, std::uint64_t pieces = 1) {
  return {number,  number % 2 == 0, Method::buffered,          true, {kBuffered, kDirect, kAlignment},
          number * 8 * kPiece, memory, pieces * kPiece, priority};
}

}  // namespace

TEST(requests_begin_by_priority) {
  std::vector<std::byte> memory(8 * kPiece);
  Gate gate;
  Transfers transfers([&] { return std::make_unique<HeldDevice>(gate); }, {1, kPiece, kPiece, 1});
  const auto submit = [&](std::uint64_t number, Priority priority, std::uint64_t pieces = 1) {
    const auto asked = asked_of(number, priority, memory.data(), pieces);
    CHECK(transfers.submit({&asked, 1}));
  };
  submit(0, Priority::evict, 3);
  gate.wait_until_began(1);  // what has begun is not recalled; the rest of it is overtaken
  submit(1, Priority::evict);
  submit(2, Priority::prefetch);
  submit(3, Priority::demand);
  submit(4, Priority::prefetch, 2);
  submit(5, Priority::evict);
  submit(6, Priority::demand);
  const std::uint64_t hurried[] = {5, 4, 3, 99};
  transfers.raise_priority(hurried);
  gate.let(100);
  for (const auto& [token, error] : wait_for(transfers, 7)) CHECK(error == 0);
  std::vector<std::uint64_t> order;
  for (const auto offset : gate.began) order.push_back(offset / (8 * kPiece));
  CHECK(order == (std::vector<std::uint64_t>{0, 3, 6, 5, 4, 4, 2, 0, 0, 1}));
}

TEST(only_a_demand_begins_beside_many_bytes) {
  std::vector<std::byte> memory(8 * kPiece);
  Gate gate;
  Limits limits{8, kPiece, kPiece, 1};
  limits.background_bytes = 2 * kPiece;
  Transfers transfers([&] { return std::make_unique<HeldDevice>(gate); }, limits);
  std::vector<Transfer> evictions;
  for (std::uint64_t number = 0; number < 6; ++number)
    evictions.push_back(asked_of(number, number % 2 == 0 ? Priority::evict : Priority::prefetch, memory.data()));
  CHECK(transfers.submit(evictions));
  gate.wait_until_began(2);
  gate.let(3);
  gate.wait_until_began(5);
  CHECK_EQUAL(gate.most_bytes, 2 * kPiece);
  const auto demand = asked_of(7, Priority::demand, memory.data());
  CHECK(transfers.submit({&demand, 1}));
  CHECK_EQUAL(gate.wait_until_began(6).back(), 7 * 8 * kPiece);
  CHECK_EQUAL(gate.most_bytes, 3 * kPiece);
  const std::uint64_t last = 4;  // an eviction that waits for others, and is waited for now
  transfers.raise_priority({&last, 1});
  CHECK_EQUAL(gate.wait_until_began(7).back(), last * 8 * kPiece);
  gate.let(100);
  CHECK_EQUAL(wait_for(transfers, 7).size(), 7U);
}

TEST(close_gives_up_after_its_time_limit) {
  std::vector<std::byte> memory(8 * kPiece);
  Gate gate;
  Transfers transfers([&] { return std::make_unique<HeldDevice>(gate); }, {1, kPiece, kPiece, 1});
  const auto asked = asked_of(0, Priority::evict, memory.data(), 2);
  CHECK(transfers.submit({&asked, 1}));
  gate.wait_until_began(1);
  CHECK(!transfers.close(std::chrono::duration<double>(0.001)));
  CHECK(!transfers.submit({&asked, 1}));
  std::atomic<int> closed = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) threads.emplace_back([&] { closed += transfers.close(); });
  gate.let(2);
  for (auto& thread : threads) thread.join();
  CHECK_EQUAL(closed, 3);
  CHECK_EQUAL(wait_for(transfers, 1).at(0), 0);
}

TEST(everything_moves_on_a_device_without_faults) {
  for (unsigned seed = 1; seed <= 6; ++seed) check_everything_moves({seed});
}

TEST(short_and_late_moves_are_continued) {
  for (unsigned seed = 1; seed <= 6; ++seed) check_everything_moves({seed, true, false, true});
}

TEST(an_error_ends_its_own_request_alone) {
  for (unsigned seed = 1; seed <= 6; ++seed) check_everything_moves({seed, true, false, true, ENOSPC});
}

TEST(a_busy_device_is_tried_again) { check_everything_moves({1, true, true, true}); }

TEST(a_pool_of_threads_moves_everything_too) {
  for (unsigned seed = 1; seed <= 6; ++seed) check_everything_moves({seed, true, false, true, ENOSPC}, 3);
}

TEST(pieces_of_a_request_are_carried_out_by_all_threads) {
  std::vector<std::byte> memory(8 * kPiece);
  Gate gate;
  Transfers transfers([&] { return std::make_unique<HeldDevice>(gate); }, {1, kPiece, kPiece, 1, 4});
  const auto asked = asked_of(1, Priority::demand, memory.data(), 4);
  CHECK(transfers.submit({&asked, 1}));
  CHECK_EQUAL(gate.wait_until_began(4).size(), 4U);
  const std::uint64_t token = 1;
  CHECK_EQUAL(transfers.cancel({&token, 1}), 0U);  // what has begun is not recalled
  gate.let(4);
  CHECK_EQUAL(wait_for(transfers, 1).at(1), 0);
}

TEST(no_piece_begins_after_one_has_failed) {
  for (const unsigned threads : {1U, 4U}) {
    std::vector<std::byte> memory(8 * kPiece);
    Gate gate;
    gate.error = ENOSPC;
    Transfers transfers([&] { return std::make_unique<HeldDevice>(gate); }, {1, kPiece, kPiece, 1, threads});
    const auto asked = asked_of(1, Priority::demand, memory.data(), 8);
    CHECK(transfers.submit({&asked, 1}));
    gate.wait_until_began(threads);
    gate.let(100);
    CHECK_EQUAL(wait_for(transfers, 1).at(1), ENOSPC);  // once, however many failed together
    transfers.close();
    CHECK(gate.began.size() < 8);
    CHECK(threads > 1 || gate.began.size() == 1);
  }
}

TEST(threads_that_do_not_all_start_are_ended_and_the_reason_thrown) {
  std::vector<std::byte> file;
  std::atomic<int> made = 0;
  bool thrown = false;
  try {
    Transfers transfers(
        [&]() -> std::unique_ptr<Io> {
          if (++made == 3) throw std::bad_alloc();
          return std::make_unique<Device>(file, Device::Faults{});
        },
        {1, kPiece, kPiece, 1, 4});
  } catch (const std::system_error& error) {
    thrown = error.code().value() == ENOMEM;
  }
  CHECK(thrown);
  CHECK_EQUAL(made, 4);
}

TEST(what_a_thread_throws_ends_what_was_submitted_and_not_the_process) {
  struct Breaking final : public test::WakingIo {
    void prepare(const Operation&, std::uint64_t) override { throw std::runtime_error("no such thing"); }
  };
  std::vector<std::byte> memory(8 * kPiece);
  for (const unsigned threads : {1U, 3U}) {
    Transfers transfers([] { return std::make_unique<Breaking>(); }, {1, kPiece, kPiece, 1, threads});
    std::vector<Transfer> asked;
    for (std::uint64_t number = 0; number < 5; ++number)
      asked.push_back(asked_of(number, Priority::evict, memory.data(), 3));
    CHECK(transfers.submit(asked));
    for (const auto& [token, error] : wait_for(transfers, 5)) CHECK_EQUAL(error, EIO);
    CHECK(transfers.close());
    CHECK(transfers.wait().empty());
  }
}

TEST(close_from_a_delivery_does_not_wait_for_itself) {
  std::vector<std::byte> file = random_bytes(kPiece, 1), memory = file;
  std::atomic<Transfers*> made = nullptr;
  std::atomic<int> refused = 0;
  std::atomic<bool> ready = false;
  Transfers transfers([&] { return std::make_unique<Device>(file, Device::Faults{}); },
                      {1, kPiece, kPiece, 1, 2}, [&](const std::list<Transfer>&) {
                        while (!ready) std::this_thread::yield();
                        refused += !made.load()->close();
                        ready = false;
                      });
  made = &transfers;
  const auto asked = asked_of(0, Priority::demand, memory.data());
  CHECK(transfers.submit({&asked, 1}));
  ready = true;
  std::thread other([&] { CHECK(transfers.close()); });
  CHECK(transfers.close());
  other.join();
  CHECK_EQUAL(refused, 1);
}

TEST(what_cannot_be_delivered_is_waited_for) {
  std::vector<std::byte> file = random_bytes(kPiece, 1), memory = file;
  Transfers transfers([&] { return std::make_unique<Device>(file, Device::Faults{}); }, {1, kPiece, kPiece, 1, 2},
                      [](const std::list<Transfer>&) { throw std::bad_alloc(); });
  const auto asked = asked_of(0, Priority::demand, memory.data());
  CHECK(transfers.submit({&asked, 1}));
  CHECK_EQUAL(wait_for(transfers, 1).at(0), 0);
  CHECK(transfers.close());
  CHECK_EQUAL(transfers.broken(), ENOMEM);
}

TEST(the_end_of_a_file) {
  auto file = random_bytes(3 * kAlignment + 100, 1);
  std::vector<std::byte> memory(8 * kAlignment);
  Transfers transfers([&] { return std::make_unique<Device>(file, Device::Faults{}); },
                      {4, kPiece, kPiece / 2, 2});
  const auto read = [&](Method method, std::uint64_t offset, std::uint64_t size) {
    const Transfer asked{1,   false, method, false, {kBuffered, kDirect, kAlignment}, offset, memory.data() + 1,
                        size};
    CHECK(transfers.submit({&asked, 1}));
    return wait_for(transfers, 1).at(1);
  };
  for (const auto method : {Method::direct, Method::staged, Method::buffered}) {
    CHECK(read(method, 10, file.size() - 10) == 0);
    CHECK(std::memcmp(memory.data() + 1, file.data() + 10, file.size() - 10) == 0);
    CHECK(read(method, 10, file.size() - 9) == EIO);
    CHECK(read(method, file.size(), 1) == EIO);
  }
}

TEST(cancel_and_close) {
  constexpr std::size_t kCount = 200;
  auto file = random_bytes(kPiece * kCount, 2);
  auto memory = random_bytes(kPiece * kCount, 3);
  Transfers transfers([&] { return std::make_unique<Device>(file, Device::Faults{}); },
                      {1, kPiece, kPiece / 2, 1});
  std::vector<Transfer> requests;
  std::vector<std::uint64_t> tokens;
  for (std::uint64_t index = 0; index < kCount; ++index) {
    requests.push_back({index, true, Method::direct, true, {kBuffered, -1, kAlignment}, index * kPiece,
                        memory.data() + index * kPiece, kPiece});
    tokens.push_back(index);
  }
  CHECK(transfers.submit(requests));
  const auto cancelled = transfers.cancel(tokens);
  CHECK(transfers.cancel(tokens) == 0 || cancelled < kCount);
  std::size_t found = 0, done = 0;
  for (const auto& [token, error] : wait_for(transfers, kCount)) {
    CHECK(error == 0 || error == ECANCELED);
    found += error == ECANCELED;
    done += error == 0;
    if (error == 0)
      CHECK(std::memcmp(file.data() + token * kPiece, memory.data() + token * kPiece, kPiece) == 0);
  }
  CHECK(found >= cancelled && found + done == kCount);
  transfers.close();
  CHECK(!transfers.submit(requests));
  CHECK(transfers.wait().empty());
  transfers.close();
}

TEST(close_finishes_what_was_submitted) {
  auto file = random_bytes(100 * kPiece, 4);
  auto memory = random_bytes(100 * kPiece, 5);
  Transfers transfers([&] { return std::make_unique<Device>(file, Device::Faults{2, true, true, true}); },
                      {3, kPiece, kPiece / 2, 2});
  const Transfer asked{9, true, Method::staged, false, {kBuffered, kDirect, kAlignment}, 0, memory.data(),
                      memory.size()};
  CHECK(transfers.submit({&asked, 1}));
  transfers.close();
  CHECK(file == memory);
  const auto finished = transfers.wait();
  CHECK(finished.size() == 1 && finished.front().error == 0);
  CHECK(transfers.wait().empty());
}

TEST(a_broken_ring_ends_everything) {
  auto file = random_bytes(kPiece, 6);
  auto memory = random_bytes(kPiece, 7);
  Transfers transfers(
      [&] { return std::make_unique<Device>(file, Device::Faults{1, false, false, false, 0, true}); },
      {4, kPiece, kPiece / 2, 2});
  const Transfer asked{1, true, Method::direct, true, {kBuffered, kDirect, kAlignment}, 0, memory.data(), kPiece};
  CHECK(transfers.submit({&asked, 1}));
  const auto finished = transfers.wait();
  CHECK(finished.size() == 1 && finished.front().error == EBADF && finished.front().abandoned);
  transfers.close();
  CHECK(!transfers.submit({&asked, 1}));
}

// This process's descriptors of that kind.
std::vector<int> descriptors(std::string_view kind) {
  std::vector<int> found;
  for (int number = 0; number < 256; ++number) {
    char name[64];
    const auto length = readlink(("/proc/self/fd/" + std::to_string(number)).c_str(), name, sizeof name);
    if (length > 0 && std::string_view(name, static_cast<std::size_t>(length)) == kind) found.push_back(number);
  }
  return found;
}

class TellingRing final : public Io {
 public:
  explicit TellingRing(std::atomic<bool>& prepared) : prepared_(prepared) {}
  bool register_memory(std::byte* address, std::size_t size) override { return ring_.register_memory(address, size); }
  void prepare(const Operation& operation, std::uint64_t tag) override {
    ring_.prepare(operation, tag);
    prepared_ = true;
  }
  void submit() override { ring_.submit(); }
  void wait() override { ring_.wait(); }
  bool next(Result& result) override { return ring_.next(result); }
  void wake() override { ring_.wake(); }

 private:
  std::atomic<bool>& prepared_;
  Ring ring_{8};
};

TEST(a_ring_that_the_program_closes_gives_its_memory_up_for_lost) {
  for (const bool busy : {true, false}) {
    int pipe_ends[2];
    CHECK_EQUAL(pipe(pipe_ends), 0);
    std::vector<std::byte> memory(8 * kPiece);
    std::atomic<bool> prepared = false;
    Transfers transfers([&] { return std::make_unique<TellingRing>(prepared); }, {4, kPiece, kPiece, 1});
    const Transfer asked{1, false, Method::buffered, false, {pipe_ends[0], -1, kAlignment}, 0, memory.data(), kPiece};
    if (busy) CHECK(transfers.submit({&asked, 1}));
    while (busy && !prepared) std::this_thread::yield();
    for (const auto* kind : {"anon_inode:[io_uring]", "anon_inode:[eventfd]"})
      for (const auto number : descriptors(kind)) close(number);
    // The thread may find out before, or only now.
    const bool begun = busy || transfers.submit({&asked, 1});
    const auto finished = transfers.wait();
    CHECK_EQUAL(finished.size(), begun ? 1U : 0U);
    if (begun) CHECK_EQUAL(finished.front().error, EBADF);
    if (busy) CHECK(finished.front().abandoned);
    CHECK_EQUAL(transfers.broken(), EBADF);
    CHECK(transfers.close());
    close(pipe_ends[0]);
    close(pipe_ends[1]);
  }
}

TEST(a_refusal_is_thrown) {
  bool thrown = false;
  try {
    Transfers transfers(
        []() -> std::unique_ptr<Io> { throw std::system_error(EPERM, std::generic_category()); }, {});
  } catch (const std::system_error& error) {
    thrown = error.code().value() == EPERM;
  }
  CHECK(thrown);
}

TEST(many_threads) {
  constexpr std::size_t kThreads = 4, kEach = 100;
  auto file = random_bytes(kThreads * kEach * kPiece, 9);
  auto memory = random_bytes(file.size(), 10);
  Transfers transfers([&] { return std::make_unique<Device>(file, Device::Faults{3, true, false, true}); },
                      {8, kPiece, kPiece / 2, 4});
  std::vector<std::thread> threads;
  std::atomic<std::size_t> over = 0;
  for (std::size_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::size_t index = thread * kEach; index < (thread + 1) * kEach; ++index) {
        const Transfer asked{
            index,      true,           static_cast<Method>(index % 3),    true,  {kBuffered, kDirect, kAlignment},
            index * kPiece, memory.data() + index * kPiece, kPiece};
        CHECK(transfers.submit({&asked, 1}));
      }
    });
  }
  threads.emplace_back([&] {
    while (over < kThreads * kEach) over += transfers.wait().size();
  });
  for (auto& thread : threads) thread.join();
  transfers.close();
  CHECK(file == memory);
}
