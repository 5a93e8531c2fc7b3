// One file: the queues, targets and losses of one class are one state machine.

#include "nvme/nvme_io.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <list>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/poller.hpp"
#include "io/ring.hpp"
#include "nvme/controller.hpp"
#include "sync.hpp"

namespace penstock::nvme {

namespace {

constexpr std::uint64_t kMostBytesUnderWay = 8U << 20;  // of a queue
constexpr unsigned kMostPieces = 64;
constexpr std::uint64_t kSocketTag = std::uint64_t{1} << 63, kSendTag = 1;  // beside the address of a queue

int errno_of(std::uint16_t status) {
  switch (status_code(status)) {
    case 0x00b:
      return ENODEV;
    case 0x020:
      return EROFS;
    case 0x081:
      return ENOSPC;
    case 0x083:
    case 0x286:
      return EACCES;
    default:
      return EIO;
  }
}

// Objects that are used again.
template <class T>
class Pool {
 public:
  T* take() {
    if (free_.empty()) {
      all_.emplace_back();
      free_.push_back(&all_.back());
    }
    auto* taken = free_.back();
    free_.pop_back();
    return taken;
  }
  void give(T* given) { free_.push_back(given); }

 private:
  std::deque<T> all_;
  std::vector<T*> free_;
};

class NvmeIo final : public Io {
 public:
  NvmeIo(unsigned depth, bool ring) : depth_(depth), wants_ring_(ring), current_(&poll_) {}
  NvmeIo(const NvmeIo&) = delete;
  NvmeIo& operator=(const NvmeIo&) = delete;
  ~NvmeIo() override;

  bool register_memory(std::byte*, std::size_t) override { return false; }
  void prepare(const Operation& operation, std::uint64_t tag) override;
  void submit() override;
  void wait() override;
  bool next(Result& result) override;
  void wake() override;

 private:
  struct Target;
  struct Buffer {
    std::unique_ptr<std::byte[]> bytes;
    std::uint64_t size_bytes = 0;
  };
  struct Remote {  // a namespace
    std::shared_ptr<Namespace> name_space;
    Target* target;
    std::uint32_t most_bytes;  // of a command
  };
  // An operation, and the commands that carry it out.
  struct Task {
    std::uint64_t tag;
    Remote* remote;
    std::uint32_t size_bytes, commands_left;
    int error;
    bool may_land = false;  // a command that was lost may write yet
    // Of an encrypted namespace: what goes over the wire, and for a read what becomes of it.
    Buffer* wire = nullptr;
    std::uint64_t wire_begin = 0, first = 0;
    std::byte* into = nullptr;
  };
  struct Part {
    Task* task;
    Command command;
    std::uint64_t begin;  // of its data, in the namespace
    int tries;
    std::size_t index;        // among those under way of its queue
    Clock::time_point since;  // it waits, or is under way
    Clock::time_point due{};  // it waits until then to be tried again
  };
  struct Queue {
    Target* target;
    std::unique_ptr<Channel> channel;
    std::vector<Part*> under_way;
    std::uint64_t bytes_under_way = 0;
    bool sending = false, receiving = false;
    bool closing = false;    // it is lost
    bool returning = false;  // others need it: it gets no more commands
    bool cancelled = false;  // what it was to receive
    msghdr send_message{}, receive_message{};
    iovec send_pieces[kMostPieces], receive_pieces[2];
  };
  struct Target {
    std::shared_ptr<Controller> controller;
    std::shared_ptr<IoClient> client;
    std::uint64_t generation = 0;
    std::list<Queue> queues;
    std::deque<Part*> waiting;
    std::vector<Part*> later;            // to be tried again after a while
    bool closed = false, asked = false;  // asked for a queue
    bool given_up = false;               // for what came so far
    std::string why;                     // it is closed, or was lost last
  };

  SocketIo& choose(bool ring);
  Remote* find(Handle handle);
  void begin(const Operation& operation, Remote& remote, std::uint64_t tag);
  void collect();
  void attend();
  void refresh(Target& target);
  void look_at_clock(Target& target, Clock::time_point now);
  void drive(Target& target);
  void give_up(Target& target, Clock::time_point before);
  void send_waiting(Target& target);
  void send_part(Queue& queue, Part* part, Clock::time_point now);
  void arm(Queue& queue);
  void handle(Queue& queue, bool sent, int moved);
  void take_completions(Queue& queue);
  void lose(Queue& queue, Kind kind, const std::string& why);
  void drop_queues(Target& target);
  void close(Queue& queue);
  bool close_if_quiet(Queue& queue);
  void return_queue(Target& target);
  bool return_if_quiet(Queue& queue);
  void retry(Target& target, Part* part);
  void end_part(Part* part, int error, const std::string& why);
  std::string describe(const Part& part) const;
  static std::list<Queue>& left_behind();

  const unsigned depth_;
  bool wants_ring_;
  PollIo poll_;
  std::unique_ptr<Ring> ring_;
  std::atomic<SocketIo*> current_;
  bool chosen_ = false, leaving_ = false;
  std::atomic<bool> woken_ = false, attention_ = false;
  std::list<Target> targets_;
  std::unordered_map<Handle, Remote> remotes_;
  std::deque<Result> results_;
  Pool<Task> tasks_;
  std::unique_ptr<Pool<Buffer>> buffers_ = std::make_unique<Pool<Buffer>>();
  Pool<Part> parts_;
};

// -- what is asked for ---------------------------------------------------------------------------

// Who comes first decides for all: one thread waits in one place.
SocketIo& NvmeIo::choose(bool ring) {
  if (!std::exchange(chosen_, true) && ring && wants_ring_) {
    try {
      ring_ = std::make_unique<Ring>(depth_);
      current_ = ring_.get();
    } catch (const std::system_error&) {  // refused: the counters of controllers say so
    }
  }
  return *current_;
}

NvmeIo::Remote* NvmeIo::find(Handle handle) {
  const auto known = remotes_.find(handle);
  if (known != remotes_.end()) return &known->second;
  auto name_space = find_namespace(handle);
  if (!name_space) return nullptr;
  const auto& controller = name_space->controller;
  auto target = std::ranges::find_if(targets_, [&](const auto& each) { return each.controller == controller; });
  if (target == targets_.end()) {
    choose(controller->options().io_uring);
    target = targets_.emplace(targets_.end());
    target->controller = controller;
    try {
      target->client = controller->add_client([this] {
        attention_ = true;
        current_.load()->wake();
      });
    } catch (...) {
      targets_.pop_back();
      throw;
    }
    controller->counters.uses_io_uring = ring_ != nullptr;
  }
  const auto most_bytes = controller->most_command_bytes(*name_space);
  return &remotes_.emplace(handle, Remote{std::move(name_space), &*target, most_bytes}).first->second;
}

void NvmeIo::prepare(const Operation& operation, std::uint64_t tag) {
  if (is_namespace(operation.handle)) {
    if (auto* remote = find(operation.handle)) {
      begin(operation, *remote, tag);
    } else {
      results_.push_back({tag, -EBADF});
    }
  } else if (operation.handle < 0) {
    results_.push_back({tag, -EINVAL});  // such as a part of a block, of a namespace
  } else if (operation.mapped) {
    results_.push_back({tag, -EOPNOTSUPP});
  } else {
    choose(true).prepare(operation, tag);
  }
}

void NvmeIo::begin(const Operation& operation, Remote& remote, std::uint64_t tag) {
  io_step("nvme begin");
  auto& name_space = *remote.name_space;
  const std::uint64_t block_bytes = name_space.block_bytes(), size_bytes = name_space.size_bytes();
  const auto first = operation.offset, end = operation.offset + operation.size_bytes;
  auto* task = tasks_.take();
  *task = {tag, &remote, operation.size_bytes, 1, 0};
  const auto refuse = [&](int error, const std::string& why) {
    auto* part = parts_.take();
    *part = {task, {}, first, 0, 0, {}};
    part->command.direction = operation.write ? Direction::to_controller : Direction::to_host;
    part->command.memory_bytes = operation.size_bytes;
    ++remote.target->client->under_way;
    end_part(part, error, why);
  };
  if (!name_space.usable()) return refuse(ESTALE, "");
  if (end < first || end > size_bytes) return refuse(EIO, "it is beyond the namespace's end");
  if (operation.write && (first % block_bytes != 0 || operation.size_bytes % block_bytes != 0))
    return refuse(EINVAL, "writes are of whole blocks of " + std::to_string(block_bytes) + " bytes");
  if (operation.size_bytes == 0) return refuse(EINVAL, "no bytes are asked for");
  auto wire_begin = first, wire_end = end;
  auto* memory = operation.address;
  if (auto* sealing = name_space.sealing.get(); sealing != nullptr && first >= sealing->begin()) {
    constexpr auto kUnit = Sealing::kUnitBytes;
    wire_begin = first / kUnit * kUnit;
    wire_end = (end + kUnit - 1) / kUnit * kUnit;
    if (wire_end > size_bytes || (operation.write && (wire_begin != first || wire_end != end)))
      return refuse(EINVAL, "what is encrypted is whole pieces of " + std::to_string(kUnit) + " bytes");
    task->wire = buffers_->take();
    if (task->wire->size_bytes < wire_end - wire_begin)
      *task->wire = {std::unique_ptr<std::byte[]>(new std::byte[wire_end - wire_begin]), wire_end - wire_begin};
    memory = task->wire->bytes.get();
    task->wire_begin = wire_begin;
    task->first = first;
    if (!operation.write) task->into = operation.address;
    if (operation.write && !sealing->seal(first, operation.address, memory, operation.size_bytes))
      return refuse(EIO, "it cannot be encrypted");
  }
  const auto now = Clock::now();
  task->commands_left = 0;
  for (auto at = wire_begin; at < wire_end;) {
    const auto block_begin = at / block_bytes * block_bytes;
    const auto stop = std::min(wire_end, block_begin + remote.most_bytes);
    const auto block_end = (stop + block_bytes - 1) / block_bytes * block_bytes;
    auto* part = parts_.take();
    *part = {task, {}, at, 0, 0, now};
    auto& command = part->command;
    command.entry = read_or_write(operation.write, name_space.nsid, block_begin / block_bytes,
                                  static_cast<std::uint32_t>((block_end - block_begin) / block_bytes));
    command.direction = operation.write ? Direction::to_controller : Direction::to_host;
    command.data_bytes = static_cast<std::uint32_t>(block_end - block_begin);
    command.skipped_bytes = static_cast<std::uint32_t>(at - block_begin);
    command.memory = memory + (at - wire_begin);
    command.memory_bytes = static_cast<std::uint32_t>(stop - at);
    command.tag = reinterpret_cast<std::uint64_t>(part);
    remote.target->waiting.push_back(part);
    ++task->commands_left;
    at = stop;
  }
  remote.target->client->under_way += task->commands_left;
  if (remote.target->given_up) remote.target->controller->reconnect_now();
}

// -- waiting -------------------------------------------------------------------------------------

void NvmeIo::submit() {
  attend();
  for (auto& target : targets_) drive(target);
  current_.load()->submit();
}

void NvmeIo::wait() {
  attend();
  for (auto& target : targets_) drive(target);
  while (results_.empty() && !woken_.exchange(false)) {
    current_.load()->wait();
    collect();
  }
}

bool NvmeIo::next(Result& result) {
  if (results_.empty()) return false;
  result = results_.front();
  results_.pop_front();
  return true;
}

void NvmeIo::wake() {
  woken_ = true;
  current_.load()->wake();
}

void NvmeIo::collect() {
  Result result;
  auto& io = *current_.load();
  while (io.next(result)) {
    if ((result.tag & kSocketTag) == 0) {
      results_.push_back(result);
    } else {
      handle(*reinterpret_cast<Queue*>(result.tag & ~(kSocketTag | kSendTag)), (result.tag & kSendTag) != 0,
             result.moved);
    }
  }
  attend();
  for (auto& target : targets_) drive(target);
}

void NvmeIo::attend() {
  if (leaving_ || !attention_.exchange(false)) return;
  const auto now = Clock::now();
  for (auto& target : targets_) {
    if (target.client->changed) refresh(target);
    look_at_clock(target, now);
  }
}

// -- targets -------------------------------------------------------------------------------------

void NvmeIo::refresh(Target& target) {
  auto view = target.controller->look(*target.client);
  if (view.generation != target.generation || view.state != View::State::up) drop_queues(target);
  target.generation = view.generation;
  target.closed = view.state == View::State::closed;
  target.given_up = view.state == View::State::down && view.given_up_before != Clock::time_point{};
  if (!view.why.empty()) target.why = view.why;
  if (target.given_up) give_up(target, view.given_up_before);
  for (auto& channel : view.channels) {
    auto& queue = target.queues.emplace_back();
    queue.target = &target;
    queue.channel = std::move(channel);
    target.asked = false;
  }
  if (target.client->must_yield) {
    send_waiting(target);  // each turn brings it on
    return_queue(target);
  }
}

// The one with the least under way.
void NvmeIo::return_queue(Target& target) {
  Queue* least = nullptr;
  for (auto& queue : target.queues) {
    if (queue.closing || queue.returning) continue;
    if (least == nullptr || queue.under_way.size() < least->under_way.size()) least = &queue;
  }
  if (least == nullptr) return;
  least->returning = true;
  return_if_quiet(*least);
}

// To the controller, once nothing is under way, not even a wait for bytes.
bool NvmeIo::return_if_quiet(Queue& queue) {
  if (!queue.returning || queue.closing || !queue.under_way.empty() || queue.sending) return false;
  if (!queue.channel->connection().quiet()) return false;
  if (queue.receiving) {
    if (!std::exchange(queue.cancelled, true))
      current_.load()->cancel_message(kSocketTag | reinterpret_cast<std::uint64_t>(&queue));
    return false;
  }
  auto& target = *queue.target;
  target.controller->give_back(*target.client, target.generation, std::move(queue.channel));
  target.queues.remove_if([&](const auto& each) { return &each == &queue; });
  return true;
}

void NvmeIo::look_at_clock(Target& target, Clock::time_point now) {
  const auto& options = target.controller->options();
  const auto limit = std::chrono::duration<double>(options.command_timeout_s);
  for (auto& queue : target.queues) {
    if (queue.closing) continue;
    const auto late =
        std::ranges::find_if(queue.under_way, [&](const auto* part) { return now - part->since > limit; });
    if (late != queue.under_way.end()) {
      lose(queue, Kind::timeout,
           "no answer: awaited the end of a " + describe(**late) + ", for " +
               seconds_text(options.command_timeout_s) + " s");
      break;
    }
  }
  const auto longest = std::chrono::duration<double>(options.reconnect_timeout_s);
  const bool alive = std::ranges::any_of(target.queues, [](const auto& queue) { return !queue.closing; });
  if (!alive) give_up(target, now - std::chrono::duration_cast<Clock::duration>(longest));
  std::erase_if(target.later, [&](auto* part) {
    if (part->due > now && !target.closed) return false;
    target.waiting.push_back(part);
    return true;
  });
  if (!target.later.empty())
    target.controller->wake_by((*std::ranges::min_element(target.later, {}, &Part::due))->due);
}

void NvmeIo::drive(Target& target) {
  for (auto queue = target.queues.begin(); queue != target.queues.end();) return_if_quiet(*queue++);
  send_waiting(target);
  for (auto& queue : target.queues) arm(queue);
}

// What has waited since before that moment.
void NvmeIo::give_up(Target& target, Clock::time_point before) {
  std::vector<Part*> given_up;
  std::erase_if(target.waiting, [&](auto* part) {
    if (part->since > before) return false;
    given_up.push_back(part);
    return true;
  });
  if (given_up.empty()) return;
  const auto why = "awaited a connection, for up to " +
                   seconds_text(target.controller->options().reconnect_timeout_s) +
                   " s; last: " + target.controller->why_down();
  for (auto* part : given_up) end_part(part, ETIMEDOUT, why);
}

// Gives commands to the queues, as many as they may have.
void NvmeIo::send_waiting(Target& target) {
  if (leaving_) return;
  if (target.closed) {
    while (!target.waiting.empty()) {
      auto* part = target.waiting.front();
      target.waiting.pop_front();
      end_part(part, ESHUTDOWN, target.why);
    }
  }
  if (!target.waiting.empty()) {
    const auto now = Clock::now();
    while (!target.waiting.empty()) {
      auto* part = target.waiting.front();
      if (!part->task->remote->name_space->usable()) {
        target.waiting.pop_front();
        end_part(part, ESTALE, "");
        continue;
      }
      Queue* best = nullptr;
      for (auto& queue : target.queues) {
        if (queue.closing || queue.returning || queue.channel->connection().room() == 0) continue;
        if (queue.bytes_under_way > 0 && queue.bytes_under_way + part->command.data_bytes > kMostBytesUnderWay)
          continue;
        if (best == nullptr || queue.bytes_under_way < best->bytes_under_way) best = &queue;
      }
      if (best == nullptr) {
        if (target.queues.size() < target.controller->options().queues && !std::exchange(target.asked, true))
          target.controller->ask_for_queue(*target.client);
        break;
      }
      target.waiting.pop_front();
      send_part(*best, part, now);
    }
  }
}

void NvmeIo::send_part(Queue& queue, Part* part, Clock::time_point now) {
  part->since = now;
  ++part->tries;
  part->index = queue.under_way.size();
  queue.under_way.push_back(part);
  queue.bytes_under_way += part->command.data_bytes;
  queue.channel->connection().submit(part->command);
}

void NvmeIo::arm(Queue& queue) {
  if (queue.closing) return;
  auto& connection = queue.channel->connection();
  const auto tag = kSocketTag | reinterpret_cast<std::uint64_t>(&queue);
  if (!queue.sending) {
    const auto count = connection.send_from(queue.send_pieces, kMostPieces);
    if (count > 0) {
      queue.send_message.msg_iov = queue.send_pieces;
      queue.send_message.msg_iovlen = count;
      current_.load()->prepare_message(true, queue.channel->socket(), &queue.send_message, tag | kSendTag);
      queue.sending = true;
    }
  }
  if (!queue.receiving && !queue.cancelled) {
    queue.receive_message.msg_iov = queue.receive_pieces;
    queue.receive_message.msg_iovlen = connection.receive_into(queue.receive_pieces);
    current_.load()->prepare_message(false, queue.channel->socket(), &queue.receive_message, tag);
    queue.receiving = true;
  }
}

void NvmeIo::handle(Queue& queue, bool sent, int moved) {
  (sent ? queue.sending : queue.receiving) = false;
  if (close_if_quiet(queue) || queue.closing) return;
  if (!sent && queue.cancelled) {
    queue.cancelled = false;
    if (moved == -ECANCELED && return_if_quiet(queue)) return;
  }
  if (moved == -EINTR || moved == -EAGAIN || moved == -ECANCELED) return;
  auto& connection = queue.channel->connection();
  if (moved < 0) {
    lose(queue, Kind::lost, std::system_category().message(-moved));
  } else if (sent) {
    connection.sent(static_cast<std::size_t>(moved));
    take_completions(queue);
  } else if (moved == 0) {
    lose(queue, Kind::lost, "the target closed the connection");
  } else {
    const bool right = connection.received(static_cast<std::size_t>(moved));
    take_completions(queue);
    if (!right)
      lose(queue, connection.terminated_by_controller() ? Kind::lost : Kind::protocol, connection.violation());
  }
}

void NvmeIo::take_completions(Queue& queue) {
  Completion completion;
  auto& target = *queue.target;
  while (queue.channel->connection().next(completion)) {
    auto* part = reinterpret_cast<Part*>(completion.tag);
    queue.bytes_under_way -= part->command.data_bytes;
    queue.under_way.back()->index = part->index;
    std::swap(queue.under_way[part->index], queue.under_way.back());
    queue.under_way.pop_back();
    if (completion.status == 0) {
      end_part(part, 0, "");
    } else if ((completion.status & kDoNotRetry) != 0 || part->tries >= kMostTries) {
      end_part(part, errno_of(completion.status), status_text(completion.status));
    } else {
      ++target.controller->counters.retries;
      part->since = Clock::now();
      const auto pause = target.controller->pause_before_retry(completion.status, part->tries);
      if (pause == Clock::duration::zero()) {
        target.waiting.push_back(part);
      } else {
        part->due = part->since + pause;
        target.later.push_back(part);
        target.controller->wake_by(part->due);
      }
    }
  }
}

// -- losses --------------------------------------------------------------------------------------

// The whole association goes: the controller connects it again.
void NvmeIo::lose(Queue& queue, Kind kind, const std::string& why) {
  auto& target = *queue.target;
  target.why = why;
  target.controller->report_loss(target.generation, kind, why);
  drop_queues(target);
}

void NvmeIo::drop_queues(Target& target) {
  for (auto queue = target.queues.begin(); queue != target.queues.end();) {
    auto& each = *queue++;  // it may be erased
    close(each);
  }
}

void NvmeIo::close(Queue& queue) {
  queue.closing = true;
  queue.channel->shut_down();
  if (std::ranges::any_of(queue.under_way, [](auto* part) { return part->command.direction == Direction::to_controller; }))
    queue.target->controller->expect_late_write();
  close_if_quiet(queue);
}

// Memory of commands is the caller's again once neither the kernel nor the connection can touch it.
bool NvmeIo::close_if_quiet(Queue& queue) {
  if (!queue.closing || queue.sending || queue.receiving) return false;
  auto& target = *queue.target;
  auto parts = std::move(queue.under_way);
  target.queues.remove_if([&](const auto& each) { return &each == &queue; });
  if (leaving_) return true;
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) retry(target, *part);
  return true;
}

void NvmeIo::retry(Target& target, Part* part) {
  if (part->command.direction == Direction::to_controller) part->task->may_land = true;
  if (part->tries >= kMostTries) {
    end_part(part, ECONNRESET, "given up after " + std::to_string(kMostTries) + " tries; last: " + target.why);
    return;
  }
  ++target.controller->counters.retries;
  part->since = Clock::now();
  target.waiting.push_front(part);
}

std::string NvmeIo::describe(const Part& part) const {
  const bool write = part.command.direction == Direction::to_controller;
  return (write ? "write of " : "read of ") + std::to_string(part.command.memory_bytes) + " bytes at " +
         std::to_string(part.begin);
}

void NvmeIo::end_part(Part* part, int error, const std::string& why) {
  auto& task = *part->task;
  auto& name_space = *task.remote->name_space;
  auto& controller = *name_space.controller;
  --task.remote->target->client->under_way;
  if (error == 0) {
    const bool write = part->command.direction == Direction::to_controller;
    auto& counters = controller.counters;
    (write ? counters.writes : counters.reads).fetch_add(1, std::memory_order_relaxed);
    (write ? counters.write_bytes : counters.read_bytes)
        .fetch_add(part->command.memory_bytes, std::memory_order_relaxed);
  } else if (task.error == 0) {
    task.error = error;
    if (!why.empty())
      name_space.set_error(controller.options().url() + ": namespace " + std::to_string(name_space.nsid) +
                           ": " + describe(*part) + ": " + why);
  }
  parts_.give(part);
  if (--task.commands_left > 0) return;
  io_step("nvme end");
  if (task.wire != nullptr) {
    const auto skipped = task.first - task.wire_begin;
    if (task.error == 0 && task.into != nullptr &&
        !name_space.sealing->open(task.wire_begin, task.wire->bytes.get(), skipped, task.into, task.size_bytes)) {
      task.error = EBADMSG;
      name_space.set_error(controller.options().url() + ": namespace " + std::to_string(name_space.nsid) + ": the " +
                           std::to_string(task.size_bytes) + " bytes at " + std::to_string(task.first) +
                           " are not what was written there: somebody has changed them");
    }
    buffers_->give(std::exchange(task.wire, nullptr));
  }
  results_.push_back({task.tag, task.error != 0 ? -task.error : static_cast<int>(task.size_bytes), task.may_land});
  tasks_.give(&task);
}

// Never destroyed, and needs no memory of its own.
std::list<NvmeIo::Queue>& NvmeIo::left_behind() {
  alignas(std::list<Queue>) static std::byte memory[sizeof(std::list<Queue>)];
  static auto* const queues = new (memory) std::list<Queue>;
  return *queues;
}

// Queues that are at rest go back; what is left of others is lost. So too after an error in the midst of anything.
NvmeIo::~NvmeIo() {
  leaving_ = true;
  for (auto& target : targets_) {
    try {
      for (auto queue = target.queues.begin(); queue != target.queues.end();) {
        auto& each = *queue++;  // it may be erased
        if (ring_ == nullptr) each.sending = each.receiving = false;  // the kernel has nothing
        each.returning = !each.closing && each.under_way.empty() && each.channel->connection().quiet();
        if (each.returning) {
          return_if_quiet(each);
        } else {
          close(each);
        }
      }
      while (!target.queues.empty()) {
        current_.load()->wait();
        collect();
      }
    } catch (const std::exception&) {  // the ring is closed, or memory is short: nothing can be waited for
      for (auto& queue : target.queues) queue.channel->shut_down();
      static std::mutex leaving;
      const std::lock_guard lock(leaving);
      if (ring_ != nullptr) {  // the kernel's, for ever
        left_behind().splice(left_behind().end(), target.queues);
        (void)buffers_.release();
      }
    }
    target.controller->remove_client(target.client);
  }
}

}  // namespace

std::unique_ptr<Io> make_nvme_io(unsigned depth, bool ring) { return std::make_unique<NvmeIo>(depth, ring); }

}  // namespace penstock::nvme
