#include "nvme/wire.hpp"

#include <algorithm>
#include <cstdio>

namespace penstock::nvme {

namespace {

constexpr std::uint8_t kInCapsule = 0x01, kByTransport = 0x5a;  // kinds of data pointers
constexpr std::uint8_t kDataByPointer = 0x40;                   // flag: an SGL says where the data is

Entry entry_of(std::uint8_t opcode, std::uint32_t nsid) {
  Entry entry{};
  store(entry.data(), opcode);
  store(entry.data() + 1, kDataByPointer);
  store(entry.data() + 4, nsid);
  set_data_pointer(entry, 0, false);
  return entry;
}

void store_text(std::byte* at, std::size_t size_bytes, std::string_view text) {
  std::memcpy(at, text.data(), std::min(size_bytes - 1, text.size()));
}

// Up to the first zero, without the blanks at its end, and only of characters that can be shown.
std::string load_text(const std::byte* at, std::size_t size_bytes) {
  const auto* text = reinterpret_cast<const char*>(at);
  std::string result(text, strnlen(text, size_bytes));
  while (!result.empty() && result.back() == ' ') result.pop_back();
  for (auto& character : result)
    if (character < 0x20 || character > 0x7e) character = '?';
  return result;
}

template <std::size_t size>
std::array<std::byte, size> load_bytes(const std::byte* at) {
  std::array<std::byte, size> result;
  std::memcpy(result.data(), at, size);
  return result;
}

}  // namespace

// -- PDUs ----------------------------------------------------------------------------------------

Header load_header(const std::byte* at) {
  return {static_cast<Pdu>(load<std::uint8_t>(at)), load<std::uint8_t>(at + 1), load<std::uint8_t>(at + 2),
          load<std::uint8_t>(at + 3), load<std::uint32_t>(at + 4)};
}

void store_header(std::byte* at, const Header& header) {
  store(at, header.type);
  store(at + 1, header.flags);
  store(at + 2, header.header_bytes);
  store(at + 3, header.data_begin);
  store(at + 4, header.pdu_bytes);
}

DataHeader load_data_header(const std::byte* pdu) {
  return {load<std::uint16_t>(pdu + 8), load<std::uint16_t>(pdu + 10), load<std::uint32_t>(pdu + 12),
          load<std::uint32_t>(pdu + 16)};
}

void store_data_header(std::byte* pdu, const DataHeader& header) {
  store(pdu + 8, header.command);
  store(pdu + 10, header.transfer_tag);
  store(pdu + 12, header.offset);
  store(pdu + 16, header.size_bytes);
  store(pdu + 20, std::uint32_t{0});
}

Response load_response(const std::byte* pdu) {
  return {load<std::uint64_t>(pdu + 8), load<std::uint16_t>(pdu + 16), load<std::uint16_t>(pdu + 18),
          load<std::uint16_t>(pdu + 20), static_cast<std::uint16_t>(load<std::uint16_t>(pdu + 22) >> 1)};
}

InitResponse load_init_response(const std::byte* pdu) {
  return {load<std::uint16_t>(pdu + 8), load<std::uint8_t>(pdu + 10), load<std::uint8_t>(pdu + 11),
          load<std::uint32_t>(pdu + 12)};
}

std::array<std::byte, kInitBytes> init_request(bool header_digest, bool data_digest) {
  std::array<std::byte, kInitBytes> pdu{};
  store_header(pdu.data(), {Pdu::init_request, 0, kInitBytes, 0, kInitBytes});
  // Format 0, data to the host on multiples of four bytes, one R2T at a time for each command.
  store(pdu.data() + 11,
        static_cast<std::uint8_t>((header_digest ? kHeaderDigest : 0) | (data_digest ? kDataDigest : 0)));
  return pdu;
}

std::string terminate_text(const std::byte* pdu, std::size_t size_bytes) {
  if (size_bytes < kDataHeaderBytes) return "without a reason";
  const auto reason = load<std::uint16_t>(pdu + 8);
  constexpr const char* kReasons[] = {"no reason",
                                      "invalid PDU header field",
                                      "PDU out of order",
                                      "wrong header digest",
                                      "data transfer out of range",
                                      "R2T limit exceeded",
                                      "unsupported parameter"};
  char text[96];
  std::snprintf(text, sizeof text, "%s (%u, at %#x)",
                reason < std::size(kReasons) ? kReasons[reason] : "reason unknown", reason,
                load<std::uint32_t>(pdu + 10));
  return text;
}

// -- commands ------------------------------------------------------------------------------------

Entry read_or_write(bool write, std::uint32_t nsid, std::uint64_t block, std::uint32_t blocks) {
  auto entry = entry_of(write ? kWrite : kRead, nsid);
  store(entry.data() + 40, block);
  store(entry.data() + 48, static_cast<std::uint16_t>(blocks - 1));
  return entry;
}

Entry flush(std::uint32_t nsid) { return entry_of(kFlush, nsid); }

Entry identify(std::uint8_t what, std::uint32_t nsid) {
  auto entry = entry_of(kIdentify, nsid);
  store(entry.data() + 40, what);
  return entry;
}

Entry get_log(std::uint8_t log, std::uint64_t offset, std::uint32_t size_bytes) {
  auto entry = entry_of(kGetLog, 0);
  const auto words = size_bytes / 4 - 1;
  store(entry.data() + 40, std::uint32_t{log} | (words & 0xffff) << 16);
  store(entry.data() + 44, words >> 16);
  store(entry.data() + 48, offset);
  return entry;
}

Entry set_queues(std::uint16_t queues) {
  auto entry = entry_of(kSetFeatures, 0);
  store(entry.data() + 40, std::uint32_t{7});
  const std::uint32_t count = queues - 1U;
  store(entry.data() + 44, count << 16 | count);
  return entry;
}

Entry set_host_behavior() {
  auto entry = entry_of(kSetFeatures, 0);
  store(entry.data() + 40, std::uint32_t{0x16});
  return entry;
}

Entry keep_alive() { return entry_of(kKeepAlive, 0); }

namespace {

Entry fabrics(std::uint8_t type) {
  auto entry = entry_of(kFabrics, 0);
  store(entry.data() + 4, type);
  return entry;
}

}  // namespace

Entry get_property(std::uint32_t offset, bool eight_bytes) {
  auto entry = fabrics(4);
  store(entry.data() + 40, static_cast<std::uint8_t>(eight_bytes));
  store(entry.data() + 44, offset);
  return entry;
}

Entry set_property(std::uint32_t offset, std::uint32_t value) {
  auto entry = fabrics(0);
  store(entry.data() + 44, offset);
  store(entry.data() + 48, value);
  return entry;
}

Entry connect(std::uint16_t queue, std::uint16_t entries, std::uint32_t keep_alive_ms, bool flow_control) {
  auto entry = fabrics(1);
  store(entry.data() + 42, queue);
  store(entry.data() + 44, static_cast<std::uint16_t>(entries - 1));
  store(entry.data() + 46, static_cast<std::uint8_t>(flow_control ? 0 : 1U << 2));
  store(entry.data() + 48, keep_alive_ms);
  return entry;
}

Entry authentication(bool send, std::uint32_t size_bytes) {
  auto entry = fabrics(send ? kAuthenticationSend : kAuthenticationReceive);
  store(entry.data() + 41, std::uint16_t{0x0101});  // the protocol's only variant
  store(entry.data() + 43, kAuthenticationProtocol);
  store(entry.data() + 44, size_bytes);
  return entry;
}

std::array<std::byte, kConnectDataBytes> connect_data(std::span<const std::byte, 16> host_id,
                                                      std::uint16_t controller, std::string_view subsystem_nqn,
                                                      std::string_view host_nqn) {
  std::array<std::byte, kConnectDataBytes> data{};
  std::copy(host_id.begin(), host_id.end(), data.begin());
  store(data.data() + 16, controller);
  store_text(data.data() + 256, 256, subsystem_nqn);
  store_text(data.data() + 512, 256, host_nqn);
  return data;
}

void set_data_pointer(Entry& entry, std::uint32_t size_bytes, bool in_capsule) {
  store(entry.data() + 24, std::uint64_t{0});
  store(entry.data() + 32, size_bytes);
  store(entry.data() + 36, std::uint32_t{0});
  store(entry.data() + 39, in_capsule ? kInCapsule : kByTransport);
}

// -- answers -------------------------------------------------------------------------------------

std::string status_text(std::uint16_t status) {
  struct Known {
    std::uint16_t code;
    const char* text;
  };
  constexpr Known kKnown[] = {
      {0x001, "invalid command"},
      {0x002, "invalid field in a command"},
      {0x004, "data transfer error"},
      {0x005, "power loss"},
      {0x006, "internal error"},
      {0x007, "command aborted"},
      {0x008, "queue deleted"},
      {0x00b, "invalid namespace"},
      {0x020, "namespace is write protected"},
      {0x022, "transient transport error"},
      {0x080, "block out of range"},
      {0x081, "capacity exceeded"},
      {0x082, "namespace not ready"},
      {0x083, "reservation conflict"},
      {0x180, "incompatible format of a connect"},
      {0x181, "controller is busy"},
      {0x182, "invalid parameters of a connect"},
      {0x183, "discovery has to be done again"},
      {0x184, "this host is not allowed"},
      {0x190, "discovery has to be done again"},
      {0x191, "authentication required"},
      {0x280, "write fault"},
      {0x281, "unrecovered read error"},
      {0x286, "access denied"},
      {0x287, "deallocated block"},
  };
  const auto code = status_code(status);
  const auto* found =
      std::find_if(std::begin(kKnown), std::end(kKnown), [&](const auto& each) { return each.code == code; });
  char text[96];
  std::snprintf(text, sizeof text, "%s (status %#05x)", found != std::end(kKnown) ? found->text : "error",
                code);
  return text;
}

ControllerData load_controller(std::span<const std::byte, kIdentifyBytes> data) {
  const auto* at = data.data();
  return {load_text(at + 4, 20),
          load_text(at + 24, 40),
          load_text(at + 64, 8),
          load_text(at + 768, 256),
          load<std::uint8_t>(at + 77),
          load<std::uint8_t>(at + 111),
          load<std::uint16_t>(at + 320),
          load<std::uint16_t>(at + 514),
          load<std::uint16_t>(at + 1800),
          load<std::uint32_t>(at + 516),
          load<std::uint32_t>(at + 1792),
          load<std::uint32_t>(at + 1796),
          (load<std::uint8_t>(at + 525) & 1) != 0,
          (load<std::uint32_t>(at + 536) & 3) != 0,
          load<std::uint16_t>(at + 78),
          {load<std::uint16_t>(at + 128), load<std::uint16_t>(at + 130), load<std::uint16_t>(at + 132)},
          load<std::uint16_t>(at + 386)};
}

NamespaceData load_namespace(std::span<const std::byte, kIdentifyBytes> data) {
  const auto* at = data.data();
  const auto formats = load<std::uint8_t>(at + 25), chosen = load<std::uint8_t>(at + 26);
  const unsigned format = (chosen & 0xfU) | (formats > 15 ? (chosen & 0x60U) >> 1 : 0);
  const auto* described = at + 128 + 4 * format;  // at most 64 formats of 4 bytes: inside
  return {load<std::uint64_t>(at),
          load<std::uint8_t>(described + 2),
          load<std::uint16_t>(described),
          (load<std::uint8_t>(at + 29) & 7) != 0,
          format <= formats,
          load_bytes<16>(at + 104),
          load_bytes<8>(at + 120)};
}

bool load_descriptors(std::span<const std::byte, kIdentifyBytes> data, Descriptors& found) {
  std::size_t begin = 0;
  while (begin + 4 <= data.size()) {
    const auto type = load<std::uint8_t>(data.data() + begin),
               size_bytes = load<std::uint8_t>(data.data() + begin + 1);
    if (type == 0) return true;
    if (size_bytes == 0 || begin + 4 + size_bytes > data.size()) return false;
    const auto* value = data.data() + begin + 4;
    if (type == 3 && size_bytes == 16) found.uuid = load_bytes<16>(value);
    if (type == 4 && size_bytes == 1) found.command_set = load<std::uint8_t>(value);
    begin += 4U + size_bytes;
  }
  return true;
}

LogEntry load_log_entry(std::span<const std::byte, kLogEntryBytes> data) {
  const auto* at = data.data();
  return {load<std::uint8_t>(at),       load<std::uint8_t>(at + 1),
          load<std::uint8_t>(at + 2),   static_cast<std::uint8_t>(load<std::uint8_t>(at + 3) & 3),
          load<std::uint8_t>(at + 768), load<std::uint16_t>(at + 4),
          load<std::uint16_t>(at + 6),  load_text(at + 512, 256),
          load_text(at + 32, 32),       load_text(at + 256, 256)};
}

}  // namespace penstock::nvme
