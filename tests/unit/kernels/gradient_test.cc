// The reference's backward operations against finite differences of its
// forward ones: central differences in fp32 inputs with double sums, so they
// agree to about 1e-3 of the largest derivative.
#include <gtest/gtest.h>

#include <functional>

#include "tests/unit/kernels/tensor.h"
#include "worker/kernels/backend.h"

namespace remesh::kernels {
namespace {

constexpr Dtype kF = Dtype::kFp32;

// d(sum(weights * f(x))) / dx by central differences.
Tensor numeric_gradient(Tensor x, const Tensor& weights,
                        const std::function<Tensor(Tensor&)>& f) {
  constexpr float kStep = 1e-2F;
  Tensor g(kF, x.size(), 0);
  const auto value = [&] {
    const Tensor y = f(x);
    double sum = 0;
    for (int64_t i = 0; i < y.size(); ++i)
      sum += static_cast<double>(y[i]) * weights[i];
    return sum;
  };
  for (int64_t i = 0; i < x.size(); ++i) {
    const float at = x[i];
    x.set(i, at + kStep);
    const double above = value();
    x.set(i, at - kStep);
    const double below = value();
    x.set(i, at);
    g.set(i, static_cast<float>((above - below) / (2 * kStep)));
  }
  return g;
}

class Gradient : public testing::Test {
 protected:
  std::unique_ptr<Backend> b_ = make_reference_backend();
};

TEST_F(Gradient, Linear) {
  Tensor w(kF, 3 * 4, 1);
  Tensor x(kF, 2 * 4, 2);
  Tensor dy(kF, 2 * 3, 3);
  const auto forward = [&](Tensor& weights, Tensor& input) {
    const auto weight = b_->make_weight(kF, 3, 4);
    b_->load_weight(*weight, weights.floats());
    Tensor y(kF, 2 * 3, 0);
    b_->linear(*weight, input.data(), 2, kF, y.data());
    return y;
  };
  const auto weight = b_->make_weight(kF, 3, 4);
  b_->load_weight(*weight, w.floats());
  Tensor dx(kF, 2 * 4, 0);
  b_->linear_backward_input(*weight, dy.data(), 2, kF, false, dx.data());
  EXPECT_LT(
      difference(dx, numeric_gradient(
                         x, dy, [&](Tensor& t) { return forward(w, t); })),
      1e-3);
  Tensor dw(kF, 3 * 4, 0);
  b_->linear_backward_weight(kF, dy.data(), x.data(), 2, 3, 4, dw.floats());
  EXPECT_LT(
      difference(dw, numeric_gradient(
                         w, dy, [&](Tensor& t) { return forward(t, x); })),
      1e-3);
}

TEST_F(Gradient, Norm) {
  constexpr int64_t kRows = 3, kDim = 6;
  Tensor x(kF, kRows * kDim, 1);
  Tensor w(kF, kDim, 2);
  Tensor dy(kF, kRows * kDim, 3);
  Tensor rstd(kF, kRows, 0);
  const auto forward = [&](Tensor& in, Tensor& weight) {
    Tensor y(kF, kRows * kDim, 0);
    b_->rmsnorm(kF, in.floats(), nullptr, weight.floats(), 1e-5, kRows, kDim,
                nullptr, y.data(), rstd.floats());
    return y;
  };
  (void)forward(x, w);
  Tensor dx(kF, kRows * kDim, 0);
  Tensor dw(kF, kDim, 0);
  b_->rmsnorm_backward(kF, dy.floats(), x.floats(), rstd.floats(), w.floats(),
                       nullptr, kRows, kDim, dx.floats(), nullptr, dw.floats());
  EXPECT_LT(
      difference(dx, numeric_gradient(
                         x, dy, [&](Tensor& t) { return forward(t, w); })),
      1e-3);
  EXPECT_LT(
      difference(dw, numeric_gradient(
                         w, dy, [&](Tensor& t) { return forward(x, t); })),
      1e-3);
}

TEST_F(Gradient, Attention) {
  constexpr int64_t kB = 2, kT = 4, kStride = 16;
  AttentionSegment s =
      whole(kB, kT, kStride, /*heads=*/4, /*kv_heads=*/2, /*head_dim=*/2);
  s.window = 3;
  Tensor qkv(kF, kB * kT * kStride, 1);
  Tensor dout(kF, kB * kT * 8, 2);
  Tensor lse(kF, kB * kT * 4, 0);
  const auto forward = [&](Tensor& t) {
    Tensor out(kF, kB * kT * 8, 0);
    b_->attention(kF, s, t.floats(), t.floats() + 8, t.floats() + 12,
                  out.data(), lse.floats());
    return out;
  };
  const Tensor out = forward(qkv);
  Tensor d(kF, qkv.size(), 0);
  b_->attention_backward(
      kF, s, qkv.floats(), qkv.floats() + 8, qkv.floats() + 12, out.data(),
      lse.floats(), dout.data(), d.floats(), d.floats() + 8, d.floats() + 12);
  EXPECT_LT(difference(d, numeric_gradient(qkv, dout, forward)), 2e-3);
}

TEST_F(Gradient, Swiglu) {
  constexpr int64_t kRows = 3, kDim = 5;
  Tensor gu(kF, kRows * 2 * kDim, 1, 2.0F);
  Tensor dy(kF, kRows * kDim, 2);
  Tensor d(kF, gu.size(), 0);
  Tensor y(kF, dy.size(), 0);
  b_->swiglu_backward(kF, gu.data(), dy.data(), kRows, kDim, d.data(),
                      y.data());
  EXPECT_LT(difference(d, numeric_gradient(gu, dy,
                                           [&](Tensor& t) {
                                             Tensor o(kF, dy.size(), 0);
                                             b_->swiglu(kF, t.data(), kRows,
                                                        kDim, o.data());
                                             return o;
                                           })),
            1e-3);
}

TEST_F(Gradient, Rope) {
  constexpr int64_t kRows = 4, kT = 2, kHead = 4;
  Tensor x(kF, kRows * kHead, 1);
  Tensor dy(kF, kRows * kHead, 2);
  Tensor cos(kF, kT * 2, 0);
  Tensor sin(kF, kT * 2, 0);
  for (int64_t i = 0; i < cos.size(); ++i) {
    cos.set(i, std::cos(static_cast<float>(i)));
    sin.set(i, std::sin(static_cast<float>(i)));
  }
  const auto turn = [&](Tensor t, bool inverse) {
    b_->rope(kF, t.data(), kRows, kT, 1, kHead, kHead, cos.floats(),
             sin.floats(), inverse);
    return t;
  };
  EXPECT_LT(difference(turn(dy, true),
                       numeric_gradient(
                           x, dy, [&](Tensor& t) { return turn(t, false); })),
            1e-3);
}

TEST_F(Gradient, CrossEntropy) {
  constexpr int64_t kRows = 4, kVocab = 5;
  constexpr double kZLoss = 0.05;
  Tensor logits(kF, kRows * kVocab, 1);
  const std::vector<int32_t> targets = {4, 0, 2, -1};
  Tensor lse(kF, kRows, 0);
  const auto forward = [&](Tensor& t) {
    Tensor top(kF, kRows, 0);
    Tensor sum(kF, kRows, 0);
    Tensor target(kF, kRows, 0);
    b_->cross_entropy_add(kF, t.data(), kRows, kVocab, 0, targets.data(), true,
                          top.floats(), sum.floats(), target.floats());
    double sum_of_losses =
        b_->cross_entropy_finish(kRows, targets.data(), top.floats(),
                                 sum.floats(), target.floats(), lse.floats());
    for (int64_t i = 0; i < kRows; ++i)
      if (targets[static_cast<size_t>(i)] >= 0)
        sum_of_losses += kZLoss * std::pow(static_cast<double>(lse[i]), 2);
    Tensor loss(kF, 1, 0);
    loss.set(0, static_cast<float>(sum_of_losses));
    return loss;
  };
  (void)forward(logits);
  Tensor d(kF, logits.size(), 0);
  b_->cross_entropy_backward(kF, logits.data(), kRows, kVocab, 0,
                             targets.data(), lse.floats(), 1.0, kZLoss,
                             d.data());
  Tensor one(kF, 1, 0);
  one.set(0, 1.0F);
  EXPECT_LT(difference(d, numeric_gradient(logits, one, forward)), 1e-3);
  for (int64_t j = 0; j < kVocab; ++j) EXPECT_EQ(d[3 * kVocab + j], 0.0F);
}

}  // namespace
}  // namespace remesh::kernels
