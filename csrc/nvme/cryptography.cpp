#include "nvme/cryptography.hpp"

#include <sys/random.h>

#include <cerrno>
#include <system_error>

#include "nvme/error.hpp"
#include "nvme/libcrypto.hpp"

namespace penstock::nvme {

namespace {

constexpr const char* kUser = "authentication by keys";
constexpr std::size_t kSecretBytes = 64;  // twice the strength of the largest group, and more
constexpr int kFirstGroup = 1126;         // OpenSSL's number of ffdhe2048, which the others follow

// Only where memory is short, or the system allows no such function.
void require(bool done) {
  if (!done) throw Error(Kind::not_supported, "OpenSSL's libcrypto does not do what authentication by keys needs");
}

const void* function_of(const Libcrypto& library, Hash hash) {
  return hash == Hash::sha256 ? library.EVP_sha256() : hash == Hash::sha384 ? library.EVP_sha384() : library.EVP_sha512();
}

// `base` to the power of `secret`, in a time that says nothing of the secret. Empty where the base is not 2 to p - 2:
// others are powers of small order, or none of the group.
Octets raised(Group group, std::span<const std::byte> base, std::span<const std::byte> secret) {
  const auto& library = libcrypto(kUser);
  const auto number = [&](std::span<const std::byte> octets) {
    return Owned(library.BN_bin2bn(octets.data(), static_cast<int>(octets.size()), nullptr), library.BN_clear_free);
  };
  const Owned parameters(library.DH_new_by_nid(kFirstGroup + static_cast<int>(group) - 1), library.DH_free);
  const Owned context(library.BN_CTX_new(), library.BN_CTX_free), result(library.BN_new(), library.BN_clear_free);
  const auto value = number(base), exponent = number(secret);
  require(parameters && context && result && value && exponent);
  const void* prime = nullptr;
  library.DH_get0_pqg(parameters.get(), &prime, nullptr, nullptr);
  Octets octets(group_bytes(group)), one(octets.size()), padded(octets.size());
  const auto write = [&](const void* from, Octets& to) {
    require(library.BN_bn2binpad(from, to.data(), static_cast<int>(to.size())) >= 0);
  };
  write(prime, octets);
  write(value.get(), padded);
  octets.back() ^= std::byte{1};  // the prime is odd
  one.back() = std::byte{1};
  if (padded <= one || padded >= octets) return {};
  require(library.BN_mod_exp_mont_consttime(result.get(), value.get(), exponent.get(), prime, context.get(), nullptr) == 1);
  write(result.get(), octets);
  return octets;
}

}  // namespace

std::size_t digest_bytes(Hash hash) {
  constexpr std::size_t kBytes[] = {0, 32, 48, 64};
  return kBytes[static_cast<int>(hash)];
}

Octets digest(Hash hash, std::span<const std::byte> message) {
  const auto& library = libcrypto(kUser);
  Octets result(digest_bytes(hash));
  require(library.EVP_Digest(message.data(), message.size(), result.data(), nullptr, function_of(library, hash), nullptr) == 1);
  return result;
}

Octets hmac(Hash hash, std::span<const std::byte> key, std::span<const std::byte> message) {
  const auto& library = libcrypto(kUser);
  Octets result(digest_bytes(hash));
  require(library.HMAC(function_of(library, hash), key.data(), static_cast<int>(key.size()), message.data(),
                       message.size(), result.data(), nullptr) != nullptr);
  return result;
}

std::size_t group_bytes(Group group) {
  constexpr std::size_t kBytes[] = {0, 256, 384, 512, 768, 1024};
  return kBytes[static_cast<int>(group)];
}

Exchange begin_exchange(Group group) {
  if (group == Group::null) return {};
  constexpr std::byte kTwo[] = {std::byte{2}};
  Exchange exchange{Octets(kSecretBytes), {}};
  fill_random(exchange.secret);
  exchange.value = raised(group, kTwo, exchange.secret);
  return exchange;
}

Octets shared_secret(Group group, std::span<const std::byte> secret, std::span<const std::byte> others_value) {
  if (group == Group::null || others_value.size() != group_bytes(group)) return {};
  return raised(group, others_value, secret);
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
