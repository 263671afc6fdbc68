// The vectorised loops, compiled once for each instruction set by
// simd_<level>.cc, which defines REMESH_SIMD_LEVEL (function name) and
// REMESH_LANES (floats in a vector register) first, and REMESH_ADAMW where it
// has an update of its own. Not a public header.
//
// Everything here is in an unnamed namespace and uses no library templates:
// an inline function shared with other files could be merged by the linker
// into code that an older host cannot run.
#include <cstdint>

#include "worker/kernels/cpu/simd.h"
#include "worker/kernels/cpu/simd_math.h"

namespace remesh::kernels {
namespace {

void matvec(int64_t rows, int64_t n, const float* w, const float* x, float* y) {
  dot_rows(rows, n, w, n, x, y);
}

// --- RMSNorm ---

void add(int64_t n, const float* a, const float* b, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

template <typename T>
void rmsnorm(const float* x, const float* branch, const float* w, float eps,
             int64_t rows, int64_t dim, float* sum, T* y, float* rstd) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* s = x + i * dim;
    if (branch != nullptr) {
      add(dim, s, branch + i * dim, sum + i * dim);
      s = sum + i * dim;
    }
    // One loop for both cases: with and without a branch the same rows give
    // the same bits, which recomputation of activations relies on.
    float ss = 0;
#pragma omp simd reduction(+ : ss)
    for (int64_t j = 0; j < dim; ++j) ss += s[j] * s[j];
    const float r = 1.0F / __builtin_sqrtf(ss / static_cast<float>(dim) + eps);
    rstd[i] = r;
    T* out = y + i * dim;
#pragma omp simd
    for (int64_t j = 0; j < dim; ++j) put(out, j, s[j] * r * w[j]);
  }
}

template <typename T>
void rmsnorm_backward(const float* dy, const float* x, const float* rstd,
                      const float* w, const float* dres, int64_t rows,
                      int64_t dim, float* dx, T* dx_d, float* dw) {
  for (int64_t j = 0; j < dim; ++j) dw[j] = 0;
  for (int64_t i = 0; i < rows; ++i, dy += dim, x += dim, dx += dim) {
    const float r = rstd[i];
    // Prefetch the next row, which the hardware would start late.
    for (int64_t j = 0; j < dim; j += 16) {
      __builtin_prefetch(dy + dim + j);
      __builtin_prefetch(x + dim + j);
      if (dres != nullptr) __builtin_prefetch(dres + dim + j);
    }
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t j = 0; j < dim; ++j) {
      const float g = dy[j] * x[j];
      dot += g * w[j];
      dw[j] += g * r;
    }
    const float c = dot * r * r * r / static_cast<float>(dim);
    if (dres != nullptr) {
#pragma omp simd
      for (int64_t j = 0; j < dim; ++j)
        dx[j] = dres[j] + dy[j] * w[j] * r - x[j] * c;
      dres += dim;
    } else {
#pragma omp simd
      for (int64_t j = 0; j < dim; ++j) dx[j] = dy[j] * w[j] * r - x[j] * c;
    }
    if (dx_d != nullptr) {
#pragma omp simd
      for (int64_t j = 0; j < dim; ++j) put(dx_d, j, dx[j]);
      dx_d += dim;
    }
  }
}

template <typename T>
void head_rmsnorm(const HeadRows& s, const T* x, const float* w, float eps,
                  T* y, float* rstd) {
  for (int64_t i = 0; i < s.rows; ++i, rstd += s.num_heads)
    for (int64_t h = 0; h < s.num_heads; ++h) {
      const T* a = x + i * s.x_stride + h * s.head_dim;
      T* out = y + i * s.y_stride + h * s.head_dim;
      float ss = 0;
#pragma omp simd reduction(+ : ss)
      for (int64_t j = 0; j < s.head_dim; ++j) ss += get(a, j) * get(a, j);
      const float r =
          1.0F / __builtin_sqrtf(ss / static_cast<float>(s.head_dim) + eps);
      rstd[h] = r;
#pragma omp simd
      for (int64_t j = 0; j < s.head_dim; ++j)
        put(out, j, get(a, j) * r * w[j]);
    }
}

template <typename T>
void head_rmsnorm_backward(const HeadRows& s, const T* x, const float* rstd,
                           const float* w, T* dy, float* dw) {
  for (int64_t j = 0; j < s.head_dim; ++j) dw[j] = 0;
  for (int64_t i = 0; i < s.rows; ++i, rstd += s.num_heads)
    for (int64_t h = 0; h < s.num_heads; ++h) {
      const T* a = x + i * s.x_stride + h * s.head_dim;
      T* d = dy + i * s.y_stride + h * s.head_dim;
      const float r = rstd[h];
      float dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t j = 0; j < s.head_dim; ++j) {
        const float g = get(d, j) * get(a, j);
        dot += g * w[j];
        dw[j] += g * r;
      }
      const float c = dot * r * r * r / static_cast<float>(s.head_dim);
#pragma omp simd
      for (int64_t j = 0; j < s.head_dim; ++j)
        put(d, j, get(d, j) * w[j] * r - get(a, j) * c);
    }
}

// --- bias ---

template <typename T>
void add_bias(const float* bias, int64_t rows, int64_t cols, T* y) {
  for (int64_t i = 0; i < rows; ++i, y += cols) {
#pragma omp simd
    for (int64_t j = 0; j < cols; ++j) put(y, j, get(y, j) + bias[j]);
  }
}

template <typename T>
void sum_rows(const T* y, int64_t rows, int64_t cols, float* sum) {
  for (int64_t j = 0; j < cols; ++j) sum[j] = 0;
  for (int64_t i = 0; i < rows; ++i, y += cols) {
#pragma omp simd
    for (int64_t j = 0; j < cols; ++j) sum[j] += get(y, j);
  }
}

// --- rotary embedding ---

template <typename T>
void rope(T* x, int64_t row0, int64_t rows, int64_t seq, int64_t heads,
          int64_t hd, int64_t stride, const float* cos, const float* sin,
          float sign) {
  const int64_t half = hd / 2;
  for (int64_t n = row0; n < row0 + rows; ++n) {
    const float* c = cos + (n % seq) * half;
    const float* s = sin + (n % seq) * half;
    for (int64_t h = 0; h < heads; ++h) {
      T* lo = x + n * stride + h * hd;
      T* hi = lo + half;
#pragma omp simd
      for (int64_t j = 0; j < half; ++j) {
        const float a = get(lo, j);
        const float b = get(hi, j);
        const float sj = sign * s[j];
        put(lo, j, a * c[j] - b * sj);
        put(hi, j, b * c[j] + a * sj);
      }
    }
  }
}

// --- SwiGLU ---

template <typename T>
void swiglu(const T* gu, int64_t rows, int64_t dim, T* y) {
  for (int64_t i = 0; i < rows; ++i, gu += 2 * dim, y += dim) {
#pragma omp simd
    for (int64_t j = 0; j < dim; ++j) {
      const float g = get(gu, j);
      put(y, j, g / (1.0F + fast_exp(-g)) * get(gu, dim + j));
    }
  }
}

template <typename T>
void swiglu_backward(const T* gu, const T* dy, int64_t rows, int64_t dim,
                     T* dgu, T* y) {
  for (int64_t i = 0; i < rows; ++i) {
#pragma omp simd
    for (int64_t j = 0; j < dim; ++j) {
      const float g = get(gu, j);
      const float u = get(gu, dim + j);
      const float d = get(dy, j);
      const float sigmoid = 1.0F / (1.0F + fast_exp(-g));
      const float silu = g * sigmoid;
      put(y, j, silu * u);
      put(dgu, j, d * u * sigmoid * (1.0F + g * (1.0F - sigmoid)));
      put(dgu, dim + j, d * silu);
    }
    gu += 2 * dim;
    dgu += 2 * dim;
    dy += dim;
    y += dim;
  }
}

// --- cross-entropy ---

template <typename T>
void cross_entropy_add(const T* logits, int64_t rows, int64_t cols,
                       int64_t col0, const int32_t* targets, bool first,
                       float* row_max, float* row_sum, float* target) {
  for (int64_t i = 0; i < rows; ++i, logits += cols) {
    float top = get(logits, 0);
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < cols; ++j) {
      const float v = get(logits, j);
      top = v > top ? v : top;
    }
    if (!first && row_max[i] > top) top = row_max[i];
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < cols; ++j) sum += fast_exp(get(logits, j) - top);
    row_sum[i] = first ? sum : row_sum[i] * fast_exp(row_max[i] - top) + sum;
    row_max[i] = top;
    const int64_t t = targets[i] - col0;
    if (t >= 0 && t < cols)
      target[i] = get(logits, t);
    else if (first)
      target[i] = 0;
  }
}

template <typename T>
void cross_entropy_backward(const T* logits, int64_t rows, int64_t cols,
                            int64_t col0, const int32_t* targets,
                            const float* lse, float scale, float z_loss,
                            T* dlogits) {
  for (int64_t i = 0; i < rows; ++i, logits += cols, dlogits += cols) {
    if (targets[i] < 0) {
      for (int64_t j = 0; j < cols; ++j) put(dlogits, j, 0.0F);
      continue;
    }
    const float l = lse[i];
    const float weight = 1.0F + 2.0F * z_loss * l;  // of exp()
    const int64_t t = targets[i] - col0;
    const bool mine = t >= 0 && t < cols;
    const float at_target = mine ? get(logits, t) : 0.0F;
#pragma omp simd
    for (int64_t j = 0; j < cols; ++j)
      put(dlogits, j, fast_exp(get(logits, j) - l) * (weight * scale));
    if (mine)
      put(dlogits, t, (fast_exp(at_target - l) * weight - 1.0F) * scale);
  }
}

// --- elementwise ---

void convert_to_bf16(int64_t n, const float* src, Bf16* dst) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) put(dst, i, src[i]);
}

void convert_to_fp32(int64_t n, const Bf16* src, float* dst) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dst[i] = get(src, i);
}

void scale(int64_t n, float a, float* x) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] *= a;
}

void accumulate(int64_t n, float a, const float* x, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

double sum_of_squares(int64_t n, const float* x) {
  // Several parts side by side: one sum would wait for its own additions, and
  // one stream for memory, because the hardware fetches only so far ahead.
  constexpr int64_t kHalf = REMESH_LANES / 2;
  constexpr int64_t kParts = 4;
  typedef float Narrow __attribute__((vector_size(4 * kHalf)));
  typedef double Wide __attribute__((vector_size(8 * kHalf)));
  Wide sums[kParts] = {};
  const int64_t part = n / kParts / kHalf * kHalf;
  for (int64_t i = 0; i < part; i += kHalf)
    for (int64_t k = 0; k < kParts; ++k) {
      // The same place of the next block.
      __builtin_prefetch(x + kSquareBlock + k * part + i, 0, 2);
      Narrow v;
      __builtin_memcpy(&v, x + k * part + i, sizeof(v));
      const Wide w = __builtin_convertvector(v, Wide);
      sums[k] += w * w;
    }
  double sum = 0;
  for (int64_t i = kParts * part; i < n; ++i)
    sum += static_cast<double>(x[i]) * x[i];
  for (int64_t k = 0; k < kParts; ++k)
    for (int64_t j = 0; j < kHalf; ++j) sum += sums[k][j];
  return sum;
}

}  // namespace
}  // namespace remesh::kernels

#ifndef REMESH_ADAMW
#define REMESH_ADAMW adamw
#include "worker/kernels/cpu/simd_adamw.h"
#endif
#include "worker/kernels/cpu/simd_attention.h"

namespace remesh::kernels {
namespace {

template <typename T>
constexpr SimdTyped<T> typed_table() {
  return {.rmsnorm = rmsnorm<T>,
          .rmsnorm_backward = rmsnorm_backward<T>,
          .head_rmsnorm = head_rmsnorm<T>,
          .head_rmsnorm_backward = head_rmsnorm_backward<T>,
          .add_bias = add_bias<T>,
          .sum_rows = sum_rows<T>,
          .rope = rope<T>,
          .swiglu = swiglu<T>,
          .swiglu_backward = swiglu_backward<T>,
          .cross_entropy_add = cross_entropy_add<T>,
          .cross_entropy_backward = cross_entropy_backward<T>,
          .attention = attention<T, false>,
          .attention_backward = attention_backward<T, false>,
          .attention_segment = attention_segment<T>,
          .attention_segment_backward = attention_backward<T, true>};
}

}  // namespace

const SimdOps& REMESH_SIMD_LEVEL() {
  static constexpr SimdOps kOps = {.name = REMESH_SIMD_NAME,
                                   .fp32 = typed_table<float>(),
                                   .bf16 = typed_table<Bf16>(),
                                   .to_bf16 = convert_to_bf16,
                                   .to_fp32 = convert_to_fp32,
                                   .scale = scale,
                                   .accumulate = accumulate,
                                   .add = add,
                                   .sum_of_squares = sum_of_squares,
                                   .matvec = matvec,
                                   .adamw = REMESH_ADAMW,
                                   .attention_scratch = attention_scratch};
  return kOps;
}

}  // namespace remesh::kernels
