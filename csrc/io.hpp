// Asynchronous reads and writes, one thread's worth of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

struct Operation {
  bool write;
  int file;
  std::uint64_t offset;
  std::byte* address;
  std::uint32_t size_bytes;
  bool registered;  // the memory is the one that was registered
};

struct Result {
  std::uint64_t tag;
  int moved;  // bytes, or a negative errno
};

// Every method but wake belongs to the one thread that constructed the object.
class Io {
 public:
  virtual ~Io() = default;
  // Memory that stays where it is as long as this object. False if the system refuses: then nothing
  // may be marked as registered.
  virtual bool register_memory(std::byte* address, std::size_t size_bytes) = 0;
  // Never called for more than the depth that the object was made for.
  virtual void prepare(const Operation& operation, std::uint64_t tag) = 0;
  virtual void submit() = 0;
  // Submits, and returns when there is a result, or after a wake.
  virtual void wait() = 0;
  // The next result there is. False: none now.
  virtual bool next(Result& result) = 0;
  // Ends the wait that goes on, or the next one. From any thread.
  virtual void wake() = 0;
};

}  // namespace penstock
