// Lets memory be short: the first allocation fails, in the next run the second, and so on, until a run asks for fewer.
//
//   void scenario(FailingNew& memory) {
//     Subject subject;
//     memory.begin();                            // from here on
//     try { subject.work(); } catch (const std::bad_alloc&) {}
//     memory.end();
//     CHECK(...);
//   }
//   TEST(short_of_memory) { fail_each_allocation(scenario); }
//
// Include it in one source file of a program: it replaces operator new. Until `begin` nothing fails.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace penstock::test {

enum class Whose { everybody, this_thread };

namespace failing {
inline std::atomic<bool> counts = false;
inline std::atomic<std::uint64_t> allocations = 0, first = 0, last = 0, failures = 0;
inline std::atomic<bool> all_threads = true;
inline thread_local bool mine = false;  // of the thread that began
inline thread_local int spared = 0;

inline bool now() {
  if (!counts.load() || spared > 0 || !(mine || all_threads.load())) return false;
  const auto number = ++allocations;
  if (number < first.load() || number > last.load()) return false;
  ++failures;
  return true;
}

inline void* allocate(std::size_t size_bytes, std::size_t alignment_bytes = 0) noexcept {
  if (now()) return nullptr;
  if (size_bytes == 0) size_bytes = 1;
  if (alignment_bytes == 0) return std::malloc(size_bytes);
  return std::aligned_alloc(alignment_bytes, (size_bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes);
}

inline void* allocate_or_throw(std::size_t size_bytes, std::size_t alignment_bytes = 0) {
  if (auto* memory = allocate(size_bytes, alignment_bytes)) return memory;
  throw std::bad_alloc();
}
}  // namespace failing

// While it lives, this thread's allocations neither fail nor count: a test's own, and those of a target's threads.
class Spared {
 public:
  Spared() { ++failing::spared; }
  Spared(const Spared&) = delete;
  Spared& operator=(const Spared&) = delete;
  ~Spared() { --failing::spared; }
  static void this_thread() { ++failing::spared; }  // until it ends
};

class FailingNew {
 public:
  // Once begun, the `number`-th allocation fails (from 1 on), and so many after it.
  explicit FailingNew(std::uint64_t number, Whose whose = Whose::everybody, std::uint64_t more = 0)
      : number_(number), more_(more), whose_(whose) {}
  FailingNew(const FailingNew&) = delete;
  FailingNew& operator=(const FailingNew&) = delete;
  ~FailingNew() { end(); }

  void begin() {
    failing::mine = true;
    failing::all_threads = whose_ == Whose::everybody;
    failing::allocations = failing::failures = 0;
    failing::first = number_;
    failing::last = number_ + more_;
    failing::counts = true;
  }
  void end() { failing::counts = failing::mine = false; }
  std::uint64_t number() const { return number_; }
  static std::uint64_t allocations() { return failing::allocations; }
  static std::uint64_t failures() { return failing::failures; }

 private:
  const std::uint64_t number_, more_;
  const Whose whose_;
};

// Until a run needs fewer allocations than the one that was to fail. Gives how many runs had one fail.
template <class Scenario>
std::uint64_t fail_each_allocation(Scenario&& scenario, Whose whose = Whose::everybody, std::uint64_t more = 0) {
  for (std::uint64_t number = 1;; ++number) {
    FailingNew memory(number, whose, more);
    scenario(memory);
    if (FailingNew::failures() == 0) return number - 1;
  }
}

}  // namespace penstock::test

// All of them: a sanitizer has each of its own. GCC takes a free that it inlines for a mistake.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void* operator new(std::size_t size) { return penstock::test::failing::allocate_or_throw(size); }
void* operator new[](std::size_t size) { return operator new(size); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return penstock::test::failing::allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment) { return operator new(size, alignment); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return penstock::test::failing::allocate(size); }
void* operator new[](std::size_t size, const std::nothrow_t& none) noexcept { return operator new(size, none); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
