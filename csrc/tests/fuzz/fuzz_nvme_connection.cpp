// What a hostile controller sends: whole PDUs whose fields are the input's, or any bytes, cut anywhere.
#include <array>
#include <memory>
#include <vector>

#include "checksum.hpp"
#include "input.hpp"
#include "nvme/connection.hpp"

using namespace penstock;
using namespace penstock::nvme;
using penstock::test::Input;

namespace {

// Of exactly its size, and gone when the command ends: who touches it afterwards is found by the sanitizer.
struct Asked {
  std::unique_ptr<std::byte[]> memory;
  bool ended = false;
};

class Fuzzed {
 public:
  explicit Fuzzed(Input& input)
      : input_(input),
        digests_(input.number<std::uint8_t>()),
        connection_({2 + input.below(8), (digests_ & 1) != 0, (digests_ & 2) != 0, input.below(4) * 512}) {}

  void run() {
    while (!input_.empty()) {
      if (connection_.room() > 0 && input_.flag()) submit();
      if (!send() || !receive(next_pdu())) break;
      Completion completion;
      while (connection_.next(completion)) {
        REQUIRE(completion.tag < asked_.size() && !asked_[completion.tag].ended);
        asked_[completion.tag].ended = true;
        asked_[completion.tag].memory.reset();
      }
    }
    REQUIRE(connection_.room() <= asked_.size() + 16);
  }

 private:
  void submit() {
    Command command;
    command.direction = static_cast<Direction>(input_.below(3));
    const auto size_bytes = command.direction == Direction::none ? 0 : 1 + input_.below(6000);
    command.entry = read_or_write(command.direction == Direction::to_controller, 1, 0, 1 + size_bytes / 512);
    command.data_bytes = size_bytes;
    command.memory_bytes = size_bytes;
    if (command.direction == Direction::to_host && size_bytes > 1) {
      command.skipped_bytes = input_.below(size_bytes);
      command.memory_bytes = 1 + input_.below(size_bytes - command.skipped_bytes);
    }
    command.tag = asked_.size();
    auto& asked = asked_.emplace_back();
    if (size_bytes > 0) asked.memory = std::make_unique<std::byte[]>(command.memory_bytes);
    command.memory = asked.memory.get();
    connection_.submit(command);
  }

  // Reads all that is to be sent, and learns the commands' identifiers from it.
  bool send() {
    std::array<iovec, 8> pieces{};
    for (unsigned turns = 0; turns < 64; ++turns) {
      const auto count = connection_.send_from(pieces.data(), pieces.size());
      std::size_t size_bytes = 0;
      std::vector<std::byte> sent;
      for (unsigned i = 0; i < count; ++i) {
        const auto* bytes = static_cast<const std::byte*>(pieces[i].iov_base);
        sent.insert(sent.end(), bytes, bytes + pieces[i].iov_len);
        size_bytes += pieces[i].iov_len;
      }
      if (size_bytes == 0) return true;
      for (std::size_t at = 0; at + kCommonBytes <= sent.size();) {
        const auto header = load_header(sent.data() + at);
        if (header.type == Pdu::command && at + kCommandBytes <= sent.size())
          identifiers_.push_back(load<std::uint16_t>(sent.data() + at + kCommonBytes + 2));
        if (header.pdu_bytes < kCommonBytes) break;
        at += header.pdu_bytes;
      }
      connection_.sent(size_bytes);
    }
    return false;
  }

  std::uint16_t identifier() {
    const auto chosen = input_.below(16);
    if (chosen >= identifiers_.size()) return input_.number<std::uint16_t>();
    return identifiers_[identifiers_.size() - 1 - chosen];
  }

  std::vector<std::byte> next_pdu() {
    const auto kind = input_.below(8);
    if (kind == 7) {
      const auto bytes = input_.take(1 + input_.below(200));
      return {bytes.begin(), bytes.end()};
    }
    if (kind == 0) {
      std::vector<std::byte> pdu(kInitBytes);
      store_header(pdu.data(), {Pdu::init_response, 0, kInitBytes, 0, kInitBytes});
      store(pdu.data() + 10, static_cast<std::uint8_t>(input_.below(8)));
      store(pdu.data() + 11, static_cast<std::uint8_t>(input_.flag() ? digests_ & 3 : input_.below(4)));
      store(pdu.data() + 12, input_.flag() ? 4096U : input_.number<std::uint32_t>());
      return pdu;
    }
    const bool has_data = kind > 3;
    const auto type = has_data ? Pdu::data_to_host : kind == 1 ? Pdu::ready_to_transfer
                              : kind == 2              ? Pdu::controller_terminates
                                                       : Pdu::response;
    const std::uint32_t header_digest = (digests_ & 1) != 0 ? kDigestBytes : 0;
    const std::uint32_t begin = kDataHeaderBytes + header_digest;
    const auto data_bytes = has_data ? input_.below(6001) : 0;
    const std::uint32_t tail = has_data && (digests_ & 2) != 0 ? kDigestBytes : 0;
    std::vector<std::byte> pdu(begin + data_bytes + tail);
    auto flags = static_cast<std::uint8_t>(input_.below(16) & (kLastData | kSuccess));
    if (header_digest > 0) flags |= kHeaderDigest;
    if (tail > 0) flags |= kDataDigest;
    store_header(pdu.data(), {type, flags, kDataHeaderBytes, static_cast<std::uint8_t>(has_data ? begin : 0),
                              static_cast<std::uint32_t>(pdu.size())});
    if (type == Pdu::response) {
      store(pdu.data() + 20, identifier());
      store(pdu.data() + 22, input_.number<std::uint16_t>());
    } else {
      const auto size_bytes = has_data ? data_bytes : input_.below(6001);
      const auto offset = input_.flag() ? expected_ : input_.number<std::uint32_t>();
      store_data_header(pdu.data(), {identifier(), input_.number<std::uint16_t>(), offset, size_bytes});
      expected_ = (flags & kLastData) != 0 ? 0 : offset + size_bytes;
    }
    if (input_.below(16) == 15) pdu[input_.below(static_cast<std::uint32_t>(pdu.size()))] ^= std::byte{1};
    if (header_digest > 0) store(pdu.data() + kDataHeaderBytes, crc32c(0, pdu.data(), kDataHeaderBytes));
    if (tail > 0) store(pdu.data() + begin + data_bytes, crc32c(0, pdu.data() + begin, data_bytes));
    return pdu;
  }

  bool receive(const std::vector<std::byte>& bytes) {
    for (std::size_t done = 0; done < bytes.size();) {
      std::array<iovec, 2> pieces{};
      const auto count = connection_.receive_into(pieces.data());
      REQUIRE(count >= 1 && count <= 2 && pieces[0].iov_len + pieces[1].iov_len > 0);
      auto left = std::min<std::size_t>(bytes.size() - done, 1 + (input_.flag() ? input_.below(64) : 65536));
      std::size_t moved = 0;
      for (unsigned i = 0; i < count && left > 0; ++i) {
        const auto part = std::min(left, pieces[i].iov_len);
        std::memcpy(pieces[i].iov_base, bytes.data() + done + moved, part);
        moved += part;
        left -= part;
      }
      if (!connection_.received(moved)) {
        REQUIRE(!connection_.violation().empty());
        return false;
      }
      done += moved;
    }
    return true;
  }

  Input& input_;
  const std::uint8_t digests_;
  Connection connection_;
  std::vector<Asked> asked_;
  std::vector<std::uint16_t> identifiers_;
  std::uint32_t expected_ = 0;
};

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  Input input(data, size_bytes);
  Fuzzed(input).run();
  return 0;
}
