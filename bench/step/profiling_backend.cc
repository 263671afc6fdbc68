#include "bench/step/profiling_backend.h"

#include "proto/base/clock.h"

namespace remesh::bench {
namespace {

using kernels::AdamWOptions;
using kernels::AttentionSegment;
using kernels::AttentionShape;
using kernels::Backend;
using kernels::Dtype;
using kernels::Weight;

class Profiler final : public ProfilingBackend {
 public:
  explicit Profiler(Backend& inner) : b_(inner) {}
  const std::map<std::string, double>& seconds() const override {
    return seconds_;
  }
  void reset() override {
    for (auto& [name, s] : seconds_) s = 0;
  }

  const char* name() const override { return b_.name(); }
  const char* description() const override { return b_.description(); }
  bool supports_bf16() const override { return b_.supports_bf16(); }
  int threads() const override { return b_.threads(); }
  Dtype product_dtype(Dtype wanted, int64_t dim) const override {
    return b_.product_dtype(wanted, dim);
  }
  void* allocate(size_t bytes) override { return b_.allocate(bytes); }
  void release(void* p) override { b_.release(p); }
  void copy(void* dst, const void* src, size_t bytes) override {
    timed("copy", [&] { b_.copy(dst, src, bytes); });
  }
  void zero(void* dst, size_t bytes) override {
    timed("copy", [&] { b_.zero(dst, bytes); });
  }
  void synchronize() override { b_.synchronize(); }
  std::unique_ptr<Weight> make_weight(Dtype d, int64_t out,
                                      int64_t in) override {
    return b_.make_weight(d, out, in);
  }
  void load_weight(Weight& w, const float* master) override {
    timed("load_weight", [&] { b_.load_weight(w, master); });
  }
  void linear(const Weight& w, const void* x, int64_t rows, void* y) override {
    timed("gemm_forward", [&] { b_.linear(w, x, rows, y); });
  }
  void linear_fp32(const Weight& w, const void* x, int64_t rows,
                   float* y) override {
    timed("gemm_forward", [&] { b_.linear_fp32(w, x, rows, y); });
  }
  void linear_backward_input(const Weight& w, const void* dy, int64_t rows,
                             void* dx) override {
    timed("gemm_input", [&] { b_.linear_backward_input(w, dy, rows, dx); });
  }
  void linear_backward_input_fp32(const Weight& w, const void* dy, int64_t rows,
                                  bool add, float* dx) override {
    timed("gemm_input",
          [&] { b_.linear_backward_input_fp32(w, dy, rows, add, dx); });
  }
  void linear_backward_weight(Dtype d, const void* dy, const void* x,
                              int64_t rows, int64_t out, int64_t in,
                              float* dw) override {
    timed("gemm_weight",
          [&] { b_.linear_backward_weight(d, dy, x, rows, out, in, dw); });
  }
  void rmsnorm(Dtype d, const float* x, const float* branch,
               const float* weight, double eps, int64_t rows, int64_t dim,
               float* sum, void* y, float* rstd) override {
    timed("norm", [&] {
      b_.rmsnorm(d, x, branch, weight, eps, rows, dim, sum, y, rstd);
    });
  }
  void rmsnorm_backward(Dtype d, const float* dy, const float* x,
                        const float* rstd, const float* weight,
                        const float* dresidual, int64_t rows, int64_t dim,
                        float* dx, void* dx_d, float* dweight) override {
    timed("norm", [&] {
      b_.rmsnorm_backward(d, dy, x, rstd, weight, dresidual, rows, dim, dx,
                          dx_d, dweight);
    });
  }
  void rope(Dtype d, void* x, int64_t rows, int64_t T, int64_t heads,
            int64_t head_dim, int64_t stride, const float* cos,
            const float* sin, bool inverse) override {
    timed("rope", [&] {
      b_.rope(d, x, rows, T, heads, head_dim, stride, cos, sin, inverse);
    });
  }
  void attention(Dtype d, const AttentionShape& s, const void* q, const void* k,
                 const void* v, void* out, float* lse) override {
    timed("attention", [&] { b_.attention(d, s, q, k, v, out, lse); });
  }
  void attention_backward(Dtype d, const AttentionShape& s, const void* q,
                          const void* k, const void* v, const void* out,
                          const float* lse, const void* dout, void* dq,
                          void* dk, void* dv) override {
    timed("attention_backward", [&] {
      b_.attention_backward(d, s, q, k, v, out, lse, dout, dq, dk, dv);
    });
  }
  void attention_segment(Dtype d, const AttentionSegment& s, const void* q,
                         const void* k, const void* v, bool first, float* out,
                         float* lse) override {
    timed("attention",
          [&] { b_.attention_segment(d, s, q, k, v, first, out, lse); });
  }
  void attention_segment_backward(Dtype d, const AttentionSegment& s,
                                  const void* q, const void* k, const void* v,
                                  const void* out, const float* lse,
                                  const void* dout, float* dq, float* dk,
                                  float* dv) override {
    timed("attention_backward", [&] {
      b_.attention_segment_backward(d, s, q, k, v, out, lse, dout, dq, dk, dv);
    });
  }
  void swiglu(Dtype d, const void* gu, int64_t rows, int64_t dim,
              void* y) override {
    timed("swiglu", [&] { b_.swiglu(d, gu, rows, dim, y); });
  }
  void swiglu_backward(Dtype d, const void* gu, const void* dy, int64_t rows,
                       int64_t dim, void* dgu, void* y) override {
    timed("swiglu", [&] { b_.swiglu_backward(d, gu, dy, rows, dim, dgu, y); });
  }
  void embedding(const float* table, int64_t row0, int64_t num_rows,
                 const int32_t* tokens, int64_t rows, int64_t dim,
                 float* y) override {
    timed("embedding",
          [&] { b_.embedding(table, row0, num_rows, tokens, rows, dim, y); });
  }
  void embedding_backward(const float* dy, const int32_t* tokens, int64_t row0,
                          int64_t num_rows, int64_t rows, int64_t dim,
                          float* dtable) override {
    timed("embedding", [&] {
      b_.embedding_backward(dy, tokens, row0, num_rows, rows, dim, dtable);
    });
  }
  void cross_entropy_add(Dtype d, const void* logits, int64_t rows,
                         int64_t cols, int64_t col0, const int32_t* targets,
                         bool first, float* row_max, float* row_sum,
                         float* target_logit) override {
    timed("cross_entropy", [&] {
      b_.cross_entropy_add(d, logits, rows, cols, col0, targets, first, row_max,
                           row_sum, target_logit);
    });
  }
  void cross_entropy_rescale(int64_t rows, const float* new_max, float* row_max,
                             float* row_sum) override {
    timed("cross_entropy",
          [&] { b_.cross_entropy_rescale(rows, new_max, row_max, row_sum); });
  }
  double cross_entropy_finish(int64_t rows, const float* row_max,
                              const float* row_sum, const float* target_logit,
                              float* lse) override {
    double loss = 0;
    timed("cross_entropy", [&] {
      loss = b_.cross_entropy_finish(rows, row_max, row_sum, target_logit, lse);
    });
    return loss;
  }
  void cross_entropy_backward(Dtype d, const void* logits, int64_t rows,
                              int64_t cols, int64_t col0,
                              const int32_t* targets, const float* lse,
                              double scale, void* dlogits) override {
    timed("cross_entropy", [&] {
      b_.cross_entropy_backward(d, logits, rows, cols, col0, targets, lse,
                                scale, dlogits);
    });
  }
  void add(int64_t n, const float* a, const float* b, float* out) override {
    timed("copy", [&] { b_.add(n, a, b, out); });
  }
  void convert(int64_t n, Dtype from, const void* src, Dtype to,
               void* dst) override {
    timed("copy", [&] { b_.convert(n, from, src, to, dst); });
  }
  void convert_rows(int64_t rows, int64_t cols, Dtype from, const void* src,
                    int64_t src_stride, Dtype to, void* dst,
                    int64_t dst_stride) override {
    timed("copy", [&] {
      b_.convert_rows(rows, cols, from, src, src_stride, to, dst, dst_stride);
    });
  }
  void scale(int64_t n, double a, float* x) override {
    timed("copy", [&] { b_.scale(n, a, x); });
  }
  void accumulate(int64_t n, double a, const float* x, float* y) override {
    timed("copy", [&] { b_.accumulate(n, a, x, y); });
  }
  double sum_of_squares(int64_t n, const float* x) override {
    double sum = 0;
    timed("clip", [&] { sum = b_.sum_of_squares(n, x); });
    return sum;
  }
  void adamw(const AdamWOptions& options, int64_t n, float* g, const float* p,
             const float* m, const float* v, float* new_p, float* new_m,
             float* new_v) override {
    timed("adamw",
          [&] { b_.adamw(options, n, g, p, m, v, new_p, new_m, new_v); });
  }

 private:
  template <typename F>
  void timed(const char* kind, const F& f) {
    const int64_t start = monotonic_ns();
    f();
    b_.synchronize();
    seconds_[kind] += static_cast<double>(monotonic_ns() - start) * 1e-9;
  }

  Backend& b_;
  std::map<std::string, double> seconds_;
};

}  // namespace

std::unique_ptr<ProfilingBackend> make_profiling_backend(Backend& inner) {
  return std::make_unique<Profiler>(inner);
}

}  // namespace remesh::bench
