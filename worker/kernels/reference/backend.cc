// The naive twin of every operation: plain loops over formulas, double
// accumulation, one thread. It defines what the other backends must compute,
// and may be slow.
//
// Over 500 lines because every operation of the backend has its twin here.
#include "worker/kernels/backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "proto/base/check.h"
#include "worker/kernels/host_memory.h"

namespace remesh::kernels {
namespace {

double at(Dtype d, const void* p, int64_t i) {
  return d == Dtype::kFp32 ? static_cast<const float*>(p)[i]
                           : to_float(static_cast<const Bf16*>(p)[i]);
}

void set(Dtype d, void* p, int64_t i, double v) {
  const auto f = static_cast<float>(v);
  if (d == Dtype::kFp32)
    static_cast<float*>(p)[i] = f;
  else
    static_cast<Bf16*>(p)[i] = to_bf16(f);
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

class ReferenceWeight final : public Weight {
 public:
  ReferenceWeight(Dtype d, int64_t out, int64_t in)
      : Weight(d, out, in),
        values_(static_cast<size_t>(out * in) * dtype_size(d)) {}
  uint64_t bytes() const override { return values_.size(); }
  void load(const float* master) {
    for (int64_t i = 0; i < out() * in(); ++i)
      set(dtype(), values_.data(), i, master[i]);
  }
  double w(int64_t o, int64_t i) const {
    return at(dtype(), values_.data(), o * in() + i);
  }

 private:
  std::vector<std::byte> values_;
};

const ReferenceWeight& own(const Weight& w) {
  return static_cast<const ReferenceWeight&>(w);
}

class ReferenceBackend final : public Backend {
 public:
  const char* name() const override { return "reference"; }
  const char* description() const override {
    return "naive loops in double, 1 thread";
  }
  bool supports_bf16() const override { return true; }
  int threads() const override { return 1; }

  void* allocate(size_t bytes) override { return host_allocate(bytes); }
  void release(void* p) override { host_release(p); }
  void copy(void* dst, const void* src, size_t bytes) override {
    std::memcpy(dst, src, bytes);
  }
  void zero(void* dst, size_t bytes) override { std::memset(dst, 0, bytes); }
  void synchronize() override {}

  std::unique_ptr<Weight> make_weight(Dtype d, int64_t out,
                                      int64_t in) override {
    return std::make_unique<ReferenceWeight>(d, out, in);
  }
  void load_weight(Weight& w, const float* master) override {
    static_cast<ReferenceWeight&>(w).load(master);
  }

  void linear(const Weight& weight, const void* x, int64_t rows, Dtype out,
              void* y) override {
    const ReferenceWeight& w = own(weight);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t o = 0; o < w.out(); ++o) {
        double sum = 0;
        for (int64_t k = 0; k < w.in(); ++k)
          sum += at(w.dtype(), x, i * w.in() + k) * w.w(o, k);
        set(out, y, i * w.out() + o, sum);
      }
  }

  void linear_backward_input(const Weight& weight, const void* dy, int64_t rows,
                             Dtype out, bool add, void* dx) override {
    const ReferenceWeight& w = own(weight);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t k = 0; k < w.in(); ++k) {
        const int64_t e = i * w.in() + k;
        double sum = 0;
        for (int64_t o = 0; o < w.out(); ++o)
          sum += at(w.dtype(), dy, i * w.out() + o) * w.w(o, k);
        set(out, dx, e, (add ? at(out, dx, e) : 0.0) + sum);
      }
  }

  void linear_backward_weight(Dtype d, const void* dy, const void* x,
                              int64_t rows, int64_t out, int64_t in,
                              float* dw) override {
    for (int64_t o = 0; o < out; ++o)
      for (int64_t k = 0; k < in; ++k) {
        double sum = dw[o * in + k];
        for (int64_t i = 0; i < rows; ++i)
          sum += at(d, dy, i * out + o) * at(d, x, i * in + k);
        dw[o * in + k] = static_cast<float>(sum);
      }
  }

  void rmsnorm(Dtype d, const float* x, const float* branch,
               const float* weight, double eps, int64_t rows, int64_t dim,
               float* sum, void* y, float* rstd) override {
    for (int64_t i = 0; i < rows; ++i) {
      const float* s = x + i * dim;
      if (branch != nullptr) {
        for (int64_t j = i * dim; j < (i + 1) * dim; ++j)
          sum[j] = x[j] + branch[j];
        s = sum + i * dim;
      }
      double ss = 0;
      for (int64_t j = 0; j < dim; ++j) ss += static_cast<double>(s[j]) * s[j];
      const double r = 1.0 / std::sqrt(ss / static_cast<double>(dim) + eps);
      rstd[i] = static_cast<float>(r);
      for (int64_t j = 0; j < dim; ++j)
        set(d, y, i * dim + j, s[j] * r * weight[j]);
    }
  }

  void rmsnorm_backward(Dtype d, const float* dy, const float* x,
                        const float* rstd, const float* weight,
                        const float* dresidual, int64_t rows, int64_t dim,
                        float* dx, void* dx_d, float* dweight) override {
    std::vector<double> dw(static_cast<size_t>(dim));
    for (int64_t i = 0; i < rows; ++i) {
      const double r = rstd[i];
      double dot = 0;
      for (int64_t j = 0; j < dim; ++j) {
        const double g = static_cast<double>(dy[i * dim + j]) * x[i * dim + j];
        dot += g * weight[j];
        dw[static_cast<size_t>(j)] += g * r;
      }
      for (int64_t j = 0; j < dim; ++j) {
        const int64_t e = i * dim + j;
        const double g = static_cast<double>(dy[e]) * weight[j] * r -
                         x[e] * dot * r * r * r / static_cast<double>(dim);
        dx[e] = static_cast<float>(
            g + (dresidual != nullptr ? dresidual[e] : 0.0F));
        if (dx_d != nullptr) set(d, dx_d, e, dx[e]);
      }
    }
    for (int64_t j = 0; j < dim; ++j)
      dweight[j] = static_cast<float>(dweight[j] + dw[static_cast<size_t>(j)]);
  }

  void head_rmsnorm(Dtype d, const HeadRows& s, const void* x,
                    const float* weight, double eps, void* y,
                    float* rstd) override {
    for_each_head(s, [&](int64_t at_rstd, int64_t x0, int64_t y0) {
      double ss = 0;
      for (int64_t j = 0; j < s.head_dim; ++j)
        ss += at(d, x, x0 + j) * at(d, x, x0 + j);
      const double r =
          1.0 / std::sqrt(ss / static_cast<double>(s.head_dim) + eps);
      rstd[at_rstd] = static_cast<float>(r);
      for (int64_t j = 0; j < s.head_dim; ++j)
        set(d, y, y0 + j, at(d, x, x0 + j) * r * weight[j]);
    });
  }
  void head_rmsnorm_backward(Dtype d, const HeadRows& s, const void* x,
                             const float* rstd, const float* weight, void* dy,
                             float* dweight) override {
    std::vector<double> dw(static_cast<size_t>(s.head_dim));
    for_each_head(s, [&](int64_t at_rstd, int64_t x0, int64_t y0) {
      const double r = rstd[at_rstd];
      double dot = 0;
      for (int64_t j = 0; j < s.head_dim; ++j) {
        const double g = at(d, dy, y0 + j) * at(d, x, x0 + j);
        dot += g * weight[j];
        dw[static_cast<size_t>(j)] += g * r;
      }
      const double c = dot * r * r * r / static_cast<double>(s.head_dim);
      for (int64_t j = 0; j < s.head_dim; ++j)
        set(d, dy, y0 + j,
            at(d, dy, y0 + j) * weight[j] * r - at(d, x, x0 + j) * c);
    });
    for (int64_t j = 0; j < s.head_dim; ++j)
      dweight[j] = static_cast<float>(dweight[j] + dw[static_cast<size_t>(j)]);
  }

  void add_bias(Dtype d, const float* bias, int64_t rows, int64_t cols,
                void* y) override {
    for (int64_t i = 0; i < rows * cols; ++i)
      set(d, y, i, at(d, y, i) + bias[i % cols]);
  }
  void bias_backward(Dtype d, const void* dy, int64_t rows, int64_t cols,
                     float* dbias) override {
    for (int64_t j = 0; j < cols; ++j) {
      double sum = dbias[j];
      for (int64_t i = 0; i < rows; ++i) sum += at(d, dy, i * cols + j);
      dbias[j] = static_cast<float>(sum);
    }
  }

  void rope(Dtype d, void* x, int64_t rows, int64_t T, int64_t heads,
            int64_t head_dim, int64_t stride, const float* cos,
            const float* sin, bool inverse) override {
    const int64_t half = head_dim / 2;
    for (int64_t n = 0; n < rows; ++n)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t j = 0; j < half; ++j) {
          const int64_t lo = n * stride + h * head_dim + j;
          const double c = cos[(n % T) * half + j];
          const double s = (inverse ? -1.0 : 1.0) * sin[(n % T) * half + j];
          const double a = at(d, x, lo);
          const double b = at(d, x, lo + half);
          set(d, x, lo, a * c - b * s);
          set(d, x, lo + half, b * c + a * s);
        }
  }

  void attention(Dtype d, const AttentionSegment& s, const void* q,
                 const void* k, const void* v, void* out, float* lse) override {
    const int64_t elements = s.B * s.Tq * s.num_heads * s.head_dim;
    std::vector<float> rows(static_cast<size_t>(elements));
    attention_segment(d, s, q, k, v, /*first=*/true, rows.data(), lse);
    convert(elements, Dtype::kFp32, rows.data(), d, out);
  }

  void attention_backward(Dtype d, const AttentionSegment& s, const void* q,
                          const void* k, const void* v, const void* out,
                          const float* lse, const void* dout, void* dq,
                          void* dk, void* dv) override {
    const auto tokens = static_cast<size_t>(s.B * s.Tq * s.head_dim);
    std::vector<double> gq(tokens * static_cast<size_t>(s.num_heads));
    std::vector<double> gk(tokens * static_cast<size_t>(s.num_kv_heads));
    std::vector<double> gv(gk.size());
    add_gradients(d, s, q, k, v, out, lse, dout, gq.data(), gk.data(),
                  gv.data());
    store_rows(d, s.num_heads * s.head_dim, gq, s.q_stride, dq);
    store_rows(d, s.num_kv_heads * s.head_dim, gk, s.kv_stride, dk);
    store_rows(d, s.num_kv_heads * s.head_dim, gv, s.kv_stride, dv);
  }

  void attention_segment(Dtype d, const AttentionSegment& s, const void* q,
                         const void* k, const void* v, bool first, float* out,
                         float* lse) override {
    for_each_segment_row(s, [&](const SegmentRow& r) {
      float& row_lse = lse[r.lse];
      float* row = out + r.out;
      if (first) {
        row_lse = -INFINITY;
        std::fill_n(row, s.head_dim, 0.0F);
      }
      if (r.visible <= r.from) return;
      std::vector<double> p(static_cast<size_t>(r.visible));
      double top = -INFINITY;
      for (int64_t u = r.from; u < r.visible; ++u)
        top = std::max(
            top, p[static_cast<size_t>(u)] = segment_score(d, s, q, k, r, u));
      double sum = 0;
      for (int64_t u = r.from; u < r.visible; ++u) {
        double& e = p[static_cast<size_t>(u)];
        sum += e = std::exp(e - top);
      }
      const double block = top + std::log(sum);
      const double most = std::max(block, static_cast<double>(row_lse));
      const double both =
          most + std::log(std::exp(block - most) + std::exp(row_lse - most));
      for (int64_t j = 0; j < s.head_dim; ++j) {
        double o = 0;
        for (int64_t u = r.from; u < r.visible; ++u)
          o += p[static_cast<size_t>(u)] * at(d, v, r.key(s, u) + j);
        row[j] = static_cast<float>(row[j] * std::exp(row_lse - both) +
                                    o / sum * std::exp(block - both));
      }
      row_lse = static_cast<float>(both);
    });
  }

  void attention_segment_backward(Dtype d, const AttentionSegment& s,
                                  const void* q, const void* k, const void* v,
                                  const void* out, const float* lse,
                                  const void* dout, float* dq, float* dk,
                                  float* dv) override {
    add_gradients(d, s, q, k, v, out, lse, dout, dq, dk, dv);
  }

  void swiglu(Dtype d, const void* gu, int64_t rows, int64_t dim,
              void* y) override {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < dim; ++j) {
        const double g = at(d, gu, i * 2 * dim + j);
        set(d, y, i * dim + j,
            g * sigmoid(g) * at(d, gu, i * 2 * dim + dim + j));
      }
  }

  void swiglu_backward(Dtype d, const void* gu, const void* dy, int64_t rows,
                       int64_t dim, void* dgu, void* y) override {
    swiglu(d, gu, rows, dim, y);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < dim; ++j) {
        const int64_t e = i * 2 * dim + j;
        const double g = at(d, gu, e);
        const double u = at(d, gu, e + dim);
        const double dyj = at(d, dy, i * dim + j);
        const double s = sigmoid(g);
        set(d, dgu, e, dyj * u * s * (1.0 + g * (1.0 - s)));
        set(d, dgu, e + dim, dyj * g * s);
      }
  }

  void embedding(const float* table, int64_t row0, int64_t num_rows,
                 const int32_t* tokens, int64_t rows, int64_t dim,
                 float* y) override {
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t t = tokens[i] - row0;
      for (int64_t j = 0; j < dim; ++j)
        y[i * dim + j] = t >= 0 && t < num_rows ? table[t * dim + j] : 0.0F;
    }
  }

  void embedding_backward(const float* dy, const int32_t* tokens, int64_t row0,
                          int64_t num_rows, int64_t rows, int64_t dim,
                          float* dtable) override {
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t t = tokens[i] - row0;
      if (t < 0 || t >= num_rows) continue;
      for (int64_t j = 0; j < dim; ++j) dtable[t * dim + j] += dy[i * dim + j];
    }
  }

  void cross_entropy_add(Dtype d, const void* logits, int64_t rows,
                         int64_t cols, int64_t col0, const int32_t* targets,
                         bool first, float* row_max, float* row_sum,
                         float* target_logit) override {
    for (int64_t i = 0; i < rows; ++i) {
      if (first) target_logit[i] = 0;
      double top = first ? at(d, logits, i * cols) : row_max[i];
      for (int64_t j = 0; j < cols; ++j)
        top = std::max(top, at(d, logits, i * cols + j));
      double sum = first ? 0.0 : row_sum[i] * std::exp(row_max[i] - top);
      for (int64_t j = 0; j < cols; ++j) {
        sum += std::exp(at(d, logits, i * cols + j) - top);
        if (col0 + j == targets[i])
          target_logit[i] = static_cast<float>(at(d, logits, i * cols + j));
      }
      row_max[i] = static_cast<float>(top);
      row_sum[i] = static_cast<float>(sum);
    }
  }

  void cross_entropy_rescale(int64_t rows, const float* new_max, float* row_max,
                             float* row_sum) override {
    for (int64_t i = 0; i < rows; ++i) {
      row_sum[i] = static_cast<float>(
          row_sum[i] * std::exp(static_cast<double>(row_max[i]) - new_max[i]));
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
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) {
        const double p = std::exp(at(d, logits, i * cols + j) - lse[i]) *
                         (1 + 2 * z_loss * lse[i]);
        const double target = col0 + j == targets[i] ? 1 : 0;
        set(d, dlogits, i * cols + j,
            targets[i] < 0 ? 0 : (p - target) * scale);
      }
  }

  void add(int64_t n, const float* a, const float* b, float* out) override {
    for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
  }
  void convert(int64_t n, Dtype from, const void* src, Dtype to,
               void* dst) override {
    for (int64_t i = 0; i < n; ++i) set(to, dst, i, at(from, src, i));
  }
  void convert_rows(int64_t rows, int64_t cols, Dtype from, const void* src,
                    int64_t src_stride, Dtype to, void* dst,
                    int64_t dst_stride) override {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c)
        set(to, dst, r * dst_stride + c, at(from, src, r * src_stride + c));
  }
  void scale(int64_t n, double a, float* x) override {
    for (int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(x[i] * a);
  }
  void accumulate(int64_t n, double a, const float* x, float* y) override {
    for (int64_t i = 0; i < n; ++i) y[i] = static_cast<float>(y[i] + a * x[i]);
  }
  double sum_of_squares(int64_t n, const float* x) override {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
    return sum;
  }

  void adamw(const AdamWOptions& o, int64_t n, const float* g, const float* p,
             const float* m, const float* v, float* new_p, float* new_m,
             float* new_v) override {
    const auto step = static_cast<double>(o.step);
    const double bc1 = 1.0 - std::pow(o.beta1, step);
    const double bc2 = 1.0 - std::pow(o.beta2, step);
    for (int64_t i = 0; i < n; ++i) {
      const double gs = g[i] * o.grad_scale;
      const double mi = o.beta1 * m[i] + (1.0 - o.beta1) * gs;
      const double vi = o.beta2 * v[i] + (1.0 - o.beta2) * gs * gs;
      const double denominator = std::sqrt(vi / bc2) + o.eps;
      new_p[i] = static_cast<float>(p[i] * (1.0 - o.lr * o.weight_decay) -
                                    o.lr / bc1 * mi / denominator);
      new_m[i] = static_cast<float>(mi);
      new_v[i] = static_cast<float>(vi);
    }
  }

 private:
  // f(index of rstd, first element in x, first element in y) for each head.
  template <typename F>
  static void for_each_head(const HeadRows& s, const F& f) {
    for (int64_t n = 0; n < s.rows; ++n)
      for (int64_t h = 0; h < s.num_heads; ++h)
        f(n * s.num_heads + h, n * s.x_stride + h * s.head_dim,
          n * s.y_stride + h * s.head_dim);
  }
  // One query of one head in a block of attention: where its elements lie and
  // which keys it sees, [from, visible).
  struct SegmentRow {
    int64_t b, g;
    int64_t query, out, lse;
    int64_t from, visible;
    int64_t key(const AttentionSegment& s, int64_t u) const {
      return (b * s.kv_batch + u) * s.kv_stride + g * s.head_dim;
    }
    int64_t key_gradient(const AttentionSegment& s, int64_t u) const {
      return ((b * s.kv_batch + u) * s.num_kv_heads + g) * s.head_dim;
    }
  };
  template <typename F>
  static void for_each_segment_row(const AttentionSegment& s, const F& f) {
    // By token, where its document begins in its sequence.
    std::vector<int64_t> starts;
    for (const Document& d : s.documents)
      starts.insert(starts.end(), static_cast<size_t>(d.tokens),
                    d.first % s.Tq);
    CHECK(starts.empty() || static_cast<int64_t>(starts.size()) == s.B * s.Tq);
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t h = 0; h < s.num_heads; ++h)
        for (int64_t i = 0; i < s.Tq; ++i) {
          const int64_t token = b * s.q_batch + i;
          f(SegmentRow{
              .b = b,
              .g = h / (s.num_heads / s.num_kv_heads),
              .query = token * s.q_stride + h * s.head_dim,
              .out = (token * s.num_heads + h) * s.head_dim,
              .lse = (b * s.num_heads + h) * s.lse_T + i,
              .from = std::max(
                  starts.empty() ? 0 : starts[static_cast<size_t>(token)],
                  s.window == 0 ? 0 : s.q0 + i - s.k0 + 1 - s.window),
              .visible = std::clamp<int64_t>(s.q0 + i - s.k0 + 1, 0, s.Tk)});
        }
  }
  static double segment_score(Dtype d, const AttentionSegment& s, const void* q,
                              const void* k, const SegmentRow& r, int64_t u) {
    double sum = 0;
    for (int64_t j = 0; j < s.head_dim; ++j)
      sum += at(d, q, r.query + j) * at(d, k, r.key(s, u) + j);
    return sum / std::sqrt(static_cast<double>(s.head_dim));
  }

  template <typename T>
  static void add_gradients(Dtype d, const AttentionSegment& s, const void* q,
                            const void* k, const void* v, const void* out,
                            const float* lse, const void* dout, T* dq, T* dk,
                            T* dv) {
    const double factor = 1.0 / std::sqrt(static_cast<double>(s.head_dim));
    for_each_segment_row(s, [&](const SegmentRow& r) {
      double delta = 0;
      for (int64_t j = 0; j < s.head_dim; ++j)
        delta += at(d, out, r.out + j) * at(d, dout, r.out + j);
      for (int64_t u = r.from; u < r.visible; ++u) {
        const double p = std::exp(segment_score(d, s, q, k, r, u) - lse[r.lse]);
        double dp = 0;
        for (int64_t j = 0; j < s.head_dim; ++j)
          dp += at(d, dout, r.out + j) * at(d, v, r.key(s, u) + j);
        const double ds = p * (dp - delta) * factor;
        const int64_t grad = r.key_gradient(s, u);
        for (int64_t j = 0; j < s.head_dim; ++j) {
          const auto add = [](T& to, double x) { to = static_cast<T>(to + x); };
          add(dv[grad + j], p * at(d, dout, r.out + j));
          add(dq[r.out + j], ds * at(d, k, r.key(s, u) + j));
          add(dk[grad + j], ds * at(d, q, r.query + j));
        }
      }
    });
  }

  // From dense rows of `width` elements to rows `stride` elements apart.
  static void store_rows(Dtype d, int64_t width,
                         const std::vector<double>& from, int64_t stride,
                         void* to) {
    for (size_t i = 0; i < from.size(); ++i) {
      const auto e = static_cast<int64_t>(i);
      set(d, to, e / width * stride + e % width, from[i]);
    }
  }
};

}  // namespace

std::unique_ptr<Backend> make_reference_backend() {
  return std::make_unique<ReferenceBackend>();
}

}  // namespace remesh::kernels
