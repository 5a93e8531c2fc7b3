#include "nvme/controller.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <map>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "nvme/process.hpp"
#include "threads.hpp"

namespace penstock::nvme {

namespace {

constexpr const char* kDiscoveryNqn = "nqn.2014-08.org.nvmexpress.discovery";
constexpr std::uint16_t kAdminEntries = 32, kWantedQueues = 64, kAnyController = 0xffff,
                        kMostController = 0xffef;
constexpr std::uint32_t kAdminInCapsuleBytes = 8192, kMostInCapsuleBytes = 1U << 20,
                        kMostCommandBytes = 1U << 20;
constexpr std::size_t kIoBufferBytes = 128U << 10;
constexpr std::uint32_t kCapabilities = 0x00, kVersion = 0x08, kConfiguration = 0x14,
                        kStatus = 0x1c;  // properties
constexpr std::uint16_t kInvalidParameters = 0x182;
constexpr std::size_t kMostNamespaces = 1U << 16;
constexpr std::uint64_t kMostLogEntries = 1U << 14;
constexpr unsigned kMostPage = 4;  // 64 KiB
constexpr int kMostTries = 5;
constexpr auto kFirstPause = std::chrono::milliseconds(20), kLongestPause = std::chrono::milliseconds(2000);
constexpr auto kShutDownWait = std::chrono::milliseconds(1000);

Clock::duration seconds(double value) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::clamp(value, 0.0, 1e8)));
}

struct Place {
  std::mutex mutex;
  std::weak_ptr<Controller> controller;
};

struct Controllers {
  pid_t process;
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Place>> places;
};

}  // namespace

std::string Options::url() const {
  const bool six = host.find(':') != std::string::npos;
  return "nvme+tcp://" + (six ? "[" + host + "]" : host) + ":" + std::to_string(port) + "/" + subsystem_nqn;
}

// -- opening and closing -------------------------------------------------------------------------

std::shared_ptr<Controller> Controller::open(const Options& options) {
  auto& all = of_this_process<Controllers>();
  std::shared_ptr<Place> place;
  {
    auto key = options.url() + " " + options.host_nqn + " ";
    key.append(reinterpret_cast<const char*>(options.host_id.data()), options.host_id.size());
    const std::lock_guard lock(all.mutex);
    auto& found = all.places[key];
    if (!found) found = std::make_shared<Place>();
    place = found;
  }
  const std::lock_guard opening(place->mutex);
  if (const auto controller = place->controller.lock()) {
    const std::lock_guard lock(controller->mutex_);
    if (!controller->closing_ && controller->options_ == options) {
      ++controller->users_;
      return controller;
    }
  }
  auto controller = std::make_shared<Controller>(options);
  controller->thread_ = std::thread([controller] { controller->run(); });
  std::unique_lock lock(controller->mutex_);
  controller->changed_.wait(lock, [&] { return controller->state_ != State::starting || controller->ended_; });
  if (controller->start_error_) {
    const Error error = *controller->start_error_;
    lock.unlock();
    controller->thread_.join();
    throw error;
  }
  lock.unlock();
  place->controller = controller;
  return controller;
}

Controller::Controller(const Options& options) : options_(options), process_(getpid()) {}

Controller::~Controller() {
  if (!thread_.joinable()) return;
  if (process_ == getpid()) {
    thread_.detach();  // the last to hold it is its thread
  } else {
    new std::thread(std::move(thread_));  // another process's: left alone for ever
  }
}

bool Controller::close(double timeout_s) {
  if (process_ != getpid()) return true;
  std::unique_lock lock(mutex_);
  if (users_ > 0) --users_;
  if (users_ > 0) return true;
  closing_ = true;
  bell_.ring();
  const bool ended = changed_.wait_for(lock, seconds(timeout_s), [this] { return ended_; });
  if (!thread_.joinable()) return ended;
  auto thread = std::move(thread_);
  lock.unlock();
  if (ended) {
    thread.join();
  } else {
    thread.detach();
  }
  return ended;
}

// -- the thread ----------------------------------------------------------------------------------

Patience Controller::patience(double timeout_s) {
  const auto period =
      std::min(seconds(options_.command_timeout_s) / 4, Clock::duration(std::chrono::seconds(1)));
  return {Clock::now() + seconds(timeout_s), &bell_, [this] { watch(); }, std::max(period, seconds(0.001))};
}

// While the thread waits for anything: a close, or a loss that an Io saw, ends the wait.
void Controller::watch() {
  const std::lock_guard lock(mutex_);
  if (closing_ && state_ != State::closed) throw Error(Kind::closed, "it is closed");
  if (reported_ && lost_generation_ == generation_ && state_ == State::up) {
    const Error error = *reported_;
    reported_.reset();
    throw error;
  }
  const auto now = Clock::now();
  if (now < next_tick_) return;
  next_tick_ =
      now + std::min(seconds(options_.command_timeout_s) / 4, Clock::duration(std::chrono::seconds(1)));
  for (const auto& seat : seats_)
    if (seat->under_way > 0) seat->wake();
}

Error Controller::described(const Error& error) const {
  return {error.kind, options_.url() + ": " + error.text};
}

void Controller::run() {
  begin_thread("penstock-nvme");
  auto pause = Clock::duration(kFirstPause);
  while (true) {
    const auto begun = Clock::now();
    try {
      establish();
      pause = kFirstPause;
      serve();
    } catch (const Error& error) {
      std::unique_lock lock(mutex_);
      if (state_ == State::starting && !closing_) {
        start_error_ = std::make_unique<Error>(described(error));
        break;
      }
      if (closing_) {
        lock.unlock();
        shut_down();
        break;
      }
      lock.unlock();
      if (state_ == State::up) {
        lose(error);
      } else {
        lock.lock();
        last_attempt_ = described(error).text;
        if (Clock::now() - down_since_ > seconds(options_.reconnect_timeout_s)) {
          given_up_before_ = begun;
          wake_seats();
        }
        lock.unlock();
        pause =
            std::min<Clock::duration>({pause * 2, kLongestPause, seconds(options_.reconnect_timeout_s / 4)});
      }
      admin_.reset();
      if (!wait_before_retry(pause)) break;
    }
  }
  admin_.reset();
  const std::lock_guard lock(mutex_);
  state_ = State::closed;
  ended_ = true;
  for (const auto& seat : seats_) seat->channels.clear();
  for (const auto handle : opened_) remove_namespace(handle);
  wake_seats();
  changed_.notify_all();
}

// With the mutex.
void Controller::wake_seats() {
  for (const auto& seat : seats_) {
    seat->changed = true;
    seat->wake();
  }
}

void Controller::lose(const Error& error) {
  const std::lock_guard lock(mutex_);
  state_ = State::down;
  loss_ = described(error).text;
  last_attempt_ = loss_;
  down_since_ = Clock::now();
  if (error.kind == Kind::protocol) ++counters.violations;
  if (error.kind == Kind::timeout) ++counters.timeouts;
  reported_.reset();
  for (const auto& seat : seats_) {
    seat->asked = seat->asked || !seat->channels.empty();
    seat->channels.clear();
    seat->held = 0;
    seat->yields = false;
  }
  spare_.clear();
  wake_seats();
}

// False: it is closed.
bool Controller::wait_before_retry(Clock::duration pause) {
  try {
    auto waiting = patience(0);
    waiting.until = Clock::now() + kFirstPause;
    wait_for(-1, 0, waiting);
    waiting.until = Clock::now() + pause;
    waiting.bell_ends = true;
    while (!hastened_.exchange(false) && Clock::now() < waiting.until) wait_for(-1, 0, waiting);
  } catch (const Error&) {
    return false;
  }
  return true;
}

Completion Controller::ask(const Entry& entry, std::span<std::byte> data, const Patience& patience,
                           const char* what) {
  Command command;
  command.entry = entry;
  if (!data.empty()) {
    command.direction = Direction::to_host;
    command.data_bytes = command.memory_bytes = static_cast<std::uint32_t>(data.size());
    command.memory = data.data();
  }
  try {
    return admin_->execute(command, patience);
  } catch (const Error& error) {
    throw Error(error.kind, std::string(what) + ": " + error.text);
  }
}

namespace {

void check(const Completion& completion, const char* what) {
  if (completion.status != 0)
    throw Error(Kind::lost, std::string(what) + ": " + status_text(completion.status));
}

// Of an admin or I/O queue. Gives the number of the controller.
std::uint16_t connect_at(Channel& channel, const Options& options, const Entry& entry, std::uint16_t controller,
                         const Patience& patience) {
  auto data = connect_data(options.host_id, controller, options.subsystem_nqn, options.host_nqn);
  Command command;
  command.entry = entry;
  command.direction = Direction::to_controller;
  command.memory = data.data();
  command.data_bytes = command.memory_bytes = static_cast<std::uint32_t>(data.size());
  channel.connection().set_in_capsule_bytes(kAdminInCapsuleBytes);
  const auto [tag, result, status] = channel.execute(command, patience);
  if (status == 0) {
    if ((result & 0xffff0000) != 0)
      throw Error(Kind::not_supported,
                  "the target asks for DH-HMAC-CHAP authentication, which penstock does not support");
    if (result > kMostController)
      throw Error(Kind::protocol, "a controller of number " + std::to_string(result));
    return static_cast<std::uint16_t>(result);
  }
  const auto code = status_code(status);
  if (code == 0x191)
    throw Error(Kind::not_supported,
                "the target asks for DH-HMAC-CHAP authentication, which penstock does not support");
  if (code == 0x184) throw Error(Kind::denied, "the target does not allow host " + options.host_nqn);
  const bool in_data = (result >> 16 & 1) != 0;
  const auto place = result & 0xffff;
  if (code == kInvalidParameters && in_data && place == 256)
    throw Error(Kind::not_found, "the target has no subsystem of this name, or not for this host");
  if (code == kInvalidParameters && in_data && place == 512)
    throw Error(Kind::denied, "the target does not allow host " + options.host_nqn);
  throw Error(Kind::refused, "the target refuses to connect: " + status_text(status));
}

}  // namespace

void Controller::establish() {
  const auto limited = patience(options_.connect_timeout_s);
  connect_admin(limited);
  enable(limited);
  learn(limited);
  check_namespaces(limited);
  const std::lock_guard lock(mutex_);
  if (state_ == State::down) ++counters.reconnects;
  state_ = State::up;
  ++generation_;
  wake_seats();
  changed_.notify_all();
}

void Controller::connect_admin(const Patience& patience) {
  Connection::Options wanted;
  wanted.entries = kAdminEntries;
  wanted.header_digest = options_.header_digest;
  wanted.data_digest = options_.data_digest;
  admin_ = std::make_unique<Channel>(connect_to(options_.host, options_.port, patience), wanted, patience);
  admin_->connection().expect_queue_head(true);
  const auto keep_alive_ms = static_cast<std::uint32_t>(std::clamp(options_.keep_alive_s * 1000, 0.0, 4e9));
  const auto controller =
      connect_at(*admin_, options_, connect(0, kAdminEntries, keep_alive_ms, true), kAnyController, patience);
  const std::lock_guard lock(mutex_);
  facts_ = {};
  facts_.controller = controller;
  facts_.header_digest = admin_->connection().header_digest();
  facts_.data_digest = admin_->connection().data_digest();
}

void Controller::enable(const Patience& patience) {
  const auto get = [&](std::uint32_t property, bool eight_bytes, const char* what) {
    const auto completion = ask(get_property(property, eight_bytes), {}, patience, what);
    check(completion, what);
    return completion.result;
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
  check(ask(set_property(kConfiguration, configuration), {}, patience, "enabling the controller"),
        "enabling the controller");
  const auto begun = Clock::now();
  auto limited = patience;
  limited.until = std::min(patience.until, begun + seconds(std::max(start_s, 1.0)));
  auto pause = Clock::duration(std::chrono::milliseconds(1));
  while (true) {
    const auto status = get(kStatus, false, "reading the controller's status");
    if ((status & 2) != 0) throw Error(Kind::lost, "the controller reports a fatal error");
    if ((status & 1) != 0) break;
    if (Clock::now() >= limited.until)
      throw Error(Kind::timeout, "the controller does not become ready, for " +
                                     seconds_text(std::chrono::duration<double>(Clock::now() - begun).count()) +
                                     " s");
    auto nap = patience;
    nap.until = Clock::now() +
                std::exchange(pause, std::min<Clock::duration>(pause * 2, std::chrono::milliseconds(50)));
    wait_for(-1, 0, nap);
  }
  const auto version = get(kVersion, false, "reading the controller's version");
  const std::lock_guard lock(mutex_);
  facts_.version = static_cast<std::uint32_t>(version);
  facts_.most_entries = static_cast<std::uint16_t>(
      std::min<std::uint64_t>((capabilities & 0xffff) + 1, Connection::kMostEntries));
  facts_.most_data_bytes = 1U << (12 + page);  // of a page, until it is multiplied
}

void Controller::learn(const Patience& patience) {
  std::array<std::byte, kIdentifyBytes> page;
  check(ask(identify(1, 0), page, patience, "identifying the controller"), "identifying the controller");
  const auto data = load_controller(page);
  if (data.type > 1)
    throw Error(Kind::not_supported, "the controller does no I/O: it is of type " + std::to_string(data.type));
  if (data.in_capsule_units < kEntryBytes / 16 || data.response_units < 1)
    throw Error(Kind::protocol, "capsules that have no room for a command, or a response");
  if (!data.data_by_pointer) throw Error(Kind::not_supported, "the controller takes no SGL");
  if (!data.subsystem_nqn.empty() && data.subsystem_nqn != options_.subsystem_nqn)
    throw Error(Kind::protocol, "the controller is of subsystem " + data.subsystem_nqn);
  const auto queues = ask(set_queues(kWantedQueues), {}, patience, "asking for I/O queues");
  check(queues, "asking for I/O queues");
  const auto granted =
      std::min<std::uint64_t>({queues.result & 0xffff, queues.result >> 16 & 0xffff, kWantedQueues - 1}) + 1;
  flow_control_ = false;
  const std::lock_guard lock(mutex_);
  const auto shift = static_cast<unsigned>(std::bit_width(facts_.most_data_bytes) - 1) + data.most_data;
  facts_.most_data_bytes = data.most_data == 0 || shift > 30 ? 0 : 1U << shift;
  facts_.data = data;
  facts_.queues = static_cast<std::uint16_t>(granted);
  const auto capsule_bytes =
      std::min<std::uint64_t>(std::uint64_t{data.in_capsule_units} * 16, kMostInCapsuleBytes);
  if (data.in_capsule_offset == 0 && capsule_bytes > kEntryBytes)
    facts_.in_capsule_bytes = static_cast<std::uint32_t>(capsule_bytes - kEntryBytes);
  if (data.most_commands >= 2) facts_.most_entries = std::min(facts_.most_entries, data.most_commands);
  if (facts_.most_entries < 2)
    throw Error(Kind::not_supported, "the controller's queues have room for no command");
  connected_queues_ = 0;
}

std::unique_ptr<Channel> Controller::connect_queue(std::uint16_t queue, const Patience& patience) {
  const auto known = facts();
  Connection::Options wanted;
  wanted.entries = std::min<unsigned>(known.most_entries, options_.depth + 1);
  wanted.header_digest = options_.header_digest;
  wanted.data_digest = options_.data_digest;
  wanted.buffer_bytes = kIoBufferBytes;
  while (true) {
    try {
      auto channel =
          std::make_unique<Channel>(connect_to(options_.host, options_.port, patience), wanted, patience);
      const auto entry = connect(queue, static_cast<std::uint16_t>(wanted.entries), 0, flow_control_);
      connect_at(*channel, options_, entry, known.controller, patience);
      channel->connection().expect_queue_head(flow_control_);
      channel->connection().set_in_capsule_bytes(known.in_capsule_bytes);
      channel->queue = queue;
      return channel;
    } catch (const Error& error) {
      // A controller need not be able to do without flow control.
      if (error.kind != Kind::refused || std::exchange(flow_control_, true)) throw;
    }
  }
}

// -- while it is up ------------------------------------------------------------------------------

void Controller::serve() {
  const auto half = options_.keep_alive_s > 0 ? seconds(options_.keep_alive_s / 2)
                                              : Clock::duration(std::chrono::hours(1000));
  next_keep_alive_ = Clock::now() + half;
  asked_ = true;
  while (true) {
    watch();
    while (asked_.exchange(false)) {
      serve_jobs();
      serve_seats();
    }
    if (Clock::now() >= next_keep_alive_) {
      if (options_.keep_alive_s > 0)
        check(ask(keep_alive(), {}, patience(options_.keep_alive_s), "keep alive"), "keep alive");
      next_keep_alive_ = Clock::now() + half;
    }
    admin_->exchange();
    auto waiting = patience(0);
    waiting.until = next_keep_alive_;
    waiting.bell_ends = true;
    // The bell may have rung, and been cleared, during a wait for an answer.
    if (!asked_) wait_for(admin_->socket(), POLLIN, waiting);
  }
}

void Controller::serve_seats() {
  std::vector<std::shared_ptr<Seat>> seats;
  {
    const std::lock_guard lock(mutex_);
    seats = seats_;
  }
  for (const auto& seat : seats) {
    if (!find_queue(*seat)) continue;
    auto channel =
        connect_queue(static_cast<std::uint16_t>(connected_queues_ + 1), patience(options_.connect_timeout_s));
    const std::lock_guard lock(mutex_);
    ++connected_queues_;
    hand_out(*seat, std::move(channel));
  }
}

// One that nobody has, if there is one. True: one has to be connected.
bool Controller::find_queue(Seat& seat) {
  const std::lock_guard lock(mutex_);
  if (!seat.asked) return false;
  if (!spare_.empty()) {
    auto channel = std::move(spare_.back());
    spare_.pop_back();
    hand_out(seat, std::move(channel));
    return false;
  }
  if (connected_queues_ < facts_.queues) return true;
  if (seat.held > 0) {  // what it has must do
    seat.asked = false;
    return false;
  }
  const auto richest =
      std::ranges::max_element(seats_, {}, [](const auto& each) { return each->yields ? 0 : each->held; });
  if (richest != seats_.end() && (*richest)->held > 0 && !(*richest)->yields.exchange(true)) {
    (*richest)->changed = true;
    (*richest)->wake();
  }
  return false;
}

// With the mutex.
void Controller::hand_out(Seat& seat, std::unique_ptr<Channel> channel) {
  if (std::ranges::none_of(seats_, [&](const auto& each) { return each.get() == &seat; })) {  // it has left
    spare_.push_back(std::move(channel));
    return;
  }
  seat.asked = false;
  ++seat.held;
  seat.channels.push_back(std::move(channel));
  seat.changed = true;
  seat.wake();
}

void Controller::serve_jobs() {
  while (true) {
    std::shared_ptr<Job> job;
    {
      const std::lock_guard lock(mutex_);
      if (jobs_.empty()) return;
      job = jobs_.front();
      jobs_.pop_front();
    }
    std::exception_ptr error;
    try {
      job->work();
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      job->error = error;
      job->done = true;
      changed_.notify_all();
    }
    // What was under way on the queue when it failed still is.
    if (error && (!admin_->connection().idle() || !admin_->connection().violation().empty()))
      std::rethrow_exception(error);
  }
}

// With the admin queue at rest. Bounded: what does not answer is left.
void Controller::shut_down() {
  {
    const std::lock_guard lock(mutex_);
    state_ = State::closed;
    wake_seats();
  }
  if (!admin_ || !admin_->connection().idle() || !admin_->connection().violation().empty()) return;
  try {
    const auto limited = patience(std::chrono::duration<double>(kShutDownWait).count());
    const auto configuration = ask(get_property(kConfiguration, false), {}, limited, "closing");
    check(configuration, "closing");
    const auto normal = (static_cast<std::uint32_t>(configuration.result) & ~(3U << 14)) | 1U << 14;
    check(ask(set_property(kConfiguration, normal), {}, limited, "closing"), "closing");
    while (true) {
      const auto status = ask(get_property(kStatus, false), {}, limited, "closing");
      check(status, "closing");
      if ((status.result >> 2 & 3) == 2 || Clock::now() >= limited.until) return;
      auto nap = limited;
      nap.until = Clock::now() + std::chrono::milliseconds(5);
      wait_for(-1, 0, nap);
    }
  } catch (const Error&) {  // it ends all the same
  }
}

// -- for others ----------------------------------------------------------------------------------

void Controller::run_job(std::function<void()> work) {
  if (process_ != getpid())
    throw Error(Kind::closed, options_.url() + ": it was opened by another process; open it anew after a fork");
  auto job = std::make_shared<Job>();
  job->work = std::move(work);
  std::unique_lock lock(mutex_);
  if (ended_ || closing_) throw Error(Kind::closed, options_.url() + ": it is closed");
  jobs_.push_back(job);
  call_thread();
  const auto limit_s = options_.command_timeout_s + options_.reconnect_timeout_s;
  changed_.wait_for(lock, seconds(limit_s), [&] { return job->done || ended_; });
  if (!job->done) {
    jobs_.remove(job);
    if (ended_) throw Error(Kind::closed, options_.url() + ": it is closed");
    throw Error(Kind::timeout, options_.url() + ": no answer for " + seconds_text(limit_s) + " s" +
                                   (state_ == State::up ? "" : "; last: " + last_attempt_));
  }
  if (!job->error) return;
  try {
    std::rethrow_exception(job->error);
  } catch (const Error& error) {
    throw described(error);
  }
}

Controller::Facts Controller::facts() {
  const std::lock_guard lock(mutex_);
  return facts_;
}

std::string Controller::last_loss() {
  const std::lock_guard lock(mutex_);
  return loss_;
}

std::vector<std::uint32_t> Controller::namespaces() {
  const auto found = std::make_shared<std::vector<std::uint32_t>>();
  run_job([this, found] {
    std::array<std::byte, kIdentifyBytes> page;
    found->clear();
    while (found->size() < kMostNamespaces) {
      const auto last = found->empty() ? 0 : found->back();
      check(ask(identify(2, last), page, patience(options_.command_timeout_s), "listing namespaces"),
            "listing namespaces");
      std::size_t at = 0;
      for (; at < page.size(); at += 4) {
        const auto nsid = load<std::uint32_t>(page.data() + at);
        if (nsid == 0) return;
        if (!found->empty() && nsid <= found->back())
          throw Error(Kind::protocol, "a list of namespaces out of order");
        found->push_back(nsid);
      }
    }
  });
  return *found;
}

Identity Controller::identify_namespace(std::uint32_t nsid, const Patience& patience) {
  std::array<std::byte, kIdentifyBytes> page;
  const auto name = "namespace " + std::to_string(nsid);
  const auto completion = ask(identify(0, nsid), page, patience, "identifying a namespace");
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
  const auto limit = facts().most_data_bytes;
  if (limit != 0 && limit < 1U << data.block_shift)
    throw Error(Kind::not_supported, name + " has larger blocks than a command may transfer");
  // Optional: old controllers do not know it.
  const auto described = ask(identify(3, nsid), page, patience, "identifying a namespace");
  if (described.status == 0 && !load_descriptors(page, identity.descriptors))
    throw Error(Kind::protocol, "descriptors of " + name + " that contradict themselves");
  if (identity.descriptors.command_set != 0)
    throw Error(Kind::not_supported, name + " is not of the NVM command set");
  return identity;
}

Handle Controller::open_namespace(std::uint32_t nsid) {
  const auto identity = std::make_shared<Identity>();
  run_job(
      [this, nsid, identity] { *identity = identify_namespace(nsid, patience(options_.command_timeout_s)); });
  const auto handle = add_namespace(std::make_shared<Namespace>(shared_from_this(), nsid, *identity));
  const std::lock_guard lock(mutex_);
  opened_.insert(handle);
  return handle;
}

void Controller::close_namespace(Handle handle) {
  {
    const std::lock_guard lock(mutex_);
    opened_.erase(handle);
  }
  remove_namespace(handle);
}

// After a new connection: whether each is still what it was.
void Controller::check_namespaces(const Patience& patience) {
  std::set<Handle> handles;
  {
    const std::lock_guard lock(mutex_);
    handles = opened_;
  }
  for (const auto handle : handles) {
    const auto name_space = find_namespace(handle);
    if (!name_space) continue;
    std::string why;
    try {
      const auto [now, descriptors] = identify_namespace(name_space->nsid, patience);
      const auto& before = name_space->identity.data;
      if (now.block_shift != before.block_shift) why = "has blocks of another size";
      if (now.blocks < before.blocks) why = "has shrunk";
      if (now.nguid != before.nguid || now.eui64 != before.eui64 ||
          !(descriptors == name_space->identity.descriptors))
        why = "is another one";
    } catch (const Error& error) {
      if (error.kind != Kind::name_space && error.kind != Kind::not_supported) throw;
      why = "cannot be used: " + error.text;
    }
    if (!why.empty())
      name_space->set_error(options_.url() + ": since the connection was made again, namespace " +
                            std::to_string(name_space->nsid) + " " + why);
    name_space->set_usable(why.empty());
  }
}

void Controller::flush(std::uint32_t nsid) {
  if (process_ != getpid())
    throw Error(Kind::closed, options_.url() + ": it was opened by another process; open it anew after a fork");
  const auto bell = std::make_shared<Bell>();
  const auto seat = take_seat([bell] { bell->ring(); });
  std::unique_ptr<Channel> channel;
  View view{};
  const auto leave = [&] {
    if (channel) give_back(*seat, view.generation, std::move(channel));
    leave_seat(seat);
  };
  const auto take_queue = [&] {
    const auto until = Clock::now() + seconds(options_.reconnect_timeout_s);
    ask_for_queue(*seat);
    while (true) {
      view = look(*seat);
      if (view.state == View::State::closed) throw Error(Kind::closed, view.why);
      if (!view.channels.empty()) {
        channel = std::move(view.channels.front());
        return;
      }
      if (Clock::now() >= until)
        throw Error(Kind::timeout, view.why.empty() ? options_.url() + ": no queue for a flush" : view.why);
      wait_for(-1, 0, {until, bell.get(), {}, std::chrono::hours(1), true});
    }
  };
  const auto interrupted = [&] {
    if (!seat->changed.exchange(false)) return;
    const auto now = look(*seat);
    if (now.state != View::State::up || now.generation != view.generation)
      throw Error(Kind::lost, "the association is lost");
  };
  Command command;
  command.entry = nvme::flush(nsid);
  try {
    for (int tries = 1;; ++tries) {
      if (!channel) take_queue();
      try {
        const auto until = Clock::now() + seconds(options_.command_timeout_s);
        const auto completion =
            channel->execute(command, {until, bell.get(), interrupted, std::chrono::hours(1)});
        if (completion.status == 0) break;
        if ((completion.status & kDoNotRetry) != 0 || tries == kMostTries)
          throw Error(status_code(completion.status) == 0x0b ? Kind::name_space : Kind::lost,
                      options_.url() + ": flush of namespace " + std::to_string(nsid) + ": " +
                          status_text(completion.status));
      } catch (const Error& error) {
        if (channel->connection().quiet() && channel->connection().violation().empty()) throw;
        channel.reset();
        report_loss(view.generation, error.kind, "flush: " + error.text);
        if (tries == kMostTries) throw described(error);
      }
      ++counters.retries;
    }
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

// -- for Ios -------------------------------------------------------------------------------------

std::shared_ptr<Seat> Controller::take_seat(std::function<void()> wake) {
  auto seat = std::make_shared<Seat>(std::move(wake));
  const std::lock_guard lock(mutex_);
  seats_.push_back(seat);
  return seat;
}

void Controller::ask_for_queue(Seat& seat) {
  const std::lock_guard lock(mutex_);
  seat.asked = true;
  call_thread();
}

void Controller::give_back(Seat& seat, std::uint64_t generation, std::unique_ptr<Channel> channel) {
  const std::lock_guard lock(mutex_);
  if (generation != generation_ || state_ != State::up) return;
  --seat.held;
  seat.yields = false;
  spare_.push_back(std::move(channel));
  call_thread();
}

void Controller::leave_seat(const std::shared_ptr<Seat>& seat) {
  const std::lock_guard lock(mutex_);
  std::erase(seats_, seat);
  for (auto& channel : seat->channels) spare_.push_back(std::move(channel));
  seat->channels.clear();
  call_thread();
}

View Controller::look(Seat& seat) {
  const std::lock_guard lock(mutex_);
  seat.changed = false;
  View view{View::State::down, generation_, {}, {}, given_up_before_};
  if (closing_ || state_ == State::closed) {
    view.state = View::State::closed;
    view.why = options_.url() + ": it is closed";
  } else if (state_ == State::up) {
    view.state = View::State::up;
    view.channels.swap(seat.channels);
  } else {
    view.why = last_attempt_ + " (no connection for " +
               seconds_text(std::chrono::duration<double>(Clock::now() - down_since_).count()) + " s)";
  }
  return view;
}

void Controller::hasten() {
  hastened_ = true;
  bell_.ring();
}

void Controller::call_thread() {
  asked_ = true;
  bell_.ring();
}

std::string Controller::why_down() {
  const std::lock_guard lock(mutex_);
  if (state_ == State::up)
    return "all " + std::to_string(facts_.queues) + " I/O queues that the target grants are in use";
  return last_attempt_;
}

void Controller::report_loss(std::uint64_t generation, Kind kind, const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (generation != generation_ || state_ != State::up || reported_) return;
  lost_generation_ = generation;
  reported_ = std::make_unique<Error>(kind, why);
  bell_.ring();
}

std::uint32_t Controller::most_command_bytes(const Namespace& name_space) const {
  const auto block_bytes = name_space.block_bytes();
  const std::lock_guard lock(mutex_);
  auto most = std::min<std::uint64_t>(kMostCommandBytes,
                                      std::uint64_t{1} << (16 + name_space.identity.data.block_shift));
  if (facts_.most_data_bytes != 0) most = std::min<std::uint64_t>(most, facts_.most_data_bytes);
  return static_cast<std::uint32_t>(most / block_bytes * block_bytes);
}

// -- discovery -----------------------------------------------------------------------------------

std::vector<LogEntry> Controller::discover(Options options, double timeout_s) {
  options.subsystem_nqn = kDiscoveryNqn;
  options.connect_timeout_s = timeout_s;
  options.keep_alive_s = 0;
  Controller controller(options);
  try {
    const auto limited = controller.patience(timeout_s);
    controller.connect_admin(limited);
    controller.enable(limited);
    std::array<std::byte, kLogEntryBytes> page;
    const auto read = [&](std::uint64_t entry) {
      check(controller.ask(get_log(0x70, entry * kLogEntryBytes, kLogEntryBytes), page, limited,
                           "reading the discovery log"),
            "reading the discovery log");
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
      if (load<std::uint64_t>(page.data()) == generation) {
        controller.shut_down();
        return entries;
      }
      if (Clock::now() >= limited.until) throw Error(Kind::timeout, "the discovery log changes all the time");
    }
  } catch (const Error& error) {
    throw controller.described(error);
  }
}

}  // namespace penstock::nvme
