// Every interleaving of three actors over two blocks of the arena.
//
//   arena_model [--seconds S] [--deep] [--forks] [--large] [--only TEXT]
//
// Each program sets the blocks up, then lets three actors do one thing each (with --deep, two actors two things each
// as well; with --forks, a child that reads beside one other). Prints what was explored; ends with 1, and the steps that led there, where something is wrong.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "model/arena_world.hpp"

using namespace penstock;
using namespace penstock::model;

namespace {

using Do = std::function<void(World&)>;

struct Act {
  std::string name;
  Do run;
};

// Who moves or uses a tensor, one at a time. False where somebody else does, or the tensor is dead.
class Turn {
 public:
  explicit Turn(Tensor& tensor) : tensor_(tensor.alive && !std::exchange(tensor.busy, true) ? &tensor : nullptr) {}
  Turn(const Turn&) = delete;
  ~Turn() {
    if (tensor_ != nullptr) tensor_->busy = false;
  }
  explicit operator bool() const { return tensor_ != nullptr; }

 private:
  Tensor* const tensor_;
};

void read_both(World& world, Tensor& tensor) {
  for (std::size_t i = 0; i < 2; ++i) world.read_cell(tensor, i);
}

void write_both(World& world, Tensor& tensor) {
  for (std::size_t i = 0; i < 2; ++i) world.write_cell(tensor, i, world.fresh_value());
}

// A kernel reads and writes: it is pinned, and what the arena took comes back.
void kernel(World& world, Tensor& tensor) {
  const Turn turn(tensor);
  if (!turn) return;
  const std::uintptr_t used[] = {reinterpret_cast<std::uintptr_t>(tensor.address)};
  std::size_t out = 0;
  world.arena.touch(used, &out);
  if (out > 0) world.arena.bring_in_moved(used);
  read_both(world, tensor);
  write_both(world, tensor);
  world.arena.kernel_over();
}

// Something else needs memory, and goes again.
void allocate(World& world, std::size_t) {
  auto* const address = world.allocate();
  if (address == nullptr) return;
  Tensor other{"Z", address, true, {}, false, false, 0};
  world.explorer.step("allocated");
  for (std::size_t i = 0; i < 2; ++i) world.write_cell(other, i, world.fresh_value());
  for (std::size_t i = 0; i < 2; ++i) world.read_cell(other, i);
  world.arena.release(address);
}

// A kernel uses Y, and makes two others: with a budget of 3, all else must leave.
void make(World& world) {
  const Turn turn(world.y);
  if (!turn) return;
  const std::uintptr_t used[] = {reinterpret_cast<std::uintptr_t>(world.y.address)};
  std::size_t out = 0;
  world.arena.touch(used, &out);
  if (out > 0) world.arena.bring_in_moved(used);
  auto* const first = world.allocate();
  allocate(world, 0);
  if (first != nullptr) world.arena.release(first);
  world.arena.kernel_over();
}

// As the copy engine does: notices writes, copies, and lets the block leave. By direct I/O, which fails where the
// memory was taken, or by a thread that copies, which faults.
void leave(World& world, Tensor& tensor, bool direct, bool release) {
  auto& arena = world.arena;
  const Turn turn(tensor);
  if (!turn) return;
  auto* const address = tensor.address;
  if (arena.guard(address) != Arena::Answer::kYes) return;
  tensor.in_slot = false;
  const auto loan = arena.lend(address);
  if (loan == 0) return;
  bool whole = true;
  if (direct) {
    whole = world.write_file(address, tensor.slot);
  } else {
    for (const std::size_t place : {std::size_t{0}, world.block_bytes - 8}) {
      world.explorer.step("copy out");
      const auto value = world.read_lent(tensor, address + place);
      World::need(raw_write(world.slots.number, reinterpret_cast<const char*>(&value), 8, tensor.slot + place) == 8, "write");
    }
  }
  world.explorer.step("copied out");
  const bool same = arena.lent_back(loan);
  if (!same || !whole || !tensor.alive) return;
  tensor.in_slot = true;
  if (release) {
    int error = 0;
    arena.leave(address, world.segments(tensor), &error);
  }
}

// A copy that is there already counts for the next time.
void leave_again(World& world, Tensor& tensor) {
  if (!tensor.in_slot) return;
  const Turn turn(tensor);
  if (!turn) return;
  int error = 0;
  world.arena.leave(tensor.address, world.segments(tensor), &error);
}

// The way back: to a place of its own, and from there.
void come(World& world, Tensor& tensor, bool guard) {
  auto& arena = world.arena;
  const Turn turn(tensor);
  if (!turn) return;
  char* staging = nullptr;
  int error = 0;
  if (arena.stage(tensor.address, false, &staging) == Arena::Answer::kYes && staging != nullptr) {
    const auto packing = world.probe.block(tensor.address)->copy->packing;
    const auto size = packing.packed_bytes == 0 ? world.block_bytes : round_up(packing.packed_bytes, kPageBytes);
    const auto begin = world.block_bytes - size;
    world.read_into.emplace_back(staging, world.block_bytes);
    World::need(world.explorer.read(world.slots.number, staging + begin, size, tensor.slot + begin) ==
                    static_cast<long>(size),
                "a staging area cannot be read into");
    world.explorer.step("read");
    if (packing.packed_bytes != 0) {
      std::vector<char> head(head_bytes(packing));
      unpack_in_place(packing, staging, world.block_bytes, head.data());  // fails only where it is not wanted any more
    }
    std::erase_if(world.read_into, [&](const auto& each) { return each.first == staging; });
    World::need(arena.arrive(staging, guard, &error) != Arena::Answer::kUnknown, "a staging area is gone");
    if (!guard) tensor.in_slot = false;
  } else if (tensor.alive) {
    arena.bring_in(tensor.address, &error);
  }
}

void pack(World& world, Tensor& tensor, bool keeps) {
  auto& arena = world.arena;
  const Turn turn(tensor);
  if (!turn) return;
  auto* const address = tensor.address;
  if (arena.guard(address) != Arena::Answer::kYes) return;
  tensor.in_slot = false;
  auto packed = arena.pack(address, Codec::kCsr, 4);
  if (!packed) return;
  const auto let_go = [&] { arena.let_go(std::move(packed)); };
  int error = 0;
  if (!tensor.alive || arena.leave_packed(address, packed, &error) != Arena::Answer::kYes) return let_go();
  world.explorer.step("write packed");
  const auto size = round_up(packed->packing.packed_bytes, kPageBytes);
  auto* const memory = arena.packed_address(*packed);
  const auto begin = world.block_bytes - size;
  if (memory != nullptr) {
    // By a thread that copies: what it reads may be anything once the arena has emptied it, but is there.
    for (std::size_t at = 0; at < size; at += kPageBytes) {
      world.explorer.step("copy packed");
      std::uint64_t first = 0;
      World::need(load(memory + at, &first), "a packed copy cannot be read while it is written");
      World::need(raw_write(world.slots.number, memory + at, kPageBytes, tensor.slot + begin + at) == kPageBytes, "write");
    }
    world.explorer.step("written packed");
    if (tensor.alive && arena.packed_address(*packed) != nullptr)
      arena.packed_written(address, packed, {{world.slots.number, tensor.slot + begin, begin, size}}, keeps);
  }
  let_go();
  if (keeps && tensor.alive) arena.drop_packed(address);
}

// The owner drops it; it is made again at the next access.
void drop(World& world, Tensor& tensor) {
  const Turn turn(tensor);
  if (!turn) return;
  tensor.in_slot = false;
  world.arena.drop(tensor.address);
}

// torch takes its memory back: the tensor has other memory now, as after share_memory_.
void release(World& world, Tensor& tensor) {
  if (!tensor.alive) return;
  read_both(world, tensor);
  if (!std::exchange(tensor.alive, false)) return;
  World::need(world.arena.release(tensor.address), "a block cannot be released");
}

// The system writes to it: receives from a socket, reads a file.
void receive(World& world, Tensor& tensor) {
  auto& arena = world.arena;
  const Turn turn(tensor);
  if (!turn) return;
  int error = 0;
  const bool held = arena.hold(tensor.address, +1, true, &error);
  if (held && error == ENODATA && world.fill(tensor)) arena.hold(tensor.address, +1, true, &error);
  if (held && error == 0 && tensor.alive) {
    for (std::size_t i = 0; i < 2; ++i) {
      world.explorer.step("receive");
      const auto value = world.fresh_value();
      const auto scratch = 2 * world.block_bytes;  // of the file
      World::need(raw_write(world.slots.number, reinterpret_cast<const char*>(&value), 8, scratch) == 8, "write");
      auto* const page = world.cell(tensor.address, i);
      const bool whole = !tensor.alive || (accessible(page, true) && raw_read(world.slots.number, page, 8, scratch) == 8);
      World::need(whole, "the system cannot write to what is held writable");
      tensor.cells[i] = value;
    }
    if (tensor.alive) arena.hold(tensor.address, -1);
  }
  tensor.in_slot = false;
}

void close_run(World& world) {
  if (std::exchange(world.closed, true)) return;
  auto& arena = world.arena;
  const auto budget = world.probe.budget();
  arena.set_limits(kUnlimited, kUnlimited);
  int error = arena.bring_in_all();
  if (error == 0) {
    World::need(arena.set_swap_file(-1, -1, 0), "all came in, and the swap file is in use");
  } else {
    world.lingers = true;
    arena.set_limits(kUnlimited, budget);
  }
}

// A child of the process, which reads what there was at the fork, whatever its parent does meanwhile.
void fork_and_read(World& world) {
  if (!world.fork_child()) return;
  do world.explorer.step("child");
  while (world.let_child_go_on());
  world.end_child();
}

void disown(World& world) {
  world.arena.disown_all();
  world.explorer.step("disowned");
  world.arena.own_all();
}

// -- what actors may do

std::vector<Act> operations() {
  std::vector<Act> all;
  const auto add = [&](const char* name, void (*call)(World&, Tensor&), bool both = false) {
    all.push_back({std::string(name) + " X", [call](World& world) { call(world, world.x); }});
    if (both) all.push_back({std::string(name) + " Y", [call](World& world) { call(world, world.y); }});
  };
  add("read", read_both);
  add("write", write_both, true);
  add("kernel", kernel);
  add("leave by direct I/O", [](World& world, Tensor& tensor) { leave(world, tensor, true, true); });
  add("leave by a copy", [](World& world, Tensor& tensor) { leave(world, tensor, false, true); });
  add("leave again", leave_again);
  add("come", [](World& world, Tensor& tensor) { come(world, tensor, true); });
  add("come writable", [](World& world, Tensor& tensor) { come(world, tensor, false); });
#ifndef PENSTOCK_SIMULATED_PAGES  // what encodes reads memory without asking
  add("pack", [](World& world, Tensor& tensor) { pack(world, tensor, false); });
  add("pack and keep", [](World& world, Tensor& tensor) { pack(world, tensor, true); });
#endif
  add("drop", drop);
  add("fill", [](World& world, Tensor& tensor) { if (tensor.alive) world.fill(tensor); });
  add("release", release);
  add("receive", receive);
  all.push_back({"allocate", [](World& world) { allocate(world, 0); }});
  all.push_back({"close", close_run});
  all.push_back({"disown", disown});
  all.push_back({"fork", fork_and_read});
  return all;
}

struct Setup {
  const char* name;
  Do run;
};

std::vector<Setup> setups() {
  return {
      {"both in", [](World&) {}},
      {"X in a slot", [](World& world) { leave(world, world.x, true, true); }},
      {"X in with a copy", [](World& world) { leave(world, world.x, true, false); }},
      {"X swapped", [](World& world) { allocate(world, 0); }},
#ifndef PENSTOCK_SIMULATED_PAGES
      {"X packed", [](World& world) {
         world.arena.guard(world.x.address);
         auto packed = world.arena.pack(world.x.address, Codec::kCsr, 4);
         int error = 0;
         if (packed) world.arena.leave_packed(world.x.address, packed, &error);
         world.arena.let_go(std::move(packed));
       }},
#endif
      {"X dropped", [](World& world) { drop(world, world.x); }},
  };
}

using Actors = std::vector<std::vector<const Act*>>;  // what each does, one after the other

struct Totals {
  std::uint64_t programs = 0, runs = 0, states = 0, steps = 0, cut = 0;
};

void explore(World& world, Explorer& explorer, const Setup& setup, const Actors& actors,
             std::size_t budget, Totals& totals) {
  Explorer::Program program;
  std::string name = std::string(setup.name) + ", budget of " + std::to_string(budget) + ":";
  for (const auto& script : actors) {
    std::string what;
    for (const auto* act : script) what += (what.empty() ? "" : ", then ") + act->name;
    name += " [" + what + "]";
    program.actors.emplace_back(what, [&world, &explorer, script] {
      for (const auto* act : script) {
        act->run(world);
        explorer.forget_past();
      }
    });
  }
  program.begin = [&] {
    world.written.clear();
    world.begin(budget);
    setup.run(world);
    world.arena.kernel_over();
  };
  program.end = [&] { world.end(); };
  program.state = [&] { return world.state(); };
  program.check = [&] { world.check(); };
  try {
    const auto report = explorer.explore(program);
    ++totals.programs;
    totals.runs += report.runs;
    totals.states += report.states;
    totals.steps += report.steps;
    totals.cut += !report.complete;
  } catch (const Violation& violation) {
    std::printf("FAILED %s\n  %s\n", name.c_str(), violation.what());
    std::exit(1);
  }
}

}  // namespace

int main(int count, char** arguments) {
  double seconds = 1e9;
  bool deep = false, forks = false;
  std::size_t block_bytes = 2 * kPageBytes;
  std::uint64_t runs = 20'000;
  std::string only;
  std::size_t part = 0, parts = 1;
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    const auto value = [&] { return i + 1 < count ? arguments[++i] : ""; };
    if (word == "--forks") forks = true;
    else if (word == "--seconds") seconds = std::atof(value());
    else if (word == "--deep") deep = true;
    else if (word == "--large") block_bytes = kLargeBytes;
    else if (word == "--runs") runs = static_cast<std::uint64_t>(std::atoll(value()));
    else if (word == "--only") only = value();
    else if (word == "--part") std::sscanf(value(), "%zu/%zu", &part, &parts);
    else return std::fprintf(stderr, "arena_model: what is %s?\n", word.c_str()), 2;
  }
  const auto began = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  };
  Explorer explorer({runs, 2'000});
  World world(block_bytes, explorer);
  const auto all = operations();
  const auto all_setups = setups();
  Totals totals;
  std::size_t number = 0, left_out = 0;
  const auto try_it = [&](const Setup& setup, const Actors& actors, std::size_t budget) {
    if (number++ % parts != part) return;
    std::string name = setup.name;
    for (const auto& script : actors)
      for (const auto* act : script) name += "; " + act->name;
    if (name.find(only) == std::string::npos) return;
    if (elapsed() > seconds) {
      ++left_out;
      return;
    }
    explore(world, explorer, setup, actors, budget, totals);
  };
  // Pairs first: they are quick, and show the shortest way. The others in an order that is drawn, but always the same:
  // so a run that is cut off has seen something of each kind.
  const auto quick = all.size() - 1;  // but for a fork, which takes as long as a thousand steps
  for (const auto& setup : all_setups)
    for (std::size_t a = 0; a < quick; ++a)
      for (std::size_t b = a; b < (forks ? all.size() : quick); ++b) try_it(setup, {{&all[a]}, {&all[b]}}, 2);
  // Longer ones that some mistake needs.
  const auto named = [&](const char* name) {
    return &*std::ranges::find(all, name, &Act::name);
  };
  for (const auto& setup : all_setups)
    for (const std::size_t budget : {2, 3}) {
      if (forks) try_it(setup, {{named("fork")}, {named("write X"), named("leave by direct I/O X")}}, budget);
      try_it(setup, {{named("come X")}, {named("write X"), named("allocate")}}, budget);
      try_it(setup, {{named("read X")}, {named("come writable X"), named("write X"), named("leave by direct I/O X")}}, budget);
      try_it(setup, {{named("leave by direct I/O X")}, {named("allocate"), named("read X")}, {named("write X")}}, budget);
      try_it(setup, {{named("read X"), named("allocate")}, {named("leave by direct I/O X"), named("leave again X")}}, budget);
    }
#ifndef PENSTOCK_SIMULATED_PAGES
  const Act makes{"make from Y", make};
  for (const char* how : {"pack X", "pack and keep X"}) {
    try_it(all_setups[0], {{named(how)}, {&makes}}, 3);
    try_it(all_setups[0], {{named(how)}, {&makes}, {named("read X")}}, 3);
  }
#endif
  std::vector<std::tuple<const Setup*, Actors, std::size_t>> longer;
  for (const auto& setup : all_setups)
    for (std::size_t a = 0; a < quick; ++a)
      for (std::size_t b = 0; b < quick; ++b)
        for (std::size_t c = b; c < quick; ++c) {
          for (const std::size_t budget : {2, 3})
            if (a <= b) longer.emplace_back(&setup, Actors{{&all[a]}, {&all[b]}, {&all[c]}}, budget);
          if (deep) longer.emplace_back(&setup, Actors{{&all[b], &all[c]}, {&all[a]}}, 2);
          if (deep && b != c) longer.emplace_back(&setup, Actors{{&all[c], &all[b]}, {&all[a]}}, 2);
        }
  std::mt19937 random(1);
  std::shuffle(longer.begin(), longer.end(), random);
  for (const auto& [setup, actors, budget] : longer) try_it(*setup, actors, budget);
  std::printf("%llu programs, %llu runs, %llu states, %llu steps in %.1f s", static_cast<unsigned long long>(totals.programs),
              static_cast<unsigned long long>(totals.runs), static_cast<unsigned long long>(totals.states),
              static_cast<unsigned long long>(totals.steps), elapsed());
  if (totals.cut > 0) std::printf("; %llu programs cut off at %llu runs", static_cast<unsigned long long>(totals.cut),
                                  static_cast<unsigned long long>(runs));
  if (left_out > 0) std::printf("; %zu programs left out for want of time", left_out);
  std::printf("\n");
  return totals.programs > 0 ? 0 : 1;
}
