// The seam between transfers and what carries them out: asynchronous reads and writes, one thread's worth of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// Names something that has bytes at offsets, to the Io that it was made for: a file descriptor to those of this
// machine, a namespace to one that speaks to a remote drive. -1: there is none. To one that makes blocking calls also
// memory, by its address.
using Handle = std::int64_t;
inline constexpr Handle kFirstNamespace = Handle{1} << 32;  // below: file descriptors
inline constexpr bool is_namespace(Handle handle) { return handle >= kFirstNamespace; }
inline constexpr bool is_memory(Handle handle) { return handle >= kFirstNamespace; }

// What is read and written: a file, a block device, a remote namespace.
struct Target {
  Handle cached;                  // takes any offset and size
  Handle direct;                  // takes whole blocks only, but for reads of a namespace
  std::uint32_t alignment_bytes;  // of these: a power of two
};

struct Operation {
  bool write;
  Handle handle;
  std::uint64_t offset;
  std::byte* address;
  std::uint32_t size_bytes;
  bool registered = false;  // the memory is the one that was registered
  bool mapped = false;      // by a mapping of the target
};

struct Result {
  std::uint64_t tag;
  int moved;               // bytes, or a negative errno
  bool may_land = false;  // a write that was sent before, and lost with its connection, may land yet
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
