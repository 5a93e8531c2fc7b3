// Runs a few actors on one thread, in every order of their steps.
//
// An actor is a function on a stack of its own. It goes on until a step: before it takes a lock, at each I/O, in each
// wait, and where it says so. There another one may go on. A program is run again and again, each time with another
// choice at the last place where one was left; what follows from a state that was seen before is not run again. So
// the code itself is explored, with its locks and its I/O, and no model of it.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "sync.hpp"

namespace penstock::model {

// Mixes numbers into one that stands for all of them.
class Hash {
 public:
  template <class T>
  Hash& operator<<(T value) {
    state_ ^= static_cast<std::uint64_t>(value) + 0x9E3779B97F4A7C15u + (state_ << 6) + (state_ >> 2);
    state_ *= 0xBF58476D1CE4E5B9u;
    state_ ^= state_ >> 29;
    return *this;
  }
  std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0x853C49E6748FEA9Bu;
};

// A violated claim, with the steps that led to it.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Explorer : public Interleaver {
 public:
  struct Limits {
    std::uint64_t runs = 1'000'000;  // most
    std::size_t steps = 2'000;       // of one run: more is taken for a livelock
  };
  struct Report {
    std::uint64_t runs = 0, states = 0, steps = 0;
    bool complete = true;
  };

  // What a program is made of. `state` stands for all that the actors share, `check` throws Violation where something
  // is wrong; both between steps, with every lock free. `begin` and `end` run alone.
  struct Program {
    std::vector<std::pair<std::string, std::function<void()>>> actors;
    std::function<void()> begin, end;
    std::function<std::uint64_t()> state;
    std::function<void()> check;
  };

  explicit Explorer(Limits limits) : limits_(limits) {}

  Report explore(const Program& program) {
    interleaver.store(this);
    Report report;
    seen_.clear();
    choices_.clear();
    do {
      if (report.runs == limits_.runs) {
        report.complete = false;
        break;
      }
      ++report.runs;
      run(program);
      report.steps += trace_.size();
    } while (next_choices());
    report.states = seen_.size();
    interleaver.store(nullptr);
    return report;
  }

  // -- for actors
  // Another actor may go on here.
  void step(const char* what) {
    if (current_ == nullptr) return;  // the beginning and the end run alone
    current_->at = what;
    ++current_->steps;
    yield();
  }
  void wait_until(std::function<bool()> ready, const char* what) {
    if (ready()) return;
    if (current_ == nullptr) throw Violation(std::string("would wait for ever: ") + what);
    current_->at = what;
    current_->ready = std::move(ready);
    yield();
    current_->ready = nullptr;
  }
  // What the actor knows of the past is over: only how far it is counts from here on.
  void forget_past(std::uint64_t result = 0) {
    if (current_ == nullptr) return;
    current_->past = result;
    current_->steps = 0;
    ++current_->operation;
  }
  // The actor knows this from here on.
  void learn(std::uint64_t what) {
    if (current_ != nullptr) current_->past = (Hash() << current_->past << what).value();
  }
  std::size_t actor() const { return current_ == nullptr ? 0 : current_->number; }
  std::string told() const {
    std::string text;
    for (const auto& [number, at] : trace_) text += "\n    " + actors_[number]->name + ": " + at;
    return text;
  }

  // -- Interleaver
  void lock(Mutex& mutex) override {
    step("lock");
    wait_until([&mutex] { return !mutex.held; }, "wait for a lock");
    mutex.held = true;
  }
  void unlock(Mutex& mutex) override { mutex.held = false; }
  void wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t timeout_ns) override {
    const auto deadline = clock_ns_ + timeout_ns;
    if (timeout_ns >= 0 && current_ != nullptr) current_->deadline_ns = deadline;
    wait_until([&word, seen, this, deadline, timeout_ns] {
      return word.load() != seen || (timeout_ns >= 0 && clock_ns_ >= deadline);
    }, "wait");
    if (current_ != nullptr) current_->deadline_ns = -1;
  }
  void notify(std::atomic<std::uint32_t>&) override {}
  void io_step(const char* what) override { step(what); }
  pthread_t this_thread() override { return static_cast<pthread_t>(actor() + 1); }
  std::int64_t now_ns(std::int64_t) override { return clock_ns_; }
  // In pieces, each with a step before and behind it.
  long write(int file, const char* data, std::size_t size_bytes, std::uint64_t offset) override {
    std::size_t done = 0;
    for (; done < size_bytes; done += piece_bytes)
      if (const auto count = write_piece(file, data + done, piece_bytes, offset + done); count < 0) return count;
    return static_cast<long>(done);
  }
  long read(int file, char* data, std::size_t size_bytes, std::uint64_t offset) override {
    std::size_t done = 0;
    for (; done < size_bytes; done += piece_bytes)
      if (const auto count = read_piece(file, data + done, piece_bytes, offset + done); count < 0) return count;
    return static_cast<long>(done);
  }
  // By the system, which reads and writes memory whatever happens to its addresses meanwhile.
  std::function<long(int, const char*, std::size_t, std::uint64_t)> write_piece;
  std::function<long(int, char*, std::size_t, std::uint64_t)> read_piece;
  std::size_t piece_bytes = 4096;
  // States count as the same only if each actor has also seen the same in what it is doing now; without it, if it is as
  // far in it.
  bool exact = false;

 private:
  static constexpr std::size_t kStackBytes = std::size_t{128} << 10;
  struct Actor {
    std::string name;
    std::size_t number = 0;
    const std::function<void()>* body = nullptr;
    ucontext_t context{};  // where it begins
    jmp_buf place;         // where it goes on: switching so makes no system call
    bool begun = false;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    std::function<bool()> ready;
    std::int64_t deadline_ns = -1;
    const char* at = "begin";
    std::uint64_t past = 0, steps = 0, operation = 0;
    bool done = false;
  };
  struct Choice {
    std::vector<std::size_t> options;  // that are left, the present one last
  };

  void run(const Program& program) {
    trace_.clear();
    clock_ns_ = std::int64_t{1} << 40;
    while (actors_.size() < program.actors.size()) actors_.push_back(std::make_unique<Actor>());
    actors_.resize(program.actors.size());
    current_ = nullptr;
    program.begin();
    for (std::size_t i = 0; i < actors_.size(); ++i) start(*actors_[i], i, program.actors[i]);
    std::size_t depth = 0;
    bool known = false;
    Actor* last = nullptr;
    for (;;) {
      program_check(program);
      const auto options = enabled(last);
      if (options.empty()) break;
      auto chosen = options.front();
      if (options.size() > 1 && depth < choices_.size()) {
        chosen = choices_[depth++].options.back();
      } else if (options.size() > 1 && !known) {
        known = !seen_.insert(state(program)).second;
        if (!known) {
          choices_.push_back({{options.rbegin(), options.rend()}});
          ++depth;
        }
      }
      last = actors_[chosen].get();
      go_on(*last, program);
    }
    for (const auto& actor : actors_)
      if (!actor->done) fail("nobody can go on", program);
    current_ = nullptr;
    try {
      program.end();
    } catch (const Violation& violation) {
      fail(violation.what(), program);
    }
  }

  std::uint64_t state(const Program& program) {
    Hash hash;
    hash << program.state();
    for (const auto& actor : actors_)
      hash << actor->past << actor->steps << actor->operation << actor->done
           << reinterpret_cast<std::uintptr_t>(actor->at);
    return hash.value();
  }

  // Of those that can go on, the one that did last comes first.
  std::vector<std::size_t> enabled(const Actor* last) {
    for (;;) {
      std::vector<std::size_t> found;
      for (const auto& actor : actors_) {
        if (actor->done || (actor->ready && !actor->ready())) continue;
        found.insert(actor.get() == last ? found.begin() : found.end(), actor->number);
      }
      if (!found.empty()) return found;
      // Nobody: time passes, until a wait is over.
      std::int64_t next = -1;
      for (const auto& actor : actors_)
        if (!actor->done && actor->deadline_ns > clock_ns_ && (next < 0 || actor->deadline_ns < next))
          next = actor->deadline_ns;
      if (next < 0) return {};
      clock_ns_ = next;
    }
  }

  void start(Actor& actor, std::size_t number, const std::pair<std::string, std::function<void()>>& what) {
    actor.name = what.first;
    actor.number = number;
    actor.body = &what.second;
    actor.ready = nullptr;
    actor.at = "begin";
    actor.past = actor.steps = actor.operation = 0;
    actor.done = false;
    actor.deadline_ns = -1;
    getcontext(&actor.context);
    actor.context.uc_stack.ss_sp = actor.stack.get();
    actor.context.uc_stack.ss_size = kStackBytes;
    actor.begun = false;
    const auto self = reinterpret_cast<std::uintptr_t>(this);
    makecontext(&actor.context, reinterpret_cast<void (*)()>(&Explorer::enter), 2, static_cast<unsigned>(self),
                static_cast<unsigned>(self >> 32));
  }

  static void enter(unsigned low, unsigned high) {
    auto* const self = reinterpret_cast<Explorer*>(std::uintptr_t{high} << 32 | low);
    auto* const actor = self->current_;
    try {
      (*actor->body)();
    } catch (const std::exception& error) {
      self->failure_ = error.what();
    }
    actor->done = true;
    actor->at = "end";
    _longjmp(self->main_, 1);
  }

  void yield() {
    if (_setjmp(current_->place) == 0) _longjmp(main_, 1);
  }

  void switch_to(Actor& actor) {
    if (_setjmp(main_) != 0) return;
    if (std::exchange(actor.begun, true)) _longjmp(actor.place, 1);
    setcontext(&actor.context);
  }

  void go_on(Actor& actor, const Program& program) {
    if (trace_.size() == limits_.steps) fail("no end after " + std::to_string(limits_.steps) + " steps", program);
    trace_.emplace_back(actor.number, actor.at);
    if (actor.steps > 0 && exact) actor.past = (Hash() << actor.past << program.state()).value();
    current_ = &actor;
    switch_to(actor);
    current_ = nullptr;
    if (!failure_.empty()) fail(failure_, program);
  }

  void program_check(const Program& program) {
    try {
      program.check();
    } catch (const Violation& violation) {
      fail(violation.what(), program);
    }
  }

  [[noreturn]] void fail(const std::string& why, const Program&) {
    const auto text = why + ", after" + told();
    failure_.clear();
    interleaver.store(nullptr);
    throw Violation(text);
  }

  // False: all were taken.
  bool next_choices() {
    while (!choices_.empty()) {
      choices_.back().options.pop_back();
      if (!choices_.back().options.empty()) return true;
      choices_.pop_back();
    }
    return false;
  }

  const Limits limits_;
  jmp_buf main_;
  std::vector<std::unique_ptr<Actor>> actors_;
  Actor* current_ = nullptr;
  std::int64_t clock_ns_ = 0;
  std::vector<Choice> choices_;
  std::unordered_set<std::uint64_t> seen_;
  std::vector<std::pair<std::size_t, const char*>> trace_;
  std::string failure_;
};

}  // namespace penstock::model
