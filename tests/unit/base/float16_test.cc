#include "proto/base/float16.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "tests/testing/seed.h"

namespace remesh {
namespace {

// The nearest fp16 by definition: the last place of a value in [2^e, 2^(e+1))
// is 2^(e-10), and 2^-24 below 2^-14.
float nearest_half(float v) {
  if (std::isnan(v) || std::isinf(v)) return v;
  const int e = v == 0 ? -14 : std::max(-14, std::ilogb(v));
  const double unit = std::ldexp(1.0, e - 10);
  const double rounded = std::nearbyint(static_cast<double>(v) / unit) * unit;
  return std::fabs(rounded) > 65504
             ? std::copysign(std::numeric_limits<float>::infinity(), v)
             : static_cast<float>(rounded);
}

TEST(Float16, EveryHalfSurvivesFp32) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const Fp16 half{static_cast<uint16_t>(bits)};
    const float wide = to_float(half);
    EXPECT_EQ(std::isnan(wide), (bits & 0x7C00) == 0x7C00 && bits % 1024 != 0);
    // A signalling NaN becomes a quiet one.
    EXPECT_EQ(to_fp16(wide).bits, std::isnan(wide) ? bits | 0x200 : bits);
  }
}

TEST(Float16, EveryBfloat16SurvivesFp32) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float wide = to_float(Bf16{static_cast<uint16_t>(bits)});
    EXPECT_EQ(to_bf16(wide).bits, std::isnan(wide) ? bits | 0x40 : bits);
  }
}

TEST(Float16, RoundsToTheNearestHalf) {
  EXPECT_EQ(to_fp16(65519.9F).bits, 0x7BFF);
  EXPECT_EQ(to_fp16(-65520.0F).bits, 0xFC00);
  EXPECT_EQ(to_fp16(0x1p-25F).bits, 0);  // a tie, to even
  EXPECT_EQ(to_fp16(0x1.8p-24F).bits, 2);
  std::mt19937_64 rng(test_seed());
  for (int i = 0; i < 200000; ++i) {
    // Exponents from 2^-30 to 2^18, where halves begin and end.
    const auto bits = static_cast<uint32_t>(rng());
    const uint32_t exponent = 97 + bits % 49;
    const float v =
        std::bit_cast<float>((bits & 0x807FFFFF) | (exponent << 23));
    const float expected = nearest_half(v);
    EXPECT_EQ(to_float(to_fp16(v)), expected) << v;
    EXPECT_EQ(std::signbit(to_float(to_fp16(v))), std::signbit(v)) << v;
  }
}

}  // namespace
}  // namespace remesh
