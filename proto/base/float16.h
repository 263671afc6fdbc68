// Floating-point types of 16 bits, and their conversion to and from fp32, which
// rounds to nearest even and keeps NaN.
//
//   bfloat16  the upper half of an IEEE binary32: 8 exponent bits, 7 mantissa
//             bits (Intel, "BFLOAT16 - Hardware Numerics Definition", 2018)
//   fp16      IEEE 754 binary16: 5 exponent bits, 10 mantissa bits
#pragma once

#include <bit>
#include <cstdint>

namespace remesh {

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

struct Fp16 {
  uint16_t bits;
};

constexpr float to_float(Fp16 v) {
  const uint32_t sign = (v.bits & 0x8000U) << 16;
  const uint32_t exponent = (v.bits >> 10) & 31U;
  const uint32_t mantissa = v.bits & 0x3FFU;
  uint32_t magnitude = 0;
  if (exponent == 31)
    magnitude = 0x7F800000U | mantissa << 13;
  else if (exponent == 0)  // a multiple of 2^-24, which fp32 represents
    magnitude =
        std::bit_cast<uint32_t>(static_cast<float>(mantissa) * 0x1p-24F);
  else
    magnitude = (exponent + 112) << 23 | mantissa << 13;
  return std::bit_cast<float>(sign | magnitude);
}

constexpr Fp16 to_fp16(float v) {
  const uint32_t u = std::bit_cast<uint32_t>(v);
  const uint32_t sign = (u >> 16) & 0x8000U;
  const uint32_t magnitude = u & 0x7FFFFFFFU;
  uint32_t bits = 0;
  if (magnitude > 0x7F800000U)
    bits = 0x7E00U | ((magnitude >> 13) & 0x3FFU);
  else if (magnitude >= 0x477FF000U)  // 65520 and more round to infinity
    bits = 0x7C00U;
  else if (magnitude < 0x38800000U)  // below 2^-14: a multiple of 2^-24, which
    bits = std::bit_cast<uint32_t>(  // is the last place of 0.5
               std::bit_cast<float>(magnitude) + 0.5F) -
           0x3F000000U;
  else
    bits = (magnitude + 0xFFFU + ((magnitude >> 13) & 1U) - 0x38000000U) >> 13;
  return Fp16{static_cast<uint16_t>(sign | bits)};
}

}  // namespace remesh
