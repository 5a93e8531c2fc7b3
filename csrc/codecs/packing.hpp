// How elements are packed: bitmask-CSR, or float32 rounded to 2 bytes, which loses precision.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

enum class Codec : std::uint8_t { kCsr, kFp16, kBf16 };

// So many elements in so many bytes. Where `packed_bytes` is 0 they are not packed.
struct Packing {
  std::size_t packed_bytes = 0, elements = 0, itemsize = 0;
  Codec codec = Codec::kCsr;
};

// The bytes that these elements take; 0 where the codec does not store such.
std::size_t packed_size(Codec codec, const void* data, std::size_t elements, std::size_t itemsize);

// False where they take other than `packed_bytes`: somebody writes to them now. fp16 makes what is larger than 65504
// that, not infinity; ties go to even.
bool pack(const Packing& packing, const void* data, void* packed);

// Whether `packed` can be expanded to so many elements; otherwise `data` holds anything.
bool unpack(const Packing& packing, const void* packed, void* data);

// The same where the packed bytes are the last ones of `data`, which is `capacity_bytes` long. `head`: room for
// head_bytes() of them.
bool unpack_in_place(const Packing& packing, void* data, std::size_t capacity_bytes, void* head);
std::size_t head_bytes(const Packing& packing);

}  // namespace penstock
