// A connection fed by a controller of our own, well or badly: cut anywhere, changed anywhere, in any order.
// Memory of a command changes within its bounds alone, every command ends at most once, and what breaks the
// protocol is told.
#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "check.hpp"
#include "checksum.hpp"
#include "nvme/connection.hpp"

using namespace penstock;
using namespace penstock::nvme;

namespace {

constexpr std::byte kGuard{0xA5};
constexpr std::size_t kGuardBytes = 512;

struct Memory {
  explicit Memory(std::size_t size_bytes)
      : bytes(size_bytes + 2 * kGuardBytes, kGuard), size_bytes(size_bytes) {}
  std::byte* data() { return bytes.data() + kGuardBytes; }
  bool guarded() const {
    const auto whole = [](auto begin, auto end) {
      return std::all_of(begin, end, [](auto byte) { return byte == kGuard; });
    };
    return whole(bytes.begin(), bytes.begin() + kGuardBytes) && whole(bytes.end() - kGuardBytes, bytes.end());
  }
  std::vector<std::byte> bytes;
  std::size_t size_bytes;
};

std::byte disk_byte(std::uint64_t offset) { return static_cast<std::byte>(offset * 2654435761U >> 11); }

struct Options {
  unsigned seed = 1;
  bool header_digest = false, data_digest = false, success = false;
  std::uint32_t most_data_bytes = 8192, in_capsule_bytes = 0;
  std::uint8_t alignment = 0;
};

// The other end: takes PDUs apart, and answers. Its blocks have 512 bytes.
class Peer {
 public:
  explicit Peer(const Options& options) : options_(options), random_(options.seed) {}
  std::vector<std::byte> disk = std::vector<std::byte>(1U << 18);

  void take(const std::byte* bytes, std::size_t size_bytes) {
    in_.insert(in_.end(), bytes, bytes + size_bytes);
    while (in_.size() >= kCommonBytes) {
      const auto header = load_header(in_.data());
      if (in_.size() < header.pdu_bytes) return;
      const std::vector<std::byte> pdu(in_.begin(), in_.begin() + header.pdu_bytes);
      in_.erase(in_.begin(), in_.begin() + header.pdu_bytes);
      answer(header, pdu);
    }
  }
  // PDUs, each whole, to be sent in this order.
  std::deque<std::vector<std::byte>> out;

 private:
  struct Write {
    std::uint64_t offset;
    std::uint32_t size_bytes, done = 0, asked = 0;
  };

  void push(Header header, std::uint32_t header_bytes, const auto& fill, const std::byte* data = nullptr,
            std::uint32_t data_bytes = 0) {
    const std::uint32_t digest = options_.header_digest && header.type != Pdu::init_response ? kDigestBytes : 0;
    const auto begin = data_bytes > 0 ? header_bytes + digest + 4 * static_cast<std::uint32_t>(random_(0, 3))
                                      : header_bytes + digest;
    const std::uint32_t tail = data_bytes > 0 && options_.data_digest ? kDigestBytes : 0;
    std::vector<std::byte> pdu(begin + data_bytes + tail);
    header.header_bytes = static_cast<std::uint8_t>(header_bytes);
    header.data_begin = static_cast<std::uint8_t>(data_bytes > 0 ? begin : 0);
    header.pdu_bytes = static_cast<std::uint32_t>(pdu.size());
    if (digest > 0) header.flags |= kHeaderDigest;
    if (tail > 0) header.flags |= kDataDigest;
    store_header(pdu.data(), header);
    fill(pdu.data());
    if (digest > 0) store(pdu.data() + header_bytes, crc32c(0, pdu.data(), header_bytes));
    if (data_bytes > 0) std::memcpy(pdu.data() + begin, data, data_bytes);
    if (tail > 0) store(pdu.data() + begin + data_bytes, crc32c(0, data, data_bytes));
    out.push_back(std::move(pdu));
  }
  void respond(std::uint16_t command, std::uint16_t status) {
    push({Pdu::response, 0, 0, 0, 0}, kDataHeaderBytes, [&](std::byte* pdu) {
      store(pdu + 20, command);
      store(pdu + 22, static_cast<std::uint16_t>(status << 1));
    });
  }
  void ask(std::uint16_t command, Write& write) {
    const auto size = static_cast<std::uint32_t>(random_(1, write.size_bytes - write.done));
    write.asked = size;
    push({Pdu::ready_to_transfer, 0, 0, 0, 0}, kDataHeaderBytes,
         [&](std::byte* pdu) { store_data_header(pdu, {command, 0x77, write.done, size}); });
  }
  void answer(const Header& header, const std::vector<std::byte>& pdu) {
    if (header.type == Pdu::init_request) {
      push({Pdu::init_response, 0, 0, 0, 0}, kInitBytes, [&](std::byte* answer) {
        store(answer + 10, options_.alignment);
        store(answer + 11, static_cast<std::uint8_t>(load<std::uint8_t>(pdu.data() + 11)));
        store(answer + 12, options_.most_data_bytes);
      });
      return;
    }
    CHECK(((header.flags & kHeaderDigest) != 0) == options_.header_digest);
    if (options_.header_digest)
      CHECK(load<std::uint32_t>(pdu.data() + header.header_bytes) ==
            crc32c(0, pdu.data(), header.header_bytes));
    const auto tail = header.data_begin > 0 && options_.data_digest ? kDigestBytes : 0;
    const auto* data = pdu.data() + header.data_begin;
    const auto data_bytes =
        static_cast<std::uint32_t>(header.data_begin > 0 ? pdu.size() - header.data_begin - tail : 0);
    if (header.data_begin > 0) CHECK(header.data_begin % (4 * (options_.alignment + 1)) == 0);
    if (tail > 0) CHECK(load<std::uint32_t>(data + data_bytes) == crc32c(0, data, data_bytes));
    if (header.type == Pdu::data_to_controller) {
      const auto at = load_data_header(pdu.data());
      auto& write = writes_.at(at.command);
      CHECK(at.transfer_tag == 0x77 && at.offset == write.done && at.size_bytes == data_bytes);
      CHECK(data_bytes <= options_.most_data_bytes && data_bytes <= write.asked);
      std::memcpy(disk.data() + write.offset + at.offset, data, data_bytes);
      write.done += data_bytes;
      write.asked -= data_bytes;
      CHECK(((header.flags & kLastData) != 0) == (write.asked == 0));
      if (write.done == write.size_bytes) {
        writes_.erase(at.command);
        respond(at.command, 0);
      } else if (write.asked == 0) {
        ask(at.command, write);
      }
      return;
    }
    CHECK(header.type == Pdu::command);
    const auto* entry = pdu.data() + kCommonBytes;
    const auto command = load<std::uint16_t>(entry + 2);
    const auto offset = load<std::uint64_t>(entry + 40) * 512;
    const auto size = (load<std::uint16_t>(entry + 48) + 1U) * 512;
    CHECK_EQUAL(load<std::uint32_t>(entry + 32), size);
    if (load<std::uint8_t>(entry) == kWrite) {
      if (data_bytes > 0) {
        CHECK_EQUAL(data_bytes, size);
        CHECK(data_bytes <= options_.in_capsule_bytes);
        std::memcpy(disk.data() + offset, data, data_bytes);
        respond(command, 0);
      } else {
        CHECK(size > options_.in_capsule_bytes);
        ask(command, writes_.emplace(command, Write{offset, size}).first->second);
      }
      return;
    }
    if (random_(0, 19) == 0) {
      respond(command, 0x281);
      return;
    }
    for (std::uint32_t done = 0; done < size;) {
      const auto step = static_cast<std::uint32_t>(random_(0, 3) == 0 ? random_(1, size - done) : size - done);
      const bool last = done + step == size;
      const auto flags = (last ? kLastData : 0) | (last && options_.success ? kSuccess : 0);
      push(
          {Pdu::data_to_host, static_cast<std::uint8_t>(flags), 0, 0, 0}, kDataHeaderBytes,
          [&](std::byte* answer) { store_data_header(answer, {command, 0, done, step}); },
          disk.data() + offset + done, step);
      done += step;
    }
    if (!options_.success) respond(command, 0);
  }

  const Options options_;
  test::Random random_;
  std::vector<std::byte> in_;
  std::map<std::uint16_t, Write> writes_;
};

// What comes in, in pieces of any size.
class Feed {
 public:
  Feed(Connection& connection, test::Random& random) : connection_(connection), random_(random) {}
  // False: the connection refuses it.
  bool give(const std::byte* bytes, std::size_t size_bytes) {
    while (size_bytes > 0) {
      iovec pieces[2];
      const auto count = connection_.receive_into(pieces);
      std::size_t room = 0;
      for (unsigned i = 0; i < count; ++i) room += pieces[i].iov_len;
      CHECK(count > 0 && pieces[count - 1].iov_len > 0);
      auto step = std::min(room, size_bytes);
      if (random_(0, 2) == 0) step = random_(1, step);
      auto left = step;
      for (unsigned i = 0; i < count && left > 0; ++i) {
        const auto part = std::min(left, pieces[i].iov_len);
        std::memcpy(pieces[i].iov_base, bytes, part);
        bytes += part;
        left -= part;
      }
      size_bytes -= step;
      if (!connection_.received(step)) return false;
    }
    return true;
  }

 private:
  Connection& connection_;
  test::Random& random_;
};

// A few at a time, as a socket takes them.
void send_some(Connection& connection, Peer& peer, test::Random& random) {
  iovec pieces[5];
  while (const auto count = connection.send_from(pieces, static_cast<unsigned>(random(1, 5)))) {
    std::size_t size = 0;
    for (unsigned i = 0; i < count; ++i) size += pieces[i].iov_len;
    const auto all = random(0, 2) == 0 ? random(1, size) : size;
    auto left = all;
    for (unsigned i = 0; i < count && left > 0; ++i) {
      const auto part = std::min(left, pieces[i].iov_len);
      peer.take(static_cast<const std::byte*>(pieces[i].iov_base), part);
      left -= part;
    }
    connection.sent(all);
    if (random(0, 9) == 0) return;
  }
}

struct Asked {
  Command command;
  std::unique_ptr<Memory> memory;
  std::uint64_t offset;
  bool ended = false;
};

Asked ask_for(test::Random& random, bool write, std::uint64_t tag) {
  const auto blocks = static_cast<std::uint32_t>(random(0, 3) == 0 ? random(1, 64) : random(1, 8));
  const auto block = random(0, 512 - blocks);
  Asked asked{{}, nullptr, block * 512};
  auto& command = asked.command;
  command.entry = read_or_write(write, 1, block, blocks);
  command.direction = write ? Direction::to_controller : Direction::to_host;
  command.data_bytes = command.memory_bytes = blocks * 512;
  if (!write && random(0, 2) == 0) {
    command.skipped_bytes = static_cast<std::uint32_t>(random(0, 511));
    command.memory_bytes = static_cast<std::uint32_t>(random(1, command.data_bytes - command.skipped_bytes));
  }
  asked.memory = std::make_unique<Memory>(command.memory_bytes);
  command.memory = asked.memory->data();
  command.tag = tag;
  if (write)
    for (std::size_t i = 0; i < command.memory_bytes; ++i)
      command.memory[i] = static_cast<std::byte>(random(0, 255));
  return asked;
}

Connection::Options connection_options(const Options& options) {
  return {17, options.header_digest, options.data_digest, 0, 2048};
}

void check_well_behaved(const Options& options) {
  test::Random random(options.seed);
  Peer peer(options);
  for (std::size_t i = 0; i < peer.disk.size(); ++i) peer.disk[i] = disk_byte(i);
  Connection connection(connection_options(options));
  Feed feed(connection, random);
  const auto exchange = [&] {
    send_some(connection, peer, random);
    while (!peer.out.empty()) {
      // Answers to different commands may overtake each other; those to one stay in order here.
      const auto pdu = std::move(peer.out.front());
      peer.out.pop_front();
      if (!feed.give(pdu.data(), pdu.size())) test::fail(__FILE__, __LINE__, connection.violation());
    }
  };
  while (!connection.initialised()) exchange();
  connection.set_in_capsule_bytes(options.in_capsule_bytes);
  std::vector<Asked> all;
  std::vector<std::byte> expected = peer.disk;
  std::size_t ended = 0, failed = 0;
  constexpr std::size_t kCount = 150;
  while (ended < kCount) {
    while (all.size() < kCount && connection.room() > 0 && random(0, 3) > 0) {
      auto asked = ask_for(random, random(0, 2) == 0, all.size());
      // What is read is not written meanwhile: only one kind at a time.
      const bool write = asked.command.direction == Direction::to_controller;
      const bool busy = std::any_of(all.begin(), all.end(), [&](const auto& other) {
        return !other.ended && (write || other.command.direction == Direction::to_controller);
      });
      if (busy) break;
      if (write) std::memcpy(expected.data() + asked.offset, asked.command.memory, asked.command.data_bytes);
      connection.submit(asked.command);
      all.push_back(std::move(asked));
    }
    exchange();
    Completion completion;
    while (connection.next(completion)) {
      auto& asked = all.at(completion.tag);
      CHECK(!asked.ended);
      asked.ended = true;
      ++ended;
      failed += completion.status != 0;
      CHECK(asked.memory->guarded());
      if (asked.command.direction == Direction::to_host && completion.status == 0) {
        const auto* from = expected.data() + asked.offset + asked.command.skipped_bytes;
        CHECK(std::equal(from, from + asked.command.memory_bytes, asked.memory->data()));
      }
    }
  }
  CHECK(peer.disk == expected);
  CHECK(connection.quiet());
  CHECK(failed < ended / 2);
}

}  // namespace

TEST(every_byte_comes_and_goes_however_it_is_cut) {
  unsigned seed = 0;
  for (const bool digest : {false, true})
    for (const bool success : {false, true})
      for (const std::uint32_t in_capsule : {0U, 4096U})
        for (const std::uint8_t alignment : {0, 31})
          check_well_behaved(
              {++seed, digest, digest && success, success, success ? 8192U : 4096U, in_capsule, alignment});
}

TEST(whatever_is_changed_stays_within_the_memory) {
  unsigned told = 0, finished = 0;
  for (unsigned seed = 1; seed <= 400; ++seed) {
    test::Random random(seed);
    const Options options{seed, seed % 2 == 0, seed % 4 == 0, seed % 3 == 0, 4096, seed % 5 == 0 ? 4096U : 0U,
                          0};
    Peer peer(options);
    Connection connection(connection_options(options));
    Feed feed(connection, random);
    std::vector<Asked> all;
    std::vector<std::vector<std::byte>> seen;
    bool right = true;
    const auto give = [&](const std::vector<std::byte>& pdu) {
      right = right && feed.give(pdu.data(), pdu.size());
    };
    for (int turn = 0; turn < 40 && right; ++turn) {
      while (connection.initialised() && connection.room() > 0 && random(0, 2) > 0) {
        all.push_back(ask_for(random, random(0, 2) == 0, all.size()));
        connection.submit(all.back().command);
      }
      try {
        send_some(connection, peer, random);
      } catch (
          const std::exception&) {  // it asked for what it did not want: the peer is as confused as it makes us
        break;
      }
      while (!peer.out.empty() && right) {
        auto which = random(0, 4) == 0 ? random(0, peer.out.size() - 1) : 0;  // out of order
        auto pdu = std::move(peer.out[which]);
        peer.out.erase(peer.out.begin() + static_cast<std::ptrdiff_t>(which));
        seen.push_back(pdu);
        switch (connection.initialised() ? random(0, 40) : 40) {
          case 0:
            pdu[random(0, std::min<std::size_t>(pdu.size(), 24) - 1)] ^=
                static_cast<std::byte>(1U << random(0, 7));
            break;
          case 1:
            pdu[random(0, pdu.size() - 1)] = static_cast<std::byte>(random(0, 255));
            break;
          case 2:
            store(pdu.data() + random(0, 5) * 4, static_cast<std::uint32_t>(random(0, 0xffffffff)));
            break;
          case 3:
            give(seen[random(0, seen.size() - 1)]);  // again
            break;
          case 4:
            pdu.resize(random(1, pdu.size()));
            break;
          default:
            break;
        }
        give(pdu);
      }
      Completion completion;
      while (connection.next(completion)) {
        CHECK(completion.tag < all.size());
        CHECK(!std::exchange(all[completion.tag].ended, true));
        ++finished;
      }
    }
    told += !right;
    CHECK(right == connection.violation().empty());
    for (const auto& asked : all) CHECK(asked.memory->guarded());
  }
  CHECK(told > 200);
  CHECK(finished > 400);
}

TEST(noise_is_no_controller) {
  for (unsigned seed = 1; seed <= 200; ++seed) {
    test::Random random(seed);
    Connection connection({8, false, false, 0, 1024});
    Feed feed(connection, random);
    const auto noise = random.bytes(4096);
    CHECK(!feed.give(reinterpret_cast<const std::byte*>(noise.data()), noise.size()));
    CHECK(!connection.violation().empty());
  }
}

TEST(memory_that_is_still_sent_from_is_not_given_back) {
  Options options;
  options.in_capsule_bytes = 8192;
  Peer peer(options);
  test::Random random(1);
  Connection connection(connection_options(options));
  Feed feed(connection, random);
  const auto hear = [&] {
    while (!peer.out.empty()) {
      CHECK(feed.give(peer.out.front().data(), peer.out.front().size()));
      peer.out.pop_front();
    }
  };
  const auto send_all = [&] {
    iovec pieces[8];
    while (const auto count = connection.send_from(pieces, 8)) {
      std::size_t size = 0;
      for (unsigned i = 0; i < count; ++i) {
        peer.take(static_cast<const std::byte*>(pieces[i].iov_base), pieces[i].iov_len);
        size += pieces[i].iov_len;
      }
      connection.sent(size);
    }
  };
  send_all();
  hear();
  connection.set_in_capsule_bytes(8192);
  Memory memory(4096);
  Command command;
  command.entry = read_or_write(true, 1, 0, 8);
  command.direction = Direction::to_controller;
  command.data_bytes = command.memory_bytes = 4096;
  command.memory = memory.data();
  connection.submit(command);
  // The capsule has been taken by the kernel but for its last byte, as far as we know; the answer is here
  // already.
  iovec pieces[8];
  const auto count = connection.send_from(pieces, 8);
  std::size_t size = 0;
  for (unsigned i = 0; i < count; ++i) {
    peer.take(static_cast<const std::byte*>(pieces[i].iov_base), pieces[i].iov_len);
    size += pieces[i].iov_len;
  }
  connection.sent(size - 1);
  hear();
  Completion completion;
  CHECK(!connection.next(completion));
  connection.sent(1);
  CHECK(connection.next(completion) && completion.status == 0);
  CHECK(connection.quiet());
}
