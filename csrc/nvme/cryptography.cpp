#include "nvme/cryptography.hpp"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace penstock::nvme {

// -- SHA-2 -----------------------------------------------------------------------------------------

namespace {

template <class Word>
Word big_endian(const std::byte* at) {
  Word word = 0;
  for (std::size_t i = 0; i < sizeof word; ++i) word = static_cast<Word>(word << 8 | static_cast<Word>(at[i]));
  return word;
}

template <class Word>
void put_big_endian(Word word, std::byte* at) {
  for (std::size_t i = sizeof word; i > 0; --i, word >>= 8)
    at[i - 1] = static_cast<std::byte>(word & 0xff);
}

// The fractions of the roots of the first primes (FIPS 180-4, 4.2 and 5.3). Those of SHA-256 are the first halves.
constexpr std::uint64_t kRounds[80] = {
    0x428a2f98d728ae22, 0x7137449123ef65cd, 0xb5c0fbcfec4d3b2f, 0xe9b5dba58189dbbc, 0x3956c25bf348b538,
    0x59f111f1b605d019, 0x923f82a4af194f9b, 0xab1c5ed5da6d8118, 0xd807aa98a3030242, 0x12835b0145706fbe,
    0x243185be4ee4b28c, 0x550c7dc3d5ffb4e2, 0x72be5d74f27b896f, 0x80deb1fe3b1696b1, 0x9bdc06a725c71235,
    0xc19bf174cf692694, 0xe49b69c19ef14ad2, 0xefbe4786384f25e3, 0x0fc19dc68b8cd5b5, 0x240ca1cc77ac9c65,
    0x2de92c6f592b0275, 0x4a7484aa6ea6e483, 0x5cb0a9dcbd41fbd4, 0x76f988da831153b5, 0x983e5152ee66dfab,
    0xa831c66d2db43210, 0xb00327c898fb213f, 0xbf597fc7beef0ee4, 0xc6e00bf33da88fc2, 0xd5a79147930aa725,
    0x06ca6351e003826f, 0x142929670a0e6e70, 0x27b70a8546d22ffc, 0x2e1b21385c26c926, 0x4d2c6dfc5ac42aed,
    0x53380d139d95b3df, 0x650a73548baf63de, 0x766a0abb3c77b2a8, 0x81c2c92e47edaee6, 0x92722c851482353b,
    0xa2bfe8a14cf10364, 0xa81a664bbc423001, 0xc24b8b70d0f89791, 0xc76c51a30654be30, 0xd192e819d6ef5218,
    0xd69906245565a910, 0xf40e35855771202a, 0x106aa07032bbd1b8, 0x19a4c116b8d2d0c8, 0x1e376c085141ab53,
    0x2748774cdf8eeb99, 0x34b0bcb5e19b48a8, 0x391c0cb3c5c95a63, 0x4ed8aa4ae3418acb, 0x5b9cca4f7763e373,
    0x682e6ff3d6b2b8a3, 0x748f82ee5defb2fc, 0x78a5636f43172f60, 0x84c87814a1f0ab72, 0x8cc702081a6439ec,
    0x90befffa23631e28, 0xa4506cebde82bde9, 0xbef9a3f7b2c67915, 0xc67178f2e372532b, 0xca273eceea26619c,
    0xd186b8c721c0c207, 0xeada7dd6cde0eb1e, 0xf57d4f7fee6ed178, 0x06f067aa72176fba, 0x0a637dc5a2c898a6,
    0x113f9804bef90dae, 0x1b710b35131c471b, 0x28db77f523047d84, 0x32caab7b40c72493, 0x3c9ebe0a15c9bebc,
    0x431d67c49c100d4c, 0x4cc5d4becb3e42b6, 0x597f299cfc657e2a, 0x5fcb6fab3ad6faec, 0x6c44198c4a475817};
constexpr std::array<std::uint64_t, 8> kBegin512 = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
constexpr std::array<std::uint64_t, 8> kBegin384 = {
    0xcbbb9d5dc1059ed8, 0x629a292a367cd507, 0x9159015a3070dd17, 0x152fecd8f70e5939,
    0x67332667ffc00b31, 0x8eb44a8768581511, 0xdb0c2e0d64f98fa7, 0x47b5481dbefa4fa4};

// How far the words are turned: both functions of the state, then both of the schedule, whose last is a shift.
struct Turns256 {
  static constexpr int kRounds = 64, kState[2][3] = {{2, 13, 22}, {6, 11, 25}},
                       kSchedule[2][3] = {{7, 18, 3}, {17, 19, 10}};
};
struct Turns512 {
  static constexpr int kRounds = 80, kState[2][3] = {{28, 34, 39}, {14, 18, 41}},
                       kSchedule[2][3] = {{1, 8, 7}, {19, 61, 6}};
};

template <class Word, class Turns>
void compress(std::array<Word, 8>& state, const std::byte* block) {
  const auto turned = [](Word x, const int (&by)[3]) {
    return static_cast<Word>(std::rotr(x, by[0]) ^ std::rotr(x, by[1]) ^ std::rotr(x, by[2]));
  };
  const auto shifted = [](Word x, const int (&by)[3]) {
    return static_cast<Word>(std::rotr(x, by[0]) ^ std::rotr(x, by[1]) ^ x >> by[2]);
  };
  Word schedule[Turns::kRounds];
  for (int i = 0; i < 16; ++i) schedule[i] = big_endian<Word>(block + sizeof(Word) * static_cast<std::size_t>(i));
  for (int i = 16; i < Turns::kRounds; ++i)
    schedule[i] = shifted(schedule[i - 2], Turns::kSchedule[1]) + schedule[i - 7] +
                  shifted(schedule[i - 15], Turns::kSchedule[0]) + schedule[i - 16];
  auto [a, b, c, d, e, f, g, h] = state;
  for (int i = 0; i < Turns::kRounds; ++i) {
    const auto constant = static_cast<Word>(kRounds[i] >> (64 - 8 * sizeof(Word)));
    const Word one = h + turned(e, Turns::kState[1]) + ((e & f) ^ (~e & g)) + constant + schedule[i];
    const Word two = turned(a, Turns::kState[0]) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
  }
  const Word added[] = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < state.size(); ++i) state[i] += added[i];
}

template <class Word, class Turns>
Octets digest_of(const std::array<std::uint64_t, 8>& begin, std::span<const std::byte> message, std::size_t size) {
  constexpr std::size_t kBlock = 16 * sizeof(Word), kLength = 2 * sizeof(Word);
  std::array<Word, 8> state;
  for (std::size_t i = 0; i < state.size(); ++i) state[i] = static_cast<Word>(begin[i] >> (64 - 8 * sizeof(Word)));
  Octets padded(message.begin(), message.end());
  padded.push_back(std::byte{0x80});
  padded.resize((padded.size() + kLength + kBlock - 1) / kBlock * kBlock);
  put_big_endian(std::uint64_t{message.size()} * 8, padded.data() + padded.size() - 8);
  for (std::size_t at = 0; at < padded.size(); at += kBlock) compress<Word, Turns>(state, padded.data() + at);
  Octets result(sizeof state);
  for (std::size_t i = 0; i < state.size(); ++i) put_big_endian(state[i], result.data() + i * sizeof(Word));
  result.resize(size);
  return result;
}

}  // namespace

std::size_t digest_bytes(Hash hash) {
  constexpr std::size_t kBytes[] = {0, 32, 48, 64};
  return kBytes[static_cast<int>(hash)];
}

Octets digest(Hash hash, std::span<const std::byte> message) {
  const auto size = digest_bytes(hash);
  if (hash == Hash::sha256) return digest_of<std::uint32_t, Turns256>(kBegin512, message, size);
  return digest_of<std::uint64_t, Turns512>(hash == Hash::sha384 ? kBegin384 : kBegin512, message, size);
}

Octets hmac(Hash hash, std::span<const std::byte> key, std::span<const std::byte> message) {
  const std::size_t block = hash == Hash::sha256 ? 64 : 128;
  Octets padded = key.size() > block ? digest(hash, key) : Octets(key.begin(), key.end());
  padded.resize(block);
  const auto keyed = [&](std::uint8_t pad, std::span<const std::byte> text) {
    auto input = padded;
    for (auto& octet : input) octet ^= std::byte{pad};
    input.insert(input.end(), text.begin(), text.end());
    return digest(hash, input);
  };
  return keyed(0x5c, keyed(0x36, message));
}

// -- Diffie-Hellman --------------------------------------------------------------------------------

namespace {

using Limbs = std::vector<std::uint64_t>;  // the lowest first
using Wide = unsigned __int128;

constexpr std::size_t kSecretBytes = 64;  // twice the strength of the largest group, and more

// e = 1 + 1/1 + 1/2! + ... in 128 limbs, of which the last is before the point: the primes are made of its digits.
const Limbs& digits_of_e() {
  static const Limbs digits = [] {
    Limbs sum(128), term(128);
    sum.back() = term.back() = 1;
    for (std::uint64_t divisor = 1; std::any_of(term.begin(), term.end(), [](auto limb) { return limb != 0; });
         ++divisor) {
      std::uint64_t rest = 0, carry = 0;
      for (auto at = term.size(); at-- > 0;) {
        const auto part = Wide{rest} << 64 | term[at];
        term[at] = static_cast<std::uint64_t>(part / divisor);
        rest = static_cast<std::uint64_t>(part % divisor);
      }
      for (std::size_t at = 0; at < sum.size(); ++at) {
        const auto added = Wide{sum[at]} + term[at] + carry;
        sum[at] = static_cast<std::uint64_t>(added);
        carry = static_cast<std::uint64_t>(added >> 64);
      }
    }
    return sum;
  }();
  return digits;
}

// p = 2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1 (RFC 7919, appendix A)
Limbs prime_of(Group group) {
  constexpr std::uint64_t kX[] = {0, 560316, 2625351, 5736041, 15705020, 10965728};
  const auto limbs = group_bytes(group) / 8;
  Limbs prime(limbs, ~std::uint64_t{0});
  // Of e, whose point is after 127 limbs, the digits before b - 130 places: a shift by whole limbs and by 2 bits.
  const auto& digits = digits_of_e();
  const auto first = 127 - (limbs - 2);
  std::uint64_t carry = kX[static_cast<int>(group)] - 1;
  for (std::size_t at = 0; at < limbs - 2; ++at) {
    const auto place = first + at;
    const auto next = place + 1 < digits.size() ? digits[place + 1] << 62 : 0;
    const auto added = Wide{digits[place] >> 2 | next} + carry;
    prime[1 + at] = static_cast<std::uint64_t>(added);
    carry = static_cast<std::uint64_t>(added >> 64);
  }
  return prime;
}

// one -= other; gives whether it was smaller.
std::uint64_t subtract(Limbs& one, const Limbs& other) {
  std::uint64_t borrow = 0;
  for (std::size_t at = 0; at < other.size(); ++at) {
    const auto left = Wide{one[at]} - other[at] - borrow;
    one[at] = static_cast<std::uint64_t>(left);
    borrow = static_cast<std::uint64_t>(left >> 64) & 1;
  }
  return borrow;
}

// Montgomery's product, x y / 2^(64 n) modulo the prime, whose lowest limb is -1: its inverse there is 1.
Limbs product(const Limbs& x, const Limbs& y, const Limbs& prime) {
  const auto n = prime.size();
  Limbs sum(n + 2);
  for (const auto limb : x) {
    std::uint64_t carry = 0;
    const auto add = [&](std::size_t at, std::uint64_t a, std::uint64_t b) {
      const auto added = Wide{a} * b + sum[at] + carry;
      sum[at] = static_cast<std::uint64_t>(added);
      carry = static_cast<std::uint64_t>(added >> 64);
    };
    for (std::size_t at = 0; at < n; ++at) add(at, limb, y[at]);
    add(n, 0, 0);
    sum[n + 1] = carry;
    carry = 0;
    const auto factor = sum[0];
    for (std::size_t at = 0; at < n; ++at) add(at, factor, prime[at]);
    add(n, 0, 0);
    sum[n + 1] += carry;
    sum.erase(sum.begin());
    sum.push_back(0);
  }
  auto less = sum;
  const bool smaller = subtract(less, prime) > less[n];  // what is beyond the highest limb counts
  less.resize(n);
  sum.resize(n);
  return smaller ? sum : less;
}

Limbs limbs_of(std::span<const std::byte> value) {
  Limbs limbs(value.size() / 8);
  for (std::size_t at = 0; at < limbs.size(); ++at)
    limbs[at] = big_endian<std::uint64_t>(value.data() + value.size() - 8 * (at + 1));
  return limbs;
}

Octets raised(const Limbs& base, std::span<const std::byte> exponent, const Limbs& prime) {
  const auto n = prime.size();
  Limbs one(n), square(n);  // in Montgomery's form: 2^(64 n), and its square, modulo the prime
  for (std::size_t at = 0; at < n; ++at) one[at] = ~prime[at];
  one[0] += 1;  // 2^(64 n) - prime: below the prime, whose highest bit is set
  square = one;
  const auto twice = [&](Limbs& value) {
    std::uint64_t carry = 0;
    for (auto& limb : value) {
      const auto high = limb >> 63;
      limb = limb << 1 | carry;
      carry = high;
    }
    auto less = value;
    if (subtract(less, prime) <= carry) value = less;
  };
  for (std::size_t i = 0; i < 64 * n; ++i) twice(square);
  const auto factor = product(base, square, prime);
  Limbs result = one;
  for (const auto octet : exponent)
    for (int bit = 7; bit >= 0; --bit) {  // both products each time, whatever the bit
      result = product(result, result, prime);
      auto times = product(result, factor, prime);
      const auto mask = std::uint64_t{0} - (static_cast<std::uint64_t>(octet) >> bit & 1);
      for (std::size_t at = 0; at < n; ++at) result[at] = (times[at] & mask) | (result[at] & ~mask);
    }
  Limbs plain(n);
  plain[0] = 1;
  result = product(result, plain, prime);
  Octets octets(8 * n);
  for (std::size_t at = 0; at < n; ++at) put_big_endian(result[at], octets.data() + octets.size() - 8 * (at + 1));
  return octets;
}

}  // namespace

std::size_t group_bytes(Group group) {
  constexpr std::size_t kBytes[] = {0, 256, 384, 512, 768, 1024};
  return kBytes[static_cast<int>(group)];
}

Exchange begin_exchange(Group group) {
  if (group == Group::null) return {};
  Exchange exchange{Octets(kSecretBytes), {}};
  fill_random(exchange.secret);
  Limbs two(group_bytes(group) / 8);
  two[0] = 2;
  exchange.value = raised(two, exchange.secret, prime_of(group));
  return exchange;
}

Octets shared_secret(Group group, std::span<const std::byte> secret, std::span<const std::byte> others_value) {
  if (group == Group::null || others_value.size() != group_bytes(group)) return {};
  const auto prime = prime_of(group);
  const auto value = limbs_of(others_value);
  auto last = prime;  // of the values that are no power of small order: prime - 2
  last[0] -= 2;
  auto left = last;
  Limbs least(value.size());
  least[0] = 2;
  auto above = value;
  if (subtract(left, value) != 0 || subtract(above, least) != 0) return {};
  return raised(value, secret, prime);
}

void fill_random(std::span<std::byte> into) {
  while (!into.empty()) {
    const auto count = getrandom(into.data(), into.size(), 0);
    if (count < 0 && errno != EINTR) throw std::system_error(errno, std::generic_category(), "getrandom");
    if (count > 0) into = into.subspan(static_cast<std::size_t>(count));
  }
}

bool same(std::span<const std::byte> one, std::span<const std::byte> other) {
  if (one.size() != other.size()) return false;
  auto differs = std::byte{0};
  for (std::size_t i = 0; i < one.size(); ++i) differs |= one[i] ^ other[i];
  return differs == std::byte{0};
}

}  // namespace penstock::nvme
