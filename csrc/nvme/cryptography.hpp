// SHA-2 and HMAC, and Diffie-Hellman in the groups of RFC 7919, by OpenSSL's libcrypto, as authentication needs them.
// Nothing here needs Python, since what is spilled has to come back while the program holds the GIL. What computes
// throws Error where there is no libcrypto.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace penstock::nvme {

using Octets = std::vector<std::byte>;

// Their numbers are those of DH-HMAC-CHAP (NVM Express Base 2.0, 8.13.5).
enum class Hash : std::uint8_t { none = 0, sha256 = 1, sha384 = 2, sha512 = 3 };
inline constexpr std::uint8_t kLastHash = 3;
enum class Group : std::uint8_t { null = 0, ffdhe2048 = 1, ffdhe3072 = 2, ffdhe4096 = 3, ffdhe6144 = 4, ffdhe8192 = 5 };
inline constexpr std::uint8_t kLastGroup = 5;

std::size_t digest_bytes(Hash hash);  // 0: none
Octets digest(Hash hash, std::span<const std::byte> message);
Octets hmac(Hash hash, std::span<const std::byte> key, std::span<const std::byte> message);

std::size_t group_bytes(Group group);  // of a public value; 0: none
// A secret exponent, and 2 to its power.
struct Exchange {
  Octets secret, value;
};
Exchange begin_exchange(Group group);
// The other's value to the power of the secret; empty where the value is none of the group, or 1 or -1.
Octets shared_secret(Group group, std::span<const std::byte> secret, std::span<const std::byte> others_value);

// From the system. Throws std::system_error.
void fill_random(std::span<std::byte> into);
// In a time that depends on the sizes alone.
bool same(std::span<const std::byte> one, std::span<const std::byte> other);

}  // namespace penstock::nvme
