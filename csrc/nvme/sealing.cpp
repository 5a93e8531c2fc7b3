#include "nvme/sealing.hpp"

#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "nvme/cryptography.hpp"
#include "nvme/libcrypto.hpp"

namespace penstock::nvme {

namespace {

constexpr int kGetTag = 0x10, kSetTag = 0x11, kTagBytes = 16;

using Nonce = std::array<std::byte, 12>;

Nonce nonce_of(std::uint64_t number) {
  Nonce nonce{};
  std::memcpy(nonce.data(), &number, sizeof number);
  return nonce;
}

}  // namespace

Sealing::Sealing(std::uint64_t begin, std::uint64_t size_bytes)
    : library_(libcrypto("encryption", ", or add &encrypt=0 to the URL and have everything cross the network in the clear")),
      begin_(begin),
      units_((std::max(size_bytes, begin) - begin) / kUnitBytes + 1) {
  fill_random(key_);
  // Zeros, and memory only for what is written.
  void* const memory = mmap(nullptr, units_ * sizeof(Seal), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  seals_ = static_cast<Seal*>(memory);
}

Sealing::~Sealing() {
  explicit_bzero(key_.data(), key_.size());
  munmap(seals_, units_ * sizeof(Seal));
}

bool Sealing::seal(std::uint64_t offset, const std::byte* from, std::byte* to, std::uint64_t size_bytes) {
  const Owned context(library_.EVP_CIPHER_CTX_new(), library_.EVP_CIPHER_CTX_free);
  if (!context || library_.EVP_EncryptInit_ex(context.get(), library_.EVP_aes_256_gcm(), nullptr, key_.data(), nullptr) != 1)
    return false;
  for (std::uint64_t at = 0; at < size_bytes; at += kUnitBytes) {
    auto& seal = seal_of(offset + at);
    seal.number = ++last_;  // never twice with this key
    const auto nonce = nonce_of(seal.number);
    int moved = 0, rest = 0;
    if (library_.EVP_EncryptInit_ex(context.get(), nullptr, nullptr, nullptr, nonce.data()) != 1 ||
        library_.EVP_EncryptUpdate(context.get(), to + at, &moved, from + at, kUnitBytes) != 1 ||
        library_.EVP_EncryptFinal_ex(context.get(), to + at + moved, &rest) != 1 ||
        library_.EVP_CIPHER_CTX_ctrl(context.get(), kGetTag, kTagBytes, seal.tag.data()) != 1)
      return false;
  }
  return true;
}

bool Sealing::open(std::uint64_t offset, const std::byte* from, std::uint64_t skipped, std::byte* to,
                   std::uint64_t size_bytes) const {
  const Owned context(library_.EVP_CIPHER_CTX_new(), library_.EVP_CIPHER_CTX_free);
  if (!context || library_.EVP_DecryptInit_ex(context.get(), library_.EVP_aes_256_gcm(), nullptr, key_.data(), nullptr) != 1)
    return false;
  const auto end = skipped + size_bytes;
  std::array<std::byte, kUnitBytes> part;
  for (std::uint64_t at = 0; at < end; at += kUnitBytes) {
    auto seal = seal_of(offset + at);
    const auto nonce = nonce_of(seal.number);
    const auto first = std::max(at, skipped), last = std::min(at + kUnitBytes, end);
    auto* const whole = last - first == kUnitBytes ? to + (at - skipped) : part.data();
    int moved = 0, rest = 0;
    if (seal.number == 0 || library_.EVP_DecryptInit_ex(context.get(), nullptr, nullptr, nullptr, nonce.data()) != 1 ||
        library_.EVP_DecryptUpdate(context.get(), whole, &moved, from + at, kUnitBytes) != 1 ||
        library_.EVP_CIPHER_CTX_ctrl(context.get(), kSetTag, kTagBytes, seal.tag.data()) != 1 ||
        library_.EVP_DecryptFinal_ex(context.get(), whole + moved, &rest) != 1) {
      std::memset(to, 0, size_bytes);  // not one byte that was not shown to be right
      return false;
    }
    if (whole == part.data()) std::memcpy(to + (first - skipped), part.data() + (first - at), last - first);
  }
  return true;
}

}  // namespace penstock::nvme
