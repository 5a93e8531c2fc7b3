// What a test program is made of: TEST(name) { CHECK(...); CHECK_EQUAL(...); }
//
// Include it in one source file for each program: it has main(), which runs every test, or those
// named on the command line, and fails if any check did. A failed check ends its test.
#pragma once

#include <atomic>
#include <cstdio>
#include <exception>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::test {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registered {
  Registered(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <class A, class B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " != " << b;
  fail(file, line, out.str());
}

// The same numbers in every run, so that a failure happens again.
class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  // From `low` to `high`, both included.
  std::size_t operator()(std::size_t low, std::size_t high) {
    return std::uniform_int_distribution<std::size_t>(low, high)(engine_);
  }
  std::vector<char> bytes(std::size_t size_bytes) {
    std::vector<char> data(size_bytes);
    for (auto& byte : data) byte = static_cast<char>(engine_() >> 24);
    return data;
  }

 private:
  std::mt19937 engine_;
};

inline bool run(const Case& test) {
  try {
    test.body();
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n  %s\n", test.name, error.what());
    return false;
  }
  return true;
}

inline int run_all(const std::vector<std::string_view>& wanted) {
  int run_count = 0, failed = 0;
  for (const auto& test : cases()) {
    bool named = wanted.empty();
    for (const auto& name : wanted) named = named || name == test.name;
    if (!named) continue;
    ++run_count;
    failed += !run(test);
  }
  std::printf("%d passed, %d failed\n", run_count - failed, failed);
  return failed == 0 && run_count > 0 ? 0 : 1;
}

}  // namespace penstock::test

#define TEST(name)                                                   \
  static void name();                                                \
  static const penstock::test::Registered name##_registered(#name, name); \
  static void name()

#define CHECK(condition) \
  if (!(condition)) penstock::test::fail(__FILE__, __LINE__, #condition)

#define CHECK_EQUAL(a, b) penstock::test::check_equal(a, b, #a " == " #b, __FILE__, __LINE__)

int main(int count, char** arguments) {
  return penstock::test::run_all({arguments + 1, arguments + count});
}
