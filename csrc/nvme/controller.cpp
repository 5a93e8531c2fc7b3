// One file: one thread, and what others ask of it under its lock.

#include "nvme/controller.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <utility>

#include "nvme/process.hpp"
#include "threads.hpp"
#include "sync.hpp"

namespace penstock::nvme {

namespace {

constexpr std::uint32_t kMostCommandBytes = 1U << 20;
constexpr auto kFirstPause = std::chrono::milliseconds(20), kLongestPause = std::chrono::milliseconds(2000);

struct Place {
  Mutex mutex;
  std::weak_ptr<Controller> controller;
};

struct Controllers {
  pid_t process;
  Mutex mutex;
  std::map<std::string, std::shared_ptr<Place>> places;
};

}  // namespace

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
  if (const auto error = controller->start_error_) {
    lock.unlock();
    controller->thread_.join();
    std::rethrow_exception(error);
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
  event_.notify();
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

Deadline Controller::deadline(double timeout_s) {
  const auto period =
      std::min(seconds(options_.command_timeout_s) / 4, Clock::duration(std::chrono::seconds(1)));
  return {Clock::now() + seconds(timeout_s), &event_, [this] { watch(); }, std::max(period, seconds(0.001))};
}

// While the thread waits for anything: a close, or a loss that an Io saw, ends the wait.
void Controller::watch() {
  const std::lock_guard lock(mutex_);
  if (closing_ && state_ != State::closed) throw Error(Kind::closed, "it is closed");
  if (reported_ && lost_generation_ == generation_ && state_ == State::up)
    std::rethrow_exception(std::exchange(reported_, nullptr));
  const auto now = Clock::now();
  if (now < next_tick_) return;
  next_tick_ =
      now + std::min(seconds(options_.command_timeout_s) / 4, Clock::duration(std::chrono::seconds(1)));
  queue_pool_.wake_busy();
}

Error Controller::described(const Error& error) const {
  return {error.kind, options_.url() + ": " + error.text};
}

void Controller::run() {
  begin_thread("penstock-nvme");
  auto pause = Clock::duration(kFirstPause);
  std::exception_ptr broken;
  try {
    while (true) {
      const auto begun = Clock::now();
      try {
        establish();
        pause = kFirstPause;
        serve();
      } catch (const Error& error) {
        if (!go_on(error, begun, pause)) break;
      } catch (const std::bad_alloc&) {
        if (!go_on(Error(Kind::lost, "memory is short"), begun, pause)) break;
      }
    }
  } catch (...) {  // such as an eventfd that the program has closed, or memory that is short for an error, too
    broken = std::current_exception();
  }
  association_.reset();
  const std::lock_guard lock(mutex_);
  if (state_ == State::starting && !start_error_) start_error_ = broken;
  state_ = State::closed;
  ended_ = true;
  for (const auto handle : opened_) remove_namespace(handle);
  queue_pool_.close();
  changed_.notify_all();
}

// After an error. False: that was all.
bool Controller::go_on(const Error& error, Clock::time_point begun, Clock::duration& pause) {
  std::unique_lock lock(mutex_);
  if (closing_) {
    lock.unlock();
    shut_down();
    return false;
  }
  if (state_ == State::starting) {
    start_error_ = std::make_exception_ptr(described(error));
    return false;
  }
  if (state_ == State::up) {
    lock.unlock();
    lose(error);
  } else {
    set_text(last_attempt_, error);
    if (Clock::now() - down_since_ > seconds(options_.reconnect_timeout_s)) {
      given_up_before_ = begun;
      queue_pool_.notify_all();
    }
    lock.unlock();
    pause = std::min<Clock::duration>({pause * 2, kLongestPause, seconds(options_.reconnect_timeout_s / 4)});
  }
  association_.reset();
  return wait_before_retry(pause);
}

// Without a text where memory is short for it.
void Controller::set_text(std::string& text, const Error& error) noexcept {
  text.clear();
  try {
    text = described(error).text;
  } catch (const std::bad_alloc&) {
  }
}

void Controller::lose(const Error& error) {
  const std::lock_guard lock(mutex_);
  state_ = State::down;
  set_text(loss_, error);
  set_text(last_attempt_, error);
  down_since_ = Clock::now();
  if (error.kind == Kind::protocol) ++counters.violations;
  if (error.kind == Kind::timeout) ++counters.timeouts;
  reported_ = nullptr;
  queue_pool_.lose();
}

// False: it is closed.
bool Controller::wait_before_retry(Clock::duration pause) {
  try {
    auto waiting = deadline(0);
    waiting.until = Clock::now() + kFirstPause;
    wait_for(-1, 0, waiting);
    waiting.until = Clock::now() + pause;
    waiting.event_ends = true;
    while (!reconnect_now_.exchange(false) && Clock::now() < waiting.until) wait_for(-1, 0, waiting);
  } catch (const Error&) {
    return false;
  } catch (const std::bad_alloc&) {  // maybe for that error
    const std::lock_guard lock(mutex_);
    return !closing_;
  }
  return true;
}

void Controller::establish() {
  const auto limited = deadline(options_.connect_timeout_s);
  association_ = std::make_unique<Association>(options_, limited);
  association_->prepare_for_io(limited);
  check_namespaces(limited);
  const std::lock_guard lock(mutex_);
  facts_ = association_->facts();
  if (state_ == State::down) ++counters.reconnects;
  state_ = State::up;
  ++generation_;
  queue_pool_.notify_all();
  changed_.notify_all();
}

// -- while it is up ------------------------------------------------------------------------------

void Controller::serve() {
  const auto half = options_.keep_alive_s > 0 ? seconds(options_.keep_alive_s / 2)
                                              : Clock::duration(std::chrono::hours(1000));
  auto next_keep_alive = Clock::now() + half;
  asked_ = true;
  while (true) {
    watch();
    while (asked_.exchange(false)) {
      serve_jobs();
      serve_clients();
    }
    if (Clock::now() >= next_keep_alive) {
      if (options_.keep_alive_s > 0) association_->keep_alive(deadline(options_.keep_alive_s));
      next_keep_alive = Clock::now() + half;
    }
    association_->exchange();
    auto waiting = deadline(0);
    {
      const std::lock_guard lock(mutex_);
      waiting.until = std::min(next_keep_alive, next_tick_);
    }
    waiting.event_ends = true;
    // It may have been notified, and cleared, during a wait for an answer.
    if (!asked_) wait_for(association_->socket(), POLLIN, waiting);
  }
}

void Controller::serve_clients() {
  while (true) {
    std::unique_lock lock(mutex_);
    const auto client = queue_pool_.serve(facts_.queues);
    if (!client) return;
    const auto number = static_cast<std::uint16_t>(queue_pool_.connected() + 1);
    lock.unlock();
    auto channel = association_->connect_queue(number, deadline(options_.connect_timeout_s));
    lock.lock();
    queue_pool_.add(*client, std::move(channel));
  }
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
    if (error && !association_->at_rest()) std::rethrow_exception(error);
  }
}

// Bounded: what does not answer is left.
void Controller::shut_down() {
  {
    const std::lock_guard lock(mutex_);
    state_ = State::closed;
    queue_pool_.notify_all();
  }
  if (!association_ || !association_->at_rest()) return;
  try {
    association_->shut_down(deadline(std::chrono::duration<double>(kShutDownWait).count()));
  } catch (const std::exception&) {  // it ends all the same
  }
}

// -- for others ----------------------------------------------------------------------------------

void Controller::require_own_process() const {
  if (process_ != getpid())
    throw Error(Kind::closed, options_.url() + ": it was opened by another process; open it anew after a fork");
}

void Controller::run_job(std::function<void()> work) {
  require_own_process();
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

Facts Controller::facts() {
  const std::lock_guard lock(mutex_);
  return facts_;
}

std::string Controller::last_loss() {
  const std::lock_guard lock(mutex_);
  return loss_;
}

double Controller::late_s() {
  const std::lock_guard lock(mutex_);
  if (!lost_write_) return 0;
  return std::max(0.0, facts_.quiesce_s - std::chrono::duration<double>(Clock::now() - *lost_write_).count());
}

std::vector<std::uint32_t> Controller::namespaces() {
  const auto found = std::make_shared<std::vector<std::uint32_t>>();
  run_job([this, found] { *found = association_->namespaces(deadline(options_.command_timeout_s)); });
  return *found;
}

Handle Controller::open_namespace(std::uint32_t nsid, std::optional<std::uint64_t> encrypted_from) {
  const auto identity = std::make_shared<Identity>();
  run_job([this, nsid, identity] {
    *identity = association_->identify_namespace(nsid, deadline(options_.command_timeout_s));
  });
  std::unique_ptr<Sealing> sealing;
  if (encrypted_from)
    sealing = std::make_unique<Sealing>(*encrypted_from, identity->data.blocks << identity->data.block_shift);
  const auto handle =
      add_namespace(std::make_shared<Namespace>(shared_from_this(), nsid, *identity, std::move(sealing)));
  const std::lock_guard lock(mutex_);
  try {
    opened_.insert(handle);
  } catch (...) {
    remove_namespace(handle);
    throw;
  }
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
void Controller::check_namespaces(const Deadline& deadline) {
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
      const auto [now, descriptors] = association_->identify_namespace(name_space->nsid, deadline);
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

// -- for Ios -------------------------------------------------------------------------------------

std::shared_ptr<IoClient> Controller::add_client(std::function<void()> wake) {
  const std::lock_guard lock(mutex_);
  return queue_pool_.add_client(std::move(wake));
}

void Controller::ask_for_queue(IoClient& client) {
  const std::lock_guard lock(mutex_);
  client.asked = true;
  call_thread();
}

void Controller::give_back(IoClient& client, std::uint64_t generation, std::unique_ptr<Channel> channel) {
  const std::lock_guard lock(mutex_);
  if (generation != generation_ || state_ != State::up) return;
  queue_pool_.give_back(client, std::move(channel));
  call_thread();
}

void Controller::expect_late_write() {
  const std::lock_guard lock(mutex_);
  lost_write_ = Clock::now();
}

void Controller::remove_client(const std::shared_ptr<IoClient>& client) {
  std::unique_lock lock(mutex_);
  const bool whole = client->held == client->channels.size();
  const auto generation = generation_;
  queue_pool_.remove_client(client);
  call_thread();
  lock.unlock();
  if (!whole) report_loss(generation, Kind::lost, "who used a queue has ended");
}

View Controller::look(IoClient& client) {
  const std::lock_guard lock(mutex_);
  client.changed = false;
  View view{View::State::down, generation_, {}, {}, given_up_before_};
  if (closing_ || state_ == State::closed) {
    view.state = View::State::closed;
    view.why = options_.url() + ": it is closed";
  } else if (state_ == State::up) {
    view.state = View::State::up;
    view.channels.swap(client.channels);
  } else {
    view.why = last_attempt_ + " (no connection for " +
               seconds_text(std::chrono::duration<double>(Clock::now() - down_since_).count()) + " s)";
  }
  return view;
}

void Controller::reconnect_now() {
  reconnect_now_ = true;
  event_.notify();
}

void Controller::call_thread() {
  asked_ = true;
  event_.notify();
}

std::string Controller::why_down() {
  const std::lock_guard lock(mutex_);
  if (state_ == State::up)
    return "all " + std::to_string(facts_.queues) + " I/O queues that the target grants are in use";
  return last_attempt_;
}

void Controller::report_loss(std::uint64_t generation, Kind kind, std::string_view why) {
  const std::lock_guard lock(mutex_);
  if (generation != generation_ || state_ != State::up || reported_) return;
  lost_generation_ = generation;
  try {
    reported_ = std::make_exception_ptr(Error(kind, std::string(why)));
  } catch (const std::bad_alloc&) {
    reported_ = std::current_exception();
  }
  event_.notify();
}

void Controller::wake_by(Clock::time_point time) {
  const std::lock_guard lock(mutex_);
  if (time >= next_tick_) return;
  next_tick_ = time;
  event_.notify();
}

// No longer than a command may take.
Clock::duration Controller::pause_before_retry(std::uint16_t status, int tries) const {
  const std::lock_guard lock(mutex_);
  return std::min(facts_.pause_before_retry(status, tries), seconds(options_.command_timeout_s));
}

std::uint32_t Controller::most_command_bytes(const Namespace& name_space) const {
  const auto block_bytes = name_space.block_bytes();
  const std::lock_guard lock(mutex_);
  auto most = std::min<std::uint64_t>(kMostCommandBytes,
                                      std::uint64_t{1} << (16 + name_space.identity.data.block_shift));
  if (facts_.most_data_bytes != 0) most = std::min<std::uint64_t>(most, facts_.most_data_bytes);
  return static_cast<std::uint32_t>(most / block_bytes * block_bytes);
}

}  // namespace penstock::nvme
