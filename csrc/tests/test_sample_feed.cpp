// Batches of samples are right and come in order, whatever the device does and whoever stops when.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <span>
#include <system_error>
#include <thread>
#include <vector>

#include "check.hpp"
#include "checksum.hpp"
#include "samples/copiers.hpp"
#include "io/blocking.hpp"
#include "samples/feed.hpp"
#include "samples/fetches.hpp"
#include "samples/reader.hpp"

using namespace penstock;
using namespace penstock::samples;

namespace {

thread_local bool no_memory = false;

// This thread gets no memory meanwhile.
struct NoMemory {
  NoMemory() { no_memory = true; }
  ~NoMemory() { no_memory = false; }
};

}  // namespace

void* operator new(std::size_t size_bytes) {
  auto* const memory = no_memory ? nullptr : std::malloc(size_bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(std::size_t size_bytes, const std::nothrow_t&) noexcept {
  return no_memory ? nullptr : std::malloc(size_bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

constexpr std::uint64_t kChunk = 4096;
constexpr auto kLong = std::chrono::seconds(60);
constexpr auto kShort = std::chrono::milliseconds(500);  // long enough to begin

// A store of one data file in memory.
struct Store {
  explicit Store(const std::vector<std::uint64_t>& lengths, unsigned seed = 1) {
    std::uint64_t size = 0;
    for (const auto length : lengths) {
      directory.push_back(Entry::of(0, directory.size(), size, length));
      size += length;
    }
    const auto count = std::max<std::uint64_t>(1, (size + kChunk - 1) / kChunk);
    data = test::Random(seed).bytes(size);
    data.resize(count * kChunk);
    for (const auto& entry : directory) sums.push_back(crc32c(0, at(entry), entry.length()));
    for (std::uint64_t chunk = 0; chunk < count; ++chunk) records.push_back(record(chunk, count));
    for (const auto& one : records) firsts.push_back(one.first);
    firsts.push_back(directory.size());
    file = memfd_create("samples", 0);
    CHECK(write(file, data.data(), data.size()) == static_cast<ssize_t>(data.size()));
    data_file = {directory.size(), count, size, file, -1, 512};
  }
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  ~Store() { close(file); }

  const char* at(const Entry& entry) const { return data.data() + entry.offset(); }
  ChunkRecord record(std::uint64_t chunk, std::uint64_t count) const {
    const auto chunk_of = [&](const Entry& entry) { return std::min(entry.offset() / kChunk, count - 1); };
    ChunkRecord found{directory.size()};
    for (std::size_t i = 0; i < directory.size(); ++i) {
      const auto& entry = directory[i];
      if (chunk_of(entry) < chunk) continue;
      found.first = std::min<std::uint64_t>(found.first, i);
      if (chunk_of(entry) > chunk) break;
      const auto end = entry.offset() + entry.length();
      if (end <= (chunk + 1) * kChunk || entry.length() < long_edge_bytes(kChunk))
        found.crc32c = crc32c(found.crc32c, at(entry), entry.length());
    }
    return found;
  }
  std::vector<Partition> partitions() const {
    return {{directory, sums, records, {}, kChunk, {data_file}}};
  }
  std::unique_ptr<Order> order(bool full, std::uint64_t slots) const {
    const Epoch epoch{5, 0, 1, 0, slots, {}};
    return full ? full_order(directory.size(), epoch) : chunk_order(firsts, epoch);
  }
  void check(const SampleBatch& batch, std::vector<std::uint64_t>& found) const {
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const auto& entry = directory[static_cast<std::size_t>(batch.indices()[i])];
      CHECK_EQUAL(batch.offsets()[i + 1] - batch.offsets()[i], static_cast<std::int64_t>(entry.length()));
      CHECK(std::memcmp(batch.data() + batch.offsets()[i], at(entry), entry.length()) == 0);
      found.push_back(static_cast<std::uint64_t>(batch.indices()[i]));
    }
  }

  std::vector<Entry> directory;
  std::vector<std::uint32_t> sums;
  std::vector<ChunkRecord> records;
  std::vector<std::uint64_t> firsts;
  std::vector<char> data;
  int file = -1;
  DataFile data_file{};
};

std::vector<std::uint64_t> some_lengths(test::Random& random, std::size_t count) {
  std::vector<std::uint64_t> lengths;
  for (std::size_t i = 0; i < count; ++i)
    lengths.push_back(random(0, 9) == 0 ? random(0, 9000) : random(0, 300));
  return lengths;
}

// A device that does nothing while its gate is shut.
struct Gate {
  std::mutex mutex;
  std::condition_variable opened;
  bool open = false;
  void set(bool to) {
    const std::lock_guard lock(mutex);
    open = to;
    opened.notify_all();
  }
};

class Stalling final : public Io {
 public:
  explicit Stalling(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {}
  bool register_memory(std::byte*, std::size_t) override { return false; }
  void prepare(const Operation& operation, std::uint64_t tag) override {
    ++prepared_;
    inner_.prepare(operation, tag);
  }
  void submit() override {}
  void wait() override {
    if (prepared_ > 0) {
      std::unique_lock lock(gate_->mutex);
      gate_->opened.wait(lock, [this] { return gate_->open; });
    }
    inner_.wait();
  }
  bool next(Result& result) override {
    const bool there = inner_.next(result);
    prepared_ -= there;
    return there;
  }
  void wake() override { inner_.wake(); }

 private:
  const std::shared_ptr<Gate> gate_;
  BlockingIo inner_;
  int prepared_ = 0;
};

}  // namespace

TEST(every_sample_comes_once_and_in_order) {
  test::Random random(3);
  for (int round = 0; round < 60; ++round) {
    const Store store(some_lengths(random, random(1, 400)));
    const bool full = round % 2 == 1;
    const auto slots = random(1, 6);
    const ReaderOptions options{random(0, 30), false, true, round % 3 != 0,
                                static_cast<unsigned>(random(0, 2)), 8};
    const auto reader = std::make_shared<Reader>(store.partitions(), options);
    std::vector<Pick> expected(store.directory.size());
    CHECK_EQUAL(store.order(full, slots)->take(expected), expected.size());
    std::vector<std::uint64_t> found;
    Feed feed(reader, store.order(full, slots), {random(0, 2), random(0, 1) * 100000, false});
    std::shared_ptr<SampleBatch> batch;
    while (feed.take(random(1, 40), Clock::now() + kLong, batch) == Feed::Outcome::batch)
      store.check(*batch, found);
    CHECK_EQUAL(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) CHECK_EQUAL(found[i], expected[i].sample);
    CHECK(reader->close(Clock::now() + kLong));
  }
}

TEST(feeds_and_single_reads_go_on_at_once_until_the_reader_closes) {
  test::Random random(4);
  const Store store(some_lengths(random, 2000));
  for (int round = 0; round < 12; ++round) {
    const ReaderOptions options{3, false, true, round % 2 == 0, 1, 8};
    const auto reader = std::make_shared<Reader>(store.partitions(), options);
    std::atomic<int> closed = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] {
        const auto feed = std::make_shared<Feed>(reader, store.order(i == 1, 4), FeedOptions{1, 20000, false});
        try {
          reader->add(feed);
          std::shared_ptr<SampleBatch> batch;
          std::vector<std::uint64_t> found;
          while (feed->take(16, Clock::now() + kLong, batch) == Feed::Outcome::batch)
            store.check(*batch, found);
        } catch (const Failed& failed) {
          closed += failed.failure.fault == Fault::closed;
        }
      });
    }
    threads.emplace_back([&] {
      std::vector<std::int64_t> indices(20);
      std::iota(indices.begin(), indices.end(), 50 * round);
      const auto signal = std::make_shared<Signal>();
      try {
        while (true) {
          const auto batch = reader->begin(indices, signal);
          CHECK(Reader::wait(*batch, *signal, Clock::now() + kLong));
          for (const auto& [position, failure] : batch->bad()) CHECK_EQUAL(failure.error, ECANCELED);
        }
      } catch (const Failed& failed) {
        closed += failed.failure.fault == Fault::closed;
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(round));
    CHECK(reader->close(Clock::now() + kLong));
    for (auto& thread : threads) thread.join();
    CHECK(closed >= 1);
  }
}

TEST(what_is_fetched_is_right_whoever_brings_it_and_whoever_closes_when) {
  test::Random random(6);
  for (int round = 0; round < 24; ++round) {
    const Store store(some_lengths(random, random(100, 900)));
    std::vector<std::uint8_t> held(round % 4 != 0 ? store.records.size() : 0);
    for (auto& one : held) one = static_cast<std::uint8_t>(random(0, 3));
    for (int i = 0; i < 9; ++i)  // what is held may be damaged
      CHECK(pwrite(store.file, "x", 1, static_cast<off_t>(random(0, store.data.size() - 1))) == 1);
    auto partitions = store.partitions();
    partitions[0].data_files[0].fetched = true;
    partitions[0].data_files[0].held = held;
    const ReaderOptions options{random(0, 9), false, true, round % 5 != 0, 1, 8};
    const auto reader = std::make_shared<Reader>(std::move(partitions), options);
    const bool closes = round % 3 == 0;
    std::atomic<int> wrong = 0;
    std::vector<std::thread> bringing, taking;
    for (int i = 0; i < 4; ++i) {
      bringing.emplace_back([&] {
        auto& fetches = *reader->reads().fetches();
        std::vector<Fetch> taken;
        while (reader->reads().take(2, Clock::now() + std::chrono::milliseconds(20), taken)) {
          for (const auto& [ticket, piece] : taken) {
            const bool all = ticket % 2 == 0;
            const auto& extent = all ? piece.extent : piece.wanted;
            const auto bytes = std::as_bytes(std::span(store.data)).subspan(extent.offset, extent.size_bytes);
            fetches.give(ticket, extent.offset, bytes);
            fetches.fail(ticket, EIO);  // it is not under way any more
            if (all && !held.empty()) std::atomic_ref(held[piece.chunk]).fetch_or(piece.bit);
          }
          taken.clear();
        }
      });
    }
    for (int i = 0; i < 2; ++i) {
      taking.emplace_back([&, full = (round + i) % 2 == 1] {
        const auto feed = std::make_shared<Feed>(reader, store.order(full, 4), FeedOptions{1, 20000, false});
        std::vector<std::uint64_t> found;
        try {
          reader->add(feed);
          std::shared_ptr<SampleBatch> batch;
          while (feed->take(16, Clock::now() + kLong, batch) == Feed::Outcome::batch)
            store.check(*batch, found);
          wrong += found.size() != store.directory.size();
        } catch (const Failed& failed) {
          wrong += !closes || (failed.failure.fault != Fault::closed && failed.failure.error != ECANCELED);
        } catch (const std::exception&) {  // of a check
          ++wrong;
        }
      });
    }
    if (closes) {
      std::this_thread::sleep_for(std::chrono::milliseconds(round / 3));
      CHECK(reader->close(Clock::now() + kLong));
    }
    for (auto& thread : taking) thread.join();
    CHECK(reader->close(Clock::now() + kLong));
    for (auto& thread : bringing) thread.join();
    CHECK_EQUAL(wrong.load(), 0);
  }
}

TEST(a_read_that_takes_too_long_is_named_and_may_still_come) {
  test::Random random(5);
  for (const bool full : {false, true}) {
    const Store store(std::vector<std::uint64_t>(300, 70000));  // too long to be read without waiting
    const Store small(std::vector<std::uint64_t>(300, 100));
    for (const auto* one : {&store, &small}) {
      if (full && one == &small) continue;  // the page cache has it
      const auto gate = std::make_shared<Gate>();
      const auto reader =
          std::make_shared<Reader>(one->partitions(), ReaderOptions{0, false, true, true, 0, 1},
                                   [gate](unsigned) { return std::make_unique<Stalling>(gate); });
      Feed feed(reader, one->order(full, 2), {1, 0, false});
      std::shared_ptr<SampleBatch> batch;
      std::vector<std::uint64_t> found;
      CHECK(feed.take(4, Clock::now() + kShort, batch) == Feed::Outcome::late);
      const auto failure = feed.late();
      CHECK(failure.fault == Fault::timeout);
      CHECK(failure.extent.size_bytes > 0);
      gate->set(true);
      CHECK(feed.take(4, Clock::now() + kLong, batch) == Feed::Outcome::batch);
      one->check(*batch, found);
      CHECK_EQUAL(found.size(), 4U);
      CHECK(reader->close(Clock::now() + kLong));
    }
  }
}

TEST(a_stuck_read_is_left_behind_and_harms_nobody) {
  const auto kept = std::make_shared<Store>(std::vector<std::uint64_t>(300, 100));
  const auto& store = *kept;
  const auto gate = std::make_shared<Gate>();
  const auto reader =
      std::make_shared<Reader>(store.partitions(), ReaderOptions{4, false, true, true, 0, 1},
                               [gate](unsigned) { return std::make_unique<Stalling>(gate); });
  leave_behind(kept);
  leave_behind(reader);
  {
    Feed feed(reader, store.order(false, 2), {1, 0, false});
    std::shared_ptr<SampleBatch> batch;
    CHECK(feed.take(4, Clock::now() + kShort, batch) == Feed::Outcome::late);
    CHECK(!reader->close(Clock::now() + kShort));
    CHECK(!reader->close(Clock::now()));
  }
  gate->set(true);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

TEST(a_chunk_whose_read_cannot_begin_is_an_error_and_is_read_when_it_can) {
  const Store store(std::vector<std::uint64_t>(300, 100));
  const auto refusals = std::make_shared<std::atomic<int>>(1);
  const auto reader = std::make_shared<Reader>(store.partitions(), ReaderOptions{4, false, true, true, 0, 8},
                                               [refusals](unsigned) -> std::unique_ptr<Io> {
                                                 if ((*refusals)-- > 0)
                                                   throw std::system_error(EAGAIN, std::generic_category());
                                                 return std::make_unique<BlockingIo>();
                                               });
  const std::atomic<bool> stop = false;
  Body body;
  CHECK(reader->catalog().body(0, body));
  reader->cache().reserve(2);
  bool refused = false;
  try {
    reader->cache().use(0, body, stop);
  } catch (const std::system_error&) {
    refused = true;
  }
  CHECK(refused);
  auto* chunk = reader->cache().use(0, body, stop);
  reader->cache().wait(chunk, stop);
  CHECK(!chunk->damaged());
  CHECK(std::memcmp(chunk->at(0), store.data.data(), body.extent.size_bytes) == 0);
  reader->cache().let_go(chunk);
  CHECK(reader->close(Clock::now() + kLong));
}

TEST(a_failed_read_needs_no_memory_to_be_told) {
  const Store store(std::vector<std::uint64_t>(300, 100));
  const auto reader = std::make_shared<Reader>(store.partitions(), ReaderOptions{});
  const auto batch = reader->make_batch(2, 200, std::make_shared<Signal>());
  std::vector<Read> reads;
  for (std::size_t i = 0; i < 2; ++i) {
    batch->set(i, i, 100);
    std::memcpy(batch->data() + batch->offsets()[i], store.data.data(), 100);
    reads.push_back(batch->read(i, reader->find(i)));
  }
  batch->assembled();
  {
    const NoMemory none;
    batch->arrived(reads[1].number, EIO);
    batch->arrived(reads[0].number, 0);
  }
  CHECK(!batch->under_way());
  CHECK_EQUAL(batch->bad().size(), 1U);
  CHECK_EQUAL(batch->bad()[0].position, 1U);
  CHECK_EQUAL(batch->bad()[0].failure.error, EIO);
  CHECK(reader->close(Clock::now() + kLong));
}

TEST(damage_in_a_chunk_is_told_where_memory_is_short) {
  Store store(std::vector<std::uint64_t>(300, 100));
  ++store.sums[3];
  ++store.records[0].crc32c;
  const auto gate = std::make_shared<Gate>();
  const auto reader = std::make_shared<Reader>(store.partitions(), ReaderOptions{4, false, true, true, 0, 8},
                                               [gate](unsigned) { return std::make_unique<Stalling>(gate); });
  const std::atomic<bool> stop = true;
  Body body;
  CHECK(reader->catalog().body(0, body));
  reader->cache().reserve(1);
  auto* chunk = reader->cache().use(0, body, stop);
  std::memcpy(const_cast<std::byte*>(chunk->at(0)), store.data.data(), body.extent.size_bytes);
  {
    const NoMemory none;
    chunk->arrived(0, 0);
  }
  Failure failure;
  CHECK(chunk->damaged());
  CHECK(!chunk->good(3, failure));
  CHECK(failure.fault == Fault::read);
  CHECK_EQUAL(failure.error, ENOMEM);
  gate->set(true);
  reader->cache().let_go(chunk);
  CHECK(reader->close(Clock::now() + kLong));
}

TEST(threads_that_cannot_all_begin_are_an_error) {
  rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  rlimit little = before;
  long pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  little.rlim_cur = static_cast<rlim_t>(pages) * 4096 + (64U << 20);  // a stack has 8 MiB
  setrlimit(RLIMIT_AS, &little);
  bool refused = false;
  try {
    const Copiers copiers(1000);
  } catch (const std::system_error&) {
    refused = true;
  }
  setrlimit(RLIMIT_AS, &before);
  CHECK(refused);
}

TEST(memory_of_batches_is_used_again) {
  const auto pool = std::make_shared<BatchPool>(0);
  const auto* first = pool->take(100000).data.get();
  for (int i = 0; i < 10; ++i) CHECK_EQUAL(pool->take(99000).data.get(), first);
  const auto held = pool->take(100000);
  CHECK(pool->take(100000).data != held.data);
}
