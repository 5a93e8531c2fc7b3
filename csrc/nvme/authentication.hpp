// DH-HMAC-CHAP: how a host and a controller show each other that they know a key, on each queue, before anything else
// (NVM Express Base 2.0, 8.13.5). Messages in, messages out: no socket, no thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "nvme/cryptography.hpp"

namespace penstock::nvme {

// As it stands in DHHC-1:xx:...: its bytes, and by which hash it is bound to the name of who shows it.
struct Key {
  Hash bound = Hash::none;
  Octets octets;
  bool operator==(const Key&) const = default;
  explicit operator bool() const { return !octets.empty(); }
};

// host: what the host shows to the controller. controller: what that shows to the host; none: it need not.
struct Keys {
  Key host, controller;
  bool operator==(const Keys&) const = default;
};

// Of a message, and of what a command transfers.
inline constexpr std::uint32_t kAuthenticationBytes = 4096;

// What both ends of one exchange hold.
struct Parties {
  std::string host_nqn, subsystem_nqn;
  Keys keys;
};

// The host's end. `next` takes what the controller has said and gives what to send; what went wrong is in `error`.
class HostAuthentication {
 public:
  explicit HostAuthentication(const Parties& parties);
  Octets negotiate();
  // Of the controller's challenge, the reply; of its success, the host's own, or nothing where there is no need of it.
  Octets answer(std::span<const std::byte> message);
  bool done() const { return done_; }
  // Not empty: the exchange has failed. What `answer` gave then is still to be sent, unless it is empty.
  const std::string& error() const { return error_; }

 private:
  Octets fail(std::string error, std::uint8_t reason);
  Octets reply(std::span<const std::byte> message);
  Octets confirm(std::span<const std::byte> message);

  const Parties parties_;
  std::uint16_t transaction_ = 0;
  bool challenged_ = false, done_ = false;
  Hash hash_ = Hash::none;
  std::uint32_t sequence_ = 0;  // of the host's challenge
  Octets challenge_, session_;  // the host's challenge, and what Diffie-Hellman gave
  std::string error_;
};

// The controller's end, of which no key is ever in a message either.
class ControllerAuthentication {
 public:
  explicit ControllerAuthentication(const Parties& parties) : parties_(parties) {}
  // A message of the host. False: it has no place here, and the connection ends.
  bool take(std::span<const std::byte> message);
  // What the host receives next; empty: nothing is due.
  Octets give();
  bool done() const { return done_; }
  // It has told the host that the exchange has failed, or the host has said so.
  bool failed() const { return failed_; }

 private:
  enum class Due : std::uint8_t { nothing, challenge, success, failure };
  bool negotiate(std::span<const std::byte> message);
  bool check(std::span<const std::byte> message);
  bool fail(std::uint8_t reason);

  const Parties parties_;
  Due due_ = Due::nothing;
  bool awaits_reply_ = false, awaits_success_ = false, done_ = false, failed_ = false;
  std::uint8_t reason_ = 0;
  std::uint16_t transaction_ = 0;
  Hash hash_ = Hash::none;
  Group group_ = Group::null;
  std::uint32_t sequence_ = 0, hosts_sequence_ = 0;
  Octets challenge_, hosts_challenge_, session_;
  Exchange exchange_;
};

}  // namespace penstock::nvme
