#include "nvme/authentication.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "nvme/wire.hpp"

namespace penstock::nvme {

namespace {

using Input = std::span<const std::byte>;

constexpr std::uint8_t kCommon = 0, kChap = 1;  // kinds of messages
constexpr std::uint8_t kNegotiate = 0, kChallenge = 1, kReply = 2, kSuccess1 = 3, kSuccess2 = 4, kFailure2 = 0xf0,
                       kFailure1 = 0xf1;
constexpr std::uint8_t kFailed = 1, kConcatenation = 3, kHashUnusable = 4, kGroupUnusable = 5, kWrongPayload = 6,
                       kWrongMessage = 7;  // reasons of a failure
constexpr std::size_t kNegotiateBytes = 72, kHeaderBytes = 16, kFailureBytes = 8, kMostIds = 30;
// The larger ones would let a stranger have the controller compute for long.
constexpr std::uint8_t kLastServedGroup = 2;

Octets message_of(std::uint8_t kind, std::uint8_t id, std::uint16_t transaction, std::size_t size) {
  Octets message(size);
  store(message.data(), kind);
  store(message.data() + 1, id);
  store(message.data() + 4, transaction);
  return message;
}

Octets failure_of(std::uint8_t id, std::uint16_t transaction, std::uint8_t reason) {
  auto message = message_of(kCommon, id, transaction, kFailureBytes);
  store(message.data() + 6, std::uint8_t{1});
  store(message.data() + 7, reason);
  return message;
}

std::uint8_t octet(Input message, std::size_t at) { return load<std::uint8_t>(message.data() + at); }
bool is(Input message, std::uint8_t kind, std::uint8_t id) {
  return message.size() >= kFailureBytes && octet(message, 0) == kind && octet(message, 1) == id;
}

void add(Octets& to, Input part) { to.insert(to.end(), part.begin(), part.end()); }
void add(Octets& to, std::string_view text) { add(to, std::as_bytes(std::span(text))); }

// A key is bound to the name of who shows it, unless it says otherwise (8.13.5.8).
Octets bound(const Key& key, const std::string& nqn) {
  if (key.bound == Hash::none) return key.octets;
  Octets message;
  add(message, nqn);
  add(message, "NVMe-over-Fabrics");
  return hmac(key.bound, key.octets, message);
}

// What shows that one knows the key: of the host's, or of the controller's.
Octets response_of(const Parties& parties, bool hosts, Hash hash, Input challenge, Input session,
                   std::uint32_t sequence, std::uint16_t transaction) {
  const auto& first = hosts ? parties.host_nqn : parties.subsystem_nqn;
  const auto& second = hosts ? parties.subsystem_nqn : parties.host_nqn;
  auto message = session.empty() ? Octets(challenge.begin(), challenge.end())
                                 : hmac(hash, digest(hash, session), challenge);
  std::array<std::byte, 7> numbers{};  // the last: no secure channel
  store(numbers.data(), sequence);
  store(numbers.data() + 4, transaction);
  add(message, numbers);
  add(message, hosts ? "HostHost" : "Controller");
  add(message, first);
  message.push_back(std::byte{0});
  add(message, second);
  return hmac(hash, bound(hosts ? parties.keys.host : parties.keys.controller, first), message);
}

std::uint32_t random_sequence() {  // 0 has a meaning
  std::uint32_t sequence = 0;
  while (sequence == 0) fill_random(std::as_writable_bytes(std::span(&sequence, 1)));
  return sequence;
}

bool known_hash(std::uint8_t number) { return number > 0 && number <= kLastHash; }

}  // namespace

// -- The host's end --------------------------------------------------------------------------------

HostAuthentication::HostAuthentication(const Parties& parties) : parties_(parties) {
  fill_random(std::as_writable_bytes(std::span(&transaction_, 1)));
}

Octets HostAuthentication::negotiate() {
  auto message = message_of(kCommon, kNegotiate, transaction_, kNegotiateBytes);
  auto* at = message.data();
  store(at + 7, std::uint8_t{1});  // one protocol
  store(at + 8, std::uint8_t{1});  // DH-HMAC-CHAP
  store(at + 10, kLastHash);
  store(at + 11, static_cast<std::uint8_t>(kLastGroup + 1));
  for (std::uint8_t hash = 1; hash <= kLastHash; ++hash) store(at + 11 + hash, hash);
  for (std::uint8_t group = 1; group <= kLastGroup; ++group) store(at + 12 + kMostIds + group - 1, group);
  return message;  // the last group: none
}

Octets HostAuthentication::answer(Input message) {
  if (is(message, kCommon, kFailure1)) {
    const auto reason = octet(message, 7);
    error_ = reason == kHashUnusable || reason == kGroupUnusable
                 ? "the target takes none of the hashes and groups of DH-HMAC-CHAP that this host knows"
                 : "the target does not accept the key of this host";
    return {};
  }
  if (!is(message, kChap, challenged_ ? kSuccess1 : kChallenge) || message.size() < kHeaderBytes ||
      load<std::uint16_t>(message.data() + 4) != transaction_)
    return fail("an answer that DH-HMAC-CHAP does not have here", kWrongMessage);
  return std::exchange(challenged_, true) ? confirm(message) : reply(message);
}

Octets HostAuthentication::fail(std::string error, std::uint8_t reason) {
  error_ = std::move(error);
  return failure_of(kFailure2, transaction_, reason);
}

Octets HostAuthentication::reply(Input message) {
  const auto size = octet(message, 6), hash = octet(message, 8), group = octet(message, 9);
  const std::size_t value_bytes = load<std::uint16_t>(message.data() + 10);
  if (!known_hash(hash) || digest_bytes(static_cast<Hash>(hash)) != size)
    return fail("a challenge by a hash that was not offered", kHashUnusable);
  if (group > kLastGroup) return fail("a challenge in a group that was not offered", kGroupUnusable);
  if (value_bytes != group_bytes(static_cast<Group>(group)) || message.size() < kHeaderBytes + size + value_bytes)
    return fail("a challenge of another size than it says", kWrongPayload);
  hash_ = static_cast<Hash>(hash);
  const auto challenge = message.subspan(kHeaderBytes, size);
  Exchange exchange;
  if (value_bytes > 0) {
    exchange = begin_exchange(static_cast<Group>(group));
    session_ = shared_secret(static_cast<Group>(group), exchange.secret, message.subspan(kHeaderBytes + size, value_bytes));
    if (session_.empty()) return fail("a challenge with a value that is none of its group", kWrongPayload);
  }
  const auto response = response_of(parties_, true, hash_, challenge, session_,
                                    load<std::uint32_t>(message.data() + 12), transaction_);
  challenge_.resize(size);
  auto answer = message_of(kChap, kReply, transaction_, kHeaderBytes);
  store(answer.data() + 6, size);
  store(answer.data() + 10, static_cast<std::uint16_t>(value_bytes));
  if (parties_.keys.controller) {
    fill_random(challenge_);
    sequence_ = random_sequence();
    store(answer.data() + 8, std::uint8_t{1});
    store(answer.data() + 12, sequence_);
  }
  for (const auto& part : {response, challenge_, exchange.value}) add(answer, part);
  return answer;
}

// A controller that need not show anything may do so: that is not looked at.
Octets HostAuthentication::confirm(Input message) {
  done_ = !parties_.keys.controller;
  if (done_) return {};
  const auto expected = response_of(parties_, false, hash_, challenge_, session_, sequence_, transaction_);
  const bool shown = octet(message, 6) == expected.size() && octet(message, 8) == 1 &&
                     message.size() >= kHeaderBytes + expected.size();
  if (!shown || !same(message.subspan(kHeaderBytes, expected.size()), expected))
    return fail("the target does not show that it knows its key", kFailed);
  done_ = true;
  return message_of(kChap, kSuccess2, transaction_, kHeaderBytes);
}

// -- The controller's end --------------------------------------------------------------------------

bool ControllerAuthentication::take(Input message) {
  if (failed_ || due_ != Due::nothing) return false;
  if (is(message, kCommon, kFailure2)) {
    failed_ = true;
    done_ = false;
    return true;
  }
  if (is(message, kCommon, kNegotiate) && !awaits_reply_ && !awaits_success_ && !done_) return negotiate(message);
  if (message.size() < kHeaderBytes || load<std::uint16_t>(message.data() + 4) != transaction_) return false;
  if (is(message, kChap, kReply) && std::exchange(awaits_reply_, false)) return check(message);
  if (!is(message, kChap, kSuccess2) || !std::exchange(awaits_success_, false)) return false;
  done_ = true;
  return true;
}

bool ControllerAuthentication::fail(std::uint8_t reason) {
  reason_ = reason;
  due_ = Due::failure;
  return true;
}

bool ControllerAuthentication::negotiate(Input message) {
  if (message.size() < kNegotiateBytes) return false;
  transaction_ = load<std::uint16_t>(message.data() + 4);
  const auto hashes = octet(message, 10), groups = octet(message, 11);
  if (octet(message, 6) != 0) return fail(kConcatenation);
  if (octet(message, 7) < 1 || octet(message, 8) != 1 || hashes > kMostIds || groups > kMostIds)
    return fail(kWrongPayload);
  // The host's order is its preference.
  const auto offered = message.subspan(12, 2 * kMostIds);
  const auto choose = [&](std::size_t begin, std::size_t count, const auto& usable) {
    const auto part = offered.subspan(begin, count);
    const auto found = std::find_if(part.begin(), part.end(), [&](auto id) { return usable(std::to_integer<std::uint8_t>(id)); });
    return found == part.end() ? -1 : std::to_integer<int>(*found);
  };
  const auto hash = choose(0, hashes, known_hash);
  const auto group = choose(kMostIds, groups, [](std::uint8_t id) { return id <= kLastServedGroup; });
  if (hash < 0) return fail(kHashUnusable);
  if (group < 0) return fail(kGroupUnusable);
  hash_ = static_cast<Hash>(hash);
  group_ = static_cast<Group>(group);
  due_ = Due::challenge;
  return true;
}

bool ControllerAuthentication::check(Input message) {
  const auto size = digest_bytes(hash_), value_bytes = group_bytes(group_);
  if (octet(message, 6) != size || load<std::uint16_t>(message.data() + 10) != value_bytes ||
      message.size() < kHeaderBytes + 2 * size + value_bytes)
    return fail(kWrongPayload);
  if (value_bytes > 0) {
    session_ = shared_secret(group_, std::exchange(exchange_, {}).secret,
                             message.subspan(kHeaderBytes + 2 * size, value_bytes));
    if (session_.empty()) return fail(kWrongPayload);
  }
  const auto expected = response_of(parties_, true, hash_, challenge_, session_, sequence_, transaction_);
  if (!same(message.subspan(kHeaderBytes, size), expected)) return fail(kFailed);
  if (octet(message, 8) != 0) {
    if (!parties_.keys.controller) return fail(kFailed);
    const auto challenge = message.subspan(kHeaderBytes + size, size);
    hosts_challenge_.assign(challenge.begin(), challenge.end());
    hosts_sequence_ = load<std::uint32_t>(message.data() + 12);
    // What the controller itself has asked could be asked of it.
    if (hosts_challenge_ == challenge_) return fail(kFailed);
  }
  due_ = Due::success;
  return true;
}

Octets ControllerAuthentication::give() {
  const auto due = std::exchange(due_, Due::nothing);
  if (due == Due::nothing) return {};
  if (due == Due::failure) {
    failed_ = true;
    return failure_of(kFailure1, transaction_, reason_);
  }
  const auto size = static_cast<std::uint8_t>(digest_bytes(hash_));
  auto message = message_of(kChap, due == Due::challenge ? kChallenge : kSuccess1, transaction_, kHeaderBytes);
  store(message.data() + 6, size);
  if (due == Due::challenge) {
    challenge_.resize(size);
    fill_random(challenge_);
    sequence_ = random_sequence();
    exchange_ = begin_exchange(group_);
    store(message.data() + 8, hash_);
    store(message.data() + 9, group_);
    store(message.data() + 10, static_cast<std::uint16_t>(exchange_.value.size()));
    store(message.data() + 12, sequence_);
    add(message, challenge_);
    add(message, exchange_.value);
    awaits_reply_ = true;
    return message;
  }
  if (hosts_challenge_.empty()) {
    done_ = true;
    return message;
  }
  store(message.data() + 8, std::uint8_t{1});
  add(message, response_of(parties_, false, hash_, hosts_challenge_, session_, hosts_sequence_, transaction_));
  awaits_success_ = true;
  return message;
}

}  // namespace penstock::nvme
