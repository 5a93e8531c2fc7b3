// What is written to a namespace, encrypted: AES-256-GCM with a key that nobody else ever has, by OpenSSL's
// libcrypto. Of each 4096 bytes a number and a tag stay in memory: what a target gives back in their place, be it
// older, moved or changed, is no answer.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace penstock::nvme {

struct Libcrypto;

class Sealing {
 public:
  static constexpr std::uint64_t kUnitBytes = 4096;

  // Of the bytes of a namespace from `begin` on. Throws Error where there is no libcrypto, std::system_error.
  Sealing(std::uint64_t begin, std::uint64_t size_bytes);
  Sealing(const Sealing&) = delete;
  Sealing& operator=(const Sealing&) = delete;
  ~Sealing();

  std::uint64_t begin() const { return begin_; }
  // Whole units at `offset`; two threads never have one. False: libcrypto has failed.
  bool seal(std::uint64_t offset, const std::byte* from, std::byte* to, std::uint64_t size_bytes);
  // Of the units at `offset`, the bytes from `skipped` on. False: they are not what was written last.
  bool open(std::uint64_t offset, const std::byte* from, std::uint64_t skipped, std::byte* to,
            std::uint64_t size_bytes) const;

 private:
  struct Seal {
    std::uint64_t number;  // 0: nothing was written
    std::array<std::byte, 16> tag;
  };
  Seal& seal_of(std::uint64_t offset) const { return seals_[(offset - begin_) / kUnitBytes]; }

  const Libcrypto& library_;
  const std::uint64_t begin_, units_;
  Seal* seals_;
  std::array<std::byte, 32> key_;
  std::atomic<std::uint64_t> last_ = 0;
};

}  // namespace penstock::nvme
