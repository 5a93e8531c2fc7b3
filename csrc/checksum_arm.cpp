// CRC-32C with the instructions of 64-bit ARM: part of every Apple chip, optional in ARMv8.0 elsewhere.
#include "checksum_kernels.hpp"

#if defined(__AARCH64EL__) && defined(__GNUC__) && \
    (defined(__linux__) || defined(__APPLE__) || defined(__ARM_FEATURE_CRC32))

#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#if defined(__ARM_FEATURE_CRC32)
#define PENSTOCK_CRC
#elif defined(__clang__)
#define PENSTOCK_CRC __attribute__((target("crc")))
#else
#define PENSTOCK_CRC __attribute__((target("+crc")))
#endif

namespace penstock {

namespace {

// The builtins rather than <arm_acle.h>, which some compilers leave empty without -march=...+crc.
#if defined(__clang__)
PENSTOCK_CRC inline std::uint32_t add_word(std::uint32_t state, std::uint64_t word) {
  return __builtin_arm_crc32cd(state, word);
}
PENSTOCK_CRC inline std::uint32_t add_byte(std::uint32_t state, char byte) {
  return __builtin_arm_crc32cb(state, static_cast<unsigned char>(byte));
}
#else
PENSTOCK_CRC inline std::uint32_t add_word(std::uint32_t state, std::uint64_t word) {
  return __builtin_aarch64_crc32cx(state, word);
}
PENSTOCK_CRC inline std::uint32_t add_byte(std::uint32_t state, char byte) {
  return __builtin_aarch64_crc32cb(state, static_cast<unsigned char>(byte));
}
#endif

// As on x86, one word a cycle with a few cycles to the result: three streams side by side.
constexpr std::size_t kStreamBytes = 512;
constexpr Advance kAdvanceOneStream(kStreamBytes);

PENSTOCK_CRC std::uint32_t three_streams(std::uint32_t state, const char* from) {
  std::uint32_t states[3] = {state, 0, 0};
  for (std::size_t at = 0; at < kStreamBytes; at += 8) {
    for (std::size_t i = 0; i < 3; ++i)
      states[i] = add_word(states[i], load_word(from + i * kStreamBytes + at));
  }
  return kAdvanceOneStream(kAdvanceOneStream(states[0]) ^ states[1]) ^ states[2];
}

PENSTOCK_CRC std::uint32_t arm_checksum(std::uint32_t crc, const void* data, std::size_t size_bytes) {
  constexpr auto kStep = 3 * kStreamBytes;
  const auto* from = static_cast<const char*>(data);
  auto state = ~crc;
  for (; size_bytes >= kStep; size_bytes -= kStep, from += kStep) state = three_streams(state, from);
  for (; size_bytes >= 8; size_bytes -= 8, from += 8) state = add_word(state, load_word(from));
  for (; size_bytes > 0; --size_bytes) state = add_byte(state, *from++);
  return ~state;
}

bool supported() {
#if defined(__ARM_FEATURE_CRC32) || defined(__APPLE__)
  return true;
#else
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}

}  // namespace

std::optional<Crc32cKernel> arm_kernel() {
  if (!supported()) return std::nullopt;
  return Crc32cKernel{"ARM CRC32", arm_checksum, copy_in_blocks<arm_checksum>};
}

}  // namespace penstock

#else

namespace penstock {

std::optional<Crc32cKernel> arm_kernel() { return std::nullopt; }

}  // namespace penstock

#endif
