// NVM Express over TCP as bytes: PDUs and commands, little endian. No state, no memory but what is given.
// Section numbers: NVMe/TCP Transport 1.0, NVM Express Base 2.0.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace penstock::nvme {

static_assert(std::endian::native == std::endian::little);

template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
template <class T>
void store(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

// -- PDUs ----------------------------------------------------------------------------------------

enum class Pdu : std::uint8_t {
  init_request = 0,
  init_response = 1,
  host_terminates = 2,
  controller_terminates = 3,
  command = 4,
  response = 5,
  data_to_controller = 6,
  data_to_host = 7,
  ready_to_transfer = 9,
};

inline constexpr std::uint8_t kHeaderDigest = 1, kDataDigest = 2, kLastData = 4, kSuccess = 8;  // flags
inline constexpr std::uint32_t kCommonBytes = 8, kInitBytes = 128, kEntryBytes = 64, kCommandBytes = 72,
                               kDataHeaderBytes = 24, kDigestBytes = 4, kMostTerminateBytes = 152;

struct Header {
  Pdu type;
  std::uint8_t flags, header_bytes, data_begin;  // data_begin: from the PDU's start; 0: no data
  std::uint32_t pdu_bytes;
};
Header load_header(const std::byte* at);
void store_header(std::byte* at, const Header& header);

// Of data in either direction, and of what the controller is ready for.
struct DataHeader {
  std::uint16_t command, transfer_tag;
  std::uint32_t offset, size_bytes;
};
DataHeader load_data_header(const std::byte* pdu);
void store_data_header(std::byte* pdu, const DataHeader& header);

struct Response {
  std::uint64_t result;
  std::uint16_t queue_head, queue, command, status;  // status: without the phase bit
};
Response load_response(const std::byte* pdu);

struct InitResponse {
  std::uint16_t format;
  std::uint8_t alignment;  // of data from the host: 4 * (this + 1)
  std::uint8_t digests;    // kHeaderDigest, kDataDigest
  std::uint32_t most_data_bytes;
};
InitResponse load_init_response(const std::byte* pdu);
std::array<std::byte, kInitBytes> init_request(bool header_digest, bool data_digest);
// Why a controller ended the connection.
std::string terminate_text(const std::byte* pdu, std::size_t size_bytes);

// -- commands ------------------------------------------------------------------------------------

using Entry = std::array<std::byte, kEntryBytes>;

inline constexpr std::uint8_t kFlush = 0, kWrite = 1, kRead = 2;                                // I/O
inline constexpr std::uint8_t kGetLog = 2, kIdentify = 6, kSetFeatures = 9, kKeepAlive = 0x18;  // admin
inline constexpr std::uint8_t kFabrics = 0x7f;
inline constexpr std::uint8_t kAuthenticationSend = 5, kAuthenticationReceive = 6;  // types of fabrics commands
// In the result of a connect.
inline constexpr std::uint32_t kAuthenticationAsked = 1U << 17, kSecureChannelAsked = 1U << 18;
inline constexpr std::uint8_t kAuthenticationProtocol = 0xe9;

Entry read_or_write(bool write, std::uint32_t nsid, std::uint64_t block, std::uint32_t blocks);
Entry flush(std::uint32_t nsid);
Entry identify(std::uint8_t what, std::uint32_t nsid);
Entry get_log(std::uint8_t log, std::uint64_t offset, std::uint32_t size_bytes);
Entry set_queues(std::uint16_t queues);
Entry set_host_behavior();  // with kHostBehaviorBytes
Entry keep_alive();
Entry get_property(std::uint32_t offset, bool eight_bytes);
Entry set_property(std::uint32_t offset, std::uint32_t value);
// `entries`: of the queue. Flow control of the queue is off where a queue never has more commands than entries.
Entry connect(std::uint16_t queue, std::uint16_t entries, std::uint32_t keep_alive_ms, bool flow_control);

inline constexpr std::uint32_t kConnectDataBytes = 1024, kIdentifyBytes = 4096,
                               kHostBehaviorBytes = 512;
// Of `size_bytes`, in the capsule or to the host.
Entry authentication(bool send, std::uint32_t size_bytes);
std::array<std::byte, kConnectDataBytes> connect_data(std::span<const std::byte, 16> host_id,
                                                      std::uint16_t controller, std::string_view subsystem_nqn,
                                                      std::string_view host_nqn);

// Where the data of a command is: behind it in its capsule, or where the transport sends it.
void set_data_pointer(Entry& entry, std::uint32_t size_bytes, bool in_capsule);
inline void set_command_id(Entry& entry, std::uint16_t id) { store(entry.data() + 2, id); }

// -- answers -------------------------------------------------------------------------------------

inline constexpr std::uint16_t kDoNotRetry = 1U << 14;
// Type and code: SCT << 8 | SC.
// Which of the controller's delays to wait for before a retry, from 1; 0: none.
inline constexpr unsigned retry_delay(std::uint16_t status) { return status >> 11 & 3U; }
inline constexpr std::uint16_t status_code(std::uint16_t status) { return status & 0x7ff; }
std::string status_text(std::uint16_t status);

struct ControllerData {
  std::string serial, model, firmware, subsystem_nqn;
  std::uint8_t most_data, type;  // most_data: a power of two of pages; 0: no limit
  std::uint16_t keep_alive_unit, most_commands, in_capsule_offset;
  std::uint32_t namespaces, in_capsule_units, response_units;  // of 16 bytes, with the command's 64
  bool volatile_write_cache, data_by_pointer;                  // by_pointer: by SGL, as everything over TCP
  std::uint16_t controller;
  std::array<std::uint16_t, 3> retry_delays;  // of 100 ms; 0: none
  std::uint16_t quiesce_ms;                   // of commands, once it has noticed a loss; 0: it does not say
};
ControllerData load_controller(std::span<const std::byte, kIdentifyBytes> data);

struct NamespaceData {
  std::uint64_t blocks;
  std::uint8_t block_shift;
  std::uint16_t metadata_bytes;
  bool protection, format_known;
  std::array<std::byte, 16> nguid;
  std::array<std::byte, 8> eui64;
  bool operator==(const NamespaceData&) const = default;
};
NamespaceData load_namespace(std::span<const std::byte, kIdentifyBytes> data);

struct Descriptors {
  std::array<std::byte, 16> uuid{};
  std::uint8_t command_set = 0;
  bool operator==(const Descriptors&) const = default;
};
// False where they contradict themselves.
bool load_descriptors(std::span<const std::byte, kIdentifyBytes> data, Descriptors& found);

inline constexpr std::size_t kLogEntryBytes = 1024;
struct LogEntry {
  std::uint8_t transport, address_family, subsystem_type, secure_channel, security;
  std::uint16_t port, controller;
  std::string address, service, subsystem_nqn;
};
LogEntry load_log_entry(std::span<const std::byte, kLogEntryBytes> data);

}  // namespace penstock::nvme
