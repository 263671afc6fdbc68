// The loops of every instruction set this machine can run agree with each
// other: one binary must compute the same model on hosts of different age.
#include "worker/kernels/cpu/simd.h"

#include <gtest/gtest.h>

#include "tests/unit/kernels/tensor.h"

namespace remesh::kernels {
namespace {

TEST(Tensor, ASmallRowThatIsWrongMakesADifference) {
  const Tensor b = Tensor(Dtype::kFp32, 4 * 10, 1).by(10);
  Tensor a = b, small = b;
  for (int64_t i = 0; i < 10; ++i) {
    small.set(i, 1e-3F * b[i]);
    a.set(i, 2e-3F * b[i]);
  }
  EXPECT_EQ(difference(b, b), 0);
  EXPECT_GT(difference(a, small), tolerance(Dtype::kBf16));
  a.set(0, NAN);
  EXPECT_EQ(difference(a, small), INFINITY);
}

TEST(Simd, LevelsAgreeOnElementwiseLoops) {
  constexpr int64_t kRows = 3, kDim = 77;
  Tensor gu(Dtype::kFp32, kRows * 2 * kDim, 1, 6.0F);
  Tensor dy(Dtype::kFp32, kRows * kDim, 2);
  std::vector<Tensor> first;
  for (const SimdOps* s : runnable_simd()) {
    SCOPED_TRACE(s->name);
    std::vector<Tensor> o(3,
                          Tensor(Dtype::kFp32, kRows * 2 * kDim, 0).by(kDim));
    s->fp32.swiglu(gu.floats(), kRows, kDim, o[0].floats());
    s->fp32.swiglu_backward(gu.floats(), dy.floats(), kRows, kDim,
                            o[1].floats(), o[2].floats());
    if (first.empty()) first = o;
    for (size_t i = 0; i < o.size(); ++i)
      EXPECT_LT(difference(o[i], first[i]), 1e-6);
  }
}

TEST(Simd, LevelsRoundToBf16Alike) {
  Tensor x(Dtype::kFp32, 1000, 1);
  x.set(0, INFINITY);
  x.set(1, NAN);
  x.set(2, std::bit_cast<float>(0x3F808000U));  // halfway, to even
  x.set(3, std::bit_cast<float>(0x3F818000U));
  for (const SimdOps* s : runnable_simd()) {
    std::vector<Bf16> y(1000);
    s->to_bf16(1000, x.floats(), y.data());
    for (size_t i = 0; i < y.size(); ++i)
      EXPECT_EQ(y[i].bits, to_bf16(x[static_cast<int64_t>(i)]).bits)
          << s->name << " " << i;
  }
  EXPECT_EQ(to_bf16(x[2]).bits, 0x3F80);
  EXPECT_EQ(to_bf16(x[3]).bits, 0x3F82);
}

TEST(Simd, LevelsAgreeOnAMatrixTimesAVector) {
  for (const auto& [rows, n] : {std::pair{1, 1}, {4, 8}, {7, 61}, {66, 200}}) {
    Tensor m(Dtype::kFp32, rows * n, 1);
    Tensor x(Dtype::kFp32, n, 2);
    Tensor expected(Dtype::kFp32, rows, 0);
    for (int i = 0; i < rows; ++i) {
      double sum = 0;
      for (int j = 0; j < n; ++j)
        sum += static_cast<double>(m[i * n + j]) * static_cast<double>(x[j]);
      expected.set(i, static_cast<float>(sum));
    }
    for (const SimdOps* s : runnable_simd()) {
      Tensor y(Dtype::kFp32, rows, 0);
      s->matvec(rows, n, m.floats(), x.floats(), y.floats());
      EXPECT_LT(difference(y, expected), 1e-6)
          << s->name << " " << rows << " x " << n;
    }
  }
}

TEST(Simd, ARowsSumDoesNotDependOnWhoElseIsMultiplied) {
  constexpr int64_t kRows = 12, kN = 100;
  Tensor m(Dtype::kFp32, kRows * kN, 1);
  Tensor x(Dtype::kFp32, kN, 2);
  for (const SimdOps* s : runnable_simd()) {
    Tensor whole(Dtype::kFp32, kRows, 0), parts(Dtype::kFp32, kRows, 0);
    s->matvec(kRows, kN, m.floats(), x.floats(), whole.floats());
    for (int64_t r = 0; r < kRows; r += kMatvecRows)
      s->matvec(kMatvecRows, kN, m.floats() + r * kN, x.floats(),
                parts.floats() + r);
    for (int64_t r = 0; r < kRows; ++r)
      EXPECT_EQ(whole[r], parts[r]) << s->name << " " << r;
  }
}

TEST(Simd, LevelsAgreeOnAttention) {
  const AttentionSegment shape =
      whole(1, 100, /*stride=*/80, /*heads=*/2, /*kv_heads=*/1,
            /*head_dim=*/20);
  Tensor qkv(Dtype::kFp32, 100 * 80, 1);
  Tensor dout(Dtype::kFp32, 100 * 40, 2);
  std::vector<Tensor> first;
  for (const SimdOps* s : runnable_simd()) {
    SCOPED_TRACE(s->name);
    std::vector<Tensor> o = {Tensor(Dtype::kFp32, 100 * 40, 0).by(20),
                             Tensor(Dtype::kFp32, 100 * 2, 0),
                             Tensor(Dtype::kFp32, qkv.size(), 0).by(20)};
    Tensor scratch(Dtype::kFp32,
                   s->attention_scratch(shape, AttentionUse::kBackward), 0);
    AttentionTask t{.segment = shape,
                    .i1 = 100,
                    .dq_stride = 80,
                    .dkv_stride = 80,
                    .q = qkv.floats(),
                    .k = qkv.floats() + 40,
                    .v = qkv.floats() + 60,
                    .out = o[0].floats(),
                    .dout = dout.floats(),
                    .o = o[0].floats(),
                    .dq = o[2].floats(),
                    .dk = o[2].floats() + 40,
                    .dv = o[2].floats() + 60,
                    .lse = o[1].floats(),
                    .scratch = scratch.floats()};
    s->fp32.attention(t);
    s->fp32.attention_backward(t);
    if (first.empty()) first = o;
    EXPECT_LT(difference(o[0], first[0]), 1e-6);
    EXPECT_LT(difference(o[1], first[1]), 1e-6);
    EXPECT_LT(difference(o[2], first[2]), 1e-5);
  }
}

TEST(Simd, AttentionStaysInItsScratch) {
  constexpr int64_t kKeys = 130, kHd = 20, kGuard = 256;
  constexpr float kMark = 12345.0F;
  Tensor qkv(Dtype::kFp32, kKeys * 3 * kHd, 1);
  Tensor o(Dtype::kFp32, kKeys * kHd, 2), lse(Dtype::kFp32, kKeys, 0);
  Tensor grad(Dtype::kFp32, kKeys * 3 * kHd, 0);
  for (const SimdOps* s : runnable_simd())
    for (const int64_t queries : {int64_t{1}, kKeys}) {
      SCOPED_TRACE(s->name);
      AttentionTask t{.segment = {.B = 1,
                                  .Tq = queries,
                                  .Tk = kKeys,
                                  .num_heads = 1,
                                  .num_kv_heads = 1,
                                  .head_dim = kHd,
                                  .q_stride = 3 * kHd,
                                  .kv_stride = 3 * kHd,
                                  .q_batch = queries,
                                  .kv_batch = kKeys,
                                  .lse_T = queries,
                                  .q0 = kKeys - queries},
                      .first = true,
                      .i1 = queries,
                      .dq_stride = 3 * kHd,
                      .dkv_stride = 3 * kHd,
                      .q = qkv.floats(),
                      .k = qkv.floats() + kHd,
                      .v = qkv.floats() + 2 * kHd,
                      .out = o.floats(),
                      .dout = o.floats(),
                      .o = o.floats(),
                      .dq = grad.floats(),
                      .dk = grad.floats() + kHd,
                      .dv = grad.floats() + 2 * kHd,
                      .lse = lse.floats()};
      const auto check = [&](AttentionUse use,
                             void (*run)(const AttentionTask&)) {
        const int64_t n = s->attention_scratch(t.segment, use);
        std::vector<float> scratch(static_cast<size_t>(n + kGuard), kMark);
        t.scratch = scratch.data();
        run(t);
        for (int64_t i = n; i < n + kGuard; ++i)
          ASSERT_EQ(scratch[static_cast<size_t>(i)], kMark) << n << " " << i;
      };
      check(AttentionUse::kSegment, s->fp32.attention_segment);
      check(AttentionUse::kBackward, s->fp32.attention_segment_backward);
      if (queries == kKeys) check(AttentionUse::kWhole, s->fp32.attention);
    }
}

}  // namespace
}  // namespace remesh::kernels
