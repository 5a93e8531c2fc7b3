#include "nvme/association.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace penstock::nvme {

namespace {

constexpr const char* kDiscoveryNqn = "nqn.2014-08.org.nvmexpress.discovery";
constexpr std::uint16_t kAdminEntries = 32, kWantedQueues = 64, kAnyController = 0xffff,
                        kMostController = 0xffef;
constexpr std::uint32_t kAdminInCapsuleBytes = 8192, kMostInCapsuleBytes = 1U << 20;
constexpr std::size_t kIoBufferBytes = 128U << 10;
constexpr std::uint32_t kCapabilities = 0x00, kVersion = 0x08, kConfiguration = 0x14,
                        kStatus = 0x1c;  // properties
constexpr std::uint16_t kInvalidParameters = 0x182;
constexpr std::size_t kMostNamespaces = 1U << 16;
constexpr std::uint64_t kMostLogEntries = 1U << 14;
constexpr unsigned kMostPage = 4;  // 64 KiB
// It notices a loss after up to three keep alive timeouts, and needs its Command Quiesce Time then (NVM Express Base
// 2.1, "Communication Loss Handling").
constexpr double kTimeoutsToNotice = 3, kUntoldKeepAliveS = 30, kUntoldQuiesceS = 10;
constexpr auto kFirstRetryPause = std::chrono::milliseconds(10);

constexpr const char* kAsked = "the target asks for DH-HMAC-CHAP authentication, and this host has no key for it";

// Before anything else on a queue.
void authenticate(Channel& channel, const Options& options, const Deadline& deadline) {
  HostAuthentication host({options.host_nqn, options.subsystem_nqn, options.keys});
  const auto transfer = [&](bool send, std::span<std::byte> data) {
    Command command;
    command.direction = send ? Direction::to_controller : Direction::to_host;
    command.memory = data.data();
    command.data_bytes = command.memory_bytes = static_cast<std::uint32_t>(data.size());
    command.entry = authentication(send, command.data_bytes);
    const auto status = channel.execute(command, deadline).status;
    if (status != 0) throw Error(Kind::unauthenticated, "authentication: " + status_text(status));
  };
  auto said = host.negotiate();
  while (true) {
    try {
      if (!said.empty()) transfer(true, said);
    } catch (const Error&) {
      if (host.error().empty()) throw;  // otherwise the target need not hear it
    }
    if (!host.error().empty()) throw Error(Kind::unauthenticated, host.error());
    if (host.done()) return;
    std::array<std::byte, kAuthenticationBytes> heard{};
    transfer(false, heard);
    said = host.answer(heard);
  }
}

// Of an admin or I/O queue. Gives the number of the controller.
std::uint16_t connect_at(Channel& channel, const Options& options, const Entry& entry, std::uint16_t controller,
                         const Deadline& deadline) {
  auto data = connect_data(options.host_id, controller, options.subsystem_nqn, options.host_nqn);
  Command command;
  command.entry = entry;
  command.direction = Direction::to_controller;
  command.memory = data.data();
  command.data_bytes = command.memory_bytes = static_cast<std::uint32_t>(data.size());
  channel.connection().set_in_capsule_bytes(kAdminInCapsuleBytes);
  const auto [tag, result, status] = channel.execute(command, deadline);
  if (status == 0) {
    const auto number = static_cast<std::uint16_t>(result & 0xffff);
    if (number > kMostController) throw Error(Kind::protocol, "a controller of number " + std::to_string(number));
    if ((result & kSecureChannelAsked) != 0)
      throw Error(Kind::not_supported, "the target asks for TLS, which penstock does not speak");
    if ((result & kAuthenticationAsked) != 0) {
      if (!options.keys.host) throw Error(Kind::unauthenticated, kAsked);
      authenticate(channel, options, deadline);
    } else if (options.keys.controller) {
      throw Error(Kind::unauthenticated, "the target does not show that it knows its key: it asks for no authentication");
    }
    return number;
  }
  const auto code = status_code(status);
  if (code == 0x191) throw Error(Kind::unauthenticated, kAsked);
  if (code == 0x184) throw Error(Kind::denied, "the target does not allow host " + options.host_nqn);
  const bool in_data = (result >> 16 & 1) != 0;
  const auto place = result & 0xffff;
  if (code == kInvalidParameters && in_data && place == 256)
    throw Error(Kind::not_found, "the target has no subsystem of this name, or not for this host");
  if (code == kInvalidParameters && in_data && place == 512)
    throw Error(Kind::denied, "the target does not allow host " + options.host_nqn);
  throw Error(Kind::refused, "the target refuses to connect: " + status_text(status));
}

Channel connect_admin(const Options& options, const Deadline& deadline) {
  Connection::Options wanted;
  wanted.entries = kAdminEntries;
  wanted.header_digest = options.header_digest;
  wanted.data_digest = options.data_digest;
  return {connect_to(options.host, options.port, deadline), wanted, deadline};
}

void pause_for(Clock::duration length, const Deadline& deadline) {
  auto limited = deadline;
  limited.until = Clock::now() + length;
  wait_for(-1, 0, limited);
}

}  // namespace

std::string Options::url() const {
  const bool six = host.find(':') != std::string::npos;
  return "nvme+tcp://" + (six ? "[" + host + "]" : host) + ":" + std::to_string(port) + "/" + subsystem_nqn;
}

Clock::duration seconds(double value) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::clamp(value, 0.0, 1e8)));
}

Clock::duration Facts::pause_before_retry(std::uint16_t status, int tries) const {
  const auto number = retry_delay(status);
  if (number > 0 && retry_delays[number - 1U] > 0) return std::chrono::milliseconds(100) * retry_delays[number - 1U];
  return tries < 2 ? Clock::duration::zero() : kFirstRetryPause * (1 << (tries - 2));
}

Association::Association(const Options& options, const Deadline& deadline)
    : options_(options), admin_(connect_admin(options, deadline)) {
  admin_.connection().expect_queue_head(true);
  const auto keep_alive_ms = static_cast<std::uint32_t>(std::clamp(options.keep_alive_s * 1000, 0.0, 4e9));
  facts_.controller =
      connect_at(admin_, options, connect(0, kAdminEntries, keep_alive_ms, true), kAnyController, deadline);
  facts_.header_digest = admin_.connection().header_digest();
  facts_.data_digest = admin_.connection().data_digest();
  enable(deadline);
}

Completion Association::try_to_ask(const Entry& entry, std::span<std::byte> data, const Deadline& deadline,
                                   const char* what) {
  Command command;
  command.entry = entry;
  if (!data.empty()) {
    // Bits of the opcode say which way the data goes.
    const bool to_controller = (load<std::uint8_t>(entry.data()) & 3) == 1;
    command.direction = to_controller ? Direction::to_controller : Direction::to_host;
    command.data_bytes = command.memory_bytes = static_cast<std::uint32_t>(data.size());
    command.memory = data.data();
  }
  try {
    return admin_.execute(command, deadline);
  } catch (const Error& error) {
    throw Error(error.kind, std::string(what) + ": " + error.text);
  }
}

std::uint64_t Association::ask(const Entry& entry, std::span<std::byte> data, const Deadline& deadline,
                               const char* what) {
  const auto completion = try_to_ask(entry, data, deadline, what);
  if (completion.status != 0)
    throw Error(Kind::lost, std::string(what) + ": " + status_text(completion.status));
  return completion.result;
}

void Association::enable(const Deadline& deadline) {
  const auto get = [&](std::uint32_t property, bool eight_bytes, const char* what) {
    return ask(get_property(property, eight_bytes), {}, deadline, what);
  };
  const auto capabilities = get(kCapabilities, true, "reading the controller's capabilities");
  const auto sets = capabilities >> 37 & 0xff, page = capabilities >> 48 & 0xf;
  const auto start_s = static_cast<double>(capabilities >> 24 & 0xff) / 2;
  if (page > kMostPage)
    throw Error(Kind::not_supported, "the controller's pages have 2^" + std::to_string(12 + page) + " bytes");
  std::uint32_t set = 0;
  if ((sets & 1) == 0) {
    if ((sets & 0x40) == 0) throw Error(Kind::not_supported, "the controller has no NVM command set");
    set = 6;
  }
  const auto configuration = 1U | set << 4 | static_cast<std::uint32_t>(page) << 7 | 6U << 16 | 4U << 20;
  ask(set_property(kConfiguration, configuration), {}, deadline, "enabling the controller");
  const auto begun = Clock::now();
  const auto until = std::min(deadline.until, begun + seconds(std::max(start_s, 1.0)));
  auto pause = Clock::duration(std::chrono::milliseconds(1));
  while (true) {
    const auto status = get(kStatus, false, "reading the controller's status");
    if ((status & 2) != 0) throw Error(Kind::lost, "the controller reports a fatal error");
    if ((status & 1) != 0) break;
    if (Clock::now() >= until)
      throw Error(Kind::timeout, "the controller does not become ready, for " +
                                     seconds_text(std::chrono::duration<double>(Clock::now() - begun).count()) +
                                     " s");
    pause_for(std::exchange(pause, std::min<Clock::duration>(pause * 2, std::chrono::milliseconds(50))), deadline);
  }
  const auto version = get(kVersion, false, "reading the controller's version");
  facts_.version = static_cast<std::uint32_t>(version);
  facts_.most_entries = static_cast<std::uint16_t>(
      std::min<std::uint64_t>((capabilities & 0xffff) + 1, Connection::kMostEntries));
  facts_.most_data_bytes = 1U << (12 + page);  // of a page, until it is multiplied
}

void Association::prepare_for_io(const Deadline& deadline) {
  std::array<std::byte, kIdentifyBytes> page;
  ask(identify(1, 0), page, deadline, "identifying the controller");
  const auto data = load_controller(page);
  if (data.type > 1)
    throw Error(Kind::not_supported, "the controller does no I/O: it is of type " + std::to_string(data.type));
  if (data.in_capsule_units < kEntryBytes / 16 || data.response_units < 1)
    throw Error(Kind::protocol, "capsules that have no room for a command, or a response");
  if (!data.data_by_pointer) throw Error(Kind::not_supported, "the controller takes no SGL");
  if (!data.subsystem_nqn.empty() && data.subsystem_nqn != options_.subsystem_nqn)
    throw Error(Kind::protocol, "the controller is of subsystem " + data.subsystem_nqn);
  const auto queues = ask(set_queues(kWantedQueues), {}, deadline, "asking for I/O queues");
  const auto granted =
      std::min<std::uint64_t>({queues & 0xffff, queues >> 16 & 0xffff, kWantedQueues - 1}) + 1;
  const auto shift = static_cast<unsigned>(std::bit_width(facts_.most_data_bytes) - 1) + data.most_data;
  facts_.most_data_bytes = data.most_data == 0 || shift > 30 ? 0 : 1U << shift;
  facts_.data = data;
  facts_.quiesce_s = kTimeoutsToNotice * (options_.keep_alive_s > 0 ? options_.keep_alive_s : kUntoldKeepAliveS) +
                     (data.quiesce_ms > 0 ? data.quiesce_ms / 1000.0 : kUntoldQuiesceS);
  facts_.queues = static_cast<std::uint16_t>(granted);
  const auto capsule_bytes =
      std::min<std::uint64_t>(std::uint64_t{data.in_capsule_units} * 16, kMostInCapsuleBytes);
  if (data.in_capsule_offset == 0 && capsule_bytes > kEntryBytes)
    facts_.in_capsule_bytes = static_cast<std::uint32_t>(capsule_bytes - kEntryBytes);
  if (data.most_commands >= 2) facts_.most_entries = std::min(facts_.most_entries, data.most_commands);
  if (facts_.most_entries < 2)
    throw Error(Kind::not_supported, "the controller's queues have room for no command");
  // A controller reports delays of retries only to hosts that promise to keep to them.
  if (data.retry_delays == decltype(data.retry_delays){}) return;
  std::array<std::byte, kHostBehaviorBytes> behavior{std::byte{1}};
  if (try_to_ask(set_host_behavior(), behavior, deadline, "asking for delays of retries").status == 0)
    facts_.retry_delays = data.retry_delays;
}

std::unique_ptr<Channel> Association::connect_queue(std::uint16_t queue, const Deadline& deadline) {
  Connection::Options wanted;
  wanted.entries = std::min<unsigned>(facts_.most_entries, options_.depth + 1);
  wanted.header_digest = options_.header_digest;
  wanted.data_digest = options_.data_digest;
  wanted.buffer_bytes = kIoBufferBytes;
  while (true) {
    try {
      auto channel =
          std::make_unique<Channel>(connect_to(options_.host, options_.port, deadline), wanted, deadline);
      const auto entry = connect(queue, static_cast<std::uint16_t>(wanted.entries), 0, flow_control_);
      connect_at(*channel, options_, entry, facts_.controller, deadline);
      channel->connection().expect_queue_head(flow_control_);
      channel->connection().set_in_capsule_bytes(facts_.in_capsule_bytes);
      channel->queue = queue;
      return channel;
    } catch (const Error& error) {
      // A controller need not be able to do without flow control.
      if (error.kind != Kind::refused || std::exchange(flow_control_, true)) throw;
    }
  }
}

std::vector<std::uint32_t> Association::namespaces(const Deadline& deadline) {
  std::vector<std::uint32_t> found;
  std::array<std::byte, kIdentifyBytes> page;
  while (found.size() < kMostNamespaces) {
    ask(identify(2, found.empty() ? 0 : found.back()), page, deadline, "listing namespaces");
    for (std::size_t at = 0; at < page.size(); at += 4) {
      const auto nsid = load<std::uint32_t>(page.data() + at);
      if (nsid == 0) return found;
      if (!found.empty() && nsid <= found.back())
        throw Error(Kind::protocol, "a list of namespaces out of order");
      found.push_back(nsid);
    }
  }
  return found;
}

Identity Association::identify_namespace(std::uint32_t nsid, const Deadline& deadline) {
  std::array<std::byte, kIdentifyBytes> page;
  const auto name = "namespace " + std::to_string(nsid);
  const auto completion = try_to_ask(identify(0, nsid), page, deadline, "identifying a namespace");
  if (completion.status != 0) throw Error(Kind::name_space, name + ": " + status_text(completion.status));
  Identity identity{load_namespace(page), {}};
  const auto& data = identity.data;
  if (data.blocks == 0) throw Error(Kind::name_space, "it has no " + name);
  if (!data.format_known || data.block_shift < 9 || data.block_shift > 16)
    throw Error(Kind::not_supported, name + " has blocks of 2^" + std::to_string(data.block_shift) +
                                         " bytes; supported: 512 to 65536 bytes");
  if (data.metadata_bytes != 0 || data.protection)
    throw Error(
        Kind::not_supported,
        name + " is formatted with metadata or protection information, which penstock does not support");
  if (data.blocks > (std::uint64_t{1} << 62) >> data.block_shift)
    throw Error(Kind::protocol, name + " claims " + std::to_string(data.blocks) + " blocks");
  const auto limit = facts_.most_data_bytes;
  if (limit != 0 && limit < 1U << data.block_shift)
    throw Error(Kind::not_supported, name + " has larger blocks than a command may transfer");
  // Optional: old controllers do not know it.
  const auto described = try_to_ask(identify(3, nsid), page, deadline, "identifying a namespace");
  if (described.status == 0 && !load_descriptors(page, identity.descriptors))
    throw Error(Kind::protocol, "descriptors of " + name + " that contradict themselves");
  if (identity.descriptors.command_set != 0)
    throw Error(Kind::not_supported, name + " is not of the NVM command set");
  return identity;
}

void Association::keep_alive(const Deadline& deadline) { ask(nvme::keep_alive(), {}, deadline, "keep alive"); }

void Association::shut_down(const Deadline& deadline) {
  const auto configuration = ask(get_property(kConfiguration, false), {}, deadline, "closing");
  const auto normal = (static_cast<std::uint32_t>(configuration) & ~(3U << 14)) | 1U << 14;
  ask(set_property(kConfiguration, normal), {}, deadline, "closing");
  while (true) {
    const auto status = ask(get_property(kStatus, false), {}, deadline, "closing");
    if ((status >> 2 & 3) == 2 || Clock::now() >= deadline.until) return;
    pause_for(std::chrono::milliseconds(5), deadline);
  }
}

std::vector<LogEntry> Association::discovery_log(const Deadline& deadline) {
  std::array<std::byte, kLogEntryBytes> page;
  const auto read = [&](std::uint64_t entry) {
    ask(get_log(0x70, entry * kLogEntryBytes, kLogEntryBytes), page, deadline, "reading the discovery log");
  };
  while (true) {  // until it did not change meanwhile
    read(0);
    const auto generation = load<std::uint64_t>(page.data()), count = load<std::uint64_t>(page.data() + 8);
    if (load<std::uint16_t>(page.data() + 16) != 0)
      throw Error(Kind::protocol, "a discovery log of an unknown format");
    if (count > kMostLogEntries)
      throw Error(Kind::protocol, "a discovery log of " + std::to_string(count) + " entries");
    std::vector<LogEntry> entries;
    for (std::uint64_t entry = 1; entry <= count; ++entry) {
      read(entry);
      entries.push_back(load_log_entry(page));
    }
    read(0);
    if (load<std::uint64_t>(page.data()) == generation) return entries;
    if (Clock::now() >= deadline.until) throw Error(Kind::timeout, "the discovery log changes all the time");
  }
}

std::vector<LogEntry> discover(Options options, double timeout_s) {
  options.subsystem_nqn = kDiscoveryNqn;
  options.keep_alive_s = 0;
  const Deadline limited{Clock::now() + seconds(timeout_s)};
  try {
    Association association(options, limited);
    const auto entries = association.discovery_log(limited);
    try {
      association.shut_down({Clock::now() + kShutDownWait});
    } catch (const Error&) {  // it ends all the same
    }
    return entries;
  } catch (const Error& error) {
    throw Error(error.kind, options.url() + ": " + error.text);
  }
}

}  // namespace penstock::nvme
