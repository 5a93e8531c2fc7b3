#include "nvme/sealing.hpp"

#include <dlfcn.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>

#include "nvme/cryptography.hpp"
#include "nvme/error.hpp"

namespace penstock::nvme {

namespace {

// Of OpenSSL 1.1 and 3: EVP's interface, which both have.
struct Libcrypto {
  void* (*context)();
  void (*free)(void*);
  const void* (*aes_256_gcm)();
  int (*begin_encryption)(void*, const void*, void*, const void*, const void*);
  int (*encrypt)(void*, void*, int*, const void*, int);
  int (*end_encryption)(void*, void*, int*);
  int (*begin_decryption)(void*, const void*, void*, const void*, const void*);
  int (*decrypt)(void*, void*, int*, const void*, int);
  int (*end_decryption)(void*, void*, int*);
  int (*control)(void*, int, int, void*);
  bool found = false;

  Libcrypto() {
    void* library = nullptr;
    for (const auto* name : {"libcrypto.so.3", "libcrypto.so.1.1"})
      if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    found = true;
    const auto find = [&](auto& function, const char* name) {
      void* const symbol = dlsym(library, name);
      std::memcpy(&function, &symbol, sizeof symbol);
      found = found && symbol != nullptr;
    };
    find(context, "EVP_CIPHER_CTX_new");
    find(free, "EVP_CIPHER_CTX_free");
    find(aes_256_gcm, "EVP_aes_256_gcm");
    find(begin_encryption, "EVP_EncryptInit_ex");
    find(encrypt, "EVP_EncryptUpdate");
    find(end_encryption, "EVP_EncryptFinal_ex");
    find(begin_decryption, "EVP_DecryptInit_ex");
    find(decrypt, "EVP_DecryptUpdate");
    find(end_decryption, "EVP_DecryptFinal_ex");
    find(control, "EVP_CIPHER_CTX_ctrl");
  }
};

const Libcrypto& libcrypto() {
  static const Libcrypto library;
  return library;
}

constexpr int kGetTag = 0x10, kSetTag = 0x11, kTagBytes = 16;

using Context = std::unique_ptr<void, void (*)(void*)>;
using Nonce = std::array<std::byte, 12>;

Nonce nonce_of(std::uint64_t number) {
  Nonce nonce{};
  std::memcpy(nonce.data(), &number, sizeof number);
  return nonce;
}

}  // namespace

Sealing::Sealing(std::uint64_t begin, std::uint64_t size_bytes)
    : begin_(begin), units_((std::max(size_bytes, begin) - begin) / kUnitBytes + 1) {
  if (!libcrypto().found)
    throw Error(Kind::not_supported, "nothing can be encrypted, since OpenSSL's libcrypto, 3 or 1.1, is not there: install "
                                     "it, or add &encrypt=0 to the URL and have everything cross the network in the clear");
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
  const auto& library = libcrypto();
  const Context context(library.context(), library.free);
  if (!context || library.begin_encryption(context.get(), library.aes_256_gcm(), nullptr, key_.data(), nullptr) != 1)
    return false;
  for (std::uint64_t at = 0; at < size_bytes; at += kUnitBytes) {
    auto& seal = seal_of(offset + at);
    seal.number = ++last_;  // never twice with this key
    const auto nonce = nonce_of(seal.number);
    int moved = 0, rest = 0;
    if (library.begin_encryption(context.get(), nullptr, nullptr, nullptr, nonce.data()) != 1 ||
        library.encrypt(context.get(), to + at, &moved, from + at, kUnitBytes) != 1 ||
        library.end_encryption(context.get(), to + at + moved, &rest) != 1 ||
        library.control(context.get(), kGetTag, kTagBytes, seal.tag.data()) != 1)
      return false;
  }
  return true;
}

bool Sealing::open(std::uint64_t offset, const std::byte* from, std::uint64_t skipped, std::byte* to,
                   std::uint64_t size_bytes) const {
  const auto& library = libcrypto();
  const Context context(library.context(), library.free);
  if (!context || library.begin_decryption(context.get(), library.aes_256_gcm(), nullptr, key_.data(), nullptr) != 1)
    return false;
  const auto end = skipped + size_bytes;
  std::array<std::byte, kUnitBytes> part;
  for (std::uint64_t at = 0; at < end; at += kUnitBytes) {
    auto seal = seal_of(offset + at);
    const auto nonce = nonce_of(seal.number);
    const auto first = std::max(at, skipped), last = std::min(at + kUnitBytes, end);
    auto* const whole = last - first == kUnitBytes ? to + (at - skipped) : part.data();
    int moved = 0, rest = 0;
    if (seal.number == 0 || library.begin_decryption(context.get(), nullptr, nullptr, nullptr, nonce.data()) != 1 ||
        library.decrypt(context.get(), whole, &moved, from + at, kUnitBytes) != 1 ||
        library.control(context.get(), kSetTag, kTagBytes, seal.tag.data()) != 1 ||
        library.end_decryption(context.get(), whole + moved, &rest) != 1) {
      std::memset(to, 0, size_bytes);  // not one byte that was not shown to be right
      return false;
    }
    if (whole == part.data()) std::memcpy(to + (first - skipped), part.data() + (first - at), last - first);
  }
  return true;
}

}  // namespace penstock::nvme
