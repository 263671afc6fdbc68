// Attention of sequences that are split over ranks: every block against the
// naive reference, and all blocks together against full attention.
#include <gtest/gtest.h>

#include "tests/unit/kernels/tensor.h"
#include "worker/kernels/backend.h"

namespace remesh::kernels {
namespace {

#ifdef __SANITIZE_THREAD__
constexpr int kThreads = 1;
#else
constexpr int kThreads = 2;
#endif

struct Heads {
  int64_t heads, kv_heads, head_dim;
};

class SegmentTest : public testing::TestWithParam<Dtype> {
 protected:
  void expect_blocks_make_the_whole(int64_t window);
  void SetUp() override {
    if (d_ == Dtype::kBf16 && !cpu_->supports_bf16())
      GTEST_SKIP() << "needs bf16";
  }
  double tolerance() const { return attention_tolerance(d_, *cpu_); }
  const void* at(const Tensor& t, int64_t e) const {
    return static_cast<const char*>(t.data()) +
           e * static_cast<int64_t>(dtype_size(d_));
  }

  Dtype d_ = GetParam();
  std::unique_ptr<Backend> cpu_ = make_cpu_backend(kThreads);
  std::unique_ptr<Backend> ref_ = make_reference_backend();
};

// A block's result, started or continued.
struct Running {
  Tensor out, lse;
};
// A block's gradients, added to the old contents.
struct Gradients {
  Tensor dq, dk, dv;
};

TEST_P(SegmentTest, BlocksAgreeWithTheReference) {
  struct Block {
    int64_t Tq, Tk, q0, k0, window = 0;
  };
  constexpr int64_t kB = 2, kPad = 3;
  for (const Block& z : {Block{1, 1, 0, 0},
                         {1, 200, 150, 0},
                         {1, 40, 2, 20},
                         {5, 9, 20, 3},
                         {70, 70, 64, 64},
                         {70, 130, 10, 40},
                         {65, 64, 0, 64},
                         {40, 33, 7, 23},
                         {40, 600, 570, 0},
                         {270, 40, 30, 20},
                         {1, 200, 199, 0, 7},
                         {1, 40, 90, 20, 30},
                         {70, 130, 60, 0, 1},
                         {70, 70, 64, 64, 20},
                         {65, 200, 200, 0, 90},
                         {300, 300, 0, 0, 33},
                         {40, 600, 570, 0, 290}})
    for (const Heads& n : {Heads{1, 1, 6}, {4, 2, 32}, {2, 1, 64}}) {
      SCOPED_TRACE(testing::Message()
                   << z.Tq << " x " << z.Tk << " at " << z.q0 << ", " << z.k0
                   << ", window " << z.window << ", heads " << n.heads << " of "
                   << n.head_dim);
      const int64_t q_dim = n.heads * n.head_dim;
      const int64_t kv_dim = n.kv_heads * n.head_dim;
      const AttentionSegment s{.B = kB,
                               .Tq = z.Tq,
                               .Tk = z.Tk,
                               .num_heads = n.heads,
                               .num_kv_heads = n.kv_heads,
                               .head_dim = n.head_dim,
                               .q_stride = q_dim + 2 * kv_dim,
                               .kv_stride = kv_dim + 2,
                               .q_batch = z.Tq + kPad,
                               .kv_batch = z.Tk + 1,
                               .lse_T = z.Tq + 2,
                               .q0 = z.q0,
                               .k0 = z.k0,
                               .window = z.window};
      const int64_t out_size = kB * s.q_batch * q_dim;
      const Tensor q(d_, kB * s.q_batch * s.q_stride, 1);
      const Tensor k(d_, kB * s.kv_batch * s.kv_stride, 2);
      const Tensor v(d_, kB * s.kv_batch * s.kv_stride, 3);
      const Tensor dout(d_, out_size, 4);
      const Tensor kv_zero =
          Tensor(Dtype::kFp32, kB * s.kv_batch * kv_dim, 5).by(n.head_dim);
      std::vector<Running> r(2,
                             {Tensor(Dtype::kFp32, out_size, 6).by(n.head_dim),
                              Tensor(Dtype::kFp32, kB * n.heads * s.lse_T, 7)});
      std::vector<Gradients> g(
          2,
          {Tensor(Dtype::kFp32, out_size, 8).by(n.head_dim), kv_zero, kv_zero});
      // Started, then continued with the keys read as values, and vice versa:
      // different contents with the same shape.
      for (int i = 0; i < 2; ++i) {
        Backend& b = i == 0 ? *cpu_ : *ref_;
        Running& o = r[static_cast<size_t>(i)];
        b.attention_segment(d_, s, q.data(), k.data(), v.data(), true,
                            o.out.floats(), o.lse.floats());
        b.attention_segment(d_, s, q.data(), v.data(), k.data(), false,
                            o.out.floats(), o.lse.floats());
      }
      EXPECT_LT(difference(r[0].out, r[1].out), tolerance());
      Tensor out(d_, out_size, 0);
      for (int64_t i = 0; i < out_size; ++i) out.set(i, r[1].out[i]);
      for (int64_t i = 0; i < r[1].lse.size(); ++i) {
        if (std::isinf(r[1].lse[i]))
          EXPECT_EQ(r[0].lse[i], r[1].lse[i]);
        else
          EXPECT_NEAR(r[0].lse[i], r[1].lse[i], tolerance());
      }
      for (int i = 0; i < 2; ++i) {
        Backend& b = i == 0 ? *cpu_ : *ref_;
        Gradients& o = g[static_cast<size_t>(i)];
        b.attention_segment_backward(
            d_, s, q.data(), k.data(), v.data(), out.data(), r[1].lse.floats(),
            dout.data(), o.dq.floats(), o.dk.floats(), o.dv.floats());
      }
      EXPECT_LT(difference(g[0].dq, g[1].dq), tolerance());
      EXPECT_LT(difference(g[0].dk, g[1].dk), tolerance());
      EXPECT_LT(difference(g[0].dv, g[1].dv), tolerance());
    }
}

// Sequences split into unequal parts; every part of queries attends to every
// part of keys, in ring order. Together: full attention and its gradients.
void SegmentTest::expect_blocks_make_the_whole(int64_t window) {
  SCOPED_TRACE(window);
  constexpr int64_t kB = 2, kT = 150;
  constexpr Heads n{4, 2, 32};
  const std::vector<int64_t> cuts = {0, 64, 70, kT};
  const int64_t q_dim = n.heads * n.head_dim;
  const int64_t kv_dim = n.kv_heads * n.head_dim;
  const int64_t stride = q_dim + 2 * kv_dim;
  AttentionSegment all = whole(kB, kT, stride, n.heads, n.kv_heads, n.head_dim);
  all.window = window;
  const Tensor qkv(d_, kB * kT * stride, 1, 1.5F);
  const Tensor dout(d_, kB * kT * q_dim, 2);
  const int64_t k0 = q_dim, v0 = q_dim + kv_dim;
  Tensor out = Tensor(d_, kB * kT * q_dim, 0).by(n.head_dim);
  Tensor lse(Dtype::kFp32, kB * n.heads * kT, 0);
  Tensor grad = Tensor(d_, kB * kT * stride, 0).by(n.head_dim);
  ref_->attention(d_, all, qkv.data(), at(qkv, k0), at(qkv, v0), out.data(),
                  lse.floats());
  ref_->attention_backward(d_, all, qkv.data(), at(qkv, k0), at(qkv, v0),
                           out.data(), lse.floats(), dout.data(), grad.data(),
                           const_cast<void*>(at(grad, k0)),
                           const_cast<void*>(at(grad, v0)));
  for (Backend* b : {cpu_.get(), ref_.get()}) {
    SCOPED_TRACE(b->name());
    Running r{Tensor(Dtype::kFp32, kB * kT * q_dim, 3),
              Tensor(Dtype::kFp32, kB * n.heads * kT, 4)};
    Gradients g{Tensor(Dtype::kFp32, kB * kT * q_dim, 0),
                Tensor(Dtype::kFp32, kB * kT * kv_dim, 0),
                Tensor(Dtype::kFp32, kB * kT * kv_dim, 0)};
    const size_t parts = cuts.size() - 1;
    for (size_t i = 0; i < parts; ++i)
      for (size_t step = 0; step < parts; ++step) {
        // From the part after one's own: the first blocks may be all hidden.
        const size_t j = (i + 1 + step) % parts;
        const AttentionSegment s{.B = kB,
                                 .Tq = cuts[i + 1] - cuts[i],
                                 .Tk = cuts[j + 1] - cuts[j],
                                 .num_heads = n.heads,
                                 .num_kv_heads = n.kv_heads,
                                 .head_dim = n.head_dim,
                                 .q_stride = stride,
                                 .kv_stride = stride,
                                 .q_batch = kT,
                                 .kv_batch = kT,
                                 .lse_T = kT,
                                 .q0 = cuts[i],
                                 .k0 = cuts[j],
                                 .window = window};
        const void* q = at(qkv, cuts[i] * stride);
        const void* k = at(qkv, cuts[j] * stride + k0);
        const void* v = at(qkv, cuts[j] * stride + v0);
        b->attention_segment(d_, s, q, k, v, step == 0,
                             r.out.floats() + cuts[i] * q_dim,
                             r.lse.floats() + cuts[i]);
        b->attention_segment_backward(
            d_, s, q, k, v, at(out, cuts[i] * q_dim), lse.floats() + cuts[i],
            at(dout, cuts[i] * q_dim), g.dq.floats() + cuts[i] * q_dim,
            g.dk.floats() + cuts[j] * kv_dim, g.dv.floats() + cuts[j] * kv_dim);
      }
    EXPECT_LT(difference(r.out, out), tolerance());
    EXPECT_LT(difference(r.lse, lse), tolerance());
    Tensor joined(Dtype::kFp32, kB * kT * stride, 0);
    for (int64_t t = 0; t < kB * kT; ++t) {
      for (int64_t c = 0; c < q_dim; ++c)
        joined.set(t * stride + c, g.dq[t * q_dim + c]);
      for (int64_t c = 0; c < kv_dim; ++c) {
        joined.set(t * stride + k0 + c, g.dk[t * kv_dim + c]);
        joined.set(t * stride + v0 + c, g.dv[t * kv_dim + c]);
      }
    }
    EXPECT_LT(difference(joined, grad), tolerance());
  }
}

TEST_P(SegmentTest, BlocksMakeTheWhole) {
  for (const int64_t window : {0, 8, 75}) expect_blocks_make_the_whole(window);
}

// Whatever the scratch memory holds.
TEST_P(SegmentTest, ABlockWithoutVisibleKeysChangesNothing) {
  constexpr int64_t kRows = 64, kHd = 32;
  AttentionSegment s{.B = 1,
                     .Tq = kRows,
                     .Tk = kRows,
                     .num_heads = 1,
                     .num_kv_heads = 1,
                     .head_dim = kHd,
                     .q_stride = kHd,
                     .kv_stride = kHd,
                     .q_batch = kRows,
                     .kv_batch = kRows,
                     .lse_T = kRows,
                     .q0 = kRows};
  const Tensor q(d_, kRows * kHd, 1);
  Tensor v(d_, kRows * kHd, 2);
  for (int64_t i = 0; i < v.size(); ++i) v.set(i, NAN);
  Tensor spoilt(Dtype::kFp32, kRows * kHd, 3), lse(Dtype::kFp32, kRows, 0);
  cpu_->attention_segment(d_, s, q.data(), q.data(), v.data(), true,
                          spoilt.floats(), lse.floats());
  s.q0 = 4 * kRows;
  s.window = 8;
  Tensor out(Dtype::kFp32, kRows * kHd, 4);
  const Tensor before = out;
  for (int64_t i = 0; i < lse.size(); ++i) lse.set(i, 1);
  cpu_->attention_segment(d_, s, q.data(), q.data(), q.data(), false,
                          out.floats(), lse.floats());
  for (int64_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], before[i]) << i;
  for (int64_t i = 0; i < lse.size(); ++i) ASSERT_EQ(lse[i], 1) << i;
}

INSTANTIATE_TEST_SUITE_P(Types, SegmentTest,
                         testing::Values(Dtype::kFp32, Dtype::kBf16),
                         [](const auto& info) {
                           return std::string(dtype_name(info.param));
                         });

}  // namespace
}  // namespace remesh::kernels
