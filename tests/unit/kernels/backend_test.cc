// Every operation of the CPU backend against the naive reference, for odd
// sizes, both types and several thread counts.
#include "worker/kernels/backend.h"

#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "tests/unit/kernels/tensor.h"

namespace remesh::kernels {
namespace {

// ThreadSanitizer cannot see OpenMP's barriers, so it gets one thread.
#ifdef __SANITIZE_THREAD__
constexpr int kMostThreads = 1;
#else
constexpr int kMostThreads = 3;
#endif

struct Case {
  Dtype d;
  int threads;
};

class BackendTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (d_ == Dtype::kBf16 && !cpu_->supports_bf16())
      GTEST_SKIP() << "needs bf16";
  }
  double tolerance() const { return kernels::tolerance(d_); }
  Tensor random(int64_t n, uint64_t stream, float std = 1.0F) const {
    return {d_, n, stream, std};
  }
  Tensor zeros(int64_t n) const { return {d_, n, 0}; }
  static Tensor random_fp32(int64_t n, uint64_t stream) {
    return {Dtype::kFp32, n, stream};
  }
  static Tensor zeros_fp32(int64_t n) { return {Dtype::kFp32, n, 0}; }
  static std::vector<int32_t> ids(int64_t n, int64_t below) {
    std::vector<int32_t> v;
    for (int64_t i = 0; i < n; ++i)
      v.push_back(
          static_cast<int32_t>(random_u64(3, 1, static_cast<uint64_t>(i)) %
                               static_cast<uint64_t>(below)));
    return v;
  }

  Dtype d_ = GetParam().d;
  std::unique_ptr<Backend> cpu_ = make_cpu_backend(GetParam().threads);
  std::unique_ptr<Backend> ref_ = make_reference_backend();
};

// Runs f(backend, outputs...) on both backends with copies of the same
// starting contents and expects every output to agree.
template <typename F, typename... T>
void expect_agreement(Backend& cpu, Backend& ref, double tolerance, const F& f,
                      T... outputs) {
  std::vector<Tensor> a = {outputs...};
  std::vector<Tensor> b = {outputs...};
  f(cpu, a);
  f(ref, b);
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_LT(difference(a[i], b[i]), tolerance) << "output " << i;
}

struct GemmSize {
  int64_t rows, out, in;
};
constexpr GemmSize kGemmSizes[] = {
    {1, 1, 1},      {3, 5, 7},      {17, 33, 65},   {130, 48, 96},
    {64, 509, 40},  {40, 70, 1100}, {1100, 40, 70}, {70, 1100, 40},
    {33, 64, 2048}, {610, 928, 33}, {300, 96, 320}, {34, 800, 800},
    {800, 34, 800}, {800, 420, 34}};

TEST_P(BackendTest, LinearForwardAndBothGradients) {
  for (const GemmSize& s : kGemmSizes) {
    SCOPED_TRACE(testing::Message()
                 << s.rows << " x " << s.out << " x " << s.in);
    Tensor master = random_fp32(s.out * s.in, 1);
    const Tensor x = random(s.rows * s.in, 2);
    const Tensor dy = random(s.rows * s.out, 3);
    expect_agreement(
        *cpu_, *ref_, tolerance(),
        [&](Backend& b, std::vector<Tensor>& o) {
          const auto w = b.make_weight(d_, s.out, s.in);
          ASSERT_NE(w, nullptr);
          b.load_weight(*w, master.floats());
          b.linear(*w, x.data(), s.rows, d_, o[0].data());
          b.linear(*w, x.data(), s.rows, Dtype::kFp32, o[1].data());
          b.linear_backward_input(*w, dy.data(), s.rows, d_, false,
                                  o[2].data());
          b.linear_backward_input(*w, dy.data(), s.rows, Dtype::kFp32, true,
                                  o[3].data());
          b.linear_backward_input(*w, dy.data(), s.rows, Dtype::kFp32, false,
                                  o[4].data());
          b.linear_backward_weight(d_, dy.data(), x.data(), s.rows, s.out, s.in,
                                   o[5].floats());
        },
        zeros(s.rows * s.out).by(s.out), zeros_fp32(s.rows * s.out).by(s.out),
        zeros(s.rows * s.in).by(s.in), random_fp32(s.rows * s.in, 4).by(s.in),
        random_fp32(s.rows * s.in, 4).by(s.in),
        random_fp32(s.out * s.in, 5).by(s.in));
  }
}

TEST_P(BackendTest, NormWithAndWithoutBranch) {
  for (const int64_t rows : {1, 3, 70})
    for (const int64_t dim : {2, 40, 129}) {
      Tensor x = random_fp32(rows * dim, 1);
      Tensor branch = random_fp32(rows * dim, 2);
      Tensor w = random_fp32(dim, 3);
      expect_agreement(
          *cpu_, *ref_, tolerance(),
          [&](Backend& b, std::vector<Tensor>& o) {
            b.rmsnorm(d_, x.floats(), nullptr, w.floats(), 1e-5, rows, dim,
                      nullptr, o[0].data(), o[1].floats());
            b.rmsnorm(d_, x.floats(), branch.floats(), w.floats(), 1e-5, rows,
                      dim, o[2].floats(), o[3].data(), o[4].floats());
          },
          zeros(rows * dim).by(dim), zeros_fp32(rows).by(1),
          zeros_fp32(rows * dim).by(dim), zeros(rows * dim).by(dim),
          zeros_fp32(rows).by(1));
    }
}

TEST_P(BackendTest, NormBackwardInPlaceAndApart) {
  for (const int64_t rows : {1, 33, 70})
    for (const int64_t dim : {2, 40, 129}) {
      Tensor x = random_fp32(rows * dim, 1);
      Tensor dy = random_fp32(rows * dim, 2);
      Tensor w = random_fp32(dim, 3);
      Tensor rstd = random_fp32(rows, 4);
      expect_agreement(
          *cpu_, *ref_, tolerance(),
          [&](Backend& b, std::vector<Tensor>& o) {
            b.rmsnorm_backward(d_, dy.floats(), x.floats(), rstd.floats(),
                               w.floats(), o[0].floats(), rows, dim,
                               o[0].floats(), o[1].data(), o[2].floats());
            b.rmsnorm_backward(d_, dy.floats(), x.floats(), rstd.floats(),
                               w.floats(), nullptr, rows, dim, o[3].floats(),
                               nullptr, o[2].floats());
          },
          random_fp32(rows * dim, 5).by(dim), zeros(rows * dim).by(dim),
          random_fp32(dim, 6), zeros_fp32(rows * dim).by(dim));
    }
}

TEST_P(BackendTest, NormOfHeadsForwardAndBackward) {
  for (const int64_t rows : {1, 33, 70})
    for (const int64_t head : {2, 10, 64}) {
      // Three heads of tokens that have other elements too.
      const HeadRows s{.rows = rows,
                       .num_heads = 3,
                       .head_dim = head,
                       .x_stride = 3 * head + 1,
                       .y_stride = 3 * head + 5};
      const Tensor x = random(rows * s.x_stride, 1);
      Tensor w = random_fp32(head, 2);
      Tensor rstd = random_fp32(rows * 3, 3);
      expect_agreement(
          *cpu_, *ref_, tolerance(),
          [&](Backend& b, std::vector<Tensor>& o) {
            b.head_rmsnorm(d_, s, x.data(), w.floats(), 1e-5, o[0].data(),
                           o[1].floats());
            b.head_rmsnorm_backward(d_, s, x.data(), rstd.floats(), w.floats(),
                                    o[2].data(), o[3].floats());
          },
          zeros(rows * s.y_stride).by(s.y_stride), zeros_fp32(rows * 3).by(1),
          random(rows * s.y_stride, 4).by(s.y_stride),
          random_fp32(head, 5).by(head));
    }
}

TEST_P(BackendTest, BiasIsAddedToRowsAndItsGradientSummed) {
  for (const int64_t rows : {1, 33, 70})
    for (const int64_t cols : {1, 40, 129}) {
      Tensor bias = random_fp32(cols, 1);
      const Tensor dy = random(rows * cols, 2);
      expect_agreement(
          *cpu_, *ref_, tolerance(),
          [&](Backend& b, std::vector<Tensor>& o) {
            b.add_bias(d_, bias.floats(), rows, cols, o[0].data());
            b.bias_backward(d_, dy.data(), rows, cols, o[1].floats());
          },
          random(rows * cols, 3).by(cols), random_fp32(cols, 4).by(cols));
    }
}

TEST_P(BackendTest, RopeTurnsAndTurnsBack) {
  constexpr int64_t kB = 3, kT = 5, kHeads = 3, kHead = 10, kStride = 37;
  Tensor cos = zeros_fp32(kT * kHead / 2);
  Tensor sin = zeros_fp32(kT * kHead / 2);
  for (int64_t i = 0; i < cos.size(); ++i) {
    cos.set(i, std::cos(0.1F * static_cast<float>(i)));
    sin.set(i, std::sin(0.1F * static_cast<float>(i)));
  }
  const auto turn = [&](Backend& b, Tensor& x, bool inverse) {
    b.rope(d_, x.data(), kB * kT, kT, kHeads, kHead, kStride, cos.floats(),
           sin.floats(), inverse);
  };
  expect_agreement(
      *cpu_, *ref_, tolerance(),
      [&](Backend& b, std::vector<Tensor>& o) { turn(b, o[0], false); },
      random(kB * kT * kStride, 1).by(kStride));
  Tensor x = random(kB * kT * kStride, 1).by(kStride);
  const Tensor before = x;
  turn(*cpu_, x, false);
  EXPECT_GT(difference(x, before), 0.1);
  turn(*cpu_, x, true);
  EXPECT_LT(difference(x, before), 2 * tolerance());
}

struct AttentionSize {
  int64_t B, T, heads, kv_heads, head_dim;
};
constexpr AttentionSize kAttentionSizes[] = {
    {1, 1, 1, 1, 2},     {2, 5, 4, 2, 6},    {1, 63, 3, 1, 16},
    {2, 64, 2, 2, 32},   {1, 65, 2, 1, 48},  {1, 130, 4, 2, 64},
    {1, 200, 2, 1, 128}, {1, 530, 2, 1, 16},
};

// Of 1, 3, 9, ... tokens, as far as a sequence goes. In short ones gradients
// nearly cancel, which costs precision.
std::vector<Document> some_documents(int64_t B, int64_t T) {
  std::vector<Document> out;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t t = 0, n = 1; t < T; t += n, n *= 3)
      out.push_back({b * T + t, std::min(n, T - t)});
  return out;
}

TEST_P(BackendTest, AttentionForwardAndBackward) {
  for (const AttentionSize& z : kAttentionSizes)
    for (const auto& [divided, window] :
         {std::pair{false, 0}, {true, 0}, {false, 40}, {true, 5}}) {
      SCOPED_TRACE(testing::Message()
                   << "T " << z.T << " heads " << z.heads << "/" << z.kv_heads
                   << " of " << z.head_dim << (divided ? ", documents" : "")
                   << ", window " << window);
      const int64_t q = z.heads * z.head_dim;
      const int64_t kv = z.kv_heads * z.head_dim;
      std::vector<Document> documents;
      if (divided) documents = some_documents(z.B, z.T);
      const int64_t stride = q + 2 * kv;
      AttentionSegment s =
          whole(z.B, z.T, stride, z.heads, z.kv_heads, z.head_dim);
      s.window = window;
      s.documents = documents;
      const int64_t N = z.B * z.T;
      const Tensor qkv = random(N * stride, 1, 1.5F);
      const Tensor dout = random(N * q, 2);
      const auto at = [&](const Tensor& t, int64_t e) -> void* {
        return static_cast<char*>(const_cast<void*>(t.data())) +
               e * static_cast<int64_t>(dtype_size(d_));
      };
      // The backward starts from the reference's output in both backends.
      Tensor out = zeros(N * q);
      Tensor lse = zeros_fp32(N * z.heads);
      ref_->attention(d_, s, qkv.data(), at(qkv, q), at(qkv, q + kv),
                      out.data(), lse.floats());
      expect_agreement(
          *cpu_, *ref_, (divided ? 2 : 1) * attention_tolerance(d_, *cpu_),
          [&](Backend& b, std::vector<Tensor>& o) {
            b.attention(d_, s, qkv.data(), at(qkv, q), at(qkv, q + kv),
                        o[0].data(), o[1].floats());
            b.attention_backward(d_, s, qkv.data(), at(qkv, q), at(qkv, q + kv),
                                 out.data(), lse.floats(), dout.data(),
                                 o[2].data(), at(o[2], q), at(o[2], q + kv));
          },
          zeros(N * q).by(z.head_dim), zeros_fp32(N * z.heads),
          zeros(N * stride).by(z.head_dim));
    }
}

TEST_P(BackendTest, AttentionSurvivesLargeScores) {
  constexpr int64_t kT = 70, kStride = 24;
  const AttentionSegment s =
      whole(1, kT, kStride, /*heads=*/1, /*kv_heads=*/1, /*head_dim=*/8);
  const Tensor qkv = random(kT * kStride, 1, 30.0F);
  const auto at = [&](int64_t e) {
    return static_cast<const char*>(qkv.data()) +
           e * static_cast<int64_t>(dtype_size(d_));
  };
  expect_agreement(
      *cpu_, *ref_, attention_tolerance(d_, *cpu_),
      [&](Backend& b, std::vector<Tensor>& o) {
        b.attention(d_, s, at(0), at(8), at(16), o[0].data(), o[1].floats());
      },
      zeros(kT * 8).by(8), zeros_fp32(kT));
}

TEST_P(BackendTest, SwigluForwardAndBackwardInPlace) {
  for (const int64_t rows : {1, 9, 40})
    for (const int64_t dim : {1, 31, 300}) {
      const Tensor gu = random(rows * 2 * dim, 1, 4.0F);
      const Tensor dy = random(rows * dim, 2);
      expect_agreement(
          *cpu_, *ref_, tolerance(),
          [&](Backend& b, std::vector<Tensor>& o) {
            b.swiglu(d_, gu.data(), rows, dim, o[0].data());
            b.swiglu_backward(d_, o[1].data(), dy.data(), rows, dim,
                              o[1].data(), o[2].data());
          },
          zeros(rows * dim).by(dim), Tensor(gu).by(2 * dim),
          zeros(rows * dim).by(dim));
    }
}

TEST_P(BackendTest, EmbeddingGathersAndAddsRepeatedTokensInOrder) {
  constexpr int64_t kVocab = 11, kDim = 70, kRows = 400;
  Tensor table = random_fp32(kVocab * kDim, 1);
  Tensor dy = random_fp32(kRows * kDim, 2);
  std::vector<int32_t> tokens = ids(kRows, kVocab);
  tokens[5] = -1;
  // The full vocabulary, and a shard of it.
  for (const auto& [first, count] :
       {std::pair<int64_t, int64_t>{0, kVocab}, {3, 4}}) {
    const int64_t row0 = first, num_rows = count;
    const auto f = [&](Backend& b, std::vector<Tensor>& o) {
      b.embedding(table.floats(), row0, num_rows, tokens.data(), kRows, kDim,
                  o[0].floats());
      b.embedding_backward(dy.floats(), tokens.data(), row0, num_rows, kRows,
                           kDim, o[1].floats());
    };
    std::vector<Tensor> a = {random_fp32(kRows * kDim, 4),
                             random_fp32(kVocab * kDim, 3)};
    std::vector<Tensor> b = a;
    f(*cpu_, a);
    f(*ref_, b);
    EXPECT_TRUE(same_bits(a[0], b[0]));
    EXPECT_TRUE(same_bits(a[1], b[1]));
    for (int64_t i = 0; i < kRows; ++i) {
      const int64_t t = tokens[static_cast<size_t>(i)] - row0;
      const bool inside = t >= 0 && t < num_rows;
      EXPECT_EQ(b[0][i * kDim], inside ? table[t * kDim] : 0.0F);
    }
  }
}

TEST_P(BackendTest, CrossEntropyInPieces) {
  constexpr int64_t kRows = 37;
  for (const int64_t vocab : {1, 100, 1031}) {
    const int64_t cut = (vocab + 1) / 2;
    std::vector<int32_t> targets = ids(kRows, vocab);
    targets[7] = targets[20] = -1;  // count for nothing
    const Tensor left = random(kRows * cut, 1, 5.0F);
    const Tensor right = random(kRows * (vocab - cut), 2, 5.0F);
    double loss[2] = {0, 0};
    int call = 0;
    expect_agreement(
        *cpu_, *ref_, tolerance(),
        [&](Backend& b, std::vector<Tensor>& o) {
          Tensor top = zeros_fp32(kRows);
          Tensor sum = zeros_fp32(kRows);
          Tensor target = zeros_fp32(kRows);
          b.cross_entropy_add(d_, left.data(), kRows, cut, 0, targets.data(),
                              true, top.floats(), sum.floats(),
                              target.floats());
          if (vocab > cut)
            b.cross_entropy_add(d_, right.data(), kRows, vocab - cut, cut,
                                targets.data(), false, top.floats(),
                                sum.floats(), target.floats());
          loss[call++] = b.cross_entropy_finish(kRows, targets.data(),
                                                top.floats(), sum.floats(),
                                                target.floats(), o[0].floats());
          // In place on a copy.
          b.cross_entropy_backward(d_, o[1].data(), kRows, cut, 0,
                                   targets.data(), o[0].floats(), 0.25, 0.01,
                                   o[1].data());
          for (int64_t j = 0; j < cut; ++j) EXPECT_EQ(o[1][7 * cut + j], 0.0F);
        },
        zeros_fp32(kRows), Tensor(left).by(cut));
    EXPECT_NEAR(loss[0], loss[1], 1e-5 * (1 + std::abs(loss[1])));
  }
}

// Ranks that each hold a piece of the vocabulary combine their statistics into
// those of the full one.
TEST_P(BackendTest, CrossEntropyOfSplitVocabulary) {
  constexpr int64_t kRows = 21, kVocab = 90, kCut = 50;
  std::vector<int32_t> targets = ids(kRows, kVocab);
  targets[4] = -1;  // counts for nothing
  Tensor whole = random(kRows * kVocab, 1, 5.0F);
  Tensor left = zeros(kRows * kCut), right = zeros(kRows * (kVocab - kCut));
  for (int64_t i = 0; i < kRows; ++i)
    for (int64_t j = 0; j < kVocab; ++j) {
      const float v = whole[i * kVocab + j];
      if (j < kCut)
        left.set(i * kCut + j, v);
      else
        right.set(i * (kVocab - kCut) + j - kCut, v);
    }
  for (Backend* b : {cpu_.get(), ref_.get()}) {
    SCOPED_TRACE(b->name());
    struct Statistics {
      Tensor top{Dtype::kFp32, kRows, 8}, sum{Dtype::kFp32, kRows, 8},
          target{Dtype::kFp32, kRows, 8};
    } all, l, r;
    const auto add = [&](const Tensor& logits, int64_t cols, int64_t col0,
                         Statistics& s) {
      b->cross_entropy_add(d_, logits.data(), kRows, cols, col0, targets.data(),
                           true, s.top.floats(), s.sum.floats(),
                           s.target.floats());
    };
    add(whole, kVocab, 0, all);
    add(left, kCut, 0, l);
    add(right, kVocab - kCut, kCut, r);
    EXPECT_EQ(all.target[4], 0.0F);
    Tensor top = l.top;
    for (int64_t i = 0; i < kRows; ++i) {
      top.set(i, std::max(l.top[i], r.top[i]));
      const bool in_left = targets[static_cast<size_t>(i)] < kCut;
      EXPECT_EQ(in_left ? r.target[i] : l.target[i], 0.0F) << i;
    }
    b->cross_entropy_rescale(kRows, top.floats(), l.top.floats(),
                             l.sum.floats());
    b->cross_entropy_rescale(kRows, top.floats(), r.top.floats(),
                             r.sum.floats());
    EXPECT_TRUE(same_bits(l.top, all.top));
    EXPECT_TRUE(same_bits(r.top, all.top));
    b->add(kRows, l.sum.floats(), r.sum.floats(), l.sum.floats());
    b->add(kRows, l.target.floats(), r.target.floats(), l.target.floats());
    EXPECT_LT(difference(l.sum, all.sum), 1e-5);
    EXPECT_TRUE(same_bits(l.target, all.target));
  }
}

TEST_P(BackendTest, ConvertsStridedRows) {
  constexpr int64_t kRows = 9;
  for (const int64_t cols : {1, 33, 2000})
    for (const Dtype from : {Dtype::kFp32, d_})
      for (const Dtype to : {Dtype::kFp32, d_}) {
        const int64_t a = cols + 5, b = cols + 2;
        const Tensor src(from, kRows * a, 1);
        std::vector<Tensor> o(2, Tensor(to, kRows * b, 2));
        cpu_->convert_rows(kRows, cols, from, src.data(), a, to, o[0].data(),
                           b);
        ref_->convert_rows(kRows, cols, from, src.data(), a, to, o[1].data(),
                           b);
        EXPECT_TRUE(same_bits(o[0], o[1]));
        EXPECT_EQ(o[1][b + cols - 1],
                  to == Dtype::kFp32 ? src[a + cols - 1]
                                     : to_float(to_bf16(src[a + cols - 1])));
      }
}

TEST_P(BackendTest, ElementwiseAndSums) {
  constexpr int64_t kFew = 16;
  for (const int64_t n : {1, 7, 1000, 70001}) {
    Tensor x = random_fp32(n, 1);
    Tensor y = random_fp32(n, 2);
    const Tensor half = random(n, 3);
    double squares[2];
    int call = 0;
    expect_agreement(
        *cpu_, *ref_, tolerance(),
        [&](Backend& b, std::vector<Tensor>& o) {
          b.add(n, x.floats(), y.floats(), o[0].floats());
          b.convert(n, Dtype::kFp32, x.floats(), d_, o[1].data());
          b.convert(n, d_, half.data(), Dtype::kFp32, o[2].floats());
          b.scale(n, 0.3, o[3].floats());
          b.accumulate(n, -0.7, x.floats(), o[3].floats());
          b.copy(o[4].floats(), x.floats(), static_cast<size_t>(n) * 4);
          b.zero(o[3].floats(), 4);
          squares[call++] = b.sum_of_squares(n, x.floats());
        },
        zeros_fp32(n).by(kFew), zeros(n).by(kFew), zeros_fp32(n).by(kFew),
        random_fp32(n, 4).by(kFew), zeros_fp32(n).by(kFew));
    EXPECT_NEAR(squares[0] / squares[1], 1.0, 1e-12);
  }
}

TEST_P(BackendTest, AdamWInPlaceAndIntoOtherBuffers) {
  for (const int64_t n : {1, 100, 30011}) {
    // Starts off a cache line, as parameters in a flat vector do.
    constexpr int64_t kOff = 3;
    constexpr int64_t kFew = 16;
    const auto buffer = [&](uint64_t stream) {
      return random_fp32(n + kOff, stream).by(kFew);
    };
    Tensor v = buffer(3);
    for (int64_t i = 0; i < v.size(); ++i) v.set(i, v[i] * v[i]);
    AdamWOptions options{
        .lr = 3e-3, .weight_decay = 0.1, .step = 3, .grad_scale = 0.5};
    const auto f = [&](Backend& b, std::vector<Tensor>& o, bool in_place) {
      const size_t to = in_place ? 0 : 4;
      b.adamw(options, n, o[3].floats() + kOff, o[0].floats() + kOff,
              o[1].floats() + kOff, o[2].floats() + kOff, o[to].floats() + kOff,
              o[to + 1].floats() + kOff, o[to + 2].floats() + kOff);
    };
    for (const bool in_place : {true, false})
      expect_agreement(
          *cpu_, *ref_, 1e-5,
          [&](Backend& b, std::vector<Tensor>& o) { f(b, o, in_place); },
          buffer(1), buffer(2), v, buffer(4), zeros_fp32(n + kOff).by(kFew),
          zeros_fp32(n + kOff).by(kFew), zeros_fp32(n + kOff).by(kFew));
  }
}

// The smallest epsilons that a job may have.
TEST_P(BackendTest, NothingIsDividedByZero) {
  const int64_t n = 100;
  const auto adamw = [&](Backend& b, std::vector<Tensor>& o) {
    b.adamw({.lr = 1e-3, .eps = 1e-30}, n, o[3].floats(), o[0].floats(),
            o[1].floats(), o[2].floats(), o[0].floats(), o[1].floats(),
            o[2].floats());
  };
  expect_agreement(*cpu_, *ref_, 1e-5, adamw, random_fp32(n, 1), zeros_fp32(n),
                   zeros_fp32(n), zeros_fp32(n));
  const auto norm = [&](Backend& b, std::vector<Tensor>& o) {
    b.rmsnorm(d_, o[0].floats(), nullptr, o[1].floats(), 1e-30, 1, n, nullptr,
              o[2].data(), o[3].floats());
  };
  expect_agreement(*cpu_, *ref_, tolerance(), norm, zeros_fp32(n),
                   random_fp32(n, 2), zeros(n), zeros_fp32(1));
}

TEST_P(BackendTest, AdamWGivesTheSameBitsWhereverItWrites) {
  const int64_t n = 30011;
  constexpr int64_t kRoom = 32;
  const auto buffer = [&](uint64_t stream) {
    return random_fp32(n + kRoom, stream);
  };
  Tensor v = buffer(3);
  for (int64_t i = 0; i < v.size(); ++i) v.set(i, v[i] * v[i]);
  const AdamWOptions options{.lr = 3e-3, .weight_decay = 0.1, .step = 3};
  // Offsets of the operands and of each result.
  for (const int64_t from : {0, 5}) {
    std::vector<Tensor> in_place = {buffer(1), buffer(2), v, buffer(4)};
    const auto at = [from](Tensor& t) { return t.floats() + from; };
    cpu_->adamw(options, n, at(in_place[3]), at(in_place[0]), at(in_place[1]),
                at(in_place[2]), at(in_place[0]), at(in_place[1]),
                at(in_place[2]));
    for (const auto& to : {std::array<int64_t, 3>{from, from, from},
                           std::array<int64_t, 3>{0, 1, 15},
                           std::array<int64_t, 3>{17, 16, 3}}) {
      SCOPED_TRACE(testing::Message() << from << " to " << to[0] << ", "
                                      << to[1] << ", " << to[2]);
      std::vector<Tensor> in = {buffer(1), buffer(2), v, buffer(4)};
      std::vector<Tensor> out = {buffer(5), buffer(6), buffer(7)};
      cpu_->adamw(options, n, at(in[3]), at(in[0]), at(in[1]), at(in[2]),
                  out[0].floats() + to[0], out[1].floats() + to[1],
                  out[2].floats() + to[2]);
      for (size_t k = 0; k < 3; ++k) {
        Tensor expected = buffer(5 + k);
        for (int64_t i = 0; i < n; ++i)
          expected.set(to[k] + i, in_place[k][from + i]);
        EXPECT_TRUE(same_bits(out[k], expected)) << "result " << k;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, BackendTest,
                         testing::Values(Case{Dtype::kFp32, 1},
                                         Case{Dtype::kFp32, kMostThreads},
                                         Case{Dtype::kBf16, 1},
                                         Case{Dtype::kBf16, kMostThreads}),
                         [](const auto& info) {
                           return std::string(dtype_name(info.param.d)) + "_" +
                                  std::to_string(info.index);
                         });

TEST(Backend, SumsDoNotDependOnThreads) {
  const int64_t rows = 300, dim = 40;
  Tensor x(Dtype::kFp32, rows * dim, 1);
  Tensor dy(Dtype::kFp32, rows * dim, 2);
  Tensor w(Dtype::kFp32, dim, 3);
  Tensor rstd(Dtype::kFp32, rows, 4);
  std::vector<Tensor> dw;
  std::vector<double> squares;
  for (const int threads : {1, kMostThreads}) {
    const auto b = make_cpu_backend(threads);
    Tensor dx(Dtype::kFp32, rows * dim, 0);
    dw.emplace_back(Dtype::kFp32, dim, 0);
    b->rmsnorm_backward(Dtype::kFp32, dy.floats(), x.floats(), rstd.floats(),
                        w.floats(), nullptr, rows, dim, dx.floats(), nullptr,
                        dw.back().floats());
    squares.push_back(b->sum_of_squares(rows * dim, x.floats()));
  }
  EXPECT_TRUE(same_bits(dw[0], dw[1]));
  EXPECT_EQ(squares[0], squares[1]);
}

// A row's result does not depend on other rows, and no result on the number of
// threads.
TEST(Backend, Bf16GemmsDependOnTheirOperandsAlone) {
  constexpr int64_t kRows = 200, kOut = 96, kIn = 700;
  Tensor master(Dtype::kFp32, kOut * kIn, 1);
  const Tensor x(Dtype::kBf16, kRows * kIn, 2);
  const Tensor dy(Dtype::kBf16, kRows * kOut, 3);
  std::vector<Tensor> y, dx, dw;
  for (const int threads : {1, kMostThreads}) {
    const auto b = make_cpu_backend(threads);
    // Elsewhere oneDNN decides.
    if (std::string(b->description()).find("AMX") == std::string::npos)
      GTEST_SKIP() << "needs amx";
    const auto w = b->make_weight(Dtype::kBf16, kOut, kIn);
    b->load_weight(*w, master.floats());
    y.emplace_back(Dtype::kBf16, kRows * kOut, 0);
    dx.emplace_back(Dtype::kFp32, kRows * kIn, 0);
    dw.emplace_back(Dtype::kFp32, kOut * kIn, 0);
    b->linear(*w, x.data(), kRows, Dtype::kBf16, y.back().data());
    b->linear_backward_input(*w, dy.data(), kRows, Dtype::kFp32, false,
                             dx.back().data());
    b->linear_backward_weight(Dtype::kBf16, dy.data(), x.data(), kRows, kOut,
                              kIn, dw.back().floats());
    Tensor few(Dtype::kBf16, kOut * 7, 0);
    b->linear(*w, x.data(), 7, Dtype::kBf16, few.data());
    for (int64_t i = 0; i < few.size(); ++i) EXPECT_EQ(few[i], y.back()[i]);
  }
  EXPECT_TRUE(same_bits(y[0], y[1]));
  EXPECT_TRUE(same_bits(dx[0], dx[1]));
  EXPECT_TRUE(same_bits(dw[0], dw[1]));
}

TEST(Backend, SeveralInOneProcessDoNotDisturbEachOther) {
  constexpr int64_t kN = 64;
  Tensor master(Dtype::kFp32, kN * kN, 1);
  const Tensor x(Dtype::kFp32, kN * kN, 2);
  const auto work = [&] {
    const auto b = make_cpu_backend(kMostThreads > 1 ? 2 : 1);
    const auto w = b->make_weight(Dtype::kFp32, kN, kN);
    b->load_weight(*w, master.floats());
    Tensor y(Dtype::kFp32, kN * kN, 0);
    for (int i = 0; i < 20; ++i)
      b->linear(*w, x.data(), kN, Dtype::kFp32, y.data());
    return y;
  };
  const Tensor expected = work();
  std::vector<Tensor> results(4, Tensor(Dtype::kFp32, kN * kN, 0));
  std::vector<std::thread> threads;
  for (Tensor& r : results) threads.emplace_back([&] { r = work(); });
  for (std::thread& t : threads) t.join();
  for (const Tensor& r : results) EXPECT_TRUE(same_bits(r, expected));
}

TEST(Backend, AllocatesZeroedAlignedMemory) {
  const auto b = make_cpu_backend(1);
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{5} << 20}) {
    auto* p = static_cast<char*>(b->allocate(bytes));
    ASSERT_NE(p, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 64, 0U);
    for (size_t i = 0; i < bytes; i += 4096) EXPECT_EQ(p[i], 0);
    b->release(p);
  }
  b->release(nullptr);
}

}  // namespace
}  // namespace remesh::kernels
