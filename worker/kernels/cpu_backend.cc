// The CPU backend: matrix products by oneDNN, everything else by the loops of
// simd.h dealt to OpenMP threads in contiguous ranges.
//
// Results do not depend on timing: every element has one writer, and sums that
// cross threads are taken in blocks of fixed size and added in order.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>

#include "proto/base/check.h"
#include "worker/kernels/backend.h"
#include "worker/kernels/host_memory.h"
#include "worker/kernels/onednn_gemm.h"
#include "worker/kernels/simd.h"

namespace remesh::kernels {
namespace {

// Elements below which a second thread costs more than it gives.
constexpr int64_t kGrain = 8192;

// Model dimension from which bf16 pays. On one AMX core, forward and backward
// of four layers in bf16 ran, relative to fp32, at 0.92 to 1.05 of the rate for
// dimensions 32 to 56, at 1.09 to 1.18 for 64 and 80, at 1.4 to 1.5 for 96.
constexpr int64_t kBf16Dim = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory that grows to the largest size asked for and is then reused.
class Workspace {
 public:
  float* reserve(int64_t floats) {
    if (floats > size_) {
      block_.reset();
      block_.reset(host_allocate(static_cast<size_t>(floats) * sizeof(float)));
      CHECK_MSG(block_ != nullptr, "no memory for a kernel's workspace");
      size_ = floats;
    }
    return static_cast<float*>(block_.get());
  }

 private:
  HostBlock block_;
  int64_t size_ = 0;
};

// fp32 weights are read where the master lies; bf16 ones are a copy.
class CpuWeight final : public Weight {
 public:
  CpuWeight(Dtype d, int64_t out, int64_t in, HostBlock copy)
      : dtype_(d), out_(out), in_(in), copy_(std::move(copy)) {}
  Dtype dtype() const override { return dtype_; }
  int64_t out() const override { return out_; }
  int64_t in() const override { return in_; }
  uint64_t bytes() const override {
    return copy_ == nullptr
               ? 0
               : static_cast<uint64_t>(out_ * in_) * dtype_size(dtype_);
  }
  void* copy() const { return copy_.get(); }
  void view(const float* master) { master_ = master; }
  // (out, in) of dtype.
  const void* values() const {
    return copy_ != nullptr ? copy_.get() : static_cast<const void*>(master_);
  }

 private:
  Dtype dtype_;
  int64_t out_, in_;
  HostBlock copy_;
  const float* master_ = nullptr;
};

const CpuWeight& own(const Weight& w) {
  return static_cast<const CpuWeight&>(w);
}

// Makes oneDNN use as many threads as the backend owns, for this call.
class ThreadScope {
 public:
  explicit ThreadScope(int threads) : before_(omp_get_max_threads()) {
    if (before_ != threads) omp_set_num_threads(threads);
    changed_ = before_ != threads;
  }
  ~ThreadScope() {
    if (changed_) omp_set_num_threads(before_);
  }
  ThreadScope(const ThreadScope&) = delete;
  ThreadScope& operator=(const ThreadScope&) = delete;

 private:
  int before_;
  bool changed_ = false;
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int threads)
      : threads_(threads), simd_(select_simd()), bf16_(bf16_hardware()) {
    CHECK_MSG(threads >= 1, "a backend needs at least one thread");
    description_ = std::string(simd_.name) +
                   (bf16_ == Bf16Hardware::kAmx      ? ", bf16 products by AMX"
                    : bf16_ == Bf16Hardware::kAvx512 ? ", AVX512-BF16 products"
                                                     : ", no bf16 hardware") +
                   ", " + std::to_string(threads) +
                   (threads == 1 ? " thread" : " threads");
  }

  const char* name() const override { return "onednn"; }
  const char* description() const override { return description_.c_str(); }
  bool supports_bf16() const override { return bf16_ != Bf16Hardware::kNone; }
  int threads() const override { return threads_; }
  Dtype product_dtype(Dtype wanted, int64_t dim) const override {
    return dim < kBf16Dim ? Dtype::kFp32 : wanted;
  }

  void* allocate(size_t bytes) override { return host_allocate(bytes); }
  void release(void* p) override { host_release(p); }
  void copy(void* dst, const void* src, size_t bytes) override {
    parallel(static_cast<int64_t>(bytes), 4 * kGrain,
             [&](int64_t i0, int64_t i1, int) {
               std::memcpy(static_cast<char*>(dst) + i0,
                           static_cast<const char*>(src) + i0,
                           static_cast<size_t>(i1 - i0));
             });
  }
  void zero(void* dst, size_t bytes) override {
    parallel(static_cast<int64_t>(bytes), 4 * kGrain,
             [&](int64_t i0, int64_t i1, int) {
               std::memset(static_cast<char*>(dst) + i0, 0,
                           static_cast<size_t>(i1 - i0));
             });
  }
  void synchronize() override {}

  std::unique_ptr<Weight> make_weight(Dtype d, int64_t out,
                                      int64_t in) override {
    CHECK(out > 0 && in > 0);
    HostBlock block;
    if (d != Dtype::kFp32) {
      block.reset(host_allocate(static_cast<size_t>(out * in) * dtype_size(d)));
      if (block == nullptr) return nullptr;
    }
    return std::make_unique<CpuWeight>(d, out, in, std::move(block));
  }
  void load_weight(Weight& weight, const float* master) override {
    auto& w = static_cast<CpuWeight&>(weight);
    if (w.dtype() == Dtype::kFp32)
      w.view(master);
    else
      convert(w.out() * w.in(), Dtype::kFp32, master, w.dtype(), w.copy());
  }

  void linear(const Weight& w, const void* x, int64_t rows, void* y) override {
    gemm(forward_key(w, rows, w.dtype()), x, own(w).values(), y);
  }
  void linear_fp32(const Weight& w, const void* x, int64_t rows,
                   float* y) override {
    gemm(forward_key(w, rows, Dtype::kFp32), x, own(w).values(), y);
  }
  void linear_backward_input(const Weight& w, const void* dy, int64_t rows,
                             void* dx) override {
    gemm(backward_key(w, rows, w.dtype(), false), dy, own(w).values(), dx);
  }
  void linear_backward_input_fp32(const Weight& w, const void* dy, int64_t rows,
                                  bool add, float* dx) override {
    gemm(backward_key(w, rows, Dtype::kFp32, add), dy, own(w).values(), dx);
  }
  void linear_backward_weight(Dtype d, const void* dy, const void* x,
                              int64_t rows, int64_t out, int64_t in,
                              float* dw) override {
    gemm({.m = out,
          .n = in,
          .k = rows,
          .in = d,
          .out = Dtype::kFp32,
          .a_transposed = true,
          .add = true},
         dy, x, dw);
  }

  void rmsnorm(Dtype d, const float* x, const float* branch,
               const float* weight, double eps, int64_t rows, int64_t dim,
               float* sum, void* y, float* rstd) override {
    typed(d, [&](auto ops, auto tag) {
      using T = decltype(tag);
      parallel(rows, row_grain(dim), [&](int64_t r0, int64_t r1, int) {
        const int64_t e = r0 * dim;
        ops->rmsnorm(x + e, at<float>(branch, e), weight,
                     static_cast<float>(eps), r1 - r0, dim, at<float>(sum, e),
                     at<T>(y, e), rstd + r0);
      });
    });
  }

  void rmsnorm_backward(Dtype d, const float* dy, const float* x,
                        const float* rstd, const float* weight,
                        const float* dresidual, int64_t rows, int64_t dim,
                        float* dx, void* dx_d, float* dweight) override {
    const int64_t blocks = ceil_div(rows, kNormBlockRows);
    float* partial = workspace_.reserve(blocks * dim);
    typed(d, [&](auto ops, auto tag) {
      using T = decltype(tag);
      parallel(blocks, 1, [&](int64_t b0, int64_t b1, int) {
        for (int64_t b = b0; b < b1; ++b) {
          const int64_t r0 = b * kNormBlockRows;
          const int64_t n = std::min(kNormBlockRows, rows - r0);
          const int64_t e = r0 * dim;
          ops->rmsnorm_backward(dy + e, x + e, rstd + r0, weight,
                                at<float>(dresidual, e), n, dim, dx + e,
                                at<T>(dx_d, e), partial + b * dim);
        }
      });
    });
    for (int64_t b = 0; b < blocks; ++b)
      simd_.accumulate(dim, 1.0F, partial + b * dim, dweight);
  }

  void rope(Dtype d, void* x, int64_t rows, int64_t T, int64_t heads,
            int64_t head_dim, int64_t stride, const float* cos,
            const float* sin, bool inverse) override {
    typed(d, [&](auto ops, auto tag) {
      using E = decltype(tag);
      parallel(rows, row_grain(heads * head_dim),
               [&](int64_t r0, int64_t r1, int) {
                 ops->rope(static_cast<E*>(x), r0, r1 - r0, T, heads, head_dim,
                           stride, cos, sin, inverse ? -1.0F : 1.0F);
               });
    });
  }

  void attention(Dtype d, const AttentionShape& s, const void* q, const void* k,
                 const void* v, void* out, float* lse) override {
    const AttentionTask task{
        .segment = whole(s), .q = q, .k = k, .v = v, .o = out, .lse = lse};
    typed(d, [&](auto ops, auto) { attention_tasks(task, ops->attention); });
  }
  void attention_backward(Dtype d, const AttentionShape& s, const void* q,
                          const void* k, const void* v, const void* out,
                          const float* lse, const void* dout, void* dq,
                          void* dk, void* dv) override {
    // The task's lse is only read on the way back.
    const AttentionTask task{.segment = whole(s),
                             .dq_stride = s.stride,
                             .dkv_stride = s.stride,
                             .q = q,
                             .k = k,
                             .v = v,
                             .out = out,
                             .dout = dout,
                             .dq = dq,
                             .dk = dk,
                             .dv = dv,
                             .lse = const_cast<float*>(lse)};
    typed(d, [&](auto ops, auto) {
      attention_tasks(task, ops->attention_backward);
    });
  }
  void attention_segment(Dtype d, const AttentionSegment& s, const void* q,
                         const void* k, const void* v, bool first, float* out,
                         float* lse) override {
    const AttentionTask task{.segment = s,
                             .first = first,
                             .q = q,
                             .k = k,
                             .v = v,
                             .o = out,
                             .lse = lse};
    typed(d, [&](auto ops, auto) {
      attention_tasks(task, ops->attention_segment);
    });
  }
  void attention_segment_backward(Dtype d, const AttentionSegment& s,
                                  const void* q, const void* k, const void* v,
                                  const void* out, const float* lse,
                                  const void* dout, float* dq, float* dk,
                                  float* dv) override {
    const AttentionTask task{.segment = s,
                             .dq_stride = s.num_heads * s.head_dim,
                             .dkv_stride = s.num_kv_heads * s.head_dim,
                             .q = q,
                             .k = k,
                             .v = v,
                             .out = out,
                             .dout = dout,
                             .dq = dq,
                             .dk = dk,
                             .dv = dv,
                             .lse = const_cast<float*>(lse)};
    typed(d, [&](auto ops, auto) {
      attention_tasks(task, ops->attention_segment_backward);
    });
  }

  void swiglu(Dtype d, const void* gu, int64_t rows, int64_t dim,
              void* y) override {
    typed(d, [&](auto ops, auto tag) {
      using T = decltype(tag);
      parallel(rows, row_grain(dim), [&](int64_t r0, int64_t r1, int) {
        ops->swiglu(at<T>(gu, r0 * 2 * dim), r1 - r0, dim, at<T>(y, r0 * dim));
      });
    });
  }
  void swiglu_backward(Dtype d, const void* gu, const void* dy, int64_t rows,
                       int64_t dim, void* dgu, void* y) override {
    typed(d, [&](auto ops, auto tag) {
      using T = decltype(tag);
      parallel(rows, row_grain(dim), [&](int64_t r0, int64_t r1, int) {
        ops->swiglu_backward(at<T>(gu, r0 * 2 * dim), at<T>(dy, r0 * dim),
                             r1 - r0, dim, at<T>(dgu, r0 * 2 * dim),
                             at<T>(y, r0 * dim));
      });
    });
  }

  void embedding(const float* table, int64_t row0, int64_t num_rows,
                 const int32_t* tokens, int64_t rows, int64_t dim,
                 float* y) override {
    const size_t bytes = static_cast<size_t>(dim) * sizeof(float);
    parallel(rows, row_grain(dim), [&](int64_t r0, int64_t r1, int) {
      for (int64_t i = r0; i < r1; ++i) {
        const int64_t t = tokens[i] - row0;
        if (t >= 0 && t < num_rows)
          std::memcpy(y + i * dim, table + t * dim, bytes);
        else
          std::memset(y + i * dim, 0, bytes);
      }
    });
  }
  void embedding_backward(const float* dy, const int32_t* tokens, int64_t row0,
                          int64_t num_rows, int64_t rows, int64_t dim,
                          float* dtable) override {
    // Each table row belongs to one thread, which adds in row order.
    const int64_t owners =
        std::min<int64_t>(threads_, ceil_div(rows * dim, kGrain));
    parallel(owners, 1, [&](int64_t o0, int64_t o1, int) {
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t t = tokens[i] - row0;
        if (t < 0 || t >= num_rows) continue;
        const int64_t owner = t % owners;
        if (owner >= o0 && owner < o1)
          simd_.accumulate(dim, 1.0F, dy + i * dim, dtable + t * dim);
      }
    });
  }

  void cross_entropy_add(Dtype d, const void* logits, int64_t rows,
                         int64_t cols, int64_t col0, const int32_t* targets,
                         bool first, float* row_max, float* row_sum,
                         float* target_logit) override {
    typed(d, [&](auto ops, auto tag) {
      using T = decltype(tag);
      parallel(rows, row_grain(cols), [&](int64_t r0, int64_t r1, int) {
        ops->cross_entropy_add(at<T>(logits, r0 * cols), r1 - r0, cols, col0,
                               targets + r0, first, row_max + r0, row_sum + r0,
                               target_logit + r0);
      });
    });
  }
  void cross_entropy_rescale(int64_t rows, const float* new_max, float* row_max,
                             float* row_sum) override {
    for (int64_t i = 0; i < rows; ++i) {
      row_sum[i] *= std::exp(row_max[i] - new_max[i]);
      row_max[i] = new_max[i];
    }
  }
  double cross_entropy_finish(int64_t rows, const float* row_max,
                              const float* row_sum, const float* target_logit,
                              float* lse) override {
    double loss = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const double l = row_max[i] + std::log(static_cast<double>(row_sum[i]));
      lse[i] = static_cast<float>(l);
      loss += l - target_logit[i];
    }
    return loss;
  }
  void cross_entropy_backward(Dtype d, const void* logits, int64_t rows,
                              int64_t cols, int64_t col0,
                              const int32_t* targets, const float* lse,
                              double scale, void* dlogits) override {
    typed(d, [&](auto ops, auto tag) {
      using T = decltype(tag);
      parallel(rows, row_grain(cols), [&](int64_t r0, int64_t r1, int) {
        ops->cross_entropy_backward(
            at<T>(logits, r0 * cols), r1 - r0, cols, col0, targets + r0,
            lse + r0, static_cast<float>(scale), at<T>(dlogits, r0 * cols));
      });
    });
  }

  void add(int64_t n, const float* a, const float* b, float* out) override {
    parallel(n, kGrain, [&](int64_t i0, int64_t i1, int) {
      simd_.add(i1 - i0, a + i0, b + i0, out + i0);
    });
  }
  void convert(int64_t n, Dtype from, const void* src, Dtype to,
               void* dst) override {
    if (from == to) {
      copy(dst, src, static_cast<size_t>(n) * dtype_size(from));
      return;
    }
    parallel(n, kGrain, [&](int64_t i0, int64_t i1, int) {
      if (to == Dtype::kBf16)
        simd_.to_bf16(i1 - i0, at<float>(src, i0), at<Bf16>(dst, i0));
      else
        simd_.to_fp32(i1 - i0, at<Bf16>(src, i0), at<float>(dst, i0));
    });
  }
  void convert_rows(int64_t rows, int64_t cols, Dtype from, const void* src,
                    int64_t src_stride, Dtype to, void* dst,
                    int64_t dst_stride) override {
    const auto at_row = [](auto* p, Dtype d, int64_t r, int64_t stride) {
      return p + r * stride * static_cast<int64_t>(dtype_size(d));
    };
    parallel(rows, row_grain(cols), [&](int64_t r0, int64_t r1, int) {
      for (int64_t r = r0; r < r1; ++r) {
        const char* a =
            at_row(static_cast<const char*>(src), from, r, src_stride);
        char* b = at_row(static_cast<char*>(dst), to, r, dst_stride);
        if (from == to)
          std::memcpy(b, a, static_cast<size_t>(cols) * dtype_size(from));
        else if (to == Dtype::kBf16)
          simd_.to_bf16(cols, at<float>(a, 0), at<Bf16>(b, 0));
        else
          simd_.to_fp32(cols, at<Bf16>(a, 0), at<float>(b, 0));
      }
    });
  }
  void scale(int64_t n, double a, float* x) override {
    parallel(n, kGrain, [&](int64_t i0, int64_t i1, int) {
      simd_.scale(i1 - i0, static_cast<float>(a), x + i0);
    });
  }
  void accumulate(int64_t n, double a, const float* x, float* y) override {
    parallel(n, kGrain, [&](int64_t i0, int64_t i1, int) {
      simd_.accumulate(i1 - i0, static_cast<float>(a), x + i0, y + i0);
    });
  }
  double sum_of_squares(int64_t n, const float* x) override {
    const int64_t blocks = ceil_div(n, kSquareBlock);
    auto* partial = reinterpret_cast<double*>(workspace_.reserve(2 * blocks));
    parallel(blocks, 1, [&](int64_t b0, int64_t b1, int) {
      for (int64_t b = b0; b < b1; ++b) {
        const int64_t e = b * kSquareBlock;
        partial[b] = simd_.sum_of_squares(std::min(kSquareBlock, n - e), x + e);
      }
    });
    double sum = 0;
    for (int64_t b = 0; b < blocks; ++b) sum += partial[b];
    return sum;
  }

  void adamw(const AdamWOptions& o, int64_t n, float* g, const float* p,
             const float* m, const float* v, float* new_p, float* new_m,
             float* new_v) override {
    const auto step = static_cast<double>(o.step);
    const double bc1 = 1.0 - std::pow(o.beta1, step);
    const double bc2 = 1.0 - std::pow(o.beta2, step);
    const AdamWConstants c{
        .beta1 = static_cast<float>(o.beta1),
        .one_minus_beta1 = static_cast<float>(1.0 - o.beta1),
        .beta2 = static_cast<float>(o.beta2),
        .one_minus_beta2 = static_cast<float>(1.0 - o.beta2),
        .step_size = static_cast<float>(o.lr / bc1),
        .denom_scale = static_cast<float>(1.0 / std::sqrt(bc2)),
        .eps = static_cast<float>(o.eps),
        .keep = static_cast<float>(1.0 - o.lr * o.weight_decay),
        .grad_scale = static_cast<float>(o.grad_scale),
        .clear_grad = o.clear_grad,
        .stream = new_p != p && new_m != m && new_v != v && n > kGrain};
    parallel(n, kGrain, [&](int64_t i0, int64_t i1, int) {
      simd_.adamw(c, i1 - i0, g + i0, p + i0, m + i0, v + i0, new_p + i0,
                  new_m + i0, new_v + i0);
    });
  }

 private:
  // Element i of an untyped array; nullptr stays nullptr.
  template <typename T>
  static const T* at(const void* p, int64_t i) {
    return p == nullptr ? nullptr : static_cast<const T*>(p) + i;
  }
  template <typename T>
  static T* at(void* p, int64_t i) {
    return p == nullptr ? nullptr : static_cast<T*>(p) + i;
  }

  static GemmKey forward_key(const Weight& w, int64_t rows, Dtype out) {
    return {.m = rows,
            .n = w.out(),
            .k = w.in(),
            .in = w.dtype(),
            .out = out,
            .b_transposed = true};
  }
  static GemmKey backward_key(const Weight& w, int64_t rows, Dtype out,
                              bool add) {
    return {.m = rows,
            .n = w.in(),
            .k = w.out(),
            .in = w.dtype(),
            .out = out,
            .add = add};
  }

  static int64_t row_grain(int64_t dim) {
    return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, dim));
  }

  // f(table of loops for the type, a value of the type).
  template <typename F>
  void typed(Dtype d, const F& f) const {
    if (d == Dtype::kFp32)
      f(&simd_.fp32, float{});
    else
      f(&simd_.bf16, Bf16{});
  }

  // f(first, last, thread) over [0, n) in contiguous ranges, one a thread, of
  // at least `grain` where possible.
  template <typename F>
  void parallel(int64_t n, int64_t grain, const F& f) const {
    const int64_t wanted = std::min<int64_t>(threads_, ceil_div(n, grain));
    if (wanted <= 1) {
      if (n > 0) f(int64_t{0}, n, 0);
      return;
    }
#pragma omp parallel num_threads(static_cast <int>(wanted))
    {
      const int64_t count = omp_get_num_threads();
      const int64_t me = omp_get_thread_num();
      const int64_t i0 = n * me / count;
      const int64_t i1 = n * (me + 1) / count;
      if (i0 < i1) f(i0, i1, static_cast<int>(me));
    }
  }

  // Attention of whole sequences is one block of each with itself.
  static AttentionSegment whole(const AttentionShape& s) {
    return {.B = s.B,
            .Tq = s.T,
            .Tk = s.T,
            .num_heads = s.num_heads,
            .num_kv_heads = s.num_kv_heads,
            .head_dim = s.head_dim,
            .q_stride = s.stride,
            .kv_stride = s.stride,
            .q_batch = s.T,
            .kv_batch = s.T,
            .lse_T = s.T};
  }

  void gemm(const GemmKey& key, const void* a, const void* b, void* c) {
    const ThreadScope scope(threads_);
    gemm_.run(key, a, b, c);
  }

  void attention_tasks(const AttentionTask& shared,
                       void (*run)(const AttentionTask&)) {
    const AttentionSegment& s = shared.segment;
    CHECK(s.num_kv_heads > 0 && s.num_heads % s.num_kv_heads == 0);
    // A multiple of a cache line, so that threads' scratch stays aligned.
    const int64_t each = ceil_div(simd_.attention_scratch(s), 16) * 16;
    float* scratch = workspace_.reserve(each * threads_);
    parallel(s.B * s.num_kv_heads, 1, [&](int64_t i0, int64_t i1, int thread) {
      AttentionTask task = shared;
      task.scratch = scratch + thread * each;
      for (int64_t i = i0; i < i1; ++i) {
        task.b = i / s.num_kv_heads;
        task.g = i % s.num_kv_heads;
        run(task);
      }
    });
  }

  int threads_;
  const SimdOps& simd_;
  Bf16Hardware bf16_;
  std::string description_;
  OnednnGemm gemm_;
  Workspace workspace_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(int threads) {
  return std::make_unique<CpuBackend>(threads);
}

}  // namespace remesh::kernels
