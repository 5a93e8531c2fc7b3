#include "nvme/connection.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

#include "checksum.hpp"

namespace penstock::nvme {

namespace {

constexpr std::uint32_t kMostHeaderBytes = 256;  // with the digest and the gap before data
constexpr std::uint32_t kLeastDataLimit = 4096;  // that a controller may set

std::uint32_t round_up(std::uint32_t value, std::uint32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::string number(std::uint64_t value) { return std::to_string(value); }

}  // namespace

// -- what is sent --------------------------------------------------------------------------------

std::byte* Connection::Batch::add(std::uint32_t size_bytes) {
  if (segments.empty() || segments.back().memory != nullptr) segments.push_back({nullptr, 0, 0});
  segments.back().size_bytes += size_bytes;
  bytes.resize(bytes.size() + size_bytes);
  return bytes.data() + bytes.size() - size_bytes;
}

void Connection::Batch::add_memory(const std::byte* memory, std::uint32_t size_bytes, std::uint32_t slot) {
  segments.push_back({memory, size_bytes, slot});
}

Connection::Connection(const Options& options)
    : entries_(std::clamp(options.entries, 2U, kMostEntries)),
      header_digest_(options.header_digest),
      data_digest_(options.data_digest),
      in_capsule_bytes_(options.in_capsule_bytes),
      slots_(entries_ - 1),
      buffer_(std::max<std::size_t>(options.buffer_bytes, 2 * kSmallWindowBytes)),
      window_bytes_(static_cast<std::uint32_t>(buffer_.size() - kMostHeaderBytes)) {
  free_.reserve(slots_.size());
  for (auto slot = slots_.size(); slot > 0; --slot) free_.push_back(static_cast<std::uint16_t>(slot - 1));
  const auto request = init_request(header_digest_, data_digest_);
  std::copy(request.begin(), request.end(), gathering_.add(kInitBytes));
}

std::uint16_t Connection::id_of(const Slot& slot) const {
  return static_cast<std::uint16_t>(static_cast<unsigned>(&slot - slots_.data()) | unsigned{slot.generation}
                                                                                       << kSlotBits);
}

std::uint32_t Connection::data_begin_after(std::uint32_t header_bytes) const {
  return round_up(header_bytes + (header_digest_ ? kDigestBytes : 0), data_alignment_);
}

// Behind the header, where there is room for it.
void Connection::add_header_digest(std::byte* header, std::uint32_t header_bytes) {
  if (header_digest_) store(header + header_bytes, crc32c(0, header, header_bytes));
}

void Connection::submit(const Command& command) {
  auto& slot = slots_[free_.back()];
  free_.pop_back();
  slot.command = command;
  slot.used = true;
  slot.last_received = slot.ended = false;
  slot.received_bytes = slot.offered_bytes = slot.unsent_bytes = 0;
  slot.generation = (slot.generation + 1) % (1U << (16 - kSlotBits));
  auto& entry = slot.command.entry;
  set_command_id(entry, id_of(slot));
  const bool carries = command.direction == Direction::to_controller && command.data_bytes <= in_capsule_bytes_;
  set_data_pointer(entry, command.data_bytes, carries);
  // Before the controller's first answer its alignment is not known: only `initialised` connections carry data.
  const auto data_begin = data_begin_after(kCommandBytes);
  const auto end = carries ? data_begin : kCommandBytes + (header_digest_ ? kDigestBytes : 0);
  auto* pdu = gathering_.add(end);
  const auto digest_bytes = carries && data_digest_ ? kDigestBytes : 0;
  const auto flags = (header_digest_ ? kHeaderDigest : 0) | (digest_bytes > 0 ? kDataDigest : 0);
  store_header(pdu, {Pdu::command, static_cast<std::uint8_t>(flags), kCommandBytes,
                     static_cast<std::uint8_t>(carries ? data_begin : 0),
                     end + (carries ? command.data_bytes : 0) + digest_bytes});
  std::copy(entry.begin(), entry.end(), pdu + kCommonBytes);
  add_header_digest(pdu, kCommandBytes);
  if (carries) add_data(slot, 0, command.data_bytes);
}

// Behind its header: the bytes, straight from memory, and their digest.
void Connection::add_data(Slot& slot, std::uint32_t offset, std::uint32_t size_bytes) {
  const auto* memory = slot.command.memory + offset;
  gathering_.add_memory(memory, size_bytes, static_cast<std::uint32_t>(&slot - slots_.data()));
  slot.offered_bytes += size_bytes;
  slot.unsent_bytes += size_bytes;
  slot.batch = gathering_.number;
  if (data_digest_) store(gathering_.add(kDigestBytes), crc32c(0, memory, size_bytes));
}

unsigned Connection::send_from(iovec* pieces, unsigned most) {
  if (sending_.empty()) {
    if (gathering_.empty()) return 0;
    std::swap(sending_, gathering_);
    gathering_.number = sending_.number + 1;
  }
  unsigned count = 0;
  auto byte = sending_.byte;
  auto within = sending_.within;
  for (auto index = sending_.segment; index < sending_.segments.size() && count < most; ++index, within = 0) {
    const auto& segment = sending_.segments[index];
    const auto* from = segment.memory != nullptr ? segment.memory + within : sending_.bytes.data() + byte;
    const auto left = segment.size_bytes - within;
    if (segment.memory == nullptr) byte += left;
    pieces[count++] = {const_cast<std::byte*>(from), left};
  }
  return count;
}

void Connection::sent(std::size_t size_bytes) {
  while (size_bytes > 0 && sending_.segment < sending_.segments.size()) {
    const auto& segment = sending_.segments[sending_.segment];
    const auto step =
        static_cast<std::uint32_t>(std::min<std::size_t>(size_bytes, segment.size_bytes - sending_.within));
    size_bytes -= step;
    sending_.within += step;
    if (segment.memory == nullptr) {
      sending_.byte += step;
    } else {
      auto& slot = slots_[segment.slot];
      slot.unsent_bytes -= step;
      if (slot.ended && slot.unsent_bytes == 0) release(slot);
    }
    if (sending_.within < segment.size_bytes) return;
    ++sending_.segment;
    sending_.within = 0;
  }
  if (sending_.segment < sending_.segments.size()) return;
  sending_.bytes.clear();
  sending_.segments.clear();
  sending_.segment = sending_.byte = 0;
}

// -- what comes in -------------------------------------------------------------------------------

bool Connection::fail(std::string what) {
  violation_ = std::move(what);
  return false;
}

Connection::Slot* Connection::find(std::uint16_t id) {
  const auto index = id & ((1U << kSlotBits) - 1);
  if (index >= slots_.size()) return nullptr;
  auto& slot = slots_[index];
  return slot.used && !slot.ended && id_of(slot) == id ? &slot : nullptr;
}

// Its memory may still be sent from: then it ends once that is over.
void Connection::end(Slot& slot, std::uint64_t result, std::uint16_t status) {
  slot.ended = true;
  slot.completion = {slot.command.tag, result, status};
  if (slot.unsent_bytes == 0) release(slot);
}

void Connection::release(Slot& slot) {
  completions_.push_back(slot.completion);
  slot.used = false;
  free_.push_back(static_cast<std::uint16_t>(&slot - slots_.data()));
}

bool Connection::next(Completion& completion) {
  if (completions_.empty()) return false;
  completion = completions_.front();
  completions_.pop_front();
  return true;
}

// Large data goes from the socket to its place, with a little room behind for the next header; small data comes
// many PDUs at a time into the buffer, and is copied: that costs less than a system call for each.
unsigned Connection::receive_into(iovec* pieces) {
  unsigned count = 0;
  direct_bytes_ = 0;
  if (data_slot_ != nullptr) {  // then the buffer is empty
    const auto& command = data_slot_->command;
    const auto at = data_slot_->received_bytes;
    const auto memory_end = command.skipped_bytes + command.memory_bytes;
    if (at >= command.skipped_bytes && at < memory_end) {
      direct_bytes_ = std::min(data_left_, memory_end - at);
      pieces[count++] = {command.memory + (at - command.skipped_bytes), direct_bytes_};
    }
  }
  pieces[count++] = {buffer_.data() + end_, std::min<std::size_t>(window_bytes_, buffer_.size() - end_)};
  return count;
}

bool Connection::received(std::size_t size_bytes) {
  if (!violation_.empty()) return false;
  const auto direct = std::min(size_bytes, std::exchange(direct_bytes_, 0));
  if (direct > 0) {
    const auto& command = data_slot_->command;
    count_data(command.memory + (data_slot_->received_bytes - command.skipped_bytes), direct);
  }
  end_ += size_bytes - direct;
  if (!parse()) return false;
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (begin_ > 0) {  // less than a header
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= std::exchange(begin_, 0);
  }
  return true;
}

bool Connection::parse() {
  while (true) {
    const auto* at = buffer_.data() + begin_;
    const auto available = end_ - begin_;
    if (data_slot_ != nullptr) {
      if (data_left_ > 0) {
        const auto step = std::min<std::size_t>(available, data_left_);
        take_data(at, step);
        begin_ += step;
        if (data_left_ > 0) return true;
        continue;
      }
      const auto digest_bytes = data_digest_ ? kDigestBytes : 0;
      if (available < digest_bytes) return true;
      if (data_digest_ && load<std::uint32_t>(at) != data_sum_) return fail("a wrong data digest");
      begin_ += digest_bytes;
      if (!end_data()) return false;
      continue;
    }
    if (available < kCommonBytes) return true;
    const auto header = load_header(at);
    if (!check_header(header)) return false;
    const bool digest = initialised_ && header_digest_ && header.type != Pdu::controller_terminates;
    std::uint32_t whole_bytes = header.header_bytes + (digest ? kDigestBytes : 0);
    if (header.type == Pdu::controller_terminates) whole_bytes = header.pdu_bytes;
    if (header.type == Pdu::data_to_host) whole_bytes = header.data_begin;
    if (available < whole_bytes) return true;
    if (digest && load<std::uint32_t>(at + header.header_bytes) != crc32c(0, at, header.header_bytes))
      return fail("a wrong header digest");
    begin_ += whole_bytes;
    if (!take_header(header, at)) return false;
  }
}

// Everything that can be said before the rest of the header is there.
bool Connection::check_header(const Header& header) {
  const auto digest_bytes = header_digest_ ? kDigestBytes : 0;
  const auto named = [&] { return "a PDU of type " + number(static_cast<unsigned>(header.type)); };
  const auto expect = [&](std::uint32_t header_bytes, std::uint32_t pdu_bytes, std::uint8_t flags) {
    if (header.header_bytes != header_bytes || header.pdu_bytes != pdu_bytes)
      return fail(named() + " with lengths " + number(header.header_bytes) + " and " +
                  number(header.pdu_bytes));
    if (header.flags != flags) return fail(named() + " with flags " + number(header.flags));
    if (header.data_begin != 0) return fail(named() + " with data at " + number(header.data_begin));
    return true;
  };
  const std::uint8_t digest_flag = header_digest_ ? kHeaderDigest : 0;
  if (header.type == Pdu::controller_terminates) {
    if (header.header_bytes == kDataHeaderBytes && header.pdu_bytes >= kDataHeaderBytes &&
        header.pdu_bytes <= kMostTerminateBytes)
      return true;
    return expect(kDataHeaderBytes, kDataHeaderBytes, header.flags);
  }
  if (!initialised_) {
    if (header.type != Pdu::init_response) return fail(named() + " before the connection's first answer");
    return expect(kInitBytes, kInitBytes, header.flags);
  }
  switch (header.type) {
    case Pdu::response:
    case Pdu::ready_to_transfer:
      return expect(kDataHeaderBytes, kDataHeaderBytes + digest_bytes, digest_flag);
    case Pdu::data_to_host: {
      const auto digests = digest_flag | (data_digest_ ? kDataDigest : 0);
      if (header.header_bytes != kDataHeaderBytes ||
          (header.flags & (kHeaderDigest | kDataDigest)) != digests ||
          (header.flags & ~(kHeaderDigest | kDataDigest | kLastData | kSuccess)) != 0 ||
          (header.flags & (kLastData | kSuccess)) == kSuccess)
        return fail("a PDU of data with header length " + number(header.header_bytes) + " and flags " +
                    number(header.flags));
      if (header.data_begin < kDataHeaderBytes + digest_bytes || header.data_begin % 4 != 0 ||
          header.pdu_bytes < header.data_begin)
        return fail("a PDU of data that begins at " + number(header.data_begin) + " of " +
                    number(header.pdu_bytes));
      return true;
    }
    default:
      return fail(named());
  }
}

bool Connection::take_header(const Header& header, const std::byte* pdu) {
  switch (header.type) {
    case Pdu::controller_terminates:
      terminated_ = true;
      return fail("the controller ended the connection: " + terminate_text(pdu, header.pdu_bytes));
    case Pdu::init_response:
      return take_init(pdu);
    case Pdu::response:
      return take_response(pdu);
    case Pdu::ready_to_transfer:
      return take_ready(pdu);
    default:
      return begin_data(header, pdu);
  }
}

bool Connection::take_init(const std::byte* pdu) {
  const auto answer = load_init_response(pdu);
  if (answer.format != 0) return fail("PDU format " + number(answer.format));
  if (answer.alignment > 31) return fail("an alignment of data of " + number(answer.alignment));
  if ((answer.digests & ~(kHeaderDigest | kDataDigest)) != 0)
    return fail("unknown digests, " + number(answer.digests));
  for (const auto& [flag, asked, name] : {std::tuple{kHeaderDigest, header_digest_, "header digests: hdgst=1"},
                                          std::tuple{kDataDigest, data_digest_, "data digests: ddgst=1"}}) {
    if (((answer.digests & flag) != 0) == asked) continue;
    return fail(asked ? std::string("the target refuses what was asked for, ") + name
                      : std::string("the target wants what was not asked for; ask for ") + name);
  }
  if (answer.most_data_bytes < kLeastDataLimit || answer.most_data_bytes % 4 != 0)
    return fail("a limit of " + number(answer.most_data_bytes) + " bytes of data in a PDU");
  data_alignment_ = 4 * (answer.alignment + 1U);
  most_data_bytes_ = answer.most_data_bytes;
  initialised_ = true;
  return true;
}

bool Connection::take_response(const std::byte* pdu) {
  const auto response = load_response(pdu);
  auto* slot = find(response.command);
  if (slot == nullptr)
    return fail("the end of command " + number(response.command) + ", which is not under way");
  if (checks_queue_head_ && response.queue_head >= entries_)
    return fail("a queue head of " + number(response.queue_head));
  const auto& command = slot->command;
  if (response.status == 0) {
    if (command.direction == Direction::to_host && slot->received_bytes != command.data_bytes)
      return fail("success after " + number(slot->received_bytes) + " of " + number(command.data_bytes) +
                  " bytes");
    if (command.direction == Direction::to_controller && slot->offered_bytes != command.data_bytes)
      return fail("success of a write of which " + number(slot->offered_bytes) + " of " +
                  number(command.data_bytes) + " bytes were asked for");
  }
  end(*slot, response.result, response.status);
  return true;
}

bool Connection::take_ready(const std::byte* pdu) {
  const auto ready = load_data_header(pdu);
  auto* slot = find(ready.command);
  if (slot == nullptr || slot->command.direction != Direction::to_controller)
    return fail("data asked for of command " + number(ready.command) + ", which has none");
  const auto left = slot->command.data_bytes - slot->offered_bytes;
  if (ready.offset != slot->offered_bytes || ready.size_bytes == 0 || ready.size_bytes > left)
    return fail("data asked for from " + number(ready.offset) + ", " + number(ready.size_bytes) +
                " bytes, where " + number(slot->offered_bytes) + " of " + number(slot->command.data_bytes) +
                " are sent");
  if (slot->unsent_bytes > 0 && slot->batch == gathering_.number)
    return fail("data asked for before it can have what it asked for last");
  for (std::uint32_t done = 0; done < ready.size_bytes;) {
    const auto step = std::min(most_data_bytes_, ready.size_bytes - done);
    const auto begin = data_begin_after(kDataHeaderBytes);
    auto* header = gathering_.add(begin);
    const bool last = done + step == ready.size_bytes;
    const auto flags =
        (header_digest_ ? kHeaderDigest : 0) | (data_digest_ ? kDataDigest : 0) | (last ? kLastData : 0);
    store_header(header, {Pdu::data_to_controller, static_cast<std::uint8_t>(flags), kDataHeaderBytes,
                          static_cast<std::uint8_t>(begin), begin + step + (data_digest_ ? kDigestBytes : 0)});
    store_data_header(header, {ready.command, ready.transfer_tag, ready.offset + done, step});
    add_header_digest(header, kDataHeaderBytes);
    add_data(*slot, ready.offset + done, step);
    done += step;
  }
  return true;
}

bool Connection::begin_data(const Header& header, const std::byte* pdu) {
  const auto data = load_data_header(pdu);
  auto* slot = find(data.command);
  if (slot == nullptr || slot->command.direction != Direction::to_host)
    return fail("data for command " + number(data.command) + ", which awaits none");
  const auto room = slot->command.data_bytes - slot->received_bytes;
  if (slot->last_received || data.offset != slot->received_bytes || data.size_bytes == 0 ||
      data.size_bytes > room)
    return fail("data from " + number(data.offset) + ", " + number(data.size_bytes) + " bytes, where " +
                number(slot->received_bytes) + " of " + number(slot->command.data_bytes) + " are there");
  if (std::uint64_t{header.data_begin} + data.size_bytes + (data_digest_ ? kDigestBytes : 0) !=
      header.pdu_bytes)
    return fail("a PDU of " + number(header.pdu_bytes) + " bytes with " + number(data.size_bytes) +
                " bytes of data");
  data_slot_ = slot;
  data_left_ = data.size_bytes;
  data_sum_ = 0;
  data_is_last_ = (header.flags & kLastData) != 0;
  data_succeeds_ = (header.flags & kSuccess) != 0;
  window_bytes_ = data.size_bytes >= kLargeDataBytes
                      ? kSmallWindowBytes
                      : static_cast<std::uint32_t>(buffer_.size() - kMostHeaderBytes);
  return true;
}

// From the buffer to its place. Bytes before and after the command's memory go nowhere.
void Connection::take_data(const std::byte* from, std::size_t size_bytes) {
  const auto& command = data_slot_->command;
  const std::size_t at = data_slot_->received_bytes, end = at + size_bytes;
  const auto begin =
      std::clamp<std::size_t>(at, command.skipped_bytes, command.skipped_bytes + command.memory_bytes);
  const auto stop =
      std::clamp<std::size_t>(end, command.skipped_bytes, command.skipped_bytes + command.memory_bytes);
  if (begin < stop)
    std::memcpy(command.memory + (begin - command.skipped_bytes), from + (begin - at), stop - begin);
  count_data(from, size_bytes);
}

void Connection::count_data(const std::byte* data, std::size_t size_bytes) {
  if (data_digest_) data_sum_ = crc32c(data_sum_, data, size_bytes);
  data_slot_->received_bytes += static_cast<std::uint32_t>(size_bytes);
  data_left_ -= static_cast<std::uint32_t>(size_bytes);
}

bool Connection::end_data() {
  auto& slot = *std::exchange(data_slot_, nullptr);
  slot.last_received = data_is_last_;
  if (data_is_last_ && slot.received_bytes != slot.command.data_bytes && data_succeeds_)
    return fail("success after " + number(slot.received_bytes) + " of " + number(slot.command.data_bytes) +
                " bytes");
  if (data_succeeds_) end(slot, 0, 0);
  return true;
}

}  // namespace penstock::nvme
