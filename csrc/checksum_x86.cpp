// CRC-32C with the instructions of x86-64. Functions name the instructions they need, and the kernels
// are offered only where the processor has them: the rest of the module runs on any x86-64.
#include "checksum_kernels.hpp"

#if defined(__x86_64__) && defined(__GNUC__)  // clang defines __GNUC__ too

#include <immintrin.h>

#define PENSTOCK_SSE42 __attribute__((target("sse4.2,crc32")))
#define PENSTOCK_AVX512 __attribute__((target("avx512f,vpclmulqdq,sse4.2,crc32")))

namespace penstock {

namespace {

// How far ahead of the loads memory is fetched. The hardware's own prefetching loses track of three
// streams, and stops at pages: of 0.75, 1.5, 3 and 6 KiB, 3 KiB was the fastest on cold memory (Zen 4).
constexpr std::size_t kPrefetchBytes = 3072;

PENSTOCK_SSE42 std::uint32_t one_stream(std::uint32_t state, const char* from, std::size_t size_bytes) {
  std::uint64_t wide = state;
  for (; size_bytes >= 8; size_bytes -= 8, from += 8) wide = _mm_crc32_u64(wide, load_word(from));
  state = static_cast<std::uint32_t>(wide);
  for (; size_bytes > 0; --size_bytes) state = _mm_crc32_u8(state, static_cast<unsigned char>(*from++));
  return state;
}

// The instruction takes one word a cycle and gives its result three cycles later: three streams side
// by side keep it busy. With kCopy the words also go to `to`, past the cache.
constexpr std::size_t kStreamBytes = 512;
constexpr Advance kAdvanceOneStream(kStreamBytes);

template <bool kCopy>
PENSTOCK_SSE42 std::uint32_t three_streams(std::uint32_t state, const char* from, char* to) {
  std::uint64_t states[3] = {state, 0, 0};
  for (std::size_t line = 0; line < kStreamBytes; line += 64) {
    for (std::size_t i = 0; i < 3; ++i)
      _mm_prefetch(from + kPrefetchBytes + 3 * line + 64 * i, _MM_HINT_T0);
    for (std::size_t at = line; at < line + 64; at += 8) {
      for (std::size_t i = 0; i < 3; ++i) {
        const auto word = load_word(from + i * kStreamBytes + at);
        if constexpr (kCopy)
          _mm_stream_si64(reinterpret_cast<long long*>(to + i * kStreamBytes + at),
                          static_cast<long long>(word));
        states[i] = _mm_crc32_u64(states[i], word);
      }
    }
  }
  state = kAdvanceOneStream(static_cast<std::uint32_t>(states[0])) ^ static_cast<std::uint32_t>(states[1]);
  return kAdvanceOneStream(state) ^ static_cast<std::uint32_t>(states[2]);
}

std::uint32_t sse42_checksum(std::uint32_t crc, const void* data, std::size_t size_bytes) {
  constexpr auto kStep = 3 * kStreamBytes;
  const auto* from = static_cast<const char*>(data);
  auto state = ~crc;
  for (; size_bytes >= kStep; size_bytes -= kStep, from += kStep)
    state = three_streams<false>(state, from, nullptr);
  return ~one_stream(state, from, size_bytes);
}

std::uint32_t sse42_copy(void* destination, const void* source, std::size_t size_bytes, std::uint32_t crc) {
  if (size_bytes < kStreamedCopyBytes)
    return copy_in_blocks<sse42_checksum>(destination, source, size_bytes, crc);
  constexpr auto kStep = 3 * kStreamBytes;
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  auto state = ~crc;
  for (; size_bytes >= kStep; size_bytes -= kStep, from += kStep, to += kStep)
    state = three_streams<true>(state, from, to);
  _mm_sfence();  // other threads see these stores before a flag that is set next
  std::memcpy(to, from, size_bytes);
  return ~one_stream(state, from, size_bytes);
}

// Folding: four registers of 512 bits hold a polynomial that is congruent to all the bytes so far.
// Each turn moves it kFoldBytes up, by two carry-less products for each 128 bits, and adds the next.
constexpr std::size_t kFoldBytes = 256;

// The factors for the first 64 of 128 bits, which count x^64 more, and for the last. A product comes
// out one place low, as it has 127 bits: hence the -1.
constexpr std::uint64_t fold_factor(std::uint64_t exponent) {
  return std::uint64_t{power_of_x(exponent - 1)} << 32;
}
constexpr auto kFoldFirst = fold_factor(8 * kFoldBytes + 64), kFoldLast = fold_factor(8 * kFoldBytes);

enum class Store { kNone, kCached, kStreamed };  // what becomes of the bytes besides

// Takes as many bytes as it can fold, and gives their number.
template <Store kStore>
PENSTOCK_AVX512 std::size_t fold(std::uint32_t& state, const char* from, char* to, std::size_t size_bytes) {
  constexpr auto kXorOfThree = 0x96;
  constexpr auto kFirst = static_cast<long long>(kFoldFirst), kLast = static_cast<long long>(kFoldLast);
  const auto factors = _mm512_set_epi64(kLast, kFirst, kLast, kFirst, kLast, kFirst, kLast, kFirst);
  const auto zero = _mm512_setzero_si512();
  __m512i sums[] = {zero, zero, zero, zero};
  // Adds to the first bytes, and then to none.
  auto start = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state)));
  std::size_t done = 0;
  for (; done + kFoldBytes <= size_bytes; done += kFoldBytes) {
    for (std::size_t i = 0; i < 4; ++i) {
      const auto at = done + 64 * i;
      const auto line = _mm512_loadu_si512(from + at);
      if constexpr (kStore == Store::kCached) _mm512_storeu_si512(to + at, line);
      if constexpr (kStore == Store::kStreamed) {
        _mm_prefetch(from + kPrefetchBytes + at, _MM_HINT_T0);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), line);
      }
      const auto first = _mm512_clmulepi64_epi128(sums[i], factors, 0x00);
      const auto last = _mm512_clmulepi64_epi128(sums[i], factors, 0x11);
      sums[i] = _mm512_ternarylogic_epi64(first, last, line, kXorOfThree);
    }
    sums[0] = _mm512_xor_si512(sums[0], start);
    start = zero;
  }
  if (done == 0) return 0;
  alignas(64) char folded[kFoldBytes];
  for (std::size_t i = 0; i < 4; ++i) _mm512_store_si512(folded + 64 * i, sums[i]);
  state = one_stream(0, folded, kFoldBytes);
  return done;
}

std::uint32_t avx512_checksum(std::uint32_t crc, const void* data, std::size_t size_bytes) {
  const auto* from = static_cast<const char*>(data);
  auto state = ~crc;
  const auto done = fold<Store::kNone>(state, from, nullptr, size_bytes);
  return ~one_stream(state, from + done, size_bytes - done);
}

std::uint32_t avx512_copy(void* destination, const void* source, std::size_t size_bytes, std::uint32_t crc) {
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  auto state = ~crc;
  std::size_t done = 0;
  if (size_bytes < kStreamedCopyBytes) {
    done = fold<Store::kCached>(state, from, to, size_bytes);
  } else {
    const auto head = (64 - reinterpret_cast<std::uintptr_t>(to) % 64) % 64;  // such stores are aligned
    std::memcpy(to, from, head);
    state = one_stream(state, from, head);
    done = head + fold<Store::kStreamed>(state, from + head, to + head, size_bytes - head);
    _mm_sfence();  // other threads see these stores before a flag that is set next
  }
  std::memcpy(to + done, from + done, size_bytes - done);
  return ~one_stream(state, from + done, size_bytes - done);
}

}  // namespace

std::optional<Crc32cKernel> avx512_kernel() {
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("vpclmulqdq")) return std::nullopt;
  return Crc32cKernel{"AVX-512 folding", avx512_checksum, avx512_copy};
}

std::optional<Crc32cKernel> sse42_kernel() {
  if (!__builtin_cpu_supports("sse4.2")) return std::nullopt;
  return Crc32cKernel{"SSE 4.2", sse42_checksum, sse42_copy};
}

}  // namespace penstock

#else

namespace penstock {

std::optional<Crc32cKernel> avx512_kernel() { return std::nullopt; }
std::optional<Crc32cKernel> sse42_kernel() { return std::nullopt; }

}  // namespace penstock

#endif
