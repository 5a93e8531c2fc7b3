// One connection to a controller, without its socket: bytes come in, bytes go out, commands end.
//
// Everything that comes in is hostile. Memory of a command is written to only in its bounds, in order, and only
// while the command is under way. What breaks the protocol ends the connection: nothing is guessed.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "nvme/wire.hpp"

namespace penstock::nvme {

enum class Direction : std::uint8_t { none, to_host, to_controller };

struct Command {
  Entry entry{};  // its identifier and its data pointer are the connection's
  Direction direction = Direction::none;
  std::uint32_t data_bytes = 0;  // that go over the wire: to the host, all but the bytes before and after
  std::uint32_t skipped_bytes = 0;
  std::byte* memory = nullptr;  // of the bytes that are not left out
  std::uint32_t memory_bytes = 0;
  std::uint64_t tag = 0;
};

struct Completion {
  std::uint64_t tag;
  std::uint64_t result;
  std::uint16_t status;  // 0: it succeeded
};

class Connection {
 public:
  struct Options {
    unsigned entries = 32;  // of the queue: commands at once are one fewer
    bool header_digest = false, data_digest = false;
    std::uint32_t in_capsule_bytes = 0;  // data that a command may carry with it
    std::size_t buffer_bytes = 8U << 10;
  };
  static constexpr unsigned kMostEntries = 1024;

  explicit Connection(const Options& options);

  // Whether the controller has answered the first PDU, which is sent by itself. Commands may be given before.
  bool initialised() const { return initialised_; }
  bool header_digest() const { return header_digest_; }
  bool data_digest() const { return data_digest_; }
  unsigned room() const { return static_cast<unsigned>(free_.size()); }
  bool idle() const { return room() == entries_ - 1; }
  // Nothing under way in either direction: it can be handed to another thread.
  bool quiet() const { return idle() && !waits_to_send() && data_slot_ == nullptr && begin_ == end_; }
  void set_in_capsule_bytes(std::uint32_t size_bytes) { in_capsule_bytes_ = size_bytes; }
  void expect_queue_head(bool expected) { checks_queue_head_ = expected; }
  // There must be room. Its memory stays until the command ends, or the connection does.
  void submit(const Command& command);
  bool next(Completion& completion);
  bool anything_ended() const { return !completions_.empty(); }

  // Where the next bytes that come in go: one or two pieces of memory, the same until `received`.
  unsigned receive_into(iovec* pieces);
  // So many bytes have come. False: the controller broke the protocol, as `violation` says.
  bool received(std::size_t size_bytes);
  // What has to be sent next; none: nothing for now. The same until `sent`.
  unsigned send_from(iovec* pieces, unsigned most);
  void sent(std::size_t size_bytes);
  const std::string& violation() const { return violation_; }
  bool terminated_by_controller() const { return terminated_; }
  bool waits_to_send() const { return !sending_.empty() || !gathering_.empty(); }

 private:
  static constexpr unsigned kSlotBits = 10;
  static constexpr std::uint32_t kSmallWindowBytes = 512, kLargeDataBytes = 16U << 10;
  struct Slot {
    Command command;
    std::uint16_t generation = 0;
    bool used = false, last_received = false, ended = false;
    std::uint32_t received_bytes = 0;  // of data to the host
    std::uint32_t offered_bytes = 0;   // of data to the controller: asked for, or in the capsule
    std::uint32_t unsent_bytes = 0;    // of these: still read from memory
    std::uint64_t batch = 0;           // with which they are sent
    Completion completion{};
  };
  // What is sent: bytes of its own, and of commands' memory, in turn.
  struct Batch {
    struct Segment {
      const std::byte* memory;  // null: the batch's own bytes
      std::uint32_t size_bytes, slot;
    };
    std::vector<std::byte> bytes;
    std::vector<Segment> segments;
    std::size_t segment = 0, byte = 0;  // reached: all before are sent
    std::uint32_t within = 0;
    std::uint64_t number = 0;
    bool empty() const { return segments.empty(); }
    std::byte* add(std::uint32_t size_bytes);
    void add_memory(const std::byte* memory, std::uint32_t size_bytes, std::uint32_t slot);
  };

  bool fail(std::string what);
  Slot* find(std::uint16_t id);
  std::uint16_t id_of(const Slot& slot) const;
  void add_header_digest(std::byte* header, std::uint32_t header_bytes);
  void add_data(Slot& slot, std::uint32_t offset, std::uint32_t size_bytes);
  std::uint32_t data_begin_after(std::uint32_t header_bytes) const;
  void end(Slot& slot, std::uint64_t result, std::uint16_t status);
  void release(Slot& slot);

  bool parse();
  bool check_header(const Header& header);
  bool take_header(const Header& header, const std::byte* pdu);
  bool take_init(const std::byte* pdu);
  bool take_response(const std::byte* pdu);
  bool take_ready(const std::byte* pdu);
  bool begin_data(const Header& header, const std::byte* pdu);
  void take_data(const std::byte* from, std::size_t size_bytes);
  void count_data(const std::byte* data, std::size_t size_bytes);
  bool end_data();

  const unsigned entries_;
  const bool header_digest_, data_digest_;
  std::uint32_t in_capsule_bytes_;
  std::uint32_t data_alignment_ = 4, most_data_bytes_ = 0;
  bool initialised_ = false, checks_queue_head_ = false, terminated_ = false;
  std::string violation_;

  std::vector<Slot> slots_;
  std::vector<std::uint16_t> free_;
  std::deque<Completion> completions_;
  Batch gathering_, sending_;

  std::vector<std::byte> buffer_;
  std::size_t begin_ = 0, end_ = 0;  // of what is in the buffer
  std::size_t direct_bytes_ = 0;     // room that was given out in a command's memory
  std::uint32_t window_bytes_;
  // The PDU of data that is coming in.
  Slot* data_slot_ = nullptr;
  std::uint32_t data_left_ = 0, data_sum_ = 0;
  bool data_is_last_ = false, data_succeeds_ = false;
};

}  // namespace penstock::nvme
