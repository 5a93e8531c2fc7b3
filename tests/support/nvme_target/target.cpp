// A small NVMe/TCP target for tests: it serves memory or mapped files, checks what the host sends, and
// misbehaves on command. Test support, no product. POSIX, Linux's epoll, and the standard library.
//
//   target --port 0 --threads 1 --violations FILE [--set OPTION=NUMBER]...
//          --subsystem NQN --namespace nsid=1,bytes=1048576,block=512[,file=PATH][,capacity=BYTES] ...
//
// It writes "READY PORT" to standard output, then answers each line of standard input by one line: see `control`.
// It ends with the end of standard input.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <queue>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

template <class T>
T load(const u8* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <class T>
void store(u8* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

u64 now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<u64>(time.tv_sec) * 1'000'000'000 + static_cast<u64>(time.tv_nsec);
}

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "target: %s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

// ---- CRC-32C

std::array<u32, 256> crc_table() {
  std::array<u32, 256> table{};
  for (u32 byte = 0; byte < 256; ++byte) {
    u32 value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? 0x82F63B78U : 0);
    table[byte] = value;
  }
  return table;
}

u32 crc32c_plain(u32 crc, const u8* data, std::size_t size) {
  static const auto table = crc_table();
  while (size--) crc = (crc >> 8) ^ table[(crc ^ *data++) & 255];
  return crc;
}

#ifdef __x86_64__
__attribute__((target("sse4.2"))) u32 crc32c_fast(u32 crc, const u8* data, std::size_t size) {
  u64 wide = crc;
  for (; size >= 8; size -= 8, data += 8) wide = __builtin_ia32_crc32di(wide, load<u64>(data));
  crc = static_cast<u32>(wide);
  while (size--) crc = __builtin_ia32_crc32qi(crc, *data++);
  return crc;
}
#endif

u32 crc32c(const u8* data, std::size_t size) {
#ifdef __x86_64__
  static const bool fast = __builtin_cpu_supports("sse4.2");
  if (fast) return ~crc32c_fast(~0U, data, size);
#endif
  return ~crc32c_plain(~0U, data, size);
}

// ---- Options: numbers that may change at any time

struct Option {
  const char* name;
  std::int64_t first;
};

enum : std::size_t {
  kMdts, kIoccsz, kIcdoff, kMaxh2c, kMqes, kQueues, kCpda, kHdgst, kDdgst, kSuccess, kC2hMax, kTcpMax, kR2tMax,
  kRate, kDelayUs, kJitterUs, kFuzzPpm, kSeed, kReadyPolls, kShutdownPolls, kCapTo, kKatoCheck, kSecure, kGenBumps,
  kAuth, kReadOnly, kOptions
};  // clang-format off
constexpr Option kOptionTable[kOptions] = {
    {"mdts", 0},          // largest transfer: 2^n pages of 4 KiB; 0: no limit
    {"ioccsz", 8192 + 64},  // bytes of a capsule: the command and data within it
    {"icdoff", 0},        // in 16 bytes
    {"maxh2c", 131072},   // largest H2CData, in bytes
    {"mqes", 1023},       // largest queue, less one
    {"queues", 16},       // I/O queues of an association
    {"cpda", 0},          // alignment of data from the host: 4 * (n + 1) bytes
    {"hdgst", 1},         // header digest: 0 never, 1 if the host asks, 2 always
    {"ddgst", 1},
    {"success", 1},       // the SUCCESS flag where the host disabled flow control
    {"c2h_max", 0},       // largest C2HData; 0: no limit
    {"tcp_max", 0},       // largest write to a socket; 0: no limit
    {"r2t_max", 0},       // largest R2T; 0: no limit
    {"rate", 0},          // bytes/s of all data together; 0: no limit
    {"delay_us", 0},      // of each completion
    {"jitter_us", 0},     // at most so much more, at random, for each PDU of data: completions change order
    {"fuzz_ppm", 0},      // of 10^6 PDUs, how many have one byte of their header changed
    {"seed", 1},
    {"ready_polls", 0},   // how often CSTS is read before RDY follows CC.EN; -1: never
    {"shutdown_polls", 0},
    {"cap_to", 20},       // CAP.TO, in 500 ms
    {"kato_check", 1},    // an association whose keep-alive does not come is closed, and that is reported
    {"secure", 0},        // the discovery log asks for TLS
    {"gen_bumps", 0},     // so many reads of the discovery log's header see another generation
    {"auth", 0},          // connect asks for authentication: 1 ATR, 2 ASCR, 3 both
    {"read_only", 0},     // writes fail with "namespace is write protected"
};  // clang-format on
std::array<std::atomic<std::int64_t>, kOptions> g_options;

std::int64_t option(std::size_t which) { return g_options[which].load(std::memory_order_relaxed); }

// ---- Counters

enum : std::size_t {
  kAccepted, kConnects, kIoConnects, kReads, kWrites, kReadBytes, kWriteBytes, kInCapsule, kR2ts, kFlushes,
  kKeepAlives, kShutdowns, kDisconnects, kAbandoned, kMaxInFlight, kDigestHeader, kDigestData, kViolations, kFaults,
  kTermRequests, kCounters
};
constexpr const char* kCounterNames[kCounters] = {
    "accepted", "connects", "io_connects", "reads", "writes", "read_bytes", "write_bytes", "in_capsule", "r2ts",
    "flushes", "keep_alives", "shutdowns", "disconnects", "abandoned", "max_in_flight", "header_digests",
    "data_digests", "violations", "faults", "term_requests"};
std::array<std::atomic<u64>, kCounters> g_counters;

void count(std::size_t which, u64 by = 1) { g_counters[which].fetch_add(by, std::memory_order_relaxed); }

// ---- What is served

struct Namespace {
  u32 nsid = 1;
  u32 block_bytes = 512;
  std::atomic<u64> blocks{0};
  u64 capacity_bytes = 0;
  u8* memory = nullptr;
  std::array<u8, 16> nguid{}, uuid{};
  std::array<u8, 8> eui64{};
};

struct Subsystem {
  std::string nqn;
  std::map<u32, std::unique_ptr<Namespace>> namespaces;
  std::set<std::string> allowed_hosts;  // none: any
  bool present = true;
};

struct Connection;

struct Controller {
  u16 cntlid;
  Subsystem* subsystem;  // null: discovery
  std::string host_nqn;
  std::array<u8, 16> host_id;
  u32 kato_ms = 0;
  std::atomic<u64> alive_ns{0};
  u32 cc = 0, csts = 0;
  std::int64_t polls = 0;
  unsigned queues = 0;
  bool shut_down = false, expired = false;
  std::set<u16> queue_ids;
  std::set<Connection*> connections;
  bool delays_retries = false;                   // the host has said that it keeps to delays
  std::map<std::pair<u8, u64>, u64> not_before;  // by opcode and block: when it may be tried again, in ns
};

struct Fault {
  std::string kind, operation = "any";
  std::int64_t after = 0, count = 1, value = 0, qid = -1, size = 0;
  std::vector<u8> bytes;  // of a patch
};

struct Patch {
  std::size_t offset;
  std::vector<u8> bytes;
};

struct Held {  // a write that the target carries out later
  u8* memory;
  std::vector<u8> data;
};

std::mutex g_mutex;  // of everything below
std::vector<Held> g_held;
std::deque<std::unique_ptr<Subsystem>> g_subsystems;
std::map<u16, std::shared_ptr<Controller>> g_controllers;
std::deque<Fault> g_faults;
std::map<std::string, std::vector<Patch>> g_patches;  // of "identify0", ..., "log112", "icresp", "connect"
std::atomic<int> g_armed{0}, g_patched{0};
u16 g_next_cntlid = 1;
u64 g_generation = 1;
int g_violations_file = -1;
std::string g_address = "127.0.0.1";
u16 g_port = 0;
std::atomic<u64> g_rate_free_ns{0};

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) >= 32 && static_cast<unsigned char>(c) < 127) result += c;
  }
  return result;
}

void report(u64 connection, int qid, const std::string& what) {
  count(kViolations);
  const auto line = "{\"violation\": \"" + escaped(what) + "\", \"connection\": " + std::to_string(connection) +
                    ", \"qid\": " + std::to_string(qid) + "}\n";
  if (g_violations_file >= 0 && write(g_violations_file, line.data(), line.size()) < 0) die("violations");
}

void patch(const std::string& what, u8* data, std::size_t size) {
  if (g_patched.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard lock(g_mutex);
  const auto found = g_patches.find(what);
  if (found == g_patches.end()) return;
  for (const auto& one : found->second)
    for (std::size_t n = 0; n < one.bytes.size() && one.offset + n < size; ++n) data[one.offset + n] = one.bytes[n];
}

// ---- Protocol

enum Pdu : u8 { kIcReq = 0, kIcResp = 1, kH2cTerm = 2, kC2hTerm = 3, kCommand = 4, kResponse = 5, kH2cData = 6,
                kC2hData = 7, kR2t = 9 };
enum Flag : u8 { kHdgstFlag = 1, kDdgstFlag = 2, kLast = 4, kSuccessFlag = 8 };
enum Status : u16 {  // type << 8 | code
  kOk = 0, kInvalidOpcode = 1, kInvalidField = 2, kInternal = 6, kInvalidNamespace = 0x0B, kSequence = 0x0C,
  kOutOfRange = 0x80, kWriteProtected = 0x20, kConnectBusy = 0x181, kConnectInvalid = 0x182, kInvalidHost = 0x184
};
constexpr u16 kDnr = 0x4000, kRetryDelay = 0x1800;  // of a status
constexpr const char* kDiscoveryNqn = "nqn.2014-08.org.nvmexpress.discovery";
constexpr std::size_t kSqe = 64;

struct Command {
  u16 cid = 0, ttag = 0;
  bool write = false, granted = false;
  Namespace* ns = nullptr;
  u64 begin = 0;  // byte offset in the namespace
  u32 length = 0, received = 0, granted_end = 0, piece_end = 0;
  std::optional<Fault> fault;
};

struct Chunk {
  std::size_t used = 0, segments = 0;
  std::unique_ptr<u8[]> bytes;
  std::size_t size;
  explicit Chunk(std::size_t bytes_) : bytes(new u8[bytes_]), size(bytes_) {}
};

struct Segment {
  const u8* data;
  std::size_t size;
  Chunk* chunk;  // null: memory of a namespace
};

struct Worker;

struct Connection : std::enable_shared_from_this<Connection> {
  Worker* worker;
  int fd;
  u64 number;
  std::vector<u8> input;
  std::size_t input_begin = 0, input_end = 0;
  std::deque<Segment> output;
  std::deque<std::unique_ptr<Chunk>> chunks;
  std::size_t output_bytes = 0;
  bool waits_for_room = false, closed = false, silent = false;
  std::atomic<bool> silence_asked{false};
  std::atomic<bool> dropped{false};  // by the target: the host may be amid a PDU
  bool initialized = false, header_digest = false, data_digest = false, flow_control = true, connected = false;
  unsigned hpda = 0;
  int qid = -1;
  u16 sqsize = 0, sqhd = 0, next_ttag = 1;
  std::shared_ptr<Controller> controller;
  std::unordered_map<u16, Command> commands;
  std::vector<u64> cids;  // in flight
  unsigned in_flight = 0, unsent = 0;
  std::vector<u16> events;
  std::optional<Fault> header_fault;  // for the next PDU of its type
  std::mt19937_64 random{1};

  Connection(Worker* worker_, int fd_, u64 number_)
      : worker(worker_), fd(fd_), number(number_), input(1 << 20), cids(1024), random(option(kSeed) * 1000 + number_) {}
  ~Connection() { close(fd); }

  void violation(const std::string& what) { report(number, qid, what); }

  void drop() {
    dropped = true;
    shutdown(fd, SHUT_RDWR);
  }

  // -- Output

  u8* reserve(std::size_t size) {
    if (chunks.empty() || chunks.back()->size - chunks.back()->used < size) {
      if (chunks.size() == 1 && chunks.back()->segments == 0 && chunks.back()->size >= size) {
        chunks.back()->used = 0;
      } else {
        chunks.push_back(std::make_unique<Chunk>(std::max<std::size_t>(size, 1 << 16)));
      }
    }
    auto& chunk = *chunks.back();
    u8* at = chunk.bytes.get() + chunk.used;
    chunk.used += size;
    return at;
  }

  void push(const u8* data, std::size_t size, bool external = false) {
    output_bytes += size;
    Chunk* chunk = external ? nullptr : chunks.back().get();
    if (!external && !output.empty() && output.back().chunk == chunk && output.back().data + output.back().size == data) {
      output.back().size += size;
      return;
    }
    if (chunk) ++chunk->segments;
    output.push_back({data, size, chunk});
  }

  // The header and what pads it, not yet sent. `data_bytes` follow it.
  u8* begin_pdu(u8 type, u8 flags, std::size_t hlen, std::size_t data_bytes, std::size_t& total) {
    const std::size_t digest = header_digest ? 4 : 0;
    std::size_t pdo = hlen + digest;
    const std::size_t alignment = (hpda + 1) * 4;
    if (data_bytes) pdo = (pdo + alignment - 1) / alignment * alignment;
    total = data_bytes ? pdo : hlen + digest;
    u8* at = reserve(total);
    std::memset(at, 0, total);
    at[0] = type;
    at[1] = static_cast<u8>(flags | (header_digest ? kHdgstFlag : 0) | (data_bytes && data_digest ? kDdgstFlag : 0));
    at[2] = static_cast<u8>(hlen);
    at[3] = data_bytes ? static_cast<u8>(pdo) : 0;
    store<u32>(at + 4, static_cast<u32>(total + data_bytes + (data_bytes && data_digest ? 4 : 0)));
    return at;
  }

  void end_header(u8* at, std::size_t total) {
    const std::size_t hlen = at[2];
    bool bad_digest = false;
    if (header_fault) {
      static const std::map<std::string, u8> types = {{"patch_rsp", kResponse}, {"patch_c2h", kC2hData}, {"patch_r2t", kR2t}};
      const auto found = types.find(header_fault->kind);
      if (found != types.end() && found->second == at[0]) {
        for (std::size_t n = 0; n < header_fault->bytes.size(); ++n)
          if (static_cast<std::size_t>(header_fault->value) + n < total) at[header_fault->value + n] = header_fault->bytes[n];
        header_fault.reset();
      } else if (header_fault->kind == "bad_header_digest") {
        bad_digest = true;
        header_fault.reset();
      }
    }
    const auto ppm = option(kFuzzPpm);
    if (ppm && static_cast<std::int64_t>(random() % 1'000'000) < ppm) {
      at[random() % hlen] ^= static_cast<u8>(1 + random() % 255);
      count(kFaults);
    }
    if (header_digest && hlen + 4 <= total) {
      store<u32>(at + hlen, crc32c(at, hlen) ^ (bad_digest ? 1 : 0));
    }
    push(at, total);
  }

  void send_response(u16 cid, u16 status, u64 result = 0) {
    std::size_t total;
    u8* at = begin_pdu(kResponse, 0, 24, 0, total);
    store<u64>(at + 8, result);
    store<u16>(at + 16, flow_control ? sqhd : 0xFFFF);
    store<u16>(at + 18, 0);
    store<u16>(at + 20, cid);
    store<u16>(at + 22, static_cast<u16>(status << 1));
    end_header(at, total);
    ++unsent;
  }

  void send_data(u16 cid, u32 offset, const u8* data, u32 size, u8 flags, bool bad_digest = false) {
    std::size_t total;
    u8* at = begin_pdu(kC2hData, flags, 24, size, total);
    store<u16>(at + 8, cid);
    store<u32>(at + 12, offset);
    store<u32>(at + 16, size);
    end_header(at, total);
    if (data_digest && size) {  // a copy: the digest must fit what is sent, whatever is written meanwhile
      u8* copy = reserve(size + 4);
      std::memcpy(copy, data, size);
      store<u32>(copy + size, crc32c(copy, size) ^ (bad_digest ? 1 : 0));
      push(copy, size + 4);
    } else if (size) {
      push(data, size, true);
    }
    if (flags & kSuccessFlag) ++unsent;
  }

  void send_copy(u16 cid, const std::vector<u8>& data, u8 flags) {
    std::size_t total;
    u8* at = begin_pdu(kC2hData, flags, 24, data.size(), total);
    store<u16>(at + 8, cid);
    store<u32>(at + 16, static_cast<u32>(data.size()));
    end_header(at, total);
    u8* copy = reserve(data.size() + 4);
    std::memcpy(copy, data.data(), data.size());
    store<u32>(copy + data.size(), crc32c(data.data(), data.size()));
    push(copy, data.size() + (data_digest ? 4 : 0));
  }

  void send_r2t(u16 cid, u16 ttag, u32 offset, u32 size) {
    std::size_t total;
    u8* at = begin_pdu(kR2t, 0, 24, 0, total);
    store<u16>(at + 8, cid);
    store<u16>(at + 10, ttag);
    store<u32>(at + 12, offset);
    store<u32>(at + 16, size);
    end_header(at, total);
    count(kR2ts);
  }

  void send_termination(u16 status, u32 information, const u8* header, std::size_t size) {
    u8* at = reserve(24 + size);
    std::memset(at, 0, 24);
    at[0] = kC2hTerm;
    at[2] = 24;
    store<u32>(at + 4, static_cast<u32>(24 + size));
    store<u16>(at + 8, status);
    store<u32>(at + 10, information);
    std::memcpy(at + 24, header, size);
    push(at, 24 + size);
  }

  void send_raw(const std::vector<u8>& bytes) {
    u8* at = reserve(bytes.size());
    std::memcpy(at, bytes.data(), bytes.size());
    push(at, bytes.size());
  }

  bool flush();
  void end(bool reset);

  // -- Input

  bool readable();
  bool parse();
  bool fail(u16 status, u32 information, const u8* pdu, std::size_t size, const std::string& what) {
    violation(what);
    send_termination(status, information, pdu, std::min<std::size_t>(size, 128));
    flush();
    return false;
  }
  bool take_ic(const u8* pdu, std::size_t size);
  bool take_command(const u8* pdu, const u8* data, std::size_t data_bytes);
  bool take_data(const u8* pdu, const u8* data, std::size_t data_bytes);

  bool mark(u16 cid) {
    const u64 bit = u64{1} << (cid & 63);
    if (cids[cid >> 6] & bit) return false;
    cids[cid >> 6] |= bit;
    ++in_flight;
    const u64 most = in_flight + unsent;
    if (most > g_counters[kMaxInFlight].load(std::memory_order_relaxed))
      g_counters[kMaxInFlight].store(most, std::memory_order_relaxed);
    return true;
  }
  void release(u16 cid) {
    cids[cid >> 6] &= ~(u64{1} << (cid & 63));
    --in_flight;
    if (sqsize) sqhd = static_cast<u16>((sqhd + 1) % (sqsize + 1));
  }
  void complete(u16 cid, u16 status, u64 result = 0) {
    release(cid);
    send_response(cid, status, result);
  }
  // Data of an admin command, then its completion.
  void complete_with(u16 cid, std::vector<u8> data, u64 result = 0) {
    send_copy(cid, data, kLast);
    complete(cid, kOk, result);
  }
  void fail_command(u16 cid, u16 status) { complete(cid, static_cast<u16>(status | kDnr)); }

  bool fabrics(const u8* sqe, const u8* data, std::size_t data_bytes);
  bool connect(const u8* sqe, const u8* data, std::size_t data_bytes);
  bool admin(const u8* sqe, const u8* data, std::size_t data_bytes);
  bool transfer(const u8* sqe, const u8* data, std::size_t data_bytes);
  std::vector<u8> identify(u8 cns, u32 nsid, bool& known);
  std::vector<u8> discovery_log();
  std::optional<Fault> due_fault(const char* operation);
  bool misbehave(const Fault& fault, u16 cid, bool& handled);
  void read(const Command& command);
  bool hostile_read(const Command& command);
  bool hostile_write(const Command& command);
  void grant(Command& command);
  void finish_write(u16 cid);
  void later(u64 due_ns, std::function<void(Connection&)> what);
  u64 due(u64 bytes);
};

struct Timed {
  u64 due_ns, sequence;
  std::weak_ptr<Connection> connection;
  std::function<void(Connection&)> what;
  bool operator<(const Timed& other) const {
    return std::tie(due_ns, sequence) > std::tie(other.due_ns, other.sequence);
  }
};

struct Worker {
  int epoll = epoll_create1(EPOLL_CLOEXEC), event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  std::map<int, std::shared_ptr<Connection>> connections;
  std::priority_queue<Timed> timed;
  u64 sequence = 0;
  std::mutex mutex;
  std::vector<std::shared_ptr<Connection>> arrived;
  std::thread thread;

  void hand(std::shared_ptr<Connection> connection) {
    {
      const std::lock_guard lock(mutex);
      arrived.push_back(std::move(connection));
    }
    wake();
  }
  void wake() {
    const u64 one = 1;
    if (write(event, &one, sizeof one) < 0 && errno != EAGAIN) die("eventfd");
  }
  void drop(const std::shared_ptr<Connection>& connection) {
    connection->end(false);
    epoll_ctl(epoll, EPOLL_CTL_DEL, connection->fd, nullptr);
    connections.erase(connection->fd);
  }
  void run() {
    epoll_event first{EPOLLIN, {.fd = event}};
    epoll_ctl(epoll, EPOLL_CTL_ADD, event, &first);
    std::array<epoll_event, 64> ready;
    while (true) {
      timespec wait{1, 0};
      if (!timed.empty()) {
        const u64 now = now_ns(), due = timed.top().due_ns;
        const u64 left = due > now ? due - now : 0;
        wait = {static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
      }
      const int found = epoll_pwait2(epoll, ready.data(), ready.size(), &wait, nullptr);
      for (int n = 0; n < found; ++n) {
        if (ready[n].data.fd == event) {
          u64 ignored;
          if (::read(event, &ignored, sizeof ignored) < 0 && errno != EAGAIN) die("eventfd");
          const std::lock_guard lock(mutex);
          for (auto& connection : arrived) {
            epoll_event wanted{EPOLLIN, {.fd = connection->fd}};
            epoll_ctl(epoll, EPOLL_CTL_ADD, connection->fd, &wanted);
            connections[connection->fd] = std::move(connection);
          }
          arrived.clear();
          continue;
        }
        const auto held = connections.find(ready[n].data.fd);
        if (held == connections.end()) continue;
        const auto connection = held->second;
        bool good = true;
        if (ready[n].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) good = connection->readable();
        if (good) good = connection->flush();
        if (!good) drop(connection);
      }
      std::set<std::shared_ptr<Connection>> touched;
      for (const u64 now = now_ns(); !timed.empty() && timed.top().due_ns <= now;) {
        const auto one = timed.top();
        timed.pop();
        if (const auto connection = one.connection.lock(); connection && !connection->closed) {
          one.what(*connection);
          touched.insert(connection);
        }
      }
      for (const auto& connection : touched)
        if (!connection->flush()) drop(connection);
    }
  }
};

std::deque<Worker> g_workers;

void Connection::later(u64 due_ns, std::function<void(Connection&)> what) {
  worker->timed.push({due_ns, worker->sequence++, weak_from_this(), std::move(what)});
}

// When data of this size may be moved, by the rate of the target and its delays. 0: now.
u64 Connection::due(u64 bytes) {
  const auto rate = option(kRate), delay = option(kDelayUs), jitter = option(kJitterUs);
  if (rate == 0 && delay == 0 && jitter == 0) return 0;
  u64 at = now_ns();
  if (rate) {
    const u64 takes = bytes * 1'000'000'000 / static_cast<u64>(rate);
    u64 free = g_rate_free_ns.load(), end;
    do {
      end = std::max(free, at) + takes;
    } while (!g_rate_free_ns.compare_exchange_weak(free, end));
    at = end;
  }
  at += static_cast<u64>(delay) * 1000;
  if (jitter) at += random() % (static_cast<u64>(jitter) * 1000);
  return at;
}

bool Connection::flush() {
  if (silent || silence_asked) return true;
  while (!output.empty()) {
    std::array<iovec, 512> parts;
    std::size_t used = 0, bytes = 0;
    const auto limit = static_cast<std::size_t>(option(kTcpMax));
    for (const auto& segment : output) {
      if (used == parts.size() || (limit && bytes == limit)) break;
      const auto size = limit ? std::min(segment.size, limit - bytes) : segment.size;
      parts[used++] = {const_cast<u8*>(segment.data), size};
      bytes += size;
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = used;
    const auto sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) return false;
      if (!waits_for_room) {
        epoll_event wanted{EPOLLIN | EPOLLOUT, {.fd = fd}};
        epoll_ctl(worker->epoll, EPOLL_CTL_MOD, fd, &wanted);
        waits_for_room = true;
      }
      return true;
    }
    unsent = 0;
    auto left = static_cast<std::size_t>(sent);
    output_bytes -= left;
    while (left) {
      auto& segment = output.front();
      const auto taken = std::min(left, segment.size);
      segment.data += taken;
      segment.size -= taken;
      left -= taken;
      if (segment.size) break;
      if (segment.chunk) --segment.chunk->segments;
      output.pop_front();
    }
    while (chunks.size() > 1 && chunks.front()->segments == 0) chunks.pop_front();
    if (output.empty() && !chunks.empty() && chunks.back()->segments == 0) chunks.back()->used = 0;
  }
  if (waits_for_room) {
    epoll_event wanted{EPOLLIN, {.fd = fd}};
    epoll_ctl(worker->epoll, EPOLL_CTL_MOD, fd, &wanted);
    waits_for_room = false;
  }
  return true;
}

void Connection::end(bool reset) {
  if (closed) return;
  closed = true;
  if (reset) {
    const linger at_once{1, 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  }
  const std::lock_guard lock(g_mutex);
  if (!controller) return;
  controller->connections.erase(this);
  controller->queue_ids.erase(static_cast<u16>(qid));
  if (qid == 0) {
    if (!controller->shut_down && !controller->expired) count(kAbandoned);
    for (auto* other : controller->connections) other->drop();
    g_controllers.erase(controller->cntlid);
  }
}

bool Connection::readable() {
  while (true) {
    if (input_begin == input_end) input_begin = input_end = 0;
    if (input.size() - input_end < (input.size() >> 1) && input_begin) {
      std::memmove(input.data(), input.data() + input_begin, input_end - input_begin);
      input_end -= input_begin;
      input_begin = 0;
    }
    const auto room = input.size() - input_end;
    const auto got = recv(fd, input.data() + input_end, room, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return true;
    if (got <= 0) {
      if (input_begin != input_end && !dropped) violation("the connection ended within a PDU");
      return false;
    }
    if (silent || silence_asked) {
      input_begin = input_end = 0;
      continue;
    }
    input_end += static_cast<std::size_t>(got);
    if (!parse()) return false;
    if (static_cast<std::size_t>(got) < room) return true;
  }
}

bool Connection::parse() {
  while (input_end - input_begin >= 8 && !silent) {
    const u8* pdu = input.data() + input_begin;
    const std::size_t available = input_end - input_begin;
    const u8 type = pdu[0], flags = pdu[1], hlen = pdu[2], pdo = pdu[3];
    const u32 plen = load<u32>(pdu + 4);
    if (plen < hlen || plen > input.size() / 2) return fail(1, 4, pdu, 8, "PLEN " + std::to_string(plen));
    if (available < plen) return true;
    if (!initialized) {
      if (type != kIcReq) return fail(2, 0, pdu, 8, "PDU type " + std::to_string(type) + " before ICReq");
      if (!take_ic(pdu, plen)) return false;
      input_begin += plen;
      continue;
    }
    static const std::map<u8, u8> lengths = {{kH2cTerm, 24}, {kCommand, 72}, {kH2cData, 24}};
    const auto length = lengths.find(type);
    if (length == lengths.end()) return fail(1, 0, pdu, 8, "PDU type " + std::to_string(type));
    if (hlen != length->second) return fail(1, 2, pdu, 8, "HLEN " + std::to_string(hlen) + " of type " + std::to_string(type));
    if (type == kH2cTerm) {
      count(kTermRequests);
      if (plen > 152) violation("H2CTermReq of " + std::to_string(plen) + " bytes");
      return false;
    }
    const std::size_t head = hlen + (header_digest ? 4U : 0U);
    const u8 allowed = static_cast<u8>(kHdgstFlag | kDdgstFlag | (type == kH2cData ? kLast : 0));
    if (flags & ~allowed) return fail(1, 1, pdu, 8, "FLAGS " + std::to_string(flags));
    if (((flags & kHdgstFlag) != 0) != header_digest) return fail(1, 1, pdu, 8, "HDGSTF is not as agreed");
    if (plen < head) return fail(1, 4, pdu, 8, "PLEN " + std::to_string(plen) + " is less than the header");
    if (header_digest) {
      if (load<u32>(pdu + hlen) != crc32c(pdu, hlen)) return fail(3, load<u32>(pdu + hlen), pdu, hlen, "header digest");
      count(kDigestHeader);
    }
    const u8* data = nullptr;
    std::size_t data_bytes = 0;
    if (pdo || plen != head) {
      const std::size_t alignment = 4 * (static_cast<std::size_t>(option(kCpda)) + 1);
      const std::size_t expected = (head + alignment - 1) / alignment * alignment;
      if (pdo != expected) return fail(1, 3, pdu, hlen, "PDO " + std::to_string(pdo) + ", not " + std::to_string(expected));
      const std::size_t tail = data_digest ? 4 : 0;
      if (plen <= pdo + tail) return fail(1, 4, pdu, hlen, "PLEN " + std::to_string(plen) + " holds no data");
      data = pdu + pdo;
      data_bytes = plen - pdo - tail;
      if (((flags & kDdgstFlag) != 0) != data_digest) return fail(1, 1, pdu, hlen, "DDGSTF is not as agreed");
      for (std::size_t n = head; n < pdo; ++n)
        if (pdu[n]) return fail(1, static_cast<u32>(n), pdu, hlen, "padding is not zero");
      if (data_digest) {
        if (load<u32>(data + data_bytes) != crc32c(data, data_bytes)) return fail(3, 0, pdu, hlen, "data digest");
        count(kDigestData);
      }
    } else if (flags & kDdgstFlag) {
      return fail(1, 1, pdu, hlen, "DDGSTF without data");
    }
    if (type == kCommand ? !take_command(pdu, data, data_bytes) : !take_data(pdu, data, data_bytes)) return false;
    input_begin += plen;
  }
  return true;
}

bool Connection::take_ic(const u8* pdu, std::size_t size) {
  if (pdu[2] != 128 || size != 128) return fail(1, 2, pdu, 8, "ICReq of " + std::to_string(size) + " bytes");
  if (pdu[1] || pdu[3]) return fail(1, 1, pdu, 8, "ICReq: FLAGS or PDO");
  if (load<u16>(pdu + 8)) return fail(6, 8, pdu, 128, "ICReq: PFV");
  hpda = pdu[10];
  if (hpda > 31) return fail(1, 10, pdu, 128, "ICReq: HPDA " + std::to_string(hpda));
  if (pdu[11] & ~3) return fail(1, 11, pdu, 128, "ICReq: DGST");
  for (std::size_t n = 16; n < 128; ++n)
    if (pdu[n]) return fail(1, static_cast<u32>(n), pdu, 128, "ICReq: a reserved byte is not zero");
  const auto agreed = [](std::int64_t rule, bool asked) { return rule == 2 || (rule == 1 && asked); };
  const bool header = agreed(option(kHdgst), pdu[11] & 1), data = agreed(option(kDdgst), pdu[11] & 2);
  const auto fault = due_fault("ic");
  bool handled = false;
  if (fault && !misbehave(*fault, 0, handled)) return false;
  initialized = true;
  if (handled) return true;
  std::vector<u8> answer(128);
  answer[0] = kIcResp;
  answer[2] = 128;
  store<u32>(answer.data() + 4, 128);
  answer[10] = static_cast<u8>(option(kCpda));
  answer[11] = static_cast<u8>((header ? 1 : 0) | (data ? 2 : 0));
  store<u32>(answer.data() + 12, static_cast<u32>(option(kMaxh2c)));
  patch("icresp", answer.data(), answer.size());
  if (fault && fault->kind == "truncate") {
    answer.resize(static_cast<std::size_t>(fault->value));
    send_raw(answer);
    flush();
    return false;
  }
  send_raw(answer);
  if (fault && fault->kind == "twice") send_raw(answer);
  header_digest = header;
  data_digest = data;
  return true;
}

// The first armed fault that this operation meets, if its turn has come.
std::optional<Fault> Connection::due_fault(const char* operation) {
  if (g_armed.load(std::memory_order_relaxed) == 0) return {};
  const std::lock_guard lock(g_mutex);
  for (auto fault = g_faults.begin(); fault != g_faults.end(); ++fault) {
    const auto& wanted = fault->operation;
    const bool io = std::strcmp(operation, "read") == 0 || std::strcmp(operation, "write") == 0;
    if (wanted != operation && wanted != "any" && !(wanted == "io" && io)) continue;
    if (fault->qid >= 0 && fault->qid != qid) continue;
    if (fault->after > 0) {
      --fault->after;
      return {};
    }
    const auto found = *fault;
    if (--fault->count == 0) {
      g_faults.erase(fault);
      --g_armed;
    }
    count(kFaults);
    return found;
  }
  return {};
}

// Faults that any command can have. False: the connection ends. `handled`: nothing is left to be done.
bool Connection::misbehave(const Fault& fault, u16 cid, bool& handled) {
  const auto& kind = fault.kind;
  if (kind == "reset") {
    end(true);
    return false;
  }
  if (kind == "close") {
    flush();
    return false;
  }
  handled = true;
  if (kind == "silence") {
    silent = true;
  } else if (kind == "silence_all") {
    const std::lock_guard lock(g_mutex);
    if (controller)
      for (auto* other : controller->connections) other->silence_asked = true;
    silence_asked = true;
  } else if (kind == "drop") {  // this command is never answered
  } else if (kind == "status") {
    complete(cid, static_cast<u16>(fault.value));
  } else if (kind == "term") {
    const std::array<u8, 128> header{};
    send_termination(static_cast<u16>(fault.value), 4, header.data(), static_cast<std::size_t>(fault.size));
    flush();
    return false;
  } else if (kind == "term_kept") {  // and the connection stays open
    const std::vector<u8> header(static_cast<std::size_t>(fault.size));
    send_termination(static_cast<u16>(fault.value), 4, header.data(), header.size());
  } else if (kind == "raw") {
    send_raw(fault.bytes);
  } else if (kind == "garbage") {
    std::vector<u8> bytes(static_cast<std::size_t>(fault.size));
    for (auto& byte : bytes) byte = static_cast<u8>(random());
    send_raw(bytes);
  } else if (kind == "wrong_cid") {
    release(cid);
    send_response(static_cast<u16>(cid ^ static_cast<u16>(fault.value)), kOk);
  } else if (kind == "wrong_sqhd") {
    release(cid);
    const auto held = sqhd;
    sqhd = static_cast<u16>(fault.value);
    send_response(cid, kOk);
    sqhd = held;
  } else {
    handled = false;
    if (kind.rfind("patch_", 0) == 0 || kind == "bad_header_digest") header_fault = fault;
  }
  return true;
}

bool Connection::take_command(const u8* pdu, const u8* data, std::size_t data_bytes) {
  const u8* sqe = pdu + 8;
  const u8 opcode = sqe[0];
  const u16 cid = load<u16>(sqe + 2);
  if (sqe[1] & 3) violation("FUSE is not zero");
  if (opcode != 0x7F && (sqe[1] & 0xC0) != 0x40) violation("PSDT is not 01b");
  if (!mark(cid)) {
    violation("CID " + std::to_string(cid) + " is in flight already");
    return false;
  }
  if (connected && in_flight + unsent > sqsize)
    violation(std::to_string(in_flight + unsent) + " commands in flight in a queue of " + std::to_string(sqsize + 1));
  if (!connected && !(opcode == 0x7F && sqe[4] == 1)) {
    violation("a command before Connect");
    fail_command(cid, kSequence);
    return true;
  }
  if (opcode == 0x7F) return fabrics(sqe, data, data_bytes);
  if (qid == 0) {
    return admin(sqe, data, data_bytes);
  }
  return transfer(sqe, data, data_bytes);
}

bool Connection::fabrics(const u8* sqe, const u8* data, std::size_t data_bytes) {
  const u16 cid = load<u16>(sqe + 2);
  const u8 type = sqe[4];
  static const std::map<u8, const char*> names = {{0, "property_set"}, {1, "connect"}, {4, "property_get"}, {8, "disconnect"}};
  const auto name = names.find(type);
  const auto fault = due_fault(name == names.end() ? "fabrics" : name->second);
  bool handled = false;
  if (fault && !misbehave(*fault, cid, handled)) return false;
  if (handled) return true;
  if (type == 1) return connect(sqe, data, data_bytes);
  if (data_bytes) violation("data in the capsule of fabrics command " + std::to_string(type));
  if (type == 8) {
    if (qid == 0) violation("Disconnect of the admin queue");
    count(kDisconnects);
    complete(cid, kOk);
    return true;
  }
  if (qid != 0 || (type != 0 && type != 4)) {
    violation("fabrics command " + std::to_string(type) + " on queue " + std::to_string(qid));
    fail_command(cid, kInvalidOpcode);
    return true;
  }
  const u8 attribute = sqe[40];
  const u32 offset = load<u32>(sqe + 44);
  const std::lock_guard lock(g_mutex);
  auto& c = *controller;
  if (type == 4) {
    u64 value = 0;
    bool wide = false;
    switch (offset) {
      case 0:
        value = static_cast<u64>(option(kMqes)) | (1U << 16) | (static_cast<u64>(option(kCapTo)) & 255) << 24 | u64{1} << 37;
        wide = true;
        break;
      case 8: value = 0x00020000; break;
      case 0x14: value = c.cc; break;
      case 0x1C:
        if ((c.cc & 1) && !(c.csts & 1)) {
          const auto polls = option(kReadyPolls);
          if (polls >= 0 && c.polls++ >= polls) c.csts |= 1, c.polls = 0;
        }
        if ((c.cc >> 14 & 3) && (c.csts >> 2 & 3) != 2) {
          const auto polls = option(kShutdownPolls);
          const bool done = polls >= 0 && c.polls++ >= polls;
          c.csts = (c.csts & ~12U) | (done ? 8 : 4);
        }
        value = c.csts;
        break;
      default:
        violation("Property Get of offset " + std::to_string(offset));
        fail_command(cid, kInvalidField);
        return true;
    }
    if ((attribute & 7) != (wide ? 1 : 0)) violation("Property Get: size of offset " + std::to_string(offset));
    u8 bytes[8];
    store<u64>(bytes, value);
    const std::string what = "property" + std::to_string(offset);
    if (g_patched)
      if (const auto found = g_patches.find(what); found != g_patches.end())
        for (const auto& one : found->second)
          for (std::size_t n = 0; n < one.bytes.size() && one.offset + n < 8; ++n) bytes[one.offset + n] = one.bytes[n];
    complete(cid, kOk, load<u64>(bytes));
    return true;
  }
  const u64 value = load<u64>(sqe + 48);
  if (offset != 0x14 || (attribute & 7)) {
    violation("Property Set of offset " + std::to_string(offset));
    fail_command(cid, kInvalidField);
    return true;
  }
  const u32 before = c.cc;
  c.cc = static_cast<u32>(value);
  if ((c.cc & 1) && !(before & 1)) {
    if ((c.cc >> 16 & 15) != 6 || (c.cc >> 20 & 15) != 4) violation("CC: IOSQES or IOCQES");
    if (c.cc >> 4 & 7) violation("CC: CSS");
    if (c.cc >> 7 & 15) violation("CC: MPS");
    if (c.cc >> 24) violation("CC: reserved bits");
    c.polls = 0;
    if (option(kReadyPolls) == 0) c.csts |= 1;
  }
  if (!(c.cc & 1)) c.csts &= ~1U;
  if (c.cc >> 14 & 3) {
    if (!c.shut_down) count(kShutdowns);
    c.shut_down = true;
    c.polls = 0;
    if (option(kShutdownPolls) == 0) c.csts = (c.csts & ~12U) | 8;
  }
  complete(cid, kOk);
  return true;
}

bool nqn_is_good(const u8* field) {
  const auto size = strnlen(reinterpret_cast<const char*>(field), 256);
  if (size < 4 || size > 223 || std::memcmp(field, "nqn.", 4) != 0) return false;
  return std::all_of(field + size, field + 256, [](u8 byte) { return byte == 0; });
}

bool Connection::connect(const u8* sqe, const u8* data, std::size_t data_bytes) {
  const u16 cid = load<u16>(sqe + 2);
  if (connected) {
    violation("a second Connect");
    fail_command(cid, kSequence);
    return true;
  }
  const u16 queue = load<u16>(sqe + 42), size = load<u16>(sqe + 44);
  const u8 attributes = sqe[46];
  const u32 kato = load<u32>(sqe + 48);
  if (data_bytes != 1024 || sqe[39] != 0x01 || load<u32>(sqe + 32) != 1024 || load<u64>(sqe + 24) != 0) {
    violation("Connect: its data are not 1024 bytes in the capsule");
    fail_command(cid, kConnectInvalid);
    return true;
  }
  if (load<u16>(sqe + 40)) violation("Connect: RECFMT");
  if (attributes & ~4) violation("Connect: CATTR " + std::to_string(attributes));
  const u16 wanted = load<u16>(data + 16);
  const auto text = [&](std::size_t at) { return std::string(reinterpret_cast<const char*>(data + at), strnlen(reinterpret_cast<const char*>(data + at), 256)); };
  if (!nqn_is_good(data + 256)) violation("Connect: SUBNQN");
  if (!nqn_is_good(data + 512)) violation("Connect: HOSTNQN");
  for (std::size_t n = 18; n < 1024; ++n)
    if ((n < 256 || n >= 768) && data[n]) {
      violation("Connect: a reserved byte is not zero");
      break;
    }
  std::array<u8, 16> host_id;
  std::copy_n(data, 16, host_id.begin());
  if (std::all_of(host_id.begin(), host_id.end(), [](u8 byte) { return byte == 0; })) violation("Connect: HOSTID is zero");
  const auto refuse = [&](u16 status, bool data_field = true) {
    complete(cid, static_cast<u16>(status | kDnr), data_field ? 1U << 16 | 256 : 44);
    return true;
  };
  if (size == 0 || size > (queue ? option(kMqes) : std::max<std::int64_t>(option(kMqes), 31))) {
    violation("Connect: SQSIZE " + std::to_string(size));
    return refuse(kConnectInvalid, false);
  }
  const std::lock_guard lock(g_mutex);
  if (queue == 0) {
    Subsystem* subsystem = nullptr;
    for (const auto& one : g_subsystems)
      if (one->present && one->nqn == text(256)) subsystem = one.get();
    if (!subsystem && text(256) != kDiscoveryNqn) return refuse(kConnectInvalid);
    if (subsystem && !subsystem->allowed_hosts.empty() && !subsystem->allowed_hosts.count(text(512)))
      return refuse(kInvalidHost);
    if (wanted != 0xFFFF) violation("Connect: CNTLID " + std::to_string(wanted) + " of a dynamic controller");
    if (subsystem && kato == 0) violation("Connect: no keep-alive");
    controller = std::make_shared<Controller>();
    while (g_next_cntlid == 0 || g_next_cntlid >= 0xFFF0 || g_controllers.count(g_next_cntlid))
      g_next_cntlid = g_next_cntlid >= 0xFFF0 ? 1 : g_next_cntlid + 1;
    controller->cntlid = g_next_cntlid++;
    controller->subsystem = subsystem;
    controller->host_nqn = text(512);
    controller->host_id = host_id;
    controller->kato_ms = kato;
    controller->alive_ns = now_ns();
    g_controllers[controller->cntlid] = controller;
    count(kConnects);
  } else {
    const auto found = g_controllers.find(wanted);
    if (found == g_controllers.end()) return refuse(kConnectInvalid);
    auto& c = *found->second;
    if (!c.subsystem || c.subsystem->nqn != text(256) || c.host_nqn != text(512) || c.host_id != host_id) {
      violation("Connect: not the host or the subsystem of the controller");
      return refuse(kConnectInvalid);
    }
    if (!(c.csts & 1)) violation("Connect of an I/O queue before CSTS.RDY");
    if (queue > c.queues) violation("Connect: queue " + std::to_string(queue) + " of " + std::to_string(c.queues));
    if (kato) violation("Connect: KATO of an I/O queue");
    if (c.queue_ids.count(queue)) {
      violation("Connect: queue " + std::to_string(queue) + " twice");
      return refuse(kSequence);
    }
    controller = found->second;
    count(kIoConnects);
  }
  controller->queue_ids.insert(queue);
  controller->connections.insert(this);
  qid = queue;
  sqsize = size;
  flow_control = (attributes & 4) == 0;
  connected = true;
  u8 result[8] = {};
  store<u32>(result, controller->cntlid | static_cast<u32>(option(kAuth)) << 17);
  if (g_patched)
    if (const auto found = g_patches.find(queue ? "io_connect" : "connect"); found != g_patches.end())
      for (const auto& one : found->second)
        for (std::size_t n = 0; n < one.bytes.size() && one.offset + n < 8; ++n) result[one.offset + n] = one.bytes[n];
  complete(cid, kOk, load<u64>(result));
  return true;
}

void put_text(u8* at, std::size_t size, const std::string& text, char fill = ' ') {
  std::memset(at, fill, size);
  std::memcpy(at, text.data(), std::min(size, text.size()));
}

std::vector<u8> Connection::identify(u8 cns, u32 nsid, bool& known) {
  std::vector<u8> page(4096);
  u8* at = page.data();
  known = true;
  auto* const subsystem = controller->subsystem;
  Namespace* ns = nullptr;
  if (subsystem)
    if (const auto found = subsystem->namespaces.find(nsid); found != subsystem->namespaces.end()) ns = found->second.get();
  if (cns == 1) {
    put_text(at + 4, 20, "test");
    put_text(at + 24, 40, "penstock test target");
    put_text(at + 64, 8, "1");
    at[77] = static_cast<u8>(option(kMdts));
    store<u16>(at + 78, controller->cntlid);
    store<u32>(at + 80, 0x00020000);
    at[111] = subsystem ? 1 : 2;
    store<u16>(at + 320, 1);
    at[512] = 0x66;
    at[513] = 0x44;
    store<u16>(at + 514, static_cast<u16>(option(kMqes) + 1));
    store<u32>(at + 516, subsystem && !subsystem->namespaces.empty() ? subsystem->namespaces.rbegin()->first : 0);
    at[525] = 1;
    store<u32>(at + 536, 1U | 1U << 20);
    put_text(at + 768, 256, subsystem ? subsystem->nqn : kDiscoveryNqn, '\0');
    store<u32>(at + 1792, static_cast<u32>(option(kIoccsz) / 16));
    store<u32>(at + 1796, 1);
    store<u16>(at + 1800, static_cast<u16>(option(kIcdoff)));
    at[1803] = 1;
    return page;
  }
  if (!subsystem) {
    known = false;
    return page;
  }
  if (cns == 2) {
    std::size_t written = 0;
    for (const auto& [number, one] : subsystem->namespaces)
      if (number > nsid && written < 1024) store<u32>(at + 4 * written++, number);
    return page;
  }
  if ((cns != 0 && cns != 3) || !ns) {
    known = cns == 0 && nsid != 0 && nsid != 0xFFFFFFFF;  // of an inactive namespace: zeros
    return page;
  }
  if (cns == 3) {
    const auto put = [&](u8 type, const u8* id, u8 size) {
      at[0] = type;
      at[1] = size;
      std::copy_n(id, size, at + 4);
      at += 4 + size;
    };
    put(1, ns->eui64.data(), 8);
    put(2, ns->nguid.data(), 16);
    put(3, ns->uuid.data(), 16);
    return page;
  }
  const u64 blocks = ns->blocks;
  for (const std::size_t field : {0, 8, 16}) store<u64>(at + field, blocks);
  std::copy(ns->nguid.begin(), ns->nguid.end(), at + 104);
  std::copy(ns->eui64.begin(), ns->eui64.end(), at + 120);
  store<u32>(at + 128, static_cast<u32>(__builtin_ctz(ns->block_bytes)) << 16);
  return page;
}

std::vector<u8> Connection::discovery_log() {
  std::vector<u8> log(1024);
  u64 records = 0;
  for (const auto& subsystem : g_subsystems) {
    if (!subsystem->present) continue;
    if (!subsystem->allowed_hosts.empty() && !subsystem->allowed_hosts.count(controller->host_nqn)) continue;
    log.resize(log.size() + 1024);
    u8* at = log.data() + log.size() - 1024;
    at[0] = 3;
    at[1] = g_address.find(':') == std::string::npos ? 1 : 2;
    at[2] = 2;
    at[3] = option(kSecure) ? 1 : 0;
    store<u16>(at + 4, 1);
    store<u16>(at + 6, 0xFFFF);
    store<u16>(at + 8, 32);
    put_text(at + 32, 32, std::to_string(g_port));
    put_text(at + 256, 256, subsystem->nqn, '\0');
    put_text(at + 512, 256, g_address);
    at[768] = static_cast<u8>(option(kSecure) ? 2 : 0);
    ++records;
  }
  store<u64>(log.data(), g_generation);
  store<u64>(log.data() + 8, records);
  return log;
}

bool Connection::admin(const u8* sqe, const u8* data, std::size_t data_bytes) {
  const u8 opcode = sqe[0];
  const u16 cid = load<u16>(sqe + 2);
  const u32 nsid = load<u32>(sqe + 4), cdw10 = load<u32>(sqe + 40), cdw11 = load<u32>(sqe + 44);
  static const std::map<u8, const char*> names = {{2, "log"}, {6, "identify"}, {9, "set_features"}, {10, "get_features"},
                                                  {0x0C, "event"}, {0x18, "keep_alive"}};
  const auto name = names.find(opcode);
  const auto fault = due_fault(name == names.end() ? "admin" : name->second);
  bool handled = false;
  if (fault && !misbehave(*fault, cid, handled)) return false;
  if (handled) return true;
  const bool has_data = opcode == 2 || opcode == 6;
  const u32 length = load<u32>(sqe + 32);
  if (has_data && (sqe[39] != 0x5A || load<u64>(sqe + 24))) violation("admin command: the SGL of its data");
  const bool discovery = !controller->subsystem;
  const bool behavior = opcode == 9 && (cdw10 & 255) == 0x16;
  if (data_bytes != (behavior ? 512 : 0)) violation("data in the capsule of admin command " + std::to_string(opcode));
  switch (opcode) {
    case 2: {
      const u64 bytes = ((u64{load<u16>(sqe + 44)} << 16 | cdw10 >> 16) + 1) * 4, offset = load<u64>(sqe + 48);
      if (bytes != length) violation("Get Log Page: the SGL's length is not NUMD");
      if (bytes > 16 << 20 || offset % 4) {
        fail_command(cid, kInvalidField);
        return true;
      }
      std::vector<u8> log;
      if ((cdw10 & 255) == 0x70 && discovery) {
        const std::lock_guard lock(g_mutex);
        if (offset == 0 && option(kGenBumps) > 0) --g_options[kGenBumps], ++g_generation;
        log = discovery_log();
      } else if ((cdw10 & 255) >= 1 && (cdw10 & 255) <= 4 && !discovery) {
        log.resize(4096);
      } else {
        fail_command(cid, kInvalidField);
        return true;
      }
      patch("log" + std::to_string(cdw10 & 255), log.data(), log.size());
      std::vector<u8> part(bytes);
      if (offset < log.size()) std::copy_n(log.begin() + static_cast<std::ptrdiff_t>(offset), std::min<u64>(bytes, log.size() - offset), part.begin());
      complete_with(cid, std::move(part));
      return true;
    }
    case 6: {
      if (length != 4096) violation("Identify of " + std::to_string(length) + " bytes");
      bool known;
      const u8 cns = static_cast<u8>(cdw10);
      std::vector<u8> page;
      {
        const std::lock_guard lock(g_mutex);
        page = identify(cns, nsid, known);
      }
      if (!known) {
        fail_command(cid, cns == 0 || cns == 3 ? kInvalidNamespace : kInvalidField);
        return true;
      }
      patch("identify" + std::to_string(cns), page.data(), page.size());
      complete_with(cid, std::move(page));
      return true;
    }
    case 9:
      if ((cdw10 & 255) == 7 && !discovery) {
        const unsigned submission = (cdw11 & 0xFFFF) + 1, completion = (cdw11 >> 16) + 1;
        const auto granted = std::min<unsigned>({submission, completion, static_cast<unsigned>(option(kQueues))});
        const std::lock_guard lock(g_mutex);
        if (!controller->queue_ids.empty() && controller->queue_ids.size() > 1) violation("Number of Queues after an I/O queue");
        controller->queues = granted;
        complete(cid, kOk, (granted - 1) | (granted - 1) << 16);
      } else if (behavior && data_bytes == 512) {  // its first byte alone is supported: ACRE
        if (data[0] > 1 || std::any_of(data + 1, data + 512, [](u8 byte) { return byte != 0; }))
          violation("Host Behavior Support of unknown bits");
        const std::lock_guard lock(g_mutex);
        controller->delays_retries = data[0] == 1;
        complete(cid, kOk);
      } else if ((cdw10 & 255) == 0x0B || (cdw10 & 255) == 0x0F) {
        if ((cdw10 & 255) == 0x0F) controller->kato_ms = cdw11;
        complete(cid, kOk);
      } else {
        fail_command(cid, kInvalidField);
      }
      return true;
    case 10:
      if ((cdw10 & 255) == 0x0F) {
        complete(cid, kOk, controller->kato_ms);
      } else {
        fail_command(cid, kInvalidField);
      }
      return true;
    case 0x0C:
      if (events.size() >= 4) {
        violation("more Asynchronous Event Requests than AERL allows");
        fail_command(cid, 0x105);
      } else {
        events.push_back(cid);
      }
      return true;
    case 0x18:
      controller->alive_ns = now_ns();
      count(kKeepAlives);
      complete(cid, kOk);
      return true;
    default:
      violation("admin opcode " + std::to_string(opcode));
      fail_command(cid, kInvalidOpcode);
      return true;
  }
}

bool Connection::transfer(const u8* sqe, const u8* data, std::size_t data_bytes) {
  const u8 opcode = sqe[0];
  const u16 cid = load<u16>(sqe + 2);
  const u32 nsid = load<u32>(sqe + 4);
  const auto& namespaces = controller->subsystem->namespaces;  // fixed while connections are there
  const auto found = namespaces.find(nsid);
  if (opcode == 0) {
    const auto fault = due_fault("flush");
    bool handled = false;
    if (fault && !misbehave(*fault, cid, handled)) return false;
    if (handled) return true;
    count(kFlushes);
    for (const auto& [number, ns] : namespaces)  // its file says so too
      if (number == nsid || nsid == 0xFFFFFFFF) msync(ns->memory, ns->capacity_bytes, MS_SYNC);
    complete(cid, found == namespaces.end() && nsid != 0xFFFFFFFF ? kInvalidNamespace | kDnr : kOk);
    return true;
  }
  if (opcode != 1 && opcode != 2) {
    violation("I/O opcode " + std::to_string(opcode));
    fail_command(cid, kInvalidOpcode);
    return true;
  }
  Command command;
  command.cid = cid;
  command.write = opcode == 1;
  command.fault = due_fault(command.write ? "write" : "read");
  {
    const std::lock_guard lock(g_mutex);
    const std::pair key{opcode, load<u64>(sqe + 40)};
    if (const auto waits = controller->not_before.find(key); waits != controller->not_before.end()) {
      if (now_ns() < waits->second) violation("a command is tried again before the delay that it was told");
      controller->not_before.erase(waits);
    }
    if (command.fault && command.fault->kind == "status" && command.fault->value & kRetryDelay) {
      if (controller->delays_retries) {
        controller->not_before[key] = now_ns() + static_cast<u64>(command.fault->size) * 1'000'000;
      } else {
        command.fault->value &= ~std::int64_t{kRetryDelay};
      }
    }
  }
  if (command.fault) {
    bool handled = false;
    if (!misbehave(*command.fault, cid, handled)) return false;
    if (handled) return true;
  }
  if (found == namespaces.end()) {
    fail_command(cid, kInvalidNamespace);
    return true;
  }
  auto& ns = *found->second;
  const u64 block = load<u64>(sqe + 40);
  const u32 cdw12 = load<u32>(sqe + 48), blocks = (cdw12 & 0xFFFF) + 1;
  command.ns = &ns;
  command.begin = block * ns.block_bytes;
  command.length = blocks * ns.block_bytes;
  if (load<u64>(sqe + 8) || load<u64>(sqe + 16)) violation("dwords 2 to 5 of a read or write are not zero");
  if (cdw12 & 0x03FF0000) violation("reserved bits or protection of a read or write: " + std::to_string(cdw12));
  const u32 sgl_length = load<u32>(sqe + 32);
  if (sgl_length != command.length)
    violation("the SGL has " + std::to_string(sgl_length) + " bytes, the blocks " + std::to_string(command.length));
  if (sqe[36] || sqe[37] || sqe[38] || load<u64>(sqe + 24)) violation("reserved bytes or the address of the SGL");
  const auto capsule = static_cast<u64>(option(kIoccsz)) - kSqe;
  if (data_bytes) {
    if (!command.write || sqe[39] != 0x01) violation("data in the capsule, which the SGL does not say");
    if (data_bytes > capsule) violation(std::to_string(data_bytes) + " bytes in a capsule for " + std::to_string(capsule));
    if (data_bytes != command.length) {
      violation("the capsule holds " + std::to_string(data_bytes) + " bytes of " + std::to_string(command.length));
      fail_command(cid, kInvalidField);
      return true;
    }
  } else if (sqe[39] != 0x5A) {
    violation("the SGL's type is " + std::to_string(sqe[39]));
    fail_command(cid, kInvalidField);
    return true;
  }
  if (const auto mdts = option(kMdts); mdts && command.length > (u64{4096} << mdts)) {
    violation(std::to_string(command.length) + " bytes are more than MDTS allows");
    fail_command(cid, kInvalidField);
    return true;
  }
  const u64 all = ns.blocks;
  if (block >= all || blocks > all - block) {
    fail_command(cid, kOutOfRange);
    return true;
  }
  if (!command.write) {
    count(kReads);
    count(kReadBytes, command.length);
    if (command.fault) return hostile_read(command);
    read(command);
    return true;
  }
  if (option(kReadOnly)) {
    fail_command(cid, kWriteProtected);
    return true;
  }
  if (data_bytes) {
    if (command.fault && command.fault->kind == "hold") {  // until "land"; the connection is lost
      {
        const std::lock_guard lock(g_mutex);
        g_held.push_back({ns.memory + command.begin, {data, data + data_bytes}});
      }
      end(true);
      return false;
    }
    if (command.fault && !hostile_write(command)) return true;
    std::memcpy(ns.memory + command.begin, data, data_bytes);
    command.received = command.length;
    count(kInCapsule);
    commands[cid] = std::move(command);
    finish_write(cid);
    return true;
  }
  auto& held = commands[cid] = std::move(command);
  if (held.fault && !hostile_write(held)) return true;
  grant(held);
  return true;
}

void Connection::read(const Command& command) {
  const u8* memory = command.ns->memory + command.begin;
  const auto most = static_cast<u32>(option(kC2hMax));
  const bool success = !flow_control && option(kSuccess);
  const bool slow = option(kRate) || option(kDelayUs) || option(kJitterUs);
  u64 at = 0;
  for (u32 done = 0; done < command.length;) {
    const u32 size = most ? std::min(most, command.length - done) : command.length;
    const bool last = done + size == command.length;
    const u8 flags = static_cast<u8>((last ? kLast : 0) | (last && success ? kSuccessFlag : 0));
    const auto act = [cid = command.cid, done, memory, size, flags, last, success](Connection& self) {
      self.send_data(cid, done, memory + done, size, flags);
      if (last && success) self.release(cid);
      if (last && !success) self.complete(cid, kOk);
    };
    if (slow) {
      at = std::max(at, due(size));
      later(at, act);
    } else {
      act(*this);
    }
    done += size;
  }
}

// Faults of data on their way to the host.
bool Connection::hostile_read(const Command& command) {
  const auto& fault = *command.fault;
  const auto& kind = fault.kind;
  const u8* memory = command.ns->memory + command.begin;
  const u32 length = command.length, half = length / 2 & ~3U;
  const u16 cid = command.cid;
  static const std::vector<u8> noise(1 << 16, 0xEE);
  const u32 extra = std::min<u32>(static_cast<u32>(fault.size ? fault.size : 4096), 1 << 16);
  if (kind == "c2h_beyond") {  // the data, and more behind them
    send_data(cid, 0, memory, length, 0);
    send_data(cid, length, noise.data(), extra, kLast);
    complete(cid, kOk);
  } else if (kind == "c2h_long") {  // one PDU with more than was asked for
    std::vector<u8> all(memory, memory + length);
    all.resize(length + extra, 0xEE);
    send_copy(cid, all, kLast);
    complete(cid, kOk);
  } else if (kind == "c2h_offset") {  // by value; negative: a number beyond 2^31
    send_data(cid, static_cast<u32>(fault.value), memory, length, kLast);
    complete(cid, kOk);
  } else if (kind == "c2h_short") {
    send_data(cid, 0, memory, half, kLast);
    complete(cid, kOk);
  } else if (kind == "c2h_short_success") {
    send_data(cid, 0, memory, half, kLast | kSuccessFlag);
    release(cid);
  } else if (kind == "c2h_none") {
    complete(cid, kOk);
  } else if (kind == "c2h_zero") {
    send_data(cid, 0, memory, 0, kLast);
    complete(cid, kOk);
  } else if (kind == "c2h_order") {
    send_data(cid, half, memory + half, length - half, 0);
    send_data(cid, 0, memory, half, kLast);
    complete(cid, kOk);
  } else if (kind == "c2h_twice") {
    send_data(cid, 0, memory, half, 0);
    send_data(cid, 0, memory, half, 0);
    send_data(cid, half, memory + half, length - half, kLast);
    complete(cid, kOk);
  } else if (kind == "c2h_gap") {
    send_data(cid, 0, memory, half - 4, 0);
    send_data(cid, half, memory + half, length - half, kLast);
    complete(cid, kOk);
  } else if (kind == "c2h_wrong_cid") {
    send_data(static_cast<u16>(cid ^ static_cast<u16>(fault.value)), 0, memory, length, kLast);
    complete(cid, kOk);
  } else if (kind == "c2h_after") {  // data for a command that has ended
    send_data(cid, 0, memory, length, kLast);
    complete(cid, kOk);
    send_data(cid, 0, noise.data(), std::min<u32>(length, 1 << 16), kLast);
  } else if (kind == "c2h_success_only") {  // SUCCESS without LAST_PDU
    send_data(cid, 0, memory, length, kSuccessFlag);
    release(cid);
  } else if (kind == "c2h_status") {  // half the data, then an error
    send_data(cid, 0, memory, half, 0);
    complete(cid, static_cast<u16>(fault.value));
  } else if (kind == "duplicate") {
    send_data(cid, 0, memory, length, kLast);
    complete(cid, kOk);
    send_response(cid, kOk);
  } else if (kind == "bad_data_digest") {
    send_data(cid, 0, memory, length, kLast, true);
    complete(cid, kOk);
  } else if (kind == "r2t_for_read") {
    send_r2t(cid, 1, 0, length);
  } else if (kind == "truncate") {  // the connection ends amid the data
    std::vector<u8> bytes(24 + half);
    bytes[0] = kC2hData;
    bytes[1] = kLast;
    bytes[2] = bytes[3] = 24;
    store<u32>(bytes.data() + 4, 24 + length);
    store<u16>(bytes.data() + 8, cid);
    store<u32>(bytes.data() + 16, length);
    std::copy_n(memory, half, bytes.begin() + 24);
    send_raw(bytes);
    flush();
    return false;
  } else if (kind == "pause") {  // half a PDU of data, and then nothing for ever
    header_digest = data_digest = false;
    std::size_t total;
    u8* at = begin_pdu(kC2hData, kLast, 24, length, total);
    store<u16>(at + 8, cid);
    store<u32>(at + 16, length);
    end_header(at, total);
    push(memory, half, true);
    flush();
    silent = true;
  } else {
    read(command);
  }
  return true;
}

// Faults of R2T. False: nothing is left to be done.
bool Connection::hostile_write(const Command& command) {
  const auto& fault = *command.fault;
  const auto& kind = fault.kind;
  const u16 cid = command.cid;
  const u32 length = command.length;
  if (kind == "r2t_beyond") {
    send_r2t(cid, 1, 0, length + static_cast<u32>(fault.size ? fault.size : 4096));
  } else if (kind == "r2t_offset") {
    send_r2t(cid, 1, static_cast<u32>(fault.value), length);
  } else if (kind == "r2t_zero") {
    send_r2t(cid, 1, 0, 0);
  } else if (kind == "r2t_twice") {
    send_r2t(cid, 1, 0, length);
    send_r2t(cid, 2, 0, length);
  } else if (kind == "r2t_wrong_cid") {
    send_r2t(static_cast<u16>(cid ^ static_cast<u16>(fault.value)), 1, 0, length);
  } else if (kind == "r2t_again") {  // the same bytes once more, after they came
    return true;
  } else if (kind == "c2h_for_write") {
    send_data(cid, 0, command.ns->memory, std::min<u32>(length, 4096), kLast);
  } else if (kind == "write_early") {  // success, before the data came
    complete(cid, kOk);
  } else if (kind == "duplicate") {
    complete(cid, kOk);
    send_response(cid, kOk);
  } else {
    return true;
  }
  return false;
}

void Connection::grant(Command& command) {
  const auto most = static_cast<u32>(option(kR2tMax));
  const u32 size = most ? std::min(most, command.length - command.received) : command.length - command.received;
  command.ttag = next_ttag++;
  command.granted = true;
  command.granted_end = command.received + size;
  send_r2t(command.cid, command.ttag, command.received, size);
}

bool Connection::take_data(const u8* pdu, const u8* data, std::size_t data_bytes) {
  const u16 cid = load<u16>(pdu + 8), ttag = load<u16>(pdu + 10);
  const u32 offset = load<u32>(pdu + 12), length = load<u32>(pdu + 16);
  const auto found = commands.find(cid);
  if (found == commands.end() || !found->second.granted) return fail(1, 8, pdu, 24, "H2CData for CID " + std::to_string(cid) + ", which waits for none");
  auto& command = found->second;
  if (ttag != command.ttag) return fail(1, 10, pdu, 24, "H2CData: TTAG " + std::to_string(ttag));
  if (length != data_bytes) return fail(1, 16, pdu, 24, "H2CData: DATAL " + std::to_string(length) + " of " + std::to_string(data_bytes));
  if (length > static_cast<u64>(option(kMaxh2c))) return fail(5, 16, pdu, 24, "H2CData of " + std::to_string(length) + " bytes");
  if (offset != command.received) return fail(5, 12, pdu, 24, "H2CData: DATAO " + std::to_string(offset) + ", not " + std::to_string(command.received));
  if (length > command.granted_end - command.received) return fail(5, 16, pdu, 24, "H2CData beyond R2T");
  std::memcpy(command.ns->memory + command.begin + offset, data, data_bytes);
  command.received += length;
  const bool last = (pdu[1] & kLast) != 0, ended = command.received == command.granted_end;
  if (last != ended) return fail(1, 1, pdu, 24, "H2CData: LAST_PDU");
  if (!ended) return true;
  command.granted = false;
  if (command.fault && command.fault->kind == "r2t_again") {
    command.fault.reset();
    command.received = 0;
  }
  if (command.received < command.length) {
    grant(command);
  } else {
    finish_write(cid);
  }
  return true;
}

void Connection::finish_write(u16 cid) {
  const auto& command = commands.at(cid);
  count(kWrites);
  count(kWriteBytes, command.length);
  if (const u64 at = due(command.length)) {
    later(at, [cid](Connection& self) {
      self.commands.erase(cid);
      self.complete(cid, kOk);
    });
    return;
  }
  commands.erase(cid);
  complete(cid, kOk);
}

// ---- Control

std::map<std::string, std::string> pairs(const std::string& text, char separator) {
  std::map<std::string, std::string> result;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    const auto equals = part.find('=');
    if (equals != std::string::npos) result[part.substr(0, equals)] = part.substr(equals + 1);
  }
  return result;
}

std::vector<u8> bytes_of(const std::string& hex) {
  std::vector<u8> bytes;
  for (std::size_t n = 0; n + 1 < hex.size(); n += 2) bytes.push_back(static_cast<u8>(std::stoul(hex.substr(n, 2), nullptr, 16)));
  return bytes;
}

bool set_option(const std::string& name, std::int64_t value) {
  for (std::size_t n = 0; n < kOptions; ++n)
    if (name == kOptionTable[n].name) {
      g_options[n] = value;
      return true;
    }
  return false;
}

Subsystem* subsystem_of(const std::string& nqn) {
  for (const auto& one : g_subsystems)
    if (one->nqn == nqn) return one.get();
  return nullptr;
}

std::atomic<int> g_listener{-1};

int listen_on(const std::string& address, u16 port) {
  const bool six = address.find(':') != std::string::npos;
  const int fd = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  sockaddr_in6 six_at{};
  sockaddr_in four_at{};
  six_at.sin6_family = AF_INET6;
  four_at.sin_family = AF_INET;
  six_at.sin6_port = four_at.sin_port = htons(port);
  if (six ? inet_pton(AF_INET6, address.c_str(), &six_at.sin6_addr) != 1 : inet_pton(AF_INET, address.c_str(), &four_at.sin_addr) != 1) die("address");
  const int bound = six ? bind(fd, reinterpret_cast<sockaddr*>(&six_at), sizeof six_at) : bind(fd, reinterpret_cast<sockaddr*>(&four_at), sizeof four_at);
  if (bound || listen(fd, 128)) die("listen on " + address + ":" + std::to_string(port));
  socklen_t size = sizeof six_at;
  getsockname(fd, reinterpret_cast<sockaddr*>(&six_at), &size);
  g_port = ntohs(six ? six_at.sin6_port : reinterpret_cast<sockaddr_in*>(&six_at)->sin_port);
  return fd;
}

// set OPTION NUMBER | fault KIND [op=read after=N count=N value=N size=N qid=N hex=BYTES] | clear
// (`size` of a status that names a delay of retries: that delay, in milliseconds)
// patch identify1 OFFSET HEX | resize NQN NSID BLOCKS | identity NQN NSID HEX (16 bytes) | hide NQN | show NQN
// allow NQN HOSTNQN | drop_connections | listen 0|1 | stats | armed | land
std::string control(const std::string& line) {
  std::stringstream stream(line);
  std::string verb, name;
  stream >> verb;
  if (verb == "set") {
    std::int64_t value;
    stream >> name >> value;
    return stream && set_option(name, value) ? "{}" : "{\"error\": \"no such option\"}";
  }
  if (verb == "stats") {
    std::string text = "{";
    for (std::size_t n = 0; n < kCounters; ++n)
      text += std::string(n ? ", " : "") + "\"" + kCounterNames[n] + "\": " + std::to_string(g_counters[n].load());
    return text + "}";
  }
  if (verb == "listen") {
    int on;
    stream >> on;
    if (!on && g_listener >= 0) {
      const int fd = g_listener.exchange(-1);
      close(fd);
    } else if (on && g_listener < 0) {
      g_listener = listen_on(g_address, g_port);
    }
    return "{}";
  }
  const std::lock_guard lock(g_mutex);
  if (verb == "fault") {
    Fault fault;
    stream >> fault.kind;
    for (std::string part; stream >> part;) {
      const auto equals = part.find('=');
      const auto key = part.substr(0, equals), value = part.substr(equals + 1);
      if (key == "op") fault.operation = value;
      else if (key == "after") fault.after = std::stoll(value);
      else if (key == "count") fault.count = std::stoll(value);
      else if (key == "value") fault.value = std::stoll(value);
      else if (key == "size") fault.size = std::stoll(value);
      else if (key == "qid") fault.qid = std::stoll(value);
      else if (key == "hex") fault.bytes = bytes_of(value);
      else return "{\"error\": \"no such key\"}";
    }
    g_faults.push_back(std::move(fault));
    ++g_armed;
    return "{}";
  }
  if (verb == "armed") return "{\"armed\": " + std::to_string(g_armed.load()) + "}";
  if (verb == "clear") {
    g_faults.clear();
    g_patches.clear();
    g_armed = 0;
    g_patched = 0;
    return "{}";
  }
  if (verb == "patch") {
    std::size_t offset;
    std::string hex;
    stream >> name >> offset >> hex;
    if (!stream) return "{\"error\": \"patch WHAT OFFSET HEX\"}";
    g_patches[name].push_back({offset, bytes_of(hex)});
    ++g_patched;
    return "{}";
  }
  if (verb == "land") {
    for (const auto& held : g_held) std::memcpy(held.memory, held.data.data(), held.data.size());
    const auto count = g_held.size();
    g_held.clear();
    return "{\"landed\": " + std::to_string(count) + "}";
  }
  if (verb == "drop_connections") {
    for (const auto& [cntlid, one] : g_controllers)
      for (auto* connection : one->connections) {
        const linger at_once{1, 0};
        setsockopt(connection->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        connection->drop();
      }
    return "{}";
  }
  stream >> name;
  auto* const subsystem = subsystem_of(name);
  if (!subsystem) return "{\"error\": \"no such verb or subsystem\"}";
  if (verb == "hide" || verb == "show") {
    subsystem->present = verb == "show";
    ++g_generation;
    return "{}";
  }
  if (verb == "allow") {
    stream >> name;
    subsystem->allowed_hosts.insert(name);
    return "{}";
  }
  u32 nsid;
  std::string value;
  stream >> nsid >> value;
  const auto found = subsystem->namespaces.find(nsid);
  if (!stream || found == subsystem->namespaces.end()) return "{\"error\": \"no such namespace\"}";
  auto& ns = *found->second;
  if (verb == "resize") {
    const u64 blocks = std::stoull(value);
    if (blocks > ns.capacity_bytes / ns.block_bytes) return "{\"error\": \"beyond the capacity\"}";
    ns.blocks = blocks;
    return "{}";
  }
  if (verb == "identity") {
    const auto bytes = bytes_of(value);
    if (bytes.size() != 16) return "{\"error\": \"16 bytes\"}";
    std::copy(bytes.begin(), bytes.end(), ns.nguid.begin());
    std::copy(bytes.begin(), bytes.end(), ns.uuid.begin());
    std::copy_n(bytes.begin(), 8, ns.eui64.begin());
    return "{}";
  }
  return "{\"error\": \"no such verb\"}";
}

void add_namespace(Subsystem& subsystem, const std::string& text) {
  auto fields = pairs(text, ',');
  auto ns = std::make_unique<Namespace>();
  const auto number = [&](const char* name, u64 otherwise) { return fields.count(name) ? std::stoull(fields[name]) : otherwise; };
  ns->nsid = static_cast<u32>(number("nsid", 1));
  ns->block_bytes = static_cast<u32>(number("block", 512));
  const u64 bytes = number("bytes", 1 << 20);
  ns->capacity_bytes = std::max<u64>(bytes, number("capacity", 0));
  ns->blocks = bytes / ns->block_bytes;
  if (fields.count("file")) {
    const int fd = open(fields["file"].c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) die(fields["file"]);
    if (const auto end = lseek(fd, 0, SEEK_END); end < static_cast<off_t>(ns->capacity_bytes) && ftruncate(fd, static_cast<off_t>(ns->capacity_bytes))) die("ftruncate");
    ns->memory = static_cast<u8*>(mmap(nullptr, ns->capacity_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    close(fd);
  } else {
    ns->memory = static_cast<u8*>(mmap(nullptr, ns->capacity_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  }
  if (ns->memory == MAP_FAILED) die("mmap");
  std::mt19937_64 random(std::hash<std::string>{}(subsystem.nqn) ^ ns->nsid);
  for (auto& byte : ns->nguid) byte = static_cast<u8>(random());
  for (auto& byte : ns->eui64) byte = static_cast<u8>(random());
  ns->uuid = ns->nguid;
  const auto nsid = ns->nsid;
  subsystem.namespaces[nsid] = std::move(ns);
}

void watch_keep_alive() {
  const std::lock_guard lock(g_mutex);
  static u64 watched = now_ns();
  const u64 now = now_ns();
  const bool slept = now - std::exchange(watched, now) > 500'000'000;  // stopped: that is not the host's fault
  for (const auto& [cntlid, one] : g_controllers) {
    if (slept) one->alive_ns = now;
    if (one->expired || one->kato_ms == 0 || !option(kKatoCheck)) continue;
    if (now < one->alive_ns + u64{one->kato_ms} * 1'000'000 + 500'000'000) continue;
    one->expired = true;
    bool silent = false;
    for (auto* connection : one->connections) silent = silent || connection->silence_asked || connection->silent;
    if (!silent) report(0, 0, "keep-alive did not come within " + std::to_string(one->kato_ms) + " ms");
    for (auto* connection : one->connections) connection->drop();
  }
}

}  // namespace

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  for (std::size_t n = 0; n < kOptions; ++n) g_options[n] = kOptionTable[n].first;
  unsigned threads = 1;
  u16 port = 0;
  for (int n = 1; n + 1 < argc; n += 2) {
    const std::string name = argv[n], value = argv[n + 1];
    if (name == "--port") port = static_cast<u16>(std::stoul(value));
    else if (name == "--address") g_address = value;
    else if (name == "--threads") threads = static_cast<unsigned>(std::stoul(value));
    else if (name == "--violations") {
      g_violations_file = open(value.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
      if (g_violations_file < 0) die(value);
    } else if (name == "--set") {
      const auto equals = value.find('=');
      if (equals == std::string::npos || !set_option(value.substr(0, equals), std::stoll(value.substr(equals + 1)))) die("--set " + value);
    } else if (name == "--subsystem") {
      g_subsystems.push_back(std::make_unique<Subsystem>());
      g_subsystems.back()->nqn = value;
    } else if (name == "--namespace") {
      if (g_subsystems.empty()) die("--namespace before --subsystem");
      add_namespace(*g_subsystems.back(), value);
    } else {
      die("unknown option " + name);
    }
  }
  g_listener = listen_on(g_address, port);
  for (unsigned n = 0; n < threads; ++n) {
    auto& worker = g_workers.emplace_back();
    worker.thread = std::thread([&worker] { worker.run(); });
  }
  std::printf("READY %u\n", static_cast<unsigned>(g_port));
  std::fflush(stdout);
  std::string pending;
  u64 connections = 0;
  while (true) {
    std::array<pollfd, 2> watched = {pollfd{0, POLLIN, 0}, pollfd{g_listener, POLLIN, 0}};
    if (poll(watched.data(), watched.size(), 100) < 0 && errno != EINTR) die("poll");
    watch_keep_alive();
    if (watched[0].revents) {
      char buffer[65536];
      const auto got = ::read(0, buffer, sizeof buffer);
      if (got <= 0) _exit(0);
      pending.append(buffer, static_cast<std::size_t>(got));
      for (std::size_t end; (end = pending.find('\n')) != std::string::npos;) {
        std::string answer;
        try {
          answer = control(pending.substr(0, end));
        } catch (const std::exception& error) {
          answer = std::string("{\"error\": \"") + error.what() + "\"}";
        }
        pending.erase(0, end + 1);
        std::printf("%s\n", answer.c_str());
        std::fflush(stdout);
      }
    }
    if (g_listener >= 0 && watched[1].revents && watched[1].fd == g_listener) {
      const int fd = accept4(g_listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0) continue;
      const int one = 1;
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
      count(kAccepted);
      auto& worker = g_workers[connections % g_workers.size()];
      worker.hand(std::make_shared<Connection>(&worker, fd, ++connections));
    }
  }
}
