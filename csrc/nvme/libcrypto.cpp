#include "nvme/libcrypto.hpp"

#include <dlfcn.h>

#include <cstring>
#include <optional>
#include <string>

#include "nvme/error.hpp"

namespace penstock::nvme {

namespace {

std::optional<Libcrypto> load() {
  void* library = nullptr;
  for (const auto* name : {"libcrypto.so.3", "libcrypto.so.1.1"})
    if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::nullopt;
  Libcrypto found;
  bool whole = true;
  const auto find = [&](auto& function, const char* name) {
    void* const symbol = dlsym(library, name);
    std::memcpy(&function, &symbol, sizeof symbol);
    whole = whole && symbol != nullptr;
  };
#define PENSTOCK_FIND(result, name, arguments) find(found.name, #name);
  PENSTOCK_LIBCRYPTO(PENSTOCK_FIND)
#undef PENSTOCK_FIND
  return whole ? std::optional(found) : std::nullopt;
}

}  // namespace

const Libcrypto& libcrypto(const char* user, const char* otherwise) {
  static const auto library = load();
  if (!library)
    throw Error(Kind::not_supported,
                std::string(user) + " needs OpenSSL's libcrypto, 3 or 1.1.1, which is not there: install it" + otherwise);
  return *library;
}

}  // namespace penstock::nvme
