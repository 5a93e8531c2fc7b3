#include "nvme/served_queue.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "checksum.hpp"
#include "nvme/served_files.hpp"

namespace penstock::nvme::served {

namespace {

constexpr const char* kDiscoveryNqn = "nqn.2014-08.org.nvmexpress.discovery";
constexpr std::uint16_t kInvalidOpcode = 1, kInvalidField = 2, kInvalidNamespace = 0x0b, kSequence = 0x0c,
                        kWriteProtected = 0x20, kOutOfRange = 0x80, kFormat = 0x180, kParameters = 0x182, kUnauthenticated = 0x191,
                        kEventLimit = 0x105, kUnrecoveredRead = 0x281;
// Why a connection is ended (NVMe/TCP, figure "Controller to Host Terminate Connection").
constexpr std::uint16_t kBadField = 1, kOutOfOrder = 2, kBadDigest = 3, kUnsupported = 6;
constexpr std::uint32_t kOnlyNamespace = 1, kEveryNamespace = 0xffffffff;
constexpr std::uint16_t kMostQueues = 16, kMostEvents = 4, kAnyController = 0xffff, kMostController = 0xffef;
constexpr std::uint8_t kMostPages = 7;  // 2^7 pages of 4 KiB
static_assert(Queue::kMostReadBytes == 4096U << kMostPages);
constexpr std::uint32_t kCapabilities = 0x00, kVersion = 0x08, kConfiguration = 0x14, kStatus = 0x1c;
constexpr std::uint32_t kMostLogBytes = 64U << 10;
constexpr std::uint8_t kSglInCapsule = 0x01, kSglByTransport = 0x5a;

std::uint16_t id_of(const std::byte* entry) { return load<std::uint16_t>(entry + 2); }

// A name in a field of 256 bytes; empty where it is none.
std::string name_in(const std::byte* field) {
  const auto* text = reinterpret_cast<const char*>(field);
  const auto size = strnlen(text, 256);
  return size < 256 ? std::string(text, size) : std::string();
}

void put_text(std::byte* at, std::size_t size_bytes, const std::string& text, char fill = ' ') {
  std::memset(at, fill, size_bytes);
  std::memcpy(at, text.data(), std::min(size_bytes, text.size()));
}

}  // namespace

// -- Input

std::size_t Queue::take(std::span<const std::byte> input) {
  std::size_t begin = 0;
  while (takes() && input.size() - begin >= kCommonBytes) {
    const auto* pdu = input.data() + begin;
    const auto header = load_header(pdu);
    if (header.pdu_bytes < std::max<std::uint32_t>(header.header_bytes, kCommonBytes) ||
        header.pdu_bytes > kMostPduBytes) {
      refuse(kBadField, 4, pdu, kCommonBytes);
      break;
    }
    if (input.size() - begin < header.pdu_bytes) break;
    take_pdu(header, pdu);
    begin += header.pdu_bytes;
  }
  return begin;
}

// The connection ends, and the host is told why.
void Queue::refuse(std::uint16_t reason, std::uint32_t at, const std::byte* pdu, std::size_t size_bytes) {
  ++counts_.violations;
  ended_ = true;
  waiting_.clear();
  const auto copied = std::min<std::size_t>(size_bytes, kMostTerminateBytes - kDataHeaderBytes);
  auto* answer = add(kDataHeaderBytes + copied);
  std::memset(answer, 0, kDataHeaderBytes);
  store_header(answer, {Pdu::controller_terminates, 0, kDataHeaderBytes, 0,
                        static_cast<std::uint32_t>(kDataHeaderBytes + copied)});
  store(answer + 8, reason);
  store(answer + 10, at);
  std::memcpy(answer + kDataHeaderBytes, pdu, copied);
}

void Queue::take_pdu(const Header& header, const std::byte* pdu) {
  if (!initialized_) return initialize(header, pdu);
  if (header.type == Pdu::host_terminates) {
    ended_ = true;
    return;
  }
  // No R2T is ever sent, so no data come but those in capsules.
  if (header.type != Pdu::command) return refuse(kOutOfOrder, 0, pdu, kCommonBytes);
  if (header.header_bytes != kCommandBytes) return refuse(kBadField, 2, pdu, kCommonBytes);
  const std::size_t head = kCommandBytes + (header_digest_ ? kDigestBytes : 0);
  if (((header.flags & kHeaderDigest) != 0) != header_digest_ || header.pdu_bytes < head)
    return refuse(kBadField, 1, pdu, kCommonBytes);
  if (header_digest_ && load<std::uint32_t>(pdu + kCommandBytes) != crc32c(0, pdu, kCommandBytes))
    return refuse(kBadDigest, load<std::uint32_t>(pdu + kCommandBytes), pdu, kCommandBytes);
  Data data;
  if (header.data_begin != 0) {
    const std::size_t tail = data_digest_ ? kDigestBytes : 0;
    if (header.data_begin < head || header.pdu_bytes <= header.data_begin + tail)
      return refuse(kBadField, 3, pdu, kCommandBytes);
    data = {pdu + header.data_begin, header.pdu_bytes - header.data_begin - tail};
    if (((header.flags & kDataDigest) != 0) != data_digest_) return refuse(kBadField, 1, pdu, kCommandBytes);
    if (data_digest_ && load<std::uint32_t>(data.data() + data.size()) != crc32c(0, data.data(), data.size()))
      return refuse(kBadDigest, 0, pdu, kCommandBytes);
  } else if (header.pdu_bytes != head) {
    return refuse(kBadField, 4, pdu, kCommandBytes);
  }
  if (++in_flight_ > entries_) return refuse(kBadField, 8, pdu, kCommandBytes);
  take_command(pdu + kCommonBytes, data);
}

void Queue::initialize(const Header& header, const std::byte* pdu) {
  if (header.type != Pdu::init_request) return refuse(kOutOfOrder, 0, pdu, kCommonBytes);
  if (header.header_bytes != kInitBytes || header.pdu_bytes != kInitBytes)
    return refuse(kBadField, 2, pdu, kCommonBytes);
  if (load<std::uint16_t>(pdu + 8) != 0) return refuse(kUnsupported, 8, pdu, kInitBytes);
  const auto alignment = load<std::uint8_t>(pdu + 10), digests = load<std::uint8_t>(pdu + 11);
  if (alignment > 31) return refuse(kBadField, 10, pdu, kInitBytes);
  initialized_ = true;
  alignment_ = 4 * (alignment + std::size_t{1});
  header_digest_ = (digests & kHeaderDigest) != 0;
  data_digest_ = (digests & kDataDigest) != 0;
  auto* answer = add(kInitBytes);
  std::memset(answer, 0, kInitBytes);
  store_header(answer, {Pdu::init_response, 0, kInitBytes, 0, kInitBytes});
  store(answer + 11, static_cast<std::uint8_t>(digests & (kHeaderDigest | kDataDigest)));
  store(answer + 12, std::uint32_t{8192});
}

void Queue::take_command(const std::byte* entry, Data data) {
  const auto opcode = load<std::uint8_t>(entry);
  const bool connects = opcode == kFabrics && load<std::uint8_t>(entry + 4) == 1;
  if ((load<std::uint8_t>(entry + 1) & 3) != 0) return respond(id_of(entry), kInvalidField | kDoNotRetry);
  if (connects == connected()) return respond(id_of(entry), kSequence | kDoNotRetry);
  const auto type = load<std::uint8_t>(entry + 4);
  if (opcode == kFabrics && (type == kAuthenticationSend || type == kAuthenticationReceive))
    return authenticate(entry, data, type == kAuthenticationSend);
  if (connected() && !admitted()) return respond(id_of(entry), kUnauthenticated | kDoNotRetry);
  if (opcode == kFabrics) return fabrics(entry, data);
  if (number_ == 0) return admin(entry, data);
  transfer(entry);
}

void Queue::fabrics(const std::byte* entry, Data data) {
  const auto type = load<std::uint8_t>(entry + 4);
  if (type == 1) return connect(entry, data);
  if (type == 8 && number_ != 0) {  // Disconnect
    respond(id_of(entry), 0);
    ended_ = true;
    return;
  }
  if (number_ != 0 || (type != 0 && type != 4)) return respond(id_of(entry), kInvalidOpcode | kDoNotRetry);
  property(entry, type == 0);
}

void Queue::connect(const std::byte* entry, Data data) {
  const auto id = id_of(entry);
  const auto number = load<std::uint16_t>(entry + 42), size = load<std::uint16_t>(entry + 44);
  if (data.size() != kConnectDataBytes || load<std::uint8_t>(entry + 39) != kSglInCapsule)
    return respond(id, kInvalidField | kDoNotRetry);
  if (load<std::uint16_t>(entry + 40) != 0) return respond(id, kFormat | kDoNotRetry);
  // What is wrong: a byte of the command, or of its data.
  const auto refuse_field = [&](std::uint32_t at, bool in_data) {
    respond(id, kParameters | kDoNotRetry, at | (in_data ? 1U << 16 : 0));
  };
  if (size == 0 || size >= kMostEntries) return refuse_field(44, false);
  const auto subsystem = name_in(data.data() + 256), host = name_in(data.data() + 512);
  if (host.empty()) return refuse_field(512, true);
  const bool discovery = subsystem == kDiscoveryNqn;
  if (!discovery && subsystem != offer_.subsystem_nqn) return refuse_field(256, true);
  std::array<std::byte, 16> host_id;
  std::copy_n(data.data(), host_id.size(), host_id.begin());
  if (number == 0) {
    if (load<std::uint16_t>(data.data() + 16) != kAnyController) return refuse_field(16, true);
    auto made = std::make_shared<Association>();
    made->id = associations_.empty() ? 1 : static_cast<std::uint16_t>(associations_.rbegin()->first + 1);
    if (made->id > kMostController)  // far more than connections: one is free
      for (made->id = 1; associations_.contains(made->id);) ++made->id;
    made->discovery = discovery;
    made->host_nqn = host;
    made->host_id = host_id;
    made->keep_alive_ms = load<std::uint32_t>(entry + 48);
    made->alive = Clock::now();
    association_ = associations_[made->id] = std::move(made);
  } else {
    const auto found = associations_.find(load<std::uint16_t>(data.data() + 16));
    if (found == associations_.end()) return refuse_field(16, true);
    auto& association = *found->second;
    if (association.discovery != discovery || association.host_nqn != host || association.host_id != host_id)
      return refuse_field(16, true);
    if ((association.status & 1) == 0 || discovery) return respond(id, kSequence | kDoNotRetry);
    if (number > association.queues || !association.connected.insert(number).second) return refuse_field(42, false);
    association_ = found->second;
  }
  number_ = number;
  entries_ = static_cast<std::uint16_t>(size + 1);
  flow_control_ = (load<std::uint8_t>(entry + 46) & 4) == 0;
  if (offer_.keys.host && !discovery)
    authentication_.emplace(Parties{host, offer_.subsystem_nqn, offer_.keys});
  respond(id, 0, association_->id | (authentication_ ? kAuthenticationAsked : 0U));
}

void Queue::authenticate(const std::byte* entry, Data data, bool sends) {
  const auto id = id_of(entry);
  const auto size_bytes = load<std::uint32_t>(entry + 44);
  const auto expected = nvme::authentication(sends, size_bytes);
  const bool fits = sends ? data.size() == size_bytes && load<std::uint8_t>(entry + 39) == kSglInCapsule
                          : size_bytes <= kAuthenticationBytes && load<std::uint32_t>(entry + 32) == size_bytes &&
                                load<std::uint8_t>(entry + 39) == kSglByTransport;
  if (!authentication_ || !fits || !std::equal(entry + 41, entry + 44, expected.data() + 41))
    return respond(id, kInvalidField | kDoNotRetry);
  if (sends) {
    const bool taken = authentication_->take(data);
    respond(id, taken ? 0 : kSequence | kDoNotRetry);
    ended_ = !taken || authentication_->failed();
  } else {
    auto message = authentication_->give();
    if (message.empty() || message.size() > size_bytes) {
      respond(id, kSequence | kDoNotRetry);
      ended_ = true;
    } else {
      message.resize(size_bytes);
      respond_data(id, message);
      ended_ = authentication_->failed();
    }
  }
  if (ended_) ++counts_.denied;
}

void Queue::property(const std::byte* entry, bool set) {
  const auto offset = load<std::uint32_t>(entry + 44);
  const bool wide = (load<std::uint8_t>(entry + 40) & 7) == 1;
  auto& its = *association_;
  if (set) {
    if (offset != kConfiguration || wide) return respond(id_of(entry), kInvalidField | kDoNotRetry);
    its.configuration = load<std::uint32_t>(entry + 48);
    const bool enabled = (its.configuration & 1) != 0, shut_down = (its.configuration >> 14 & 3) != 0;
    its.status = (enabled ? 1U : 0U) | (shut_down ? 8U : 0U);
    return respond(id_of(entry), 0);
  }
  std::uint64_t value;
  switch (offset) {
    // Entries of a queue less one; they are contiguous; ready after 500 ms; the NVM command set.
    case kCapabilities: value = (kMostEntries - 1) | 1U << 16 | 1U << 24 | std::uint64_t{1} << 37; break;
    case kVersion: value = 0x00020000; break;
    case kConfiguration: value = its.configuration; break;
    case kStatus: value = its.status; break;
    default: return respond(id_of(entry), kInvalidField | kDoNotRetry);
  }
  if (wide != (offset == kCapabilities)) return respond(id_of(entry), kInvalidField | kDoNotRetry);
  respond(id_of(entry), 0, value);
}

// -- Commands

void Queue::admin(const std::byte* entry, Data data) {
  constexpr std::uint8_t kGetFeatures = 0x0a, kAsyncEvent = 0x0c;
  switch (load<std::uint8_t>(entry)) {
    case kGetLog: return log_page(entry);
    case kIdentify: return identify(entry);
    case kSetFeatures: return features(entry, data, true);
    case kGetFeatures: return features(entry, data, false);
    case kAsyncEvent:  // nothing ever happens here: they wait until the end
      if (events_ == kMostEvents) return respond(id_of(entry), kEventLimit | kDoNotRetry);
      ++events_;
      return;
    case kKeepAlive:
      association_->alive = Clock::now();
      return respond(id_of(entry), 0);
    default: return respond(id_of(entry), kInvalidOpcode | kDoNotRetry);
  }
}

void Queue::log_page(const std::byte* entry) {
  constexpr std::uint8_t kFirst = 1, kLast = 4, kDiscoveryLog = 0x70;  // errors, health, firmware, namespaces
  const auto log = load<std::uint8_t>(entry + 40);
  const auto words = (std::uint64_t{load<std::uint16_t>(entry + 44)} << 16 | load<std::uint16_t>(entry + 42)) + 1;
  const auto offset = load<std::uint64_t>(entry + 48);
  const bool known = association_->discovery ? log == kDiscoveryLog : log >= kFirst && log <= kLast;
  if (!known || words * 4 > kMostLogBytes || offset % 4 != 0)
    return respond(id_of(entry), kInvalidField | kDoNotRetry);
  std::array<std::byte, 2 * kLogEntryBytes> page{};
  if (log == kDiscoveryLog) {
    store(page.data(), std::uint64_t{1});      // generation
    store(page.data() + 8, std::uint64_t{1});  // records
    auto* record = page.data() + kLogEntryBytes;
    const bool six = local_address_.find(':') != std::string::npos;
    store(record, std::uint8_t{3});  // TCP
    store(record + 1, static_cast<std::uint8_t>(six ? 2 : 1));
    store(record + 2, std::uint8_t{2});                    // an NVM subsystem
    store(record + 4, std::uint16_t{1});                   // port
    store(record + 6, kAnyController);
    store(record + 8, std::uint16_t{32});                  // entries of the admin queue
    put_text(record + 32, 32, std::to_string(port_));
    put_text(record + 256, 256, offer_.subsystem_nqn, '\0');
    put_text(record + 512, 256, local_address_);
  }
  std::vector<std::byte> part(words * 4);
  if (offset < page.size())
    std::copy_n(page.data() + offset, std::min<std::size_t>(part.size(), page.size() - offset), part.data());
  respond_data(id_of(entry), part);
}

void Queue::identify(const std::byte* entry) {
  const auto what = load<std::uint8_t>(entry + 40);
  const auto nsid = load<std::uint32_t>(entry + 4);
  std::array<std::byte, kIdentifyBytes> page{};
  auto* at = page.data();
  const bool discovery = association_->discovery;
  if (what == 1) {  // the controller
    put_text(at + 4, 20, "penstock");
    put_text(at + 24, 40, "penstock sample store");
    put_text(at + 64, 8, "1");
    store(at + 77, kMostPages);
    store(at + 78, association_->id);
    store(at + 80, std::uint32_t{0x00020000});
    store(at + 111, static_cast<std::uint8_t>(discovery ? 2 : 1));
    store(at + 320, std::uint16_t{10});  // keep-alive in units of a second
    store(at + 512, std::uint8_t{0x66});
    store(at + 513, std::uint8_t{0x44});
    store(at + 514, static_cast<std::uint16_t>(kMostEntries));
    store(at + 516, std::uint32_t{discovery ? 0 : kOnlyNamespace});
    store(at + 259, static_cast<std::uint8_t>(kMostEvents - 1));
    store(at + 536, std::uint32_t{1U | 1U << 20});
    put_text(at + 768, 256, discovery ? kDiscoveryNqn : offer_.subsystem_nqn, '\0');
    store(at + 1792, std::uint32_t{(kEntryBytes + 8192) / 16});
    store(at + 1796, std::uint32_t{1});
    store(at + 1803, std::uint8_t{1});
    return respond_data(id_of(entry), page);
  }
  if (discovery || what > 3) return respond(id_of(entry), kInvalidField | kDoNotRetry);
  if (what == 2) {  // the namespaces above a number
    if (nsid < kOnlyNamespace) store(at, kOnlyNamespace);
    return respond_data(id_of(entry), page);
  }
  if (nsid != kOnlyNamespace) return respond(id_of(entry), kInvalidNamespace | kDoNotRetry);
  if (what == 3) {  // its names
    for (const std::uint8_t type : {2, 3}) {
      store(at, type);
      store(at + 1, static_cast<std::uint8_t>(offer_.id.size()));
      std::copy(offer_.id.begin(), offer_.id.end(), at + 4);
      at += 4 + offer_.id.size();
    }
    return respond_data(id_of(entry), page);
  }
  for (const std::size_t field : {0, 8, 16}) store(at + field, offer_.blocks);
  store(at + 30, std::uint8_t{1});  // several controllers may share it
  store(at + 99, std::uint8_t{1});  // write protected
  std::copy(offer_.id.begin(), offer_.id.end(), at + 104);
  constexpr std::uint8_t kShift = 9;
  static_assert(kBlockBytes == 1U << kShift);
  store(at + 130, kShift);
  respond_data(id_of(entry), page);
}

void Queue::features(const std::byte* entry, Data data, bool set) {
  constexpr std::uint8_t kQueues = 0x07, kEvents = 0x0b, kKeepAliveTimer = 0x0f, kBehavior = 0x16;
  const auto feature = load<std::uint8_t>(entry + 40);
  const auto value = load<std::uint32_t>(entry + 44);
  auto& its = *association_;
  if (feature == kKeepAliveTimer) {
    if (set) its.keep_alive_ms = value;
    return respond(id_of(entry), 0, set ? 0 : its.keep_alive_ms);
  }
  if (feature == kQueues && !its.discovery) {
    if (set) its.queues = static_cast<std::uint16_t>(std::min({value & 0xffff, value >> 16, kMostQueues - 1U}) + 1);
    const auto last = std::max<std::uint32_t>(its.queues, 1) - 1;
    return respond(id_of(entry), 0, last | last << 16);
  }
  // What the host can do, and which events it wants: neither matters here.
  if (set && (feature == kEvents || (feature == kBehavior && data.size() == kHostBehaviorBytes)))
    return respond(id_of(entry), 0);
  respond(id_of(entry), kInvalidField | kDoNotRetry);
}

void Queue::transfer(const std::byte* entry) {
  // Of those that change a namespace: Write, Write Uncorrectable, Write Zeroes, Dataset Management.
  constexpr std::uint8_t kChanging[] = {kWrite, 0x04, 0x08, 0x09};
  const auto opcode = load<std::uint8_t>(entry);
  const auto nsid = load<std::uint32_t>(entry + 4);
  if (nsid != kOnlyNamespace && !(opcode == kFlush && nsid == kEveryNamespace))
    return respond(id_of(entry), kInvalidNamespace | kDoNotRetry);
  if (opcode == kFlush) return respond(id_of(entry), 0);
  if (std::find(std::begin(kChanging), std::end(kChanging), opcode) != std::end(kChanging)) {
    ++counts_.refused_writes;
    return respond(id_of(entry), kWriteProtected | kDoNotRetry);
  }
  if (opcode != kRead) return respond(id_of(entry), kInvalidOpcode | kDoNotRetry);
  const auto block = load<std::uint64_t>(entry + 40);
  const auto blocks = std::uint32_t{load<std::uint16_t>(entry + 48)} + 1, size_bytes = blocks * kBlockBytes;
  if (block >= offer_.blocks || blocks > offer_.blocks - block)
    return respond(id_of(entry), kOutOfRange | kDoNotRetry);
  if (size_bytes > kMostReadBytes || load<std::uint32_t>(entry + 32) != size_bytes ||
      load<std::uint8_t>(entry + 39) != kSglByTransport)
    return respond(id_of(entry), kInvalidField | kDoNotRetry);
  waiting_.push_back({id_of(entry), block * kBlockBytes, size_bytes});
}

// -- Output

Read Queue::begin_read() {
  const auto [command, offset, size_bytes] = waiting_.front();
  waiting_.pop_front();
  auto read = answer_of(command, size_bytes);
  read.offset = offset;
  return read;
}

void Queue::end_read(Read read, bool good) {
  if (ended_) return;
  if (!good) return respond(read.command, kUnrecoveredRead | kDoNotRetry);
  ++counts_.reads;
  counts_.read_bytes += read.size_bytes;
  deliver(std::move(read));
}

void Queue::deliver(Read read) {
  release();
  if (flow_control_)
    write_response(read.answer.data.get() + read.answer.size - response_bytes(), read.command, 0, 0);
  unsent_bytes_ += read.answer.size;
  output.push_back(std::move(read.answer));
}

// Room for data of this size, between its header and, where the host cannot do without, the response.
Read Queue::answer_of(std::uint16_t command, std::uint32_t size_bytes) const {
  const auto head = kDataHeaderBytes + (header_digest_ ? kDigestBytes : 0);
  const auto begin = (head + alignment_ - 1) / alignment_ * alignment_;
  const auto data_bytes = size_bytes + (data_digest_ ? kDigestBytes : 0);
  Read read{command, 0, size_bytes, begin, data_digest_, {}};
  read.answer.size = begin + data_bytes + (flow_control_ ? response_bytes() : 0);
  read.answer.data.reset(new std::byte[read.answer.size]);
  auto* at = read.answer.data.get();
  std::memset(at, 0, begin);
  const unsigned flags = kLastData | (flow_control_ ? 0U : kSuccess) | (header_digest_ ? kHeaderDigest : 0U) |
                         (data_digest_ ? kDataDigest : 0U);
  store_header(at, {Pdu::data_to_host, static_cast<std::uint8_t>(flags), kDataHeaderBytes,
                    static_cast<std::uint8_t>(begin), static_cast<std::uint32_t>(begin + data_bytes)});
  store_data_header(at, {command, 0, 0, size_bytes});
  if (header_digest_) store(at + kDataHeaderBytes, crc32c(0, at, kDataHeaderBytes));
  return read;
}

void Queue::release() {
  --in_flight_;
  head_ = static_cast<std::uint16_t>((head_ + 1) % entries_);
}

std::byte* Queue::add(std::size_t size_bytes) {
  unsent_bytes_ += size_bytes;
  output.push_back({std::unique_ptr<std::byte[]>(new std::byte[size_bytes]), size_bytes});
  return output.back().data.get();
}

void Queue::write_response(std::byte* at, std::uint16_t command, std::uint16_t status, std::uint64_t result) {
  store_header(at, {Pdu::response, header_digest_ ? kHeaderDigest : std::uint8_t{0}, kDataHeaderBytes, 0,
                    static_cast<std::uint32_t>(response_bytes())});
  store(at + 8, result);
  store(at + 16, flow_control_ ? head_ : std::uint16_t{0xffff});
  store(at + 18, number_);
  store(at + 20, command);
  store(at + 22, static_cast<std::uint16_t>(status << 1));
  if (header_digest_) store(at + kDataHeaderBytes, crc32c(0, at, kDataHeaderBytes));
}

void Queue::respond(std::uint16_t command, std::uint16_t status, std::uint64_t result) {
  release();
  write_response(add(response_bytes()), command, status, result);
}

void Queue::respond_data(std::uint16_t command, Data data) {
  auto read = answer_of(command, static_cast<std::uint32_t>(data.size()));
  auto* at = read.answer.data.get() + read.begin;
  std::memcpy(at, data.data(), data.size());
  if (data_digest_) store(at + data.size(), crc32c(0, data.data(), data.size()));
  deliver(std::move(read));
}

}  // namespace penstock::nvme::served
