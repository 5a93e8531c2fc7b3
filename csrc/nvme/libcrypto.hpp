// OpenSSL's libcrypto, 3 or 1.1.1, loaded where it is first needed: by itself, or as Python's hashlib has loaded it.
// No function of it needs Python.
#pragma once

#include <cstddef>
#include <memory>

namespace penstock::nvme {

// Of its functions those that both have: what they give, their names, what they take.
#define PENSTOCK_LIBCRYPTO(FUNCTION)                                                                    \
  FUNCTION(void*, EVP_CIPHER_CTX_new, ())                                                               \
  FUNCTION(void, EVP_CIPHER_CTX_free, (void*))                                                          \
  FUNCTION(int, EVP_CIPHER_CTX_ctrl, (void*, int, int, void*))                                          \
  FUNCTION(const void*, EVP_aes_256_gcm, ())                                                            \
  FUNCTION(int, EVP_EncryptInit_ex, (void*, const void*, void*, const void*, const void*))              \
  FUNCTION(int, EVP_EncryptUpdate, (void*, void*, int*, const void*, int))                              \
  FUNCTION(int, EVP_EncryptFinal_ex, (void*, void*, int*))                                              \
  FUNCTION(int, EVP_DecryptInit_ex, (void*, const void*, void*, const void*, const void*))              \
  FUNCTION(int, EVP_DecryptUpdate, (void*, void*, int*, const void*, int))                              \
  FUNCTION(int, EVP_DecryptFinal_ex, (void*, void*, int*))                                              \
  FUNCTION(const void*, EVP_sha256, ())                                                                 \
  FUNCTION(const void*, EVP_sha384, ())                                                                 \
  FUNCTION(const void*, EVP_sha512, ())                                                                 \
  FUNCTION(int, EVP_Digest, (const void*, std::size_t, void*, unsigned*, const void*, void*))           \
  FUNCTION(void*, HMAC, (const void*, const void*, int, const void*, std::size_t, void*, unsigned*))    \
  FUNCTION(void*, DH_new_by_nid, (int))                                                                 \
  FUNCTION(void, DH_get0_pqg, (const void*, const void**, const void**, const void**))                  \
  FUNCTION(void, DH_free, (void*))                                                                      \
  FUNCTION(void*, BN_CTX_new, ())                                                                       \
  FUNCTION(void, BN_CTX_free, (void*))                                                                  \
  FUNCTION(void*, BN_new, ())                                                                           \
  FUNCTION(void, BN_clear_free, (void*))                                                                \
  FUNCTION(void*, BN_bin2bn, (const void*, int, void*))                                                 \
  FUNCTION(int, BN_bn2binpad, (const void*, void*, int))                                                \
  FUNCTION(int, BN_mod_exp_mont_consttime, (void*, const void*, const void*, const void*, void*, void*))

struct Libcrypto {
#define PENSTOCK_DECLARE(result, name, arguments) result(*name) arguments;
  PENSTOCK_LIBCRYPTO(PENSTOCK_DECLARE)
#undef PENSTOCK_DECLARE
};

// Throws Error where it is not there: `user` needs it, and `otherwise` says what does without.
const Libcrypto& libcrypto(const char* user, const char* otherwise = "");

// What one of its functions has made, and the one that frees it.
using Owned = std::unique_ptr<void, void (*)(void*)>;

}  // namespace penstock::nvme
