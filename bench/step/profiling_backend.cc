#include "bench/step/profiling_backend.h"

#include "proto/base/clock.h"

namespace remesh::bench {
namespace {

using kernels::AdamWOptions;
using kernels::AttentionSegment;
using kernels::Backend;
using kernels::Dtype;
using kernels::HeadRows;
using kernels::Weight;

class Profiler final : public ProfilingBackend {
 public:
  explicit Profiler(Backend& inner) : b_(inner) {}
  const std::map<std::string, OperationCost>& costs() const override {
    return costs_;
  }
  void record(bool on) override { recording_ = on; }
  const std::map<GemmShape, GemmUse>& gemms() const override { return gemms_; }

  const char* name() const override { return b_.name(); }
  const char* description() const override { return b_.description(); }
  bool supports_bf16() const override { return b_.supports_bf16(); }
  int threads() const override { return b_.threads(); }
  void* allocate(size_t bytes) override { return b_.allocate(bytes); }
  void release(void* p) override { b_.release(p); }
  void copy(void* dst, const void* src, size_t bytes) override {
    timed("copy", {.bytes = 2.0 * static_cast<double>(bytes)},
          [&] { b_.copy(dst, src, bytes); });
  }
  void zero(void* dst, size_t bytes) override {
    timed("copy", {.bytes = static_cast<double>(bytes)},
          [&] { b_.zero(dst, bytes); });
  }
  void synchronize() override { b_.synchronize(); }
  std::unique_ptr<Weight> make_weight(Dtype d, int64_t out,
                                      int64_t in) override {
    return b_.make_weight(d, out, in);
  }
  void load_weight(Weight& w, const float* master) override {
    timed("load_weight", load_cost(w), [&] { b_.load_weight(w, master); });
  }
  void linear(const Weight& w, const void* x, int64_t rows, Dtype out,
              void* y) override {
    gemm("gemm_forward", shape_of(GemmPass::kForward, w, rows, out),
         [&] { b_.linear(w, x, rows, out, y); });
  }
  void linear_backward_input(const Weight& w, const void* dy, int64_t rows,
                             Dtype out, bool add, void* dx) override {
    gemm("gemm_input", shape_of(GemmPass::kInput, w, rows, out, add),
         [&] { b_.linear_backward_input(w, dy, rows, out, add, dx); });
  }
  void linear_backward_weight(Dtype d, const void* dy, const void* x,
                              int64_t rows, int64_t out, int64_t in,
                              float* dw) override {
    gemm("gemm_weight",
         {GemmPass::kWeight, rows, out, in, d, Dtype::kFp32, /*add=*/true},
         [&] { b_.linear_backward_weight(d, dy, x, rows, out, in, dw); });
  }
  void rmsnorm(Dtype d, const float* x, const float* branch,
               const float* weight, double eps, int64_t rows, int64_t dim,
               float* sum, void* y, float* rstd) override {
    timed("norm",
          {.bytes = elements(rows, dim) * (branch != nullptr ? 12.0 : 4.0) +
                    elements(rows, dim) * size(d)},
          [&] {
            b_.rmsnorm(d, x, branch, weight, eps, rows, dim, sum, y, rstd);
          });
  }
  void rmsnorm_backward(Dtype d, const float* dy, const float* x,
                        const float* rstd, const float* weight,
                        const float* dresidual, int64_t rows, int64_t dim,
                        float* dx, void* dx_d, float* dweight) override {
    timed(
        "norm",
        {.bytes = elements(rows, dim) * ((dresidual != nullptr ? 16.0 : 12.0) +
                                         (dx_d != nullptr ? size(d) : 0))},
        [&] {
          b_.rmsnorm_backward(d, dy, x, rstd, weight, dresidual, rows, dim, dx,
                              dx_d, dweight);
        });
  }
  void head_rmsnorm(Dtype d, const HeadRows& s, const void* x,
                    const float* weight, double eps, void* y,
                    float* rstd) override {
    timed("norm",
          {.bytes = 2 * elements(s.rows, s.num_heads * s.head_dim) * size(d)},
          [&] { b_.head_rmsnorm(d, s, x, weight, eps, y, rstd); });
  }
  void head_rmsnorm_backward(Dtype d, const HeadRows& s, const void* x,
                             const float* rstd, const float* weight, void* dy,
                             float* dweight) override {
    timed(
        "norm",
        {.bytes = 3 * elements(s.rows, s.num_heads * s.head_dim) * size(d)},
        [&] { b_.head_rmsnorm_backward(d, s, x, rstd, weight, dy, dweight); });
  }
  void add_bias(Dtype d, const float* bias, int64_t rows, int64_t cols,
                void* y) override {
    timed("copy", {.bytes = 2 * elements(rows, cols) * size(d)},
          [&] { b_.add_bias(d, bias, rows, cols, y); });
  }
  void bias_backward(Dtype d, const void* dy, int64_t rows, int64_t cols,
                     float* dbias) override {
    timed("copy", {.bytes = elements(rows, cols) * size(d)},
          [&] { b_.bias_backward(d, dy, rows, cols, dbias); });
  }
  void rope(Dtype d, void* x, int64_t rows, int64_t T, int64_t heads,
            int64_t head_dim, int64_t stride, const float* cos,
            const float* sin, bool inverse) override {
    timed("rope", {.bytes = 2 * elements(rows, heads * head_dim) * size(d)},
          [&] {
            b_.rope(d, x, rows, T, heads, head_dim, stride, cos, sin, inverse);
          });
  }
  void attention(Dtype d, const AttentionSegment& s, const void* q,
                 const void* k, const void* v, void* out, float* lse) override {
    timed("attention", attention_cost(d, s, false),
          [&] { b_.attention(d, s, q, k, v, out, lse); });
  }
  void attention_backward(Dtype d, const AttentionSegment& s, const void* q,
                          const void* k, const void* v, const void* out,
                          const float* lse, const void* dout, void* dq,
                          void* dk, void* dv) override {
    timed("attention_backward", attention_cost(d, s, true), [&] {
      b_.attention_backward(d, s, q, k, v, out, lse, dout, dq, dk, dv);
    });
  }
  void attention_segment(Dtype d, const AttentionSegment& s, const void* q,
                         const void* k, const void* v, bool first, float* out,
                         float* lse) override {
    timed("attention", attention_cost(d, s, false),
          [&] { b_.attention_segment(d, s, q, k, v, first, out, lse); });
  }
  void attention_segment_backward(Dtype d, const AttentionSegment& s,
                                  const void* q, const void* k, const void* v,
                                  const void* out, const float* lse,
                                  const void* dout, float* dq, float* dk,
                                  float* dv) override {
    timed("attention_backward", attention_cost(d, s, true), [&] {
      b_.attention_segment_backward(d, s, q, k, v, out, lse, dout, dq, dk, dv);
    });
  }
  void swiglu(Dtype d, const void* gu, int64_t rows, int64_t dim,
              void* y) override {
    timed("swiglu", {.bytes = 3 * elements(rows, dim) * size(d)},
          [&] { b_.swiglu(d, gu, rows, dim, y); });
  }
  void swiglu_backward(Dtype d, const void* gu, const void* dy, int64_t rows,
                       int64_t dim, void* dgu, void* y) override {
    timed("swiglu", {.bytes = 6 * elements(rows, dim) * size(d)},
          [&] { b_.swiglu_backward(d, gu, dy, rows, dim, dgu, y); });
  }
  void embedding(const float* table, int64_t row0, int64_t num_rows,
                 const int32_t* tokens, int64_t rows, int64_t dim,
                 float* y) override {
    timed("embedding", {.bytes = 8 * elements(rows, dim)},
          [&] { b_.embedding(table, row0, num_rows, tokens, rows, dim, y); });
  }
  void embedding_backward(const float* dy, const int32_t* tokens, int64_t row0,
                          int64_t num_rows, int64_t rows, int64_t dim,
                          float* dtable) override {
    timed("embedding", {.bytes = 12 * elements(rows, dim)}, [&] {
      b_.embedding_backward(dy, tokens, row0, num_rows, rows, dim, dtable);
    });
  }
  void cross_entropy_add(Dtype d, const void* logits, int64_t rows,
                         int64_t cols, int64_t col0, const int32_t* targets,
                         bool first, float* row_max, float* row_sum,
                         float* target_logit) override {
    timed("cross_entropy", {.bytes = elements(rows, cols) * size(d)}, [&] {
      b_.cross_entropy_add(d, logits, rows, cols, col0, targets, first, row_max,
                           row_sum, target_logit);
    });
  }
  void cross_entropy_rescale(int64_t rows, const float* new_max, float* row_max,
                             float* row_sum) override {
    timed("cross_entropy", {.bytes = 20 * elements(rows, 1)},
          [&] { b_.cross_entropy_rescale(rows, new_max, row_max, row_sum); });
  }
  double cross_entropy_finish(int64_t rows, const int32_t* targets,
                              const float* row_max, const float* row_sum,
                              const float* target_logit, float* lse) override {
    double loss = 0;
    timed("cross_entropy", {.bytes = 20 * elements(rows, 1)}, [&] {
      loss = b_.cross_entropy_finish(rows, targets, row_max, row_sum,
                                     target_logit, lse);
    });
    return loss;
  }
  void cross_entropy_backward(Dtype d, const void* logits, int64_t rows,
                              int64_t cols, int64_t col0,
                              const int32_t* targets, const float* lse,
                              double scale, double z_loss,
                              void* dlogits) override {
    timed("cross_entropy", {.bytes = 2 * elements(rows, cols) * size(d)}, [&] {
      b_.cross_entropy_backward(d, logits, rows, cols, col0, targets, lse,
                                scale, z_loss, dlogits);
    });
  }
  void add(int64_t n, const float* a, const float* b, float* out) override {
    timed("copy", {.bytes = 12 * elements(n, 1)},
          [&] { b_.add(n, a, b, out); });
  }
  void convert(int64_t n, Dtype from, const void* src, Dtype to,
               void* dst) override {
    timed("copy", {.bytes = elements(n, 1) * (size(from) + size(to))},
          [&] { b_.convert(n, from, src, to, dst); });
  }
  void convert_rows(int64_t rows, int64_t cols, Dtype from, const void* src,
                    int64_t src_stride, Dtype to, void* dst,
                    int64_t dst_stride) override {
    timed("copy", {.bytes = elements(rows, cols) * (size(from) + size(to))},
          [&] {
            b_.convert_rows(rows, cols, from, src, src_stride, to, dst,
                            dst_stride);
          });
  }
  void scale(int64_t n, double a, float* x) override {
    timed("copy", {.bytes = 8 * elements(n, 1)}, [&] { b_.scale(n, a, x); });
  }
  void accumulate(int64_t n, double a, const float* x, float* y) override {
    timed("copy", {.bytes = 12 * elements(n, 1)},
          [&] { b_.accumulate(n, a, x, y); });
  }
  double sum_of_squares(int64_t n, const float* x) override {
    double sum = 0;
    timed("clip", {.bytes = 4 * elements(n, 1)},
          [&] { sum = b_.sum_of_squares(n, x); });
    return sum;
  }
  void adamw(const AdamWOptions& options, int64_t n, const float* g,
             const float* p, const float* m, const float* v, float* new_p,
             float* new_m, float* new_v) override {
    timed("adamw", {.bytes = 28 * elements(n, 1)},
          [&] { b_.adamw(options, n, g, p, m, v, new_p, new_m, new_v); });
  }

 private:
  static double size(Dtype d) {
    return static_cast<double>(kernels::dtype_size(d));
  }
  static double elements(int64_t rows, int64_t cols) {
    return static_cast<double>(rows) * static_cast<double>(cols);
  }
  static GemmShape shape_of(GemmPass pass, const Weight& w, int64_t rows,
                            Dtype result, bool add = false) {
    return {pass, rows, w.out(), w.in(), w.dtype(), result, add};
  }
  // Each operand once, and the result twice where it is added to.
  static OperationCost gemm_cost(const GemmShape& s) {
    const double x = elements(s.rows, s.in);
    const double y = elements(s.rows, s.out);
    const double w = elements(s.out, s.in);
    const double result = s.pass == GemmPass::kForward ? y
                          : s.pass == GemmPass::kInput ? x
                                                       : w;
    return {.flops = s.flops(),
            .bytes = (x + y + w - result) * size(s.operands) +
                     result * size(s.result) * (s.add ? 2 : 1)};
  }
  static OperationCost load_cost(const Weight& w) {
    // An fp32 weight may be used in place.
    if (w.dtype() == Dtype::kFp32) return {};
    return {.bytes =
                4 * elements(w.out(), w.in()) + static_cast<double>(w.bytes())};
  }
  // Causal: half of the scores. Two GEMMs forward, five backward.
  static OperationCost attention_cost(Dtype d, const AttentionSegment& s,
                                      bool backward) {
    const double q = elements(s.B * s.Tq, s.num_heads * s.head_dim);
    const double kv = elements(s.B * s.Tk, s.num_kv_heads * s.head_dim);
    return {.flops = (backward ? 5 : 2) * q * static_cast<double>(s.Tk),
            .bytes = size(d) * (backward ? 4 * q + 4 * kv : 2 * q + 2 * kv)};
  }

  template <typename F>
  double timed(const char* kind, const OperationCost& cost, const F& f) {
    const int64_t start = monotonic_ns();
    f();
    b_.synchronize();
    const double seconds = seconds_since(start);
    if (!recording_) return seconds;
    OperationCost& sum = costs_[kind];
    sum.seconds += seconds;
    sum.flops += cost.flops;
    sum.bytes += cost.bytes;
    return seconds;
  }

  template <typename F>
  void gemm(const char* kind, const GemmShape& shape, const F& f) {
    const double seconds = timed(kind, gemm_cost(shape), f);
    if (!recording_) return;
    GemmUse& use = gemms_[shape];
    ++use.calls;
    use.seconds += seconds;
  }

  Backend& b_;
  bool recording_ = false;
  std::map<std::string, OperationCost> costs_;
  std::map<GemmShape, GemmUse> gemms_;
};

}  // namespace

std::unique_ptr<ProfilingBackend> make_profiling_backend(Backend& inner) {
  return std::make_unique<Profiler>(inner);
}

}  // namespace remesh::bench
