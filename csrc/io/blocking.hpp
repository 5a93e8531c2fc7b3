// Reads, writes and mappings by calls that wait, one at a time: works on any POSIX system.
#pragma once

#include <optional>

#include "io/io.hpp"
#include "sync.hpp"

namespace penstock {

// Made for a depth of one.
class BlockingIo final : public Io {
 public:
  bool register_memory(std::byte*, std::size_t) override { return false; }
  void prepare(const Operation& operation, std::uint64_t tag) override {
    prepared_ = operation;
    tag_ = tag;
  }
  void submit() override {}
  void wait() override;
  bool next(Result& result) override;
  void wake() override;

 private:
  std::optional<Operation> prepared_;
  std::optional<int> moved_;
  std::uint64_t tag_ = 0;
  Mutex mutex_;
  Condition woken_up_;
  bool woken_ = false;
};

// Bytes moved, or a negative errno. Waits for the device.
int move(const Operation& operation);

// Carries out the operation if that needs no wait for a device; bytes moved, or a negative errno: EAGAIN where it
// would have to wait.
int move_at_once(const Operation& operation);

}  // namespace penstock
