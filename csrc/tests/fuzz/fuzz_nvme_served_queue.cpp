// What a hostile host sends to a served store: whole commands whose fields are the input's, or any bytes.
#include <array>
#include <vector>

#include "checksum.hpp"
#include "input.hpp"
#include "nvme/served_queue.hpp"

using namespace penstock;
using namespace penstock::nvme;
using penstock::test::Input;

namespace {

constexpr const char* kNqn = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001";
constexpr std::uint64_t kBlocks = 4096;
constexpr std::size_t kMostOutputBytes = served::Queue::kMostUnsentBytes + served::Queue::kMostReadBytes + (128U << 10);

class Fuzzed {
 public:
  explicit Fuzzed(Input& input)
      : input_(input),
        digests_(static_cast<std::uint8_t>(input.below(8))),
        offer_{kNqn, {std::byte{1}}, kBlocks, {(digests_ & 4) != 0 ? Key{Hash::sha256, Octets(32)} : Key{}, {}}},
        queue_(offer_, associations_, counts_, "127.0.0.1", 4420) {
    if (input.below(8) == 7) return;
    take(init_request((digests_ & 1) != 0, (digests_ & 2) != 0));
    if (input.below(8) != 7) connect(static_cast<std::uint16_t>(input.below(8) == 7));
  }

  void run() {
    while (!input_.empty() && !queue_.ended()) {
      switch (input_.below(11)) {
        case 0: {
          const auto bytes = input_.take(1 + input_.below(200));
          take(bytes);
          break;
        }
        case 1:
          connect(static_cast<std::uint16_t>(input_.below(20)));
          break;
        case 2:
          command(set_property(input_.flag() ? 0x14 : input_.number<std::uint32_t>(), input_.number<std::uint32_t>()));
          break;
        case 3:
          command(get_property(input_.below(40), input_.flag()));
          break;
        case 4:
          command(identify(static_cast<std::uint8_t>(input_.below(8)), input_.below(3)));
          break;
        case 5:
          command(get_log(static_cast<std::uint8_t>(input_.below(128)), input_.number<std::uint64_t>(),
                          input_.number<std::uint32_t>() % (1U << 20)));
          break;
        case 6:
        case 7: {
          const auto block = input_.flag() ? input_.below(kBlocks) : input_.number<std::uint64_t>();
          const auto blocks = 1 + input_.below(2048);
          auto entry = read_or_write(input_.below(8) == 7, 1, block, blocks);
          set_data_pointer(entry, blocks * 512, false);
          command(entry);
          break;
        }
        case 8:
          command(input_.flag() ? set_queues(input_.number<std::uint16_t>()) : keep_alive());
          break;
        case 9: {
          const auto message = input_.take(input_.below(200));
          auto entry = authentication(!message.empty(), message.empty() ? 4096 : static_cast<std::uint32_t>(message.size()));
          set_data_pointer(entry, message.empty() ? 4096 : static_cast<std::uint32_t>(message.size()), !message.empty());
          command(entry, message);
          break;
        }
        default: {
          Entry entry{};
          Input::copy(input_.take(entry.size()), entry.data());
          command(entry);
        }
      }
      serve();
    }
  }

 private:
  void connect(std::uint16_t number) {
    std::array<std::byte, 16> id{};
    const auto data = connect_data(id, input_.flag() ? 0xffff : input_.number<std::uint16_t>(),
                                   input_.below(8) == 7 ? "nqn.2014-08.org.nvmexpress.discovery" : kNqn, "nqn.host");
    const auto entries = static_cast<std::uint16_t>(input_.below(200)), keep_alive_ms = input_.number<std::uint16_t>();
    auto entry = nvme::connect(number, entries, keep_alive_ms, input_.flag());
    set_data_pointer(entry, kConnectDataBytes, true);
    command(entry, data);
  }

  // In its capsule, with what digests there have to be.
  void command(Entry entry, std::span<const std::byte> data = {}) {
    set_command_id(entry, static_cast<std::uint16_t>(input_.below(256)));
    const std::size_t header_digest = (digests_ & 1) != 0 ? kDigestBytes : 0, begin = kCommandBytes + header_digest;
    const std::size_t tail = !data.empty() && (digests_ & 2) != 0 ? kDigestBytes : 0;
    std::vector<std::byte> pdu(begin + data.size() + tail);
    const auto flags =
        static_cast<std::uint8_t>((header_digest > 0 ? kHeaderDigest : 0) | (tail > 0 ? kDataDigest : 0));
    store_header(pdu.data(), {Pdu::command, flags, kCommandBytes, static_cast<std::uint8_t>(data.empty() ? 0 : begin),
                              static_cast<std::uint32_t>(pdu.size())});
    std::memcpy(pdu.data() + kCommonBytes, entry.data(), entry.size());
    if (!data.empty()) std::memcpy(pdu.data() + begin, data.data(), data.size());
    if (header_digest > 0) store(pdu.data() + kCommandBytes, crc32c(0, pdu.data(), kCommandBytes));
    if (tail > 0) store(pdu.data() + begin + data.size(), crc32c(0, pdu.data() + begin, data.size()));
    take(pdu);
  }

  // As a socket gives them: what was not taken comes again, with more behind it.
  void take(std::span<const std::byte> bytes) {
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    const std::vector<std::byte> exact(buffer_);  // a read beyond its end is found
    const auto taken = queue_.take(exact);
    REQUIRE(taken <= buffer_.size());
    buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<std::ptrdiff_t>(taken));
    if (buffer_.size() > 2 * served::Queue::kMostPduBytes) buffer_.clear();  // the peer stops sending
  }

  void serve() {
    while (const auto size_bytes = queue_.next_read_bytes()) {
      REQUIRE(size_bytes <= served::Queue::kMostReadBytes);
      auto read = queue_.begin_read();
      REQUIRE(read.offset + read.size_bytes <= kBlocks * 512 && read.begin + read.size_bytes <= read.answer.size);
      std::memset(read.answer.data.get() + read.begin, 1, read.size_bytes);
      queue_.end_read(std::move(read), input_.below(8) != 7);
    }
    std::size_t waiting_bytes = 0;
    for (const auto& bytes : queue_.output) waiting_bytes += bytes.size;
    REQUIRE(waiting_bytes <= kMostOutputBytes + (std::size_t{queue_.kMostEntries} << 19));
    if (input_.flag()) return;  // it does not read
    for (; !queue_.output.empty(); queue_.output.pop_front()) queue_.sent(queue_.output.front().size);
    take({});
  }

  Input& input_;
  const std::uint8_t digests_;  // and whether it asks for a key
  const served::Offer offer_;
  served::Associations associations_;
  served::Counts counts_;
  served::Queue queue_;
  std::vector<std::byte> buffer_;
};

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  Input input(data, size_bytes);
  Fuzzed(input).run();
  return 0;
}
