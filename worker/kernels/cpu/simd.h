// SimdOps: the vectorised inner loops of the CPU backend, one table for each
// instruction set. Private to this folder.
//
// Each function works on the given rows or elements, on the calling thread;
// the backend distributes ranges to threads. The loops are compiled several
// times from simd_body.h with different flags; select_simd() picks the best
// table the host can run.
#pragma once

#include <cstdint>
#include <vector>

#include "worker/kernels/backend.h"

namespace remesh::kernels {

// Rows over which one partial sum of a norm weight's gradient runs: fixed, so
// that the result does not depend on the number of threads.
constexpr int64_t kNormBlockRows = 32;
// Elements of one partial sum of squares, likewise.
constexpr int64_t kSquareBlock = 16384;

// Per-element constants of an AdamW update, in fp32.
struct AdamWConstants {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float step_size;    // lr / (1 - beta1^step)
  float denom_scale;  // 1 / sqrt(1 - beta2^step)
  float eps, keep;    // keep = 1 - lr * weight_decay
  float grad_scale;
  bool stream;
};

// One attention problem: key/value head `g` of sequence `b` of a block, and all
// query heads that read it. o, dq, dk, dv are written as the type of q, or for
// the *_segment functions merged or added in fp32.
struct AttentionTask {
  AttentionSegment segment;
  bool first = false;
  int64_t b = 0, g = 0;
  int64_t i0 = 0, i1 = 0;  // of the queries; the backward takes all
  int64_t dq_stride = 0, dkv_stride = 0;  // elements between tokens
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  const void *out = nullptr, *dout = nullptr;
  void *o = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
  float* lse = nullptr;
  float* scratch = nullptr;  // attention_scratch() floats
};

// What the scratch of a task is for: the *_segment forward, the other one, or
// either backward.
enum class AttentionUse { kWhole, kSegment, kBackward };

// Same signature with T = float or Bf16.
template <typename T>
struct SimdTyped {
  void (*rmsnorm)(const float* x, const float* branch, const float* w,
                  float eps, int64_t rows, int64_t dim, float* sum, T* y,
                  float* rstd);
  // dw_partial (dim) is overwritten.
  void (*rmsnorm_backward)(const float* dy, const float* x, const float* rstd,
                           const float* w, const float* dres, int64_t rows,
                           int64_t dim, float* dx, T* dx_d, float* dw_partial);
  // dw (head_dim) is overwritten.
  void (*head_rmsnorm)(const HeadRows& s, const T* x, const float* w, float eps,
                       T* y, float* rstd);
  void (*head_rmsnorm_backward)(const HeadRows& s, const T* x,
                                const float* rstd, const float* w, T* dy,
                                float* dw);
  void (*add_bias)(const float* bias, int64_t rows, int64_t cols, T* y);
  // sum (cols) is overwritten.
  void (*sum_rows)(const T* y, int64_t rows, int64_t cols, float* sum);
  void (*rope)(T* x, int64_t row0, int64_t rows, int64_t seq, int64_t heads,
               int64_t hd, int64_t stride, const float* cos, const float* sin,
               float sign);
  void (*swiglu)(const T* gu, int64_t rows, int64_t dim, T* y);
  void (*swiglu_backward)(const T* gu, const T* dy, int64_t rows, int64_t dim,
                          T* dgu, T* y);
  void (*cross_entropy_add)(const T* logits, int64_t rows, int64_t cols,
                            int64_t col0, const int32_t* targets, bool first,
                            float* row_max, float* row_sum, float* target);
  void (*cross_entropy_backward)(const T* logits, int64_t rows, int64_t cols,
                                 int64_t col0, const int32_t* targets,
                                 const float* lse, float scale, float z_loss,
                                 T* dlogits);
  void (*attention)(const AttentionTask& t);
  void (*attention_backward)(const AttentionTask& t);
  void (*attention_segment)(const AttentionTask& t);
  void (*attention_segment_backward)(const AttentionTask& t);
};

inline constexpr int64_t kMatvecRows = 4;

struct SimdOps {
  const char* name;
  SimdTyped<float> fp32;
  SimdTyped<Bf16> bf16;
  void (*to_bf16)(int64_t n, const float* src, Bf16* dst);
  void (*to_fp32)(int64_t n, const Bf16* src, float* dst);
  void (*scale)(int64_t n, float a, float* x);
  void (*accumulate)(int64_t n, float a, const float* x, float* y);
  void (*add)(int64_t n, const float* a, const float* b, float* out);
  double (*sum_of_squares)(int64_t n, const float* x);
  // y (rows) = w (rows, n) x. A row's sum does not depend on its place among
  // the rows, if that is a multiple of kMatvecRows.
  void (*matvec)(int64_t rows, int64_t n, const float* w, const float* x,
                 float* y);
  void (*adamw)(const AdamWConstants& c, int64_t n, const float* g,
                const float* p, const float* m, const float* v, float* new_p,
                float* new_m, float* new_v);
  // Floats of scratch for one attention task of that use.
  int64_t (*attention_scratch)(const AttentionSegment& s, AttentionUse use);
};

// Defined in simd_<level>.cc, compiled for that level: call one only on a host
// that has it.
const SimdOps& simd_base();     // any x86-64
const SimdOps& simd_v3();       // AVX2, FMA
const SimdOps& simd_v4();       // AVX-512
const SimdOps& simd_v4_bf16();  // and AVX512-BF16

// The levels that this host can run, the best one last. Each includes the ones
// before it.
std::vector<const SimdOps*> runnable_simd();

// The best of them.
const SimdOps& select_simd();

}  // namespace remesh::kernels
