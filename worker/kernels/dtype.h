// Dtype and bfloat16: the element types that kernels compute in.
//
// bfloat16 is the upper half of an IEEE binary32: 8 exponent bits, 7 mantissa
// bits. Conversion rounds to nearest even and keeps NaN (Intel, "BFLOAT16 -
// Hardware Numerics Definition", 2018).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace remesh::kernels {

enum class Dtype { kFp32, kBf16 };

constexpr size_t dtype_size(Dtype d) { return d == Dtype::kFp32 ? 4 : 2; }
constexpr const char* dtype_name(Dtype d) {
  return d == Dtype::kFp32 ? "fp32" : "bf16";
}

struct Bf16 {
  uint16_t bits;
};

constexpr float to_float(Bf16 v) {
  return std::bit_cast<float>(static_cast<uint32_t>(v.bits) << 16);
}

constexpr Bf16 to_bf16(float v) {
  const uint32_t u = std::bit_cast<uint32_t>(v);
  const uint32_t rounded = (u + 0x7FFFU + ((u >> 16) & 1U)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40U;
  const bool is_nan = (u & 0x7FFFFFFFU) > 0x7F800000U;
  return Bf16{static_cast<uint16_t>(is_nan ? nan : rounded)};
}

}  // namespace remesh::kernels
