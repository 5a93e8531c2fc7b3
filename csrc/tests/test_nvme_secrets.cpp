// What is encrypted comes back, or not one byte of it; and hosts and controllers that know a key, or do not.
#include <algorithm>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "check.hpp"
#include "nvme/authentication.hpp"
#include "nvme/error.hpp"
#include "nvme/sealing.hpp"

using namespace penstock::nvme;
using penstock::test::Random;

namespace {

constexpr std::uint64_t kBegin = 1U << 20, kUnit = Sealing::kUnitBytes, kSize = 300 * kUnit;

std::vector<std::byte> drawn(Random& random, std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random(0, 255));
  return bytes;
}

Key key_of(Random& random, Hash bound = Hash::sha256) { return {bound, drawn(random, 32)}; }

// The messages of both ends, in turn. What became of it, as the host and the controller see it.
std::pair<bool, bool> meet(const Keys& hosts, const Keys& controllers) {
  HostAuthentication host({"nqn.host", "nqn.subsystem", hosts});
  ControllerAuthentication controller({"nqn.host", "nqn.subsystem", controllers});
  auto said = host.negotiate();
  while (true) {
    if (!said.empty() && !controller.take(said)) return {false, false};
    if (!host.error().empty() || host.done()) return {host.done(), controller.done()};
    said = host.answer(controller.give());
  }
}

}  // namespace

TEST(any_part_comes_back_and_nothing_that_was_changed) {
  Random random(1);
  std::optional<Sealing> sealing;
  try {
    sealing.emplace(kBegin, kBegin + kSize);
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
    return;
  }
  const auto plain = drawn(random, kSize);
  std::vector<std::byte> wire(kSize);
  for (int round = 0; round < 2; ++round) CHECK(sealing->seal(kBegin, plain.data(), wire.data(), kSize));
  for (int i = 0; i < 500; ++i) {
    const auto first = random(0, kSize - 1), size = random(1, std::min<std::uint64_t>(kSize - first, 20'000));
    const auto begin = first / kUnit * kUnit, end = (first + size + kUnit - 1) / kUnit * kUnit;
    std::vector<std::byte> part(wire.begin() + static_cast<std::ptrdiff_t>(begin),
                                wire.begin() + static_cast<std::ptrdiff_t>(end)),
        found(size);
    CHECK(sealing->open(kBegin + begin, part.data(), first - begin, found.data(), size));
    CHECK(std::equal(found.begin(), found.end(), plain.begin() + static_cast<std::ptrdiff_t>(first)));
    part[random(0, part.size() - 1)] ^= static_cast<std::byte>(random(1, 255));
    CHECK(!sealing->open(kBegin + begin, part.data(), first - begin, found.data(), size));
    CHECK(std::all_of(found.begin(), found.end(), [](auto byte) { return byte == std::byte{0}; }));
  }
}

TEST(hashes_have_their_known_values) {
  const auto octets = [](std::string_view text) { return std::as_bytes(std::span(text)); };
  const auto first = [](const Octets& from) {
    std::string text;
    for (const auto octet : std::span(from).first(4)) {
      constexpr const char* kDigits = "0123456789abcdef";
      text += kDigits[std::to_integer<int>(octet >> 4)];
      text += kDigits[std::to_integer<int>(octet & std::byte{15})];
    }
    return text + " " + std::to_string(from.size());
  };
  const auto abc = octets("abc"), key = octets("Jefe"), message = octets("what do ya want for nothing?");
  CHECK_EQUAL(first(digest(Hash::sha256, abc)), "ba7816bf 32");  // FIPS 180-4
  CHECK_EQUAL(first(digest(Hash::sha384, abc)), "cb00753f 48");
  CHECK_EQUAL(first(digest(Hash::sha512, abc)), "ddaf35a1 64");
  CHECK_EQUAL(first(hmac(Hash::sha256, key, message)), "5bdcc146 32");  // RFC 4231, test case 2
  CHECK_EQUAL(first(hmac(Hash::sha384, key, message)), "af45d2e3 48");
  CHECK_EQUAL(first(hmac(Hash::sha512, key, message)), "164b7a7b 64");
}

TEST(powers_of_both_ends_agree) {
  for (const auto group : {Group::ffdhe2048, Group::ffdhe3072, Group::ffdhe4096, Group::ffdhe6144, Group::ffdhe8192}) {
    const auto one = begin_exchange(group), other = begin_exchange(group);
    const auto shared = shared_secret(group, one.secret, other.value);
    CHECK_EQUAL(shared.size(), group_bytes(group));
    CHECK(shared == shared_secret(group, other.secret, one.value));
    auto value = Octets(group_bytes(group));
    CHECK(shared_secret(group, one.secret, value).empty());
    value.back() = std::byte{1};
    CHECK(shared_secret(group, one.secret, value).empty());
    std::fill(value.begin(), value.end(), std::byte{0xff});
    CHECK(shared_secret(group, one.secret, value).empty());
  }
}

TEST(who_knows_the_keys_is_let_in) {
  Random random(2);
  const auto key = key_of(random), its = key_of(random, Hash::none), wrong = key_of(random);
  CHECK((meet({key, {}}, {key, {}}) == std::pair(true, true)));
  CHECK((meet({key, its}, {key, its}) == std::pair(true, true)));
  CHECK((meet({wrong, {}}, {key, {}}) == std::pair(false, false)));
  CHECK((meet({key, its}, {key, wrong}) == std::pair(false, false)));
  CHECK((meet({key, its}, {key, {}}) == std::pair(false, false)));
}
