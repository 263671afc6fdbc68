// Backend: every operation on tensors that the model and the optimizer need.
//
// It is the seam between what is computed and where: nothing above it knows the
// device. Each backend is a folder: reference/ (naive, double accumulation, the
// definition of correct) and cpu/ (AMX, AVX-512 or oneDNN for GEMMs, OpenMP and
// SIMD for the rest). A new one is a folder, a name in backend.cc, and an
// allowed value of train.backend (proto/job.proto).
//
// Ownership: pointers passed to an operation are borrowed for the call and lie
// in memory the backend can reach (allocate(), or any host memory on a CPU).
// Weight objects belong to the caller and must not outlive their backend.
// Threads: one Backend belongs to one thread at a time; several Backends may
// live in different threads of one process, each with its own worker threads.
// Determinism: the same call with the same inputs, on the same machine and
// thread count, gives the same bits. No operation depends on earlier ones.
// Memory: an operation that has run once does not allocate operands' memory
// when it runs again with sizes that are no larger; a GEMM of new sizes is
// prepared once, and kept.
//
// Types: operands of GEMMs and the activations between them are `d` (fp32 or
// bf16). The residual stream and its gradient, weights of norms, the
// embedding, statistics, parameter gradients and optimizer state are always
// fp32. Sums inside an operation are fp32 or better. All matrices are dense and
// row-major.
//
// Shape letters: B sequences, T tokens a sequence, N rows (B*T tokens),
// D model dimension, F hidden dimension, V vocabulary.
// Errors: sizes and pointers that do not fit are programmer errors (CHECK).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "proto/base/status.h"
#include "worker/kernels/dtype.h"

namespace remesh::kernels {

// A linear layer's weight (out, in) in the backend's own format.
class Weight {
 public:
  Weight(Dtype dtype, int64_t out, int64_t in)
      : dtype_(dtype), out_(out), in_(in) {}
  virtual ~Weight() = default;
  Dtype dtype() const { return dtype_; }
  int64_t out() const { return out_; }
  int64_t in() const { return in_; }
  virtual uint64_t bytes() const = 0;

 private:
  const Dtype dtype_;
  const int64_t out_, in_;
};

// Tokens [first, first + tokens) of the B * T of a batch, all of one sequence.
struct Document {
  int64_t first = 0, tokens = 0;
};

// The first num_heads heads of each of `rows` tokens; inside a token, heads are
// contiguous.
struct HeadRows {
  int64_t rows = 0, num_heads = 0, head_dim = 0;
  int64_t x_stride = 0, y_stride = 0;  // elements between tokens
};

// Grouped-query attention (Ainslie et al. 2023) between Tq queries and Tk keys
// of each of B sequences: query head h reads key/value head
// h / (num_heads / num_kv_heads), and query i, at position q0 + i, sees key j,
// at position k0 + j, when 0 <= q0 + i - (k0 + j) < window, a window of 0 being
// infinite. Token n = b * q_batch + i of q starts n * q_stride elements in,
// token n = b * kv_batch + j of k and v n * kv_stride; inside a token, heads
// are contiguous. lse of (b, h, i) is lse[(b * num_heads + h) * lse_T + i].
//
// Of complete sequences of T tokens, Tq, Tk, q_batch, kv_batch and lse_T are T,
// and q0 and k0 are 0. Of sequences that are split over ranks (ring attention,
// Liu et al. 2023) it is one block.
struct AttentionSegment {
  int64_t B = 0, Tq = 0, Tk = 0;
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  int64_t q_stride = 0, kv_stride = 0;  // elements between tokens
  int64_t q_batch = 0, kv_batch = 0;    // tokens between sequences
  int64_t lse_T = 0;
  int64_t q0 = 0, k0 = 0;
  int64_t window = 0;
  // Of complete sequences: a token attends to those of its own document only.
  // They divide the batch, in order; empty: each sequence is one.
  std::span<const Document> documents;
};

// One AdamW update (Loshchilov & Hutter 2019), as torch.optim.AdamW:
//   g' = g * grad_scale;  m = b1 m + (1-b1) g';  v = b2 v + (1-b2) g'^2
//   p = p (1 - lr wd) - lr / (1 - b1^step) * m / (sqrt(v / (1 - b2^step)) +
//   eps)
struct AdamWOptions {
  double lr = 0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0;
  int64_t step = 1;         // this update's number, from 1
  double grad_scale = 1.0;  // clip factor
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const char* name() const = 0;
  // What the machine offers, for logs: "avx512_bf16 + amx, 2 threads".
  virtual const char* description() const = 0;
  // False: bf16 would be slower than fp32 here or is not possible.
  virtual bool supports_bf16() const = 0;
  virtual int threads() const = 0;

  // --- memory ---
  // Zeroed, 64-byte aligned (2 MiB for large blocks); nullptr when short.
  virtual void* allocate(size_t bytes) = 0;
  // REQUIRES: `p` came from allocate() of this backend, or is nullptr.
  virtual void release(void* p) = 0;
  virtual void copy(void* dst, const void* src, size_t bytes) = 0;
  virtual void zero(void* dst, size_t bytes) = 0;
  // Returns when all earlier operations have finished.
  virtual void synchronize() = 0;

  // --- linear layers ---
  // nullptr when memory is short.
  virtual std::unique_ptr<Weight> make_weight(Dtype d, int64_t out,
                                              int64_t in) = 0;
  // master: fp32 (out, in). It must not change until the next load: an fp32
  // weight may be read from there instead of copied.
  virtual void load_weight(Weight& w, const float* master) = 0;
  // y (rows, out) = x (rows, in) W^T, as type `out`: the weight's, or fp32.
  virtual void linear(const Weight& w, const void* x, int64_t rows, Dtype out,
                      void* y) = 0;
  // dx (rows, in) = dy (rows, out) W, likewise; `add`, in fp32 only: added into
  // dx.
  virtual void linear_backward_input(const Weight& w, const void* dy,
                                     int64_t rows, Dtype out, bool add,
                                     void* dx) = 0;
  // dw (out, in) += dy^T (out, rows) x (rows, in).
  virtual void linear_backward_weight(Dtype d, const void* dy, const void* x,
                                      int64_t rows, int64_t out, int64_t in,
                                      float* dw) = 0;

  // --- RMSNorm (Zhang & Sennrich 2019) ---
  // s = x + branch when branch is given, and then also written to sum (which
  // may alias x); else s = x. x, sum: the residual stream, fp32.
  // y = s * rstd * weight, rstd (rows) = 1 / sqrt(mean(s^2) + eps).
  virtual void rmsnorm(Dtype d, const float* x, const float* branch,
                       const float* weight, double eps, int64_t rows,
                       int64_t dim, float* sum, void* y, float* rstd) = 0;
  // dx = gradient through the norm of its input x, plus `dresidual` when
  // given (dx may alias it); dx_d, when given, is dx as type d. dweight +=
  // the gradient of the weight.
  virtual void rmsnorm_backward(Dtype d, const float* dy, const float* x,
                                const float* rstd, const float* weight,
                                const float* dresidual, int64_t rows,
                                int64_t dim, float* dx, void* dx_d,
                                float* dweight) = 0;

  // --- RMSNorm of each head, with one weight (head_dim), as in Qwen 3 ---
  // y = x * rstd * weight; rstd (rows, num_heads).
  virtual void head_rmsnorm(Dtype d, const HeadRows& s, const void* x,
                            const float* weight, double eps, void* y,
                            float* rstd) = 0;
  // dy, laid out as y, becomes the gradient of x. dweight += the gradient of
  // the weight.
  virtual void head_rmsnorm_backward(Dtype d, const HeadRows& s, const void* x,
                                     const float* rstd, const float* weight,
                                     void* dy, float* dweight) = 0;

  // --- bias of a linear layer ---
  // y (rows, cols) += bias, in each row.
  virtual void add_bias(Dtype d, const float* bias, int64_t rows, int64_t cols,
                        void* y) = 0;
  // dbias (cols) += the sum of the rows of dy.
  virtual void bias_backward(Dtype d, const void* dy, int64_t rows,
                             int64_t cols, float* dbias) = 0;

  // --- rotary embedding (Su et al. 2021), half-split order ---
  // In place on the first `heads` heads of each token; token n has position
  // n % T. cos, sin: (T, head_dim / 2). inverse: rotates back, which is the
  // backward.
  virtual void rope(Dtype d, void* x, int64_t rows, int64_t T, int64_t heads,
                    int64_t head_dim, int64_t stride, const float* cos,
                    const float* sin, bool inverse) = 0;

  // --- causal attention (Dao et al. 2022: tiles, no score matrix) ---
  // Of complete sequences. out (N, num_heads * head_dim), lse (B, num_heads,
  // T): log of the softmax denominators. Scores are scaled by
  // 1 / sqrt(head_dim).
  virtual void attention(Dtype d, const AttentionSegment& s, const void* q,
                         const void* k, const void* v, void* out,
                         float* lse) = 0;
  // dq, dk, dv are written, with the strides of q, k, v.
  virtual void attention_backward(Dtype d, const AttentionSegment& s,
                                  const void* q, const void* k, const void* v,
                                  const void* out, const float* lse,
                                  const void* dout, void* dq, void* dk,
                                  void* dv) = 0;

  // The same for one block of sequences that are split over ranks. Adds the
  // block to the running result by the log-sum-exp rule, or with `first`
  // starts it: out is fp32 and normalised, with num_heads * head_dim elements
  // between tokens and q_batch tokens between sequences. A row that has seen no
  // key has out 0 and lse -infinity.
  virtual void attention_segment(Dtype d, const AttentionSegment& s,
                                 const void* q, const void* k, const void* v,
                                 bool first, float* out, float* lse) = 0;
  // Gradients through the block, given the final out (type d, laid out as the
  // fp32 one), lse and dout (as out). Added into dq (laid out as the fp32 out)
  // and into dk and dv (num_kv_heads * head_dim elements between tokens,
  // kv_batch tokens between sequences).
  virtual void attention_segment_backward(Dtype d, const AttentionSegment& s,
                                          const void* q, const void* k,
                                          const void* v, const void* out,
                                          const float* lse, const void* dout,
                                          float* dq, float* dk, float* dv) = 0;

  // --- SwiGLU (Shazeer 2020) ---
  // gu (rows, 2 * dim): gate, then up. y (rows, dim) = silu(gate) * up.
  virtual void swiglu(Dtype d, const void* gu, int64_t rows, int64_t dim,
                      void* y) = 0;
  // dgu may alias gu. y is written again, as the forward did.
  virtual void swiglu_backward(Dtype d, const void* gu, const void* dy,
                               int64_t rows, int64_t dim, void* dgu,
                               void* y) = 0;

  // --- embedding ---
  // table: vocabulary rows [row0, row0 + num_rows). y (rows, dim) =
  // table[token - row0], or 0 for tokens outside.
  virtual void embedding(const float* table, int64_t row0, int64_t num_rows,
                         const int32_t* tokens, int64_t rows, int64_t dim,
                         float* y) = 0;
  // dtable[token - row0] += dy, equal tokens added in row order; tokens outside
  // are skipped.
  virtual void embedding_backward(const float* dy, const int32_t* tokens,
                                  int64_t row0, int64_t num_rows, int64_t rows,
                                  int64_t dim, float* dtable) = 0;

  // --- softmax cross-entropy over pieces of the vocabulary ---
  // The logits need not exist all at once: each piece (rows, cols), whose
  // first column is vocabulary entry col0, updates the running statistics
  // (online softmax, Milakov & Gimelshein 2018). `first` starts the statistics.
  // target_logit stays 0 for a row whose target lies in none of the pieces
  // added. So the ranks of a split vocabulary combine by the maximum of
  // row_max, cross_entropy_rescale to it, and the sums of row_sum and of
  // target_logit.
  virtual void cross_entropy_add(Dtype d, const void* logits, int64_t rows,
                                 int64_t cols, int64_t col0,
                                 const int32_t* targets, bool first,
                                 float* row_max, float* row_sum,
                                 float* target_logit) = 0;
  // row_sum *= exp(row_max - new_max); row_max = new_max. REQUIRES: no new
  // maximum is less than the row's own.
  virtual void cross_entropy_rescale(int64_t rows, const float* new_max,
                                     float* row_max, float* row_sum) = 0;
  // lse = row_max + log(row_sum); returns the sum of lse - target_logit, added
  // in row order in double, over the rows whose target is not negative.
  virtual double cross_entropy_finish(int64_t rows, const int32_t* targets,
                                      const float* row_max,
                                      const float* row_sum,
                                      const float* target_logit,
                                      float* lse) = 0;
  // The gradient of lse - target_logit + z_loss * lse^2, times scale:
  // dlogits = (exp(logits - lse) * (1 + 2 z_loss lse) - [column is the target])
  // * scale, and 0 in a row whose target is negative; may alias logits.
  virtual void cross_entropy_backward(Dtype d, const void* logits, int64_t rows,
                                      int64_t cols, int64_t col0,
                                      const int32_t* targets, const float* lse,
                                      double scale, double z_loss,
                                      void* dlogits) = 0;

  // --- elementwise ---
  // out = a + b; may alias.
  virtual void add(int64_t n, const float* a, const float* b, float* out) = 0;
  virtual void convert(int64_t n, Dtype from, const void* src, Dtype to,
                       void* dst) = 0;
  // Strided rows: dst[r * dst_stride + c] = src[r * src_stride + c], c < cols.
  virtual void convert_rows(int64_t rows, int64_t cols, Dtype from,
                            const void* src, int64_t src_stride, Dtype to,
                            void* dst, int64_t dst_stride) = 0;
  // x *= a.
  virtual void scale(int64_t n, double a, float* x) = 0;
  // y += a * x.
  virtual void accumulate(int64_t n, double a, const float* x, float* y) = 0;
  // Sum of squares in double; its order depends on n alone, not on threads.
  virtual double sum_of_squares(int64_t n, const float* x) = 0;

  // --- optimizer ---
  // Reads p, m, v and g; writes new_p, new_m, new_v, each of which may be the
  // buffer it updates or lie apart from all inputs.
  virtual void adamw(const AdamWOptions& options, int64_t n, const float* g,
                     const float* p, const float* m, const float* v,
                     float* new_p, float* new_m, float* new_v) = 0;
};

// Deletes memory of allocate(), for std::unique_ptr.
struct Release {
  Backend* backend = nullptr;
  void operator()(void* p) const { backend->release(p); }
};

// A backend by its name, "cpu" or "reference", with `threads` threads.
Result<std::unique_ptr<Backend>> make_backend(std::string_view name,
                                              int threads);

// Naive twin of every operation, one thread, double accumulation.
std::unique_ptr<Backend> make_reference_backend();

// The fast CPU backend with its own `threads` OpenMP threads. When ranks share
// cores, start them with OMP_WAIT_POLICY=passive: OpenMP's threads otherwise
// spin on cores that other ranks need. One binary picks the instruction set of
// the host at run time. REQUIRES: threads >= 1.
std::unique_ptr<Backend> make_cpu_backend(int threads);

}  // namespace remesh::kernels
