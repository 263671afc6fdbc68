// Causal attention in tiles, forward and backward; part of simd_body.h, not a
// public header.
//
// After FlashAttention (Dao et al. 2022; backward as in its Algorithm 4): a
// tile of kTile x kTile scores exists at a time; the forward keeps only the
// log-sum-exp of each row, from which the backward recomputes scores.
// One task is one key/value head of one sequence with all query heads that
// read it, so that dk and dv have one writer and one order.
#pragma once

namespace remesh::kernels {
namespace {

constexpr int64_t kTile = 64;
constexpr int64_t kLanes = REMESH_LANES;
typedef float Vec __attribute__((vector_size(4 * REMESH_LANES)));

REMESH_INLINE int64_t round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}
REMESH_INLINE Vec load_vec(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
REMESH_INLINE void store_vec(float* p, Vec v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

// C (R rows, C vectors wide) += A B; A(i, k) = a[i * ars + k * acs].
template <int R, int C>
REMESH_INLINE void gemm_block(int64_t depth, const float* a, int64_t ars,
                              int64_t acs, const float* b, int64_t ldb,
                              float* c, int64_t ldc) {
  Vec acc[R][C];
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < C; ++j) acc[i][j] = load_vec(c + i * ldc + j * kLanes);
  for (int64_t k = 0; k < depth; ++k) {
    Vec bk[C];
    for (int j = 0; j < C; ++j) bk[j] = load_vec(b + k * ldb + j * kLanes);
    for (int i = 0; i < R; ++i) {
      const float aik = a[i * ars + k * acs];
      for (int j = 0; j < C; ++j) acc[i][j] += aik * bk[j];
    }
  }
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < C; ++j) store_vec(c + i * ldc + j * kLanes, acc[i][j]);
}

template <int C>
REMESH_INLINE void gemm_columns(int64_t rows, int64_t depth, const float* a,
                                int64_t ars, int64_t acs, const float* b,
                                int64_t ldb, float* c, int64_t ldc) {
  constexpr int kRows = 4;
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows)
    gemm_block<kRows, C>(depth, a + i * ars, ars, acs, b, ldb, c + i * ldc,
                         ldc);
  for (; i < rows; ++i)
    gemm_block<1, C>(depth, a + i * ars, ars, acs, b, ldb, c + i * ldc, ldc);
}

// C (rows, cols) += A (rows, depth) B (depth, cols); cols % kLanes == 0.
__attribute__((noinline)) void gemm_add(int64_t rows, int64_t cols,
                                        int64_t depth, const float* a,
                                        int64_t ars, int64_t acs,
                                        const float* b, int64_t ldb, float* c,
                                        int64_t ldc) {
  constexpr int kWide = REMESH_LANES == 16 ? 4 : 2;  // registers: 32 or 16
  int64_t j = 0;
  for (; j + kWide * kLanes <= cols; j += kWide * kLanes)
    gemm_columns<kWide>(rows, depth, a, ars, acs, b + j, ldb, c + j, ldc);
  for (; j < cols; j += kLanes)
    gemm_columns<1>(rows, depth, a, ars, acs, b + j, ldb, c + j, ldc);
}

// Rows of one head, as fp32 times `factor`, padded with zeros to `width`
// columns.
template <typename T>
void load_rows(const T* src, int64_t stride, int64_t rows, int64_t hd,
               int64_t width, float factor, float* dst) {
  for (int64_t i = 0; i < rows; ++i, src += stride, dst += width) {
#pragma omp simd
    for (int64_t j = 0; j < hd; ++j) dst[j] = get(src, j) * factor;
    for (int64_t j = hd; j < width; ++j) dst[j] = 0;
  }
}

template <typename T>
void store_rows(const float* src, int64_t width, int64_t rows, int64_t hd,
                float factor, T* dst, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i, src += width, dst += stride) {
#pragma omp simd
    for (int64_t j = 0; j < hd; ++j) put(dst, j, src[j] * factor);
  }
}

// rows (seq, width) -> tiles [seq / kTile][width][kTile]; missing rows are 0.
void transpose_tiles(const float* rows, int64_t seq, int64_t width,
                     float* tiles) {
  for (int64_t t0 = 0; t0 < seq; t0 += kTile) {
    const int64_t n = seq - t0 < kTile ? seq - t0 : kTile;
    float* tile = tiles + t0 * width;
    if (n < kTile) fill_zero(tile, width * kTile);
    for (int64_t i0 = 0; i0 < n; i0 += 16) {
      const int64_t i1 = i0 + 16 < n ? i0 + 16 : n;
      for (int64_t j = 0; j < width; ++j)
        for (int64_t i = i0; i < i1; ++i)
          tile[j * kTile + i] = rows[(t0 + i) * width + j];
    }
  }
}

// The columns [from, to) of a row of a tile, which count; from <= to.
struct Columns {
  int64_t from, to;
  REMESH_INLINE_MEMBER bool none() const { return from == to; }
  REMESH_INLINE_MEMBER bool has(int64_t j) const {
    return static_cast<uint64_t>(j - from) < static_cast<uint64_t>(to - from);
  }
};

// One row of scores: updates the running
// maximum and sum, turns scores into probabilities relative to the new
// maximum, and returns the factor for what was accumulated before.
REMESH_INLINE float softmax_row(float* s, Columns seen, float* row_max,
                                float* row_sum) {
  const float any = s[seen.from];
  float top = any;
#pragma omp simd reduction(max : top)
  for (int64_t j = 0; j < kTile; ++j) {
    const float v = seen.has(j) ? s[j] : any;
    top = v > top ? v : top;
  }
  if (*row_max > top) top = *row_max;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < kTile; ++j) {
    const float e = fast_exp(s[j] - top);
    const float p = seen.has(j) ? e : 0.0F;
    s[j] = p;
    sum += p;
  }
  const float keep = fast_exp(*row_max - top);
  *row_sum = *row_sum * keep + sum;
  *row_max = top;
  return keep;
}

// The keys of a tile from k0 on that query i sees.
REMESH_INLINE Columns columns_of(const AttentionSegment& s, int64_t i,
                                 int64_t k0) {
  const int64_t first = first_key(s, i) - k0;
  const int64_t end = visible_keys(s, i) - k0;
  const int64_t from = first < 0 ? 0 : first;
  const int64_t to = end < kTile ? end : kTile;
  return {from, to < from ? from : to};
}
// The first tile with a key that query i sees.
REMESH_INLINE int64_t first_tile(const AttentionSegment& s, int64_t i) {
  return first_key(s, i) / kTile * kTile;
}

// Backward: k, v, both transposed, dk, dv; tiles of q, of the output's gradient
// and dq; two score tiles; delta. Forward: k, both ways, and v; tiles of q and
// o; a score tile; maximum and sum. One query: q, o and a row of scores.
int64_t attention_scratch(const AttentionSegment& s, AttentionUse use) {
  const int64_t width = round_up(s.head_dim, kLanes);
  const int64_t keys = round_up(s.Tk, kTile);
  if (use == AttentionUse::kSegment && s.Tq == 1) return 2 * width + kTile;
  if (use != AttentionUse::kBackward)
    return 3 * keys * width + 2 * kTile * width + kTile * kTile + 2 * kTile;
  return 6 * keys * width + 3 * kTile * width + 2 * kTile * kTile + kTile;
}

// The parts of a task for its sequence and key/value head.
struct Geometry {
  int64_t width, keys, group, out_row, kv;
  float factor;
  int64_t query(const AttentionTask& t, int64_t h) const {
    return t.b * t.segment.q_batch * t.segment.q_stride +
           h * t.segment.head_dim;
  }
  int64_t out(const AttentionTask& t, int64_t h) const {
    return t.b * t.segment.q_batch * out_row + h * t.segment.head_dim;
  }
};

REMESH_INLINE Geometry geometry_of(const AttentionTask& t) {
  const AttentionSegment& s = t.segment;
  return {.width = round_up(s.head_dim, kLanes),
          .keys = round_up(s.Tk, kTile),
          .group = s.num_heads / s.num_kv_heads,
          .out_row = s.num_heads * s.head_dim,
          .kv = t.b * s.kv_batch * s.kv_stride + t.g * s.head_dim,
          .factor = 1.0F / __builtin_sqrtf(static_cast<float>(s.head_dim))};
}

// kRunning: merged into a running fp32 result; else written as type T.
template <typename T, bool kRunning>
void attention(const AttentionTask& t) {
  const AttentionSegment& s = t.segment;
  const Geometry geo = geometry_of(t);
  const int64_t w = geo.width;
  float* k = t.scratch;
  float* kt = k + geo.keys * w;
  float* v = kt + geo.keys * w;
  float* q = v + geo.keys * w;
  float* o = q + kTile * w;
  float* p = o + kTile * w;
  float* top = p + kTile * kTile;
  float* sum = top + kTile;
  load_rows(static_cast<const T*>(t.k) + geo.kv, s.kv_stride, s.Tk, s.head_dim,
            w, 1, k);
  load_rows(static_cast<const T*>(t.v) + geo.kv, s.kv_stride, s.Tk, s.head_dim,
            w, 1, v);
  fill_zero(v + s.Tk * w, (geo.keys - s.Tk) * w);
  transpose_tiles(k, s.Tk, w, kt);
  for (int64_t h = t.g * geo.group; h < (t.g + 1) * geo.group; ++h) {
    const T* qh = static_cast<const T*>(t.q) + geo.query(t, h);
    float* lse = t.lse + (t.b * s.num_heads + h) * s.lse_T;
    for (int64_t i0 = t.i0; i0 < t.i1; i0 += kTile) {
      const int64_t n = t.i1 - i0 < kTile ? t.i1 - i0 : kTile;
      load_rows(qh + i0 * s.q_stride, s.q_stride, n, s.head_dim, w, geo.factor,
                q);
      fill_zero(o, n * w);
      for (int64_t i = 0; i < n; ++i) {
        top[i] = -1e30F;
        sum[i] = 0;
      }
      for (int64_t k0 = first_tile(s, i0); k0 < visible_keys(s, i0 + n - 1);
           k0 += kTile) {
        fill_zero(p, n * kTile);
        gemm_add(n, kTile, w, q, w, 1, kt + k0 * w, kTile, p, kTile);
        for (int64_t i = 0; i < n; ++i) {
          const Columns seen = columns_of(s, i0 + i, k0);
          if (seen.none()) {
            fill_zero(p + i * kTile, kTile);
            continue;
          }
          const float keep = softmax_row(p + i * kTile, seen, top + i, sum + i);
          if (keep == 1.0F) continue;
#pragma omp simd
          for (int64_t j = 0; j < w; ++j) o[i * w + j] *= keep;
        }
        gemm_add(n, w, kTile, p, kTile, 1, v + k0 * w, w, o, w);
      }
      const int64_t at = geo.out(t, h) + i0 * geo.out_row;
      for (int64_t i = 0; i < n; ++i) {
        const float row_lse = top[i] + __builtin_logf(sum[i]);
        if constexpr (kRunning) {
          merge_row(s.head_dim, t.first, o + i * w, sum[i], row_lse,
                    static_cast<float*>(t.o) + at + i * geo.out_row,
                    lse + i0 + i);
        } else {
          lse[i0 + i] = row_lse;
          store_rows(o + i * w, w, 1, s.head_dim, 1.0F / sum[i],
                     static_cast<T*>(t.o) + at + i * geo.out_row, geo.out_row);
        }
      }
    }
  }
}

// attention<T, true>() of one query: reads keys and values where they are.
template <typename T>
void attention_row(const AttentionTask& t) {
  const AttentionSegment& s = t.segment;
  const Geometry geo = geometry_of(t);
  const T* k = static_cast<const T*>(t.k) + geo.kv;
  const T* v = static_cast<const T*>(t.v) + geo.kv;
  float* q = t.scratch;
  float* o = q + geo.width;
  float* p = o + geo.width;
  const int64_t n = visible_keys(s, 0);
  for (int64_t h = t.g * geo.group; h < (t.g + 1) * geo.group; ++h) {
    load_rows(static_cast<const T*>(t.q) + geo.query(t, h), s.q_stride, 1,
              s.head_dim, geo.width, geo.factor, q);
    fill_zero(o, geo.width);
    float top = -1e30F, sum = 0;
    for (int64_t k0 = first_key(s, 0); k0 < n; k0 += kTile) {
      const int64_t valid = n - k0 < kTile ? n - k0 : kTile;
      fill_zero(p + valid, kTile - valid);
      dot_rows(valid, s.head_dim, k + k0 * s.kv_stride, s.kv_stride, q, p);
      const float keep = softmax_row(p, {0, valid}, &top, &sum);
#pragma omp simd
      for (int64_t j = 0; j < geo.width; ++j) o[j] *= keep;
      add_scaled_rows(valid, s.head_dim, v + k0 * s.kv_stride, s.kv_stride, p,
                      o);
    }
    merge_row(s.head_dim, t.first, o, sum, top + __builtin_logf(sum),
              static_cast<float*>(t.o) + geo.out(t, h),
              t.lse + (t.b * s.num_heads + h) * s.lse_T);
  }
}

template <typename T>
void attention_segment(const AttentionTask& t) {
  if (t.segment.Tq == 1)
    attention_row<T>(t);
  else
    attention<T, true>(t);
}

// p := probabilities from scores and lse; ds := p * (dp - delta).
REMESH_INLINE void score_gradient_row(Columns seen, float lse, float delta,
                                      float* p, float* dp) {
#pragma omp simd
  for (int64_t j = 0; j < kTile; ++j) {
    const float e = fast_exp(p[j] - lse);
    const float pj = seen.has(j) ? e : 0.0F;
    p[j] = pj;
    dp[j] = seen.has(j) ? pj * (dp[j] - delta) : 0.0F;
  }
}

// Rows of a gradient, written as type T or added in fp32.
template <typename T, bool kAdd>
REMESH_INLINE void put_gradient(const float* src, int64_t width, int64_t rows,
                                int64_t hd, float factor, void* dst, int64_t at,
                                int64_t stride) {
  if constexpr (kAdd) {
    float* to = static_cast<float*>(dst) + at;
    for (int64_t i = 0; i < rows; ++i, src += width, to += stride) {
#pragma omp simd
      for (int64_t j = 0; j < hd; ++j) to[j] += src[j] * factor;
    }
  } else {
    store_rows(src, width, rows, hd, factor, static_cast<T*>(dst) + at, stride);
  }
}

template <typename T, bool kAdd>
void attention_backward(const AttentionTask& t) {
  const AttentionSegment& s = t.segment;
  const Geometry geo = geometry_of(t);
  const int64_t w = geo.width;
  const int64_t plane = geo.keys * w;
  float* k = t.scratch;
  float* v = k + plane;
  float* kt = v + plane;
  float* vt = kt + plane;
  float* dk = vt + plane;
  float* dv = dk + plane;
  float* q = dv + plane;
  float* go = q + kTile * w;  // gradient of the output
  float* dq = go + kTile * w;
  float* p = dq + kTile * w;
  float* ds = p + kTile * kTile;
  float* delta = ds + kTile * kTile;
  load_rows(static_cast<const T*>(t.k) + geo.kv, s.kv_stride, s.Tk, s.head_dim,
            w, 1, k);
  fill_zero(k + s.Tk * w, plane - s.Tk * w);
  load_rows(static_cast<const T*>(t.v) + geo.kv, s.kv_stride, s.Tk, s.head_dim,
            w, 1, v);
  transpose_tiles(k, s.Tk, w, kt);
  transpose_tiles(v, s.Tk, w, vt);
  fill_zero(dk, plane);
  fill_zero(dv, plane);
  for (int64_t h = t.g * geo.group; h < (t.g + 1) * geo.group; ++h) {
    const T* qh = static_cast<const T*>(t.q) + geo.query(t, h);
    const T* out = static_cast<const T*>(t.out) + geo.out(t, h);
    const T* dout = static_cast<const T*>(t.dout) + geo.out(t, h);
    const float* lse = t.lse + (t.b * s.num_heads + h) * s.lse_T;
    const int64_t dq0 = t.b * s.q_batch * t.dq_stride + h * s.head_dim;
    for (int64_t i0 = 0; i0 < s.Tq; i0 += kTile) {
      const int64_t n = s.Tq - i0 < kTile ? s.Tq - i0 : kTile;
      load_rows(qh + i0 * s.q_stride, s.q_stride, n, s.head_dim, w, geo.factor,
                q);
      load_rows(dout + i0 * geo.out_row, geo.out_row, n, s.head_dim, w, 1, go);
      fill_zero(dq, n * w);
      for (int64_t i = 0; i < n; ++i) {
        // Where a query sees one key almost alone, dP - delta cancels.
        double dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t j = 0; j < s.head_dim; ++j)
          dot += static_cast<double>(get(out + (i0 + i) * geo.out_row, j)) *
                 static_cast<double>(go[i * w + j]);
        delta[i] = static_cast<float>(dot);
      }
      for (int64_t k0 = first_tile(s, i0); k0 < visible_keys(s, i0 + n - 1);
           k0 += kTile) {
        fill_zero(p, n * kTile);
        fill_zero(ds, n * kTile);
        gemm_add(n, kTile, w, q, w, 1, kt + k0 * w, kTile, p, kTile);
        gemm_add(n, kTile, w, go, w, 1, vt + k0 * w, kTile, ds, kTile);
        for (int64_t i = 0; i < n; ++i)
          score_gradient_row(columns_of(s, i0 + i, k0), lse[i0 + i], delta[i],
                             p + i * kTile, ds + i * kTile);
        gemm_add(kTile, w, n, p, 1, kTile, go, w, dv + k0 * w, w);
        gemm_add(kTile, w, n, ds, 1, kTile, q, w, dk + k0 * w, w);
        gemm_add(n, w, kTile, ds, kTile, 1, k + k0 * w, w, dq, w);
      }
      put_gradient<T, kAdd>(dq, w, n, s.head_dim, geo.factor, t.dq,
                            dq0 + i0 * t.dq_stride, t.dq_stride);
    }
  }
  const int64_t dkv0 = t.b * s.kv_batch * t.dkv_stride + t.g * s.head_dim;
  put_gradient<T, kAdd>(dk, w, s.Tk, s.head_dim, 1.0F, t.dk, dkv0,
                        t.dkv_stride);
  put_gradient<T, kAdd>(dv, w, s.Tk, s.head_dim, 1.0F, t.dv, dkv0,
                        t.dkv_stride);
}

}  // namespace
}  // namespace remesh::kernels
