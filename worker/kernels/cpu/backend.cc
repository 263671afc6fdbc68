// The CPU backend: GEMMs by linear.h, everything else by the loops of simd.h,
// which OpenMP threads share in contiguous ranges.
//
// Results do not depend on timing: every element has one writer, and sums that
// cross threads are taken in blocks of fixed size and added in order.
//
// Over 500 lines because every operation is distributed to threads here.
#include "worker/kernels/backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "proto/base/check.h"
#include "worker/kernels/cpu/amx_tiles.h"
#include "worker/kernels/cpu/linear.h"
#include "worker/kernels/cpu/parallel.h"
#include "worker/kernels/cpu/simd.h"
#include "worker/kernels/cpu/workspace.h"
#include "worker/kernels/host_memory.h"

namespace remesh::kernels {
namespace {

// Elements below which a second thread costs more than it gives.
constexpr int64_t kGrain = 8192;

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int threads)
      : threads_(threads), simd_(select_simd()), linear_(threads, simd_) {
    const Bf16Hardware bf16 = linear_.bf16();
    CHECK_MSG(threads >= 1, "a backend needs at least one thread");
    description_ =
        std::string(simd_.name) +
        (bf16 == Bf16Hardware::kAmx      ? ", bf16 GEMMs by AMX"
         : bf16 == Bf16Hardware::kAvx512 ? ", bf16 GEMMs by AVX512-BF16"
                                         : ", no bf16 hardware") +
        ", " + std::to_string(threads) +
        (threads == 1 ? " thread" : " threads");
  }

  const char* name() const override { return "cpu"; }
  const char* description() const override { return description_.c_str(); }
  bool supports_bf16() const override {
    return linear_.bf16() != Bf16Hardware::kNone;
  }
  int threads() const override { return threads_; }

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
    return linear_.make_weight(d, out, in);
  }
  void load_weight(Weight& w, const float* master) override {
    linear_.load_weight(w, master);
  }
  void linear(const Weight& w, const void* x, int64_t rows, Dtype out,
              void* y) override {
    linear_.forward(w, x, rows, out, y);
  }
  void linear_backward_input(const Weight& w, const void* dy, int64_t rows,
                             Dtype out, bool add, void* dx) override {
    linear_.backward_input(w, dy, rows, out, add, dx);
  }
  void linear_backward_weight(Dtype d, const void* dy, const void* x,
                              int64_t rows, int64_t out, int64_t in,
                              float* dw) override {
    linear_.backward_weight(d, dy, x, rows, out, in, dw);
  }

  void rmsnorm(Dtype d, const float* x, const float* branch,
               const float* weight, double eps, int64_t rows, int64_t dim,
               float* sum, void* y, float* rstd) override {
    by_rows(d, rows, dim, [&](auto ops, auto in, int64_t r0, int64_t n) {
      const int64_t e = r0 * dim;
      ops->rmsnorm(x + e, at<float>(branch, e), weight, static_cast<float>(eps),
                   n, dim, at<float>(sum, e), in(y, e), rstd + r0);
    });
  }

  void rmsnorm_backward(Dtype d, const float* dy, const float* x,
                        const float* rstd, const float* weight,
                        const float* dresidual, int64_t rows, int64_t dim,
                        float* dx, void* dx_d, float* dweight) override {
    sum_blocks(d, rows, dim, dweight,
               [&](auto ops, auto in, int64_t r0, int64_t n, float* sum) {
                 const int64_t e = r0 * dim;
                 ops->rmsnorm_backward(dy + e, x + e, rstd + r0, weight,
                                       at<float>(dresidual, e), n, dim, dx + e,
                                       in(dx_d, e), sum);
               });
  }

  void head_rmsnorm(Dtype d, const HeadRows& s, const void* x,
                    const float* weight, double eps, void* y,
                    float* rstd) override {
    by_rows(d, s.rows, s.num_heads * s.head_dim,
            [&](auto ops, auto in, int64_t r0, int64_t n) {
              HeadRows part = s;
              part.rows = n;
              ops->head_rmsnorm(part, in(x, r0 * s.x_stride), weight,
                                static_cast<float>(eps), in(y, r0 * s.y_stride),
                                rstd + r0 * s.num_heads);
            });
  }
  void head_rmsnorm_backward(Dtype d, const HeadRows& s, const void* x,
                             const float* rstd, const float* weight, void* dy,
                             float* dweight) override {
    sum_blocks(d, s.rows, s.head_dim, dweight,
               [&](auto ops, auto in, int64_t r0, int64_t n, float* sum) {
                 HeadRows part = s;
                 part.rows = n;
                 ops->head_rmsnorm_backward(part, in(x, r0 * s.x_stride),
                                            rstd + r0 * s.num_heads, weight,
                                            in(dy, r0 * s.y_stride), sum);
               });
  }

  void add_bias(Dtype d, const float* bias, int64_t rows, int64_t cols,
                void* y) override {
    by_rows(d, rows, cols, [&](auto ops, auto in, int64_t r0, int64_t n) {
      ops->add_bias(bias, n, cols, in(y, r0 * cols));
    });
  }
  void bias_backward(Dtype d, const void* dy, int64_t rows, int64_t cols,
                     float* dbias) override {
    sum_blocks(d, rows, cols, dbias,
               [&](auto ops, auto in, int64_t r0, int64_t n, float* sum) {
                 ops->sum_rows(in(dy, r0 * cols), n, cols, sum);
               });
  }

  void rope(Dtype d, void* x, int64_t rows, int64_t T, int64_t heads,
            int64_t head_dim, int64_t stride, const float* cos,
            const float* sin, bool inverse) override {
    by_rows(d, rows, heads * head_dim,
            [&](auto ops, auto in, int64_t r0, int64_t n) {
              ops->rope(in(x, 0), r0, n, T, heads, head_dim, stride, cos, sin,
                        inverse ? -1.0F : 1.0F);
            });
  }

  void attention(Dtype d, const AttentionSegment& s, const void* q,
                 const void* k, const void* v, void* out, float* lse) override {
    const AttentionTask task{
        .segment = s, .q = q, .k = k, .v = v, .o = out, .lse = lse};
    run_attention(d, task, AttentionUse::kWhole, amx_attention,
                  [](auto& ops) { return ops.attention; });
  }
  void attention_backward(Dtype d, const AttentionSegment& s, const void* q,
                          const void* k, const void* v, const void* out,
                          const float* lse, const void* dout, void* dq,
                          void* dk, void* dv) override {
    const AttentionTask task = backward_task(
        {.segment = s, .dq_stride = s.q_stride, .dkv_stride = s.kv_stride}, q,
        k, v, out, lse, dout, dq, dk, dv);
    run_attention(d, task, AttentionUse::kBackward, amx_attention_backward,
                  [](auto& ops) { return ops.attention_backward; });
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
    run_attention(d, task, AttentionUse::kSegment, amx_attention_segment,
                  [](auto& ops) { return ops.attention_segment; });
  }
  void attention_segment_backward(Dtype d, const AttentionSegment& s,
                                  const void* q, const void* k, const void* v,
                                  const void* out, const float* lse,
                                  const void* dout, float* dq, float* dk,
                                  float* dv) override {
    const AttentionTask task =
        backward_task({.segment = s,
                       .dq_stride = s.num_heads * s.head_dim,
                       .dkv_stride = s.num_kv_heads * s.head_dim},
                      q, k, v, out, lse, dout, dq, dk, dv);
    run_attention(d, task, AttentionUse::kBackward,
                  amx_attention_segment_backward,
                  [](auto& ops) { return ops.attention_segment_backward; });
  }

  void swiglu(Dtype d, const void* gu, int64_t rows, int64_t dim,
              void* y) override {
    by_rows(d, rows, dim, [&](auto ops, auto in, int64_t r0, int64_t n) {
      ops->swiglu(in(gu, r0 * 2 * dim), n, dim, in(y, r0 * dim));
    });
  }
  void swiglu_backward(Dtype d, const void* gu, const void* dy, int64_t rows,
                       int64_t dim, void* dgu, void* y) override {
    by_rows(d, rows, dim, [&](auto ops, auto in, int64_t r0, int64_t n) {
      ops->swiglu_backward(in(gu, r0 * 2 * dim), in(dy, r0 * dim), n, dim,
                           in(dgu, r0 * 2 * dim), in(y, r0 * dim));
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
    by_rows(d, rows, cols, [&](auto ops, auto in, int64_t r0, int64_t n) {
      ops->cross_entropy_add(in(logits, r0 * cols), n, cols, col0, targets + r0,
                             first, row_max + r0, row_sum + r0,
                             target_logit + r0);
    });
  }
  void cross_entropy_rescale(int64_t rows, const float* new_max, float* row_max,
                             float* row_sum) override {
    for (int64_t i = 0; i < rows; ++i) {
      row_sum[i] *= std::exp(row_max[i] - new_max[i]);
      row_max[i] = new_max[i];
    }
  }
  double cross_entropy_finish(int64_t rows, const int32_t* targets,
                              const float* row_max, const float* row_sum,
                              const float* target_logit, float* lse) override {
    double loss = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const double l = row_max[i] + std::log(static_cast<double>(row_sum[i]));
      lse[i] = static_cast<float>(l);
      if (targets[i] >= 0) loss += l - target_logit[i];
    }
    return loss;
  }
  void cross_entropy_backward(Dtype d, const void* logits, int64_t rows,
                              int64_t cols, int64_t col0,
                              const int32_t* targets, const float* lse,
                              double scale, double z_loss,
                              void* dlogits) override {
    by_rows(d, rows, cols, [&](auto ops, auto in, int64_t r0, int64_t n) {
      ops->cross_entropy_backward(
          in(logits, r0 * cols), n, cols, col0, targets + r0, lse + r0,
          static_cast<float>(scale), static_cast<float>(z_loss),
          in(dlogits, r0 * cols));
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
    parallel(rows, row_grain(cols), [&](int64_t r0, int64_t r1, int) {
      for (int64_t r = r0; r < r1; ++r) {
        const void* a = at(from, src, r * src_stride);
        void* b = at(to, dst, r * dst_stride);
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

  void adamw(const AdamWOptions& o, int64_t n, const float* g, const float* p,
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
        .stream = new_p != p && new_m != m && new_v != v && n > kGrain};
    parallel(n, kGrain, [&](int64_t i0, int64_t i1, int) {
      simd_.adamw(c, i1 - i0, g + i0, p + i0, m + i0, v + i0, new_p + i0,
                  new_m + i0, new_v + i0);
    });
  }

 private:
  static AttentionTask backward_task(AttentionTask task, const void* q,
                                     const void* k, const void* v,
                                     const void* out, const float* lse,
                                     const void* dout, void* dq, void* dk,
                                     void* dv) {
    task.q = q;
    task.k = k;
    task.v = v;
    task.out = out;
    task.lse = const_cast<float*>(lse);  // only read in backward
    task.dout = dout;
    task.dq = dq;
    task.dk = dk;
    task.dv = dv;
    return task;
  }
  // Element i of an untyped array; nullptr stays nullptr.
  template <typename T>
  static const T* at(const void* p, int64_t i) {
    return p == nullptr ? nullptr : static_cast<const T*>(p) + i;
  }
  template <typename T>
  static T* at(void* p, int64_t i) {
    return p == nullptr ? nullptr : static_cast<T*>(p) + i;
  }

  static const void* at(Dtype d, const void* p, int64_t i) {
    return at<char>(p, i * static_cast<int64_t>(dtype_size(d)));
  }
  static void* at(Dtype d, void* p, int64_t i) {
    return at<char>(p, i * static_cast<int64_t>(dtype_size(d)));
  }

  static int64_t row_grain(int64_t dim) {
    return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, dim));
  }

  // f(table of loops for the type, at<T> for it).
  template <typename F>
  void typed(Dtype d, const F& f) const {
    if (d == Dtype::kFp32)
      f(&simd_.fp32, [](auto* p, int64_t i) { return at<float>(p, i); });
    else
      f(&simd_.bf16, [](auto* p, int64_t i) { return at<Bf16>(p, i); });
  }

  template <typename F>
  void parallel(int64_t n, int64_t grain, const F& f) const {
    parallel_ranges(threads_, n, grain, f);
  }

  // f(loops and at<T> as typed() has them, first row, rows) on the threads.
  template <typename F>
  void by_rows(Dtype d, int64_t rows, int64_t width, const F& f) const {
    typed(d, [&](auto ops, auto in) {
      parallel(rows, row_grain(width),
               [&](int64_t r0, int64_t r1, int) { f(ops, in, r0, r1 - r0); });
    });
  }

  // Adds to `total` what f(loops, at<T>, first row, rows, sum) writes into
  // `sum`, for each block of kNormBlockRows rows.
  template <typename F>
  void sum_blocks(Dtype d, int64_t rows, int64_t dim, float* total,
                  const F& f) {
    const int64_t blocks = ceil_div(rows, kNormBlockRows);
    float* partial = workspace_.reserve(blocks * dim);
    typed(d, [&](auto ops, auto in) {
      parallel(blocks, 1, [&](int64_t b0, int64_t b1, int) {
        for (int64_t b = b0; b < b1; ++b) {
          const int64_t r0 = b * kNormBlockRows;
          f(ops, in, r0, std::min(kNormBlockRows, rows - r0),
            partial + b * dim);
        }
      });
    });
    for (int64_t b = 0; b < blocks; ++b)
      simd_.accumulate(dim, 1.0F, partial + b * dim, total);
  }

  // `on_tiles` for bf16 where the host has them, else the loop that `choose`
  // takes from the type's table. One query would leave tiles almost empty.
  template <typename F>
  void run_attention(Dtype d, const AttentionTask& task, AttentionUse use,
                     void (*on_tiles)(const AttentionTask&), const F& choose) {
    const AttentionSegment& s = task.segment;
    void (*run)(const AttentionTask&) = on_tiles;
    int64_t floats = 0;
    if (d == Dtype::kBf16 && linear_.bf16() == Bf16Hardware::kAmx && s.Tq > 1) {
      floats = amx_attention_scratch(s);
    } else {
      run = d == Dtype::kFp32 ? choose(simd_.fp32) : choose(simd_.bf16);
      floats = simd_.attention_scratch(s, use);
    }
    if (s.documents.empty())
      attention_tasks(task, run, floats);
    else
      document_tasks(d, task, run, floats);
  }

  // The task of one document of a batch.
  static AttentionTask document_task(Dtype d, const AttentionTask& batch,
                                     const Document& document) {
    const AttentionSegment& s = batch.segment;
    const int64_t row = s.num_heads * s.head_dim;
    AttentionTask t = batch;
    t.segment.B = 1;
    t.segment.Tq = t.segment.Tk = document.tokens;
    t.i1 = document.tokens;
    const auto moved = [&](auto* p, int64_t stride) {
      return at(d, p, document.first * stride);
    };
    t.q = moved(batch.q, s.q_stride);
    t.k = moved(batch.k, s.kv_stride);
    t.v = moved(batch.v, s.kv_stride);
    t.out = moved(batch.out, row);
    t.dout = moved(batch.dout, row);
    t.o = moved(batch.o, row);
    t.dq = moved(batch.dq, batch.dq_stride);
    t.dk = moved(batch.dk, batch.dkv_stride);
    t.dv = moved(batch.dv, batch.dkv_stride);
    t.lse += document.first / s.q_batch * s.num_heads * s.lse_T +
             document.first % s.q_batch;
    return t;
  }

  // The heads of the documents, divided so that threads have about equal work.
  void document_tasks(Dtype d, const AttentionTask& batch,
                      void (*run)(const AttentionTask&), int64_t floats) {
    const std::span<const Document> documents = batch.segment.documents;
    const int64_t heads = batch.segment.num_kv_heads;
    const auto work = [](const Document& document) {
      constexpr int64_t kRows = 64;  // whose scores cost as much as the rest
      return static_cast<double>(document.tokens * (document.tokens + kRows));
    };
    double all = 0;
    for (const Document& document : documents)
      all += work(document) * static_cast<double>(heads);
    const int64_t each = ceil_div(floats, 16) * 16;
    float* scratch = workspace_.reserve(each * threads_);
    parallel(threads_, 1, [&](int64_t t0, int64_t t1, int thread) {
      double before = 0;
      for (const Document& document : documents)
        for (int64_t g = 0; g < heads; ++g) {
          const double middle = before + work(document) / 2;
          before += work(document);
          const auto part = static_cast<int64_t>(middle / all *
                                                 static_cast<double>(threads_));
          if (part < t0 || part >= t1) continue;
          AttentionTask task = document_task(d, batch, document);
          task.g = g;
          task.scratch = scratch + thread * each;
          run(task);
        }
    });
  }

  // With few heads the forward's tasks are also split by queries, which do not
  // depend on each other.
  void attention_tasks(const AttentionTask& shared,
                       void (*run)(const AttentionTask&), int64_t floats) {
    constexpr int64_t kQueries = 64;  // a multiple of every kernel's tile
    const AttentionSegment& s = shared.segment;
    CHECK(s.num_kv_heads > 0 && s.num_heads % s.num_kv_heads == 0);
    const int64_t heads = s.B * s.num_kv_heads;
    if (heads == 0 || s.Tq == 0) return;
    const bool forward = shared.o != nullptr;
    const int64_t parts =
        forward ? std::clamp<int64_t>(ceil_div(4 * threads_, heads), 1,
                                      ceil_div(s.Tq, kQueries))
                : 1;
    const int64_t queries =
        ceil_div(ceil_div(s.Tq, parts), kQueries) * kQueries;
    // A multiple of a cache line, so that threads' scratch stays aligned.
    const int64_t each = ceil_div(floats, 16) * 16;
    float* scratch =
        workspace_.reserve(each * std::min<int64_t>(threads_, heads * parts));
    parallel(heads * parts, 1, [&](int64_t i0, int64_t i1, int thread) {
      AttentionTask task = shared;
      task.scratch = scratch + thread * each;
      for (int64_t i = i0; i < i1; ++i) {
        task.b = i / parts / s.num_kv_heads;
        task.g = i / parts % s.num_kv_heads;
        task.i0 = std::min(i % parts * queries, s.Tq);
        task.i1 = parts == 1 ? s.Tq : std::min(task.i0 + queries, s.Tq);
        if (task.i0 < task.i1) run(task);
      }
    });
  }

  int threads_;
  const SimdOps& simd_;
  CpuLinear linear_;
  std::string description_;
  Workspace workspace_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(int threads) {
  return std::make_unique<CpuBackend>(threads);
}

}  // namespace remesh::kernels
