// Attention on AMX tiles, forward and backward; see amx_tiles.h.
//
// After FlashAttention (Dao et al. 2022), as simd_attention.h: a chunk of
// kChunk keys' scores exists at a time. The tiles make the GEMMs so cheap that
// the exponentials dominate, so GEMMs are arranged for few conversions rather
// than for depth. Probabilities and score gradients are rounded to bf16 before
// the second GEMM.
//
// Over 500 lines because forward and backward share the packing of keys, values
// and scores, whose layouts are chosen together.
#include "worker/kernels/cpu/amx_body.h"
#include "worker/kernels/cpu/amx_tiles.h"
#include "worker/kernels/cpu/simd_exp2.h"

namespace remesh::kernels {
namespace {

constexpr int64_t kChunk = 256;  // queries or keys
constexpr int64_t kChunkPanels = kChunk / 32;
constexpr int64_t kFetchRows = 40;  // of Upcoming, for a block of scores
constexpr int64_t kBlock = 1024;    // elements of a 32 x 32 block

REMESH_INLINE float exp2_one(float x) {
  return _mm512_cvtss_f32(exp2_512(_mm512_set1_ps(x)));
}

// The columns [from, to) of a row of scores, which count.
struct Columns {
  int64_t from = 0, to = 0;
  // Of the 16 from `at` on.
  REMESH_INLINE_MEMBER __mmask16 mask(int64_t at) const {
    return static_cast<__mmask16>(first_mask(to - at) & ~first_mask(from - at));
  }
};

// Of the keys from k0 on, those that query i sees.
REMESH_INLINE Columns columns_of(const AttentionSegment& s, int64_t i,
                                 int64_t k0) {
  return {first_key(s, i) - k0, visible_keys(s, i) - k0};
}
// The first chunk with a key that query i sees.
REMESH_INLINE int64_t first_chunk(const AttentionSegment& s, int64_t i) {
  return first_key(s, i) / kChunk * kChunk;
}

struct Sizes {
  int64_t depth;  // steps (or panels) of head_dim
  int64_t keys;   // panels of keys
  int64_t group, out_row, kv;
  float factor;
};

REMESH_INLINE Sizes sizes_of(const AttentionTask& t) {
  const AttentionSegment& s = t.segment;
  return {.depth = amx_panels(s.head_dim),
          .keys = amx_panels(s.Tk),
          .group = s.num_heads / s.num_kv_heads,
          .out_row = s.num_heads * s.head_dim,
          .kv = t.b * s.kv_batch * s.kv_stride + t.g * s.head_dim,
          .factor = 1.0F / __builtin_sqrtf(static_cast<float>(s.head_dim))};
}

// Divides a task's scratch; without memory, counts what is needed.
struct Bump {
  char* base;
  int64_t at = 0;  // bytes
  template <typename T>
  REMESH_INLINE_MEMBER T* take(int64_t n) {
    char* p = base == nullptr ? nullptr : base + at;
    at += (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(p);
  }
};

REMESH_INLINE void gemm(const Bf16* a, const Bf16* b, int64_t steps, bool load,
                        float* c) {
  panel_gemm<false>(
      {reinterpret_cast<const char*>(a), 64, kStepBytes, kTileBytes},
      reinterpret_cast<const char*>(b), steps, load, c, 32, [] {});
}

// Rows of one head as a panel of rows.
REMESH_INLINE void pack_rows(const Bf16* x, int64_t stride, int64_t rows,
                             int64_t hd, Bf16* dst) {
  for (int64_t j = 0; j < hd; j += 32, dst += kBlock)
    pack_rows_step(x + j, stride, rows, hd - j, dst);
}
// Keys or values as columns, depth head_dim.
REMESH_INLINE void pack_across(const Bf16* x, int64_t stride, int64_t rows,
                               int64_t hd, Bf16* dst) {
  for (int64_t i = 0; i < rows; i += 32)
    for (int64_t j = 0; j < hd; j += 32, dst += kBlock)
      pack_transposed_step(x + i * stride + j, stride, rows - i, hd - j, dst);
}
// Rows as depth, head_dim as columns: [panel of head_dim][step of rows].
REMESH_INLINE void pack_along(const Bf16* x, int64_t stride, int64_t rows,
                              int64_t hd, int64_t steps, Bf16* dst) {
  for (int64_t j = 0; j < hd; j += 32, dst += steps * kBlock)
    for (int64_t i = 0; i < rows; i += 32)
      pack_step(x + i * stride + j, stride, rows - i, hd - j,
                dst + i / 32 * kBlock);
}

// Prefetches, a little at a time, the rows that this thread's next task will
// most likely read: they are too far apart for the hardware to find a pattern.
class Upcoming {
 public:
  REMESH_INLINE_MEMBER explicit Upcoming(const AttentionTask& t) {
    const AttentionSegment& s = t.segment;
    const bool more = t.g + 1 < s.num_kv_heads;
    const int64_t b = more ? t.b : t.b + 1;
    const int64_t g = more ? t.g + 1 : 0;
    if (b >= s.B) return;
    const int64_t group = s.num_heads / s.num_kv_heads;
    const int64_t kv = b * s.kv_batch * s.kv_stride + g * s.head_dim;
    const int64_t h = g * group * s.head_dim;
    const int64_t out_row = s.num_heads * s.head_dim;
    add(t.k, kv, s.kv_stride, s.Tk, s.head_dim);
    add(t.v, kv, s.kv_stride, s.Tk, s.head_dim);
    add(t.q, b * s.q_batch * s.q_stride + h, s.q_stride, s.Tq,
        group * s.head_dim);
    add(t.out, b * s.q_batch * out_row + h, out_row, s.Tq, group * s.head_dim);
    add(t.dout, b * s.q_batch * out_row + h, out_row, s.Tq, group * s.head_dim);
  }
  REMESH_INLINE_MEMBER void fetch(int64_t rows) {
    for (; rows > 0 && at_ < count_; --rows) {
      Rows& r = rows_[at_];
      for (int64_t i = 0; i < r.bytes; i += 64)
        _mm_prefetch(r.at + i, _MM_HINT_T1);
      r.at += r.stride;
      if (--r.rows == 0) ++at_;
    }
  }

 private:
  struct Rows {
    const char* at;
    int64_t stride, rows, bytes;
  };
  REMESH_INLINE_MEMBER void add(const void* p, int64_t at, int64_t stride,
                                int64_t rows, int64_t elements) {
    if (p == nullptr || rows == 0) return;
    rows_[count_++] = {
        reinterpret_cast<const char*>(static_cast<const Bf16*>(p) + at),
        2 * stride, rows, 2 * elements};
  }

  Rows rows_[5];
  int count_ = 0, at_ = 0;
};

// 32 columns of a row, or `columns` at its end.
REMESH_INLINE void put_row(__m512i v, int64_t columns, Bf16* to) {
  if (columns >= 32 && reinterpret_cast<uintptr_t>(to) % 64 == 0)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), v);
  else
    _mm512_mask_storeu_epi16(to, first_mask(columns), v);
}

// --- forward ---

struct Forward {
  Bf16 *kt, *v, *q, *p;
  float *s, *o, *top, *sum;
};

REMESH_INLINE Forward place_forward(const AttentionSegment& s, Bump& bump) {
  const int64_t depth = amx_panels(s.head_dim);
  const int64_t plane = amx_panels(s.Tk) * depth * kBlock;
  Forward f;
  f.kt = bump.take<Bf16>(plane);
  f.v = bump.take<Bf16>(plane);
  f.q = bump.take<Bf16>(depth * kBlock);
  f.p = bump.take<Bf16>(kChunkPanels * kBlock);
  f.s = bump.take<float>(kChunkPanels * kBlock);
  f.o = bump.take<float>(depth * kBlock);
  f.top = bump.take<float>(32);
  f.sum = bump.take<float>(32);
  return f;
}

// One row of a chunk of scores, in `panels` blocks: updates the running maximum
// and sum (in powers of two), leaves probabilities relative to the new maximum
// in p, and returns the factor for what was accumulated before. `first`:
// nothing was. The sum is that of the rounded probabilities, so the errors of
// their rounding partly cancel.
REMESH_INLINE float softmax_row(const float* s, int64_t panels, Columns seen,
                                float factor, bool first, float* top,
                                float* sum, Bf16* p) {
  const __m512 none = _mm512_set1_ps(-3e38F);
  __m512 most = none;
  for (int64_t n = 0; n < panels; ++n) {
    const float* at = s + n * kBlock;
    most =
        _mm512_max_ps(most, _mm512_mask_loadu_ps(none, seen.mask(n * 32), at));
    most = _mm512_max_ps(
        most, _mm512_mask_loadu_ps(none, seen.mask(n * 32 + 16), at + 16));
  }
  const float here = _mm512_reduce_max_ps(most) * factor;
  const float now = first || here > *top ? here : *top;
  const __m512 scale = _mm512_set1_ps(factor);
  const __m512 minus = _mm512_set1_ps(-now);
  __m512 total = _mm512_setzero_ps();
  for (int64_t n = 0; n < panels; ++n) {
    const float* at = s + n * kBlock;
    const __m512 lo = _mm512_maskz_mov_ps(
        seen.mask(n * 32),
        exp2_512(_mm512_fmadd_ps(_mm512_load_ps(at), scale, minus)));
    const __m512 hi = _mm512_maskz_mov_ps(
        seen.mask(n * 32 + 16),
        exp2_512(_mm512_fmadd_ps(_mm512_load_ps(at + 16), scale, minus)));
    const __m512i rounded = round_pair(lo, hi);
    total = _mm512_add_ps(
        total,
        _mm512_add_ps(
            _mm512_castsi512_ps(_mm512_slli_epi32(rounded, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(
                rounded, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))))));
    _mm512_store_si512(p + n * kBlock, rounded);
  }
  const float here_sum = _mm512_reduce_add_ps(total);
  const float keep = first ? 1.0F : exp2_one(*top - now);
  *sum = first ? here_sum : *sum * keep + here_sum;
  *top = now;
  return keep;
}

REMESH_INLINE void zero_row(int64_t panels, Bf16* p) {
  for (int64_t n = 0; n < panels; ++n)
    _mm512_store_si512(p + n * kBlock, _mm512_setzero_si512());
}

// 32 queries from i0 on (n of them exist) against all keys they see.
REMESH_INLINE void forward_rows(const AttentionTask& t, const Sizes& z,
                                const Forward& f, Upcoming& upcoming,
                                int64_t i0, int64_t n) {
  const AttentionSegment& s = t.segment;
  for (int64_t i = 0; i < 32; ++i) {
    f.top[i] = -1e30F;
    f.sum[i] = 0;
  }
  const int64_t end = visible_keys(s, i0 + n - 1);
  const int64_t begin = first_chunk(s, i0);
  for (int64_t k0 = begin; k0 < end; k0 += kChunk) {
    const int64_t panels = amx_panels(least(end - k0, kChunk));
    for (int64_t p = 0; p < panels; ++p) {
      upcoming.fetch(kFetchRows);
      gemm(f.q, f.kt + (k0 / 32 + p) * z.depth * kBlock, z.depth, false,
           f.s + p * kBlock);
    }
    for (int64_t i = 0; i < 32; ++i) {
      const Columns seen = i < n ? columns_of(s, i0 + i, k0) : Columns();
      if (seen.from >= least(seen.to, kChunk)) {
        zero_row(panels, f.p + i * 32);
        continue;
      }
      const float keep =
          softmax_row(f.s + i * 32, panels, seen, z.factor * kLog2e,
                      f.sum[i] == 0.0F, f.top + i, f.sum + i, f.p + i * 32);
      if (keep == 1.0F) continue;
      for (int64_t j = 0; j < z.depth * 2; ++j) {
        float* o = f.o + (j / 2) * kBlock + i * 32 + (j % 2) * 16;
        _mm512_store_ps(o,
                        _mm512_mul_ps(_mm512_load_ps(o), _mm512_set1_ps(keep)));
      }
    }
    for (int64_t h = 0; h < z.depth; ++h)
      gemm(f.p, f.v + (h * z.keys + k0 / 32) * kBlock, panels, k0 > begin,
           f.o + h * kBlock);
  }
}

template <bool kRunning>
REMESH_INLINE void put_rows(const AttentionTask& t, const Sizes& z,
                            const Forward& f, int64_t h, int64_t i0,
                            int64_t n) {
  const AttentionSegment& s = t.segment;
  float* lse = t.lse + (t.b * s.num_heads + h) * s.lse_T + i0;
  const int64_t at = (t.b * s.q_batch + i0) * z.out_row + h * s.head_dim;
  for (int64_t i = 0; i < n; ++i) {
    const float row_lse = f.top[i] / kLog2e + __builtin_logf(f.sum[i]);
    const float one = 1.0F / f.sum[i];
    float before = kRunning ? lse[i] : 0.0F;
    for (int64_t j = 0; j < s.head_dim; j += 32) {
      const int64_t hd = least(s.head_dim - j, 32);
      const float* o = f.o + j / 32 * kBlock + i * 32;
      const int64_t to = at + i * z.out_row + j;
      if constexpr (kRunning) {
        // Every part of the row starts from the row's old lse.
        float row = before;
        merge_row(hd, t.first, o, f.sum[i], row_lse,
                  static_cast<float*>(t.o) + to, &row);
        lse[i] = row;
      } else {
        const __m512 r = _mm512_set1_ps(one);
        put_row(round_pair(_mm512_mul_ps(_mm512_load_ps(o), r),
                           _mm512_mul_ps(_mm512_load_ps(o + 16), r)),
                hd, static_cast<Bf16*>(t.o) + to);
      }
    }
    if constexpr (!kRunning) lse[i] = row_lse;
  }
}

template <bool kRunning>
REMESH_INLINE void forward(const AttentionTask& t) {
  const AttentionSegment& s = t.segment;
  const Tiles tiles;
  const Sizes z = sizes_of(t);
  Bump bump{reinterpret_cast<char*>(t.scratch)};
  const Forward f = place_forward(s, bump);
  const int64_t seen = visible_keys(s, t.i1 - 1);
  Upcoming upcoming(t);
  pack_across(static_cast<const Bf16*>(t.k) + z.kv, s.kv_stride, seen,
              s.head_dim, f.kt);
  pack_along(static_cast<const Bf16*>(t.v) + z.kv, s.kv_stride, seen,
             s.head_dim, z.keys, f.v);
  for (int64_t h = t.g * z.group; h < (t.g + 1) * z.group; ++h)
    for (int64_t i0 = t.i0; i0 < t.i1; i0 += 32) {
      const int64_t n = least(t.i1 - i0, 32);
      pack_rows(static_cast<const Bf16*>(t.q) +
                    (t.b * s.q_batch + i0) * s.q_stride + h * s.head_dim,
                s.q_stride, n, s.head_dim, f.q);
      forward_rows(t, z, f, upcoming, i0, n);
      put_rows<kRunning>(t, z, f, h, i0, n);
    }
  _mm_sfence();
}

// --- backward ---

struct Backward {
  Bf16 *kt, *vt, *k;                  // as columns across and along
  Bf16 *q, *go, *q_along, *go_along;  // of a chunk of queries
  Bf16 *ds, *p_turned, *ds_turned;    // of a chunk of queries and of keys
  Bf16* p_block;
  float *s_block, *dp_block, *dq, *dk, *dv, *delta, *lse;
};

REMESH_INLINE Backward place_backward(const AttentionSegment& s, Bump& bump) {
  const int64_t depth = amx_panels(s.head_dim);
  const int64_t plane = amx_panels(s.Tk) * depth * kBlock;
  const int64_t chunk = kChunkPanels * depth * kBlock;
  const int64_t square = kChunkPanels * kChunkPanels * kBlock;
  Backward b;
  for (Bf16** p : {&b.kt, &b.vt, &b.k}) *p = bump.take<Bf16>(plane);
  for (Bf16** p : {&b.q, &b.go, &b.q_along, &b.go_along})
    *p = bump.take<Bf16>(chunk);
  for (Bf16** p : {&b.ds, &b.p_turned, &b.ds_turned})
    *p = bump.take<Bf16>(square);
  b.p_block = bump.take<Bf16>(kBlock);
  b.s_block = bump.take<float>(2 * kBlock);
  b.dp_block = bump.take<float>(2 * kBlock);
  b.dq = bump.take<float>(chunk);
  b.dk = bump.take<float>(plane);
  b.dv = bump.take<float>(plane);
  b.delta = bump.take<float>(kChunk);
  b.lse = bump.take<float>(kChunk);
  return b;
}

// A block of scores and of their gradients, the columns seen(i) of row i of
// which count, to probabilities and score gradients in bf16.
template <typename F>
REMESH_INLINE void score_gradients(const float* scores, const float* dp,
                                   const float* lse, const float* delta,
                                   float factor, const F& seen, Bf16* p,
                                   Bf16* ds) {
  const __m512 log_scale = _mm512_set1_ps(factor * kLog2e);
  const __m512 scale = _mm512_set1_ps(factor);
  for (int64_t i = 0; i < 32; ++i) {
    const Columns columns = seen(i);
    const __m512 minus = _mm512_set1_ps(-lse[i] * kLog2e);
    const __m512 d = _mm512_set1_ps(delta[i]);
    __m512 pj[2], g[2];
    for (int64_t j = 0; j < 2; ++j) {
      const __mmask16 mask = columns.mask(j * 16);
      const int64_t at = i * 32 + j * 16;
      pj[j] = _mm512_maskz_mov_ps(
          mask, exp2_512(_mm512_fmadd_ps(_mm512_load_ps(scores + at), log_scale,
                                         minus)));
      g[j] = _mm512_maskz_mul_ps(mask, _mm512_mul_ps(pj[j], scale),
                                 _mm512_sub_ps(_mm512_load_ps(dp + at), d));
    }
    _mm512_store_si512(p + i * 32, round_pair(pj[0], pj[1]));
    _mm512_store_si512(ds + i * 32, round_pair(g[0], g[1]));
  }
}

// Queries [i0, i0 + n) of a chunk against keys [k0, k0 + m): adds to dq, dk,
// dv.
REMESH_INLINE void backward_chunk(const AttentionTask& t, const Sizes& z,
                                  const Backward& b, Upcoming& upcoming,
                                  int64_t i0, int64_t n, int64_t k0) {
  const AttentionSegment& s = t.segment;
  const int64_t rows = amx_panels(n);
  const int64_t kp0 = k0 / 32;
  // Panels of keys that the queries of panel r see.
  const auto keys_of = [&](int64_t r) {
    const int64_t seen = visible_keys(s, i0 + least(r * 32 + 31, n - 1)) - k0;
    return seen <= 0 ? 0 : amx_panels(least(seen, kChunk));
  };
  // The tiles form a block's scores while the one before is turned into
  // probabilities.
  int64_t slot = 0;
  int64_t before_r = 0, before_c = -1;
  const auto finish = [&] {
    if (before_c < 0) return;
    Bf16* ds = b.ds + (before_r * kChunkPanels + before_c) * kBlock;
    const auto seen = [&](int64_t i) {
      const int64_t q = before_r * 32 + i;
      return q < n ? columns_of(s, i0 + q, k0 + before_c * 32) : Columns();
    };
    const int64_t other = (slot ^ 1) * kBlock;
    score_gradients(b.s_block + other, b.dp_block + other,
                    b.lse + before_r * 32, b.delta + before_r * 32, z.factor,
                    seen, b.p_block, ds);
    const int64_t turned = (before_c * kChunkPanels + before_r) * kBlock;
    turn_full_step(b.p_block, 32, b.p_turned + turned);
    turn_full_step(ds, 32, b.ds_turned + turned);
  };
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < keys_of(r); ++c) {
      upcoming.fetch(kFetchRows);
      gemm(b.q + r * z.depth * kBlock, b.kt + (kp0 + c) * z.depth * kBlock,
           z.depth, false, b.s_block + slot * kBlock);
      gemm(b.go + r * z.depth * kBlock, b.vt + (kp0 + c) * z.depth * kBlock,
           z.depth, false, b.dp_block + slot * kBlock);
      finish();
      before_r = r;
      before_c = c;
      slot ^= 1;
    }
  finish();
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < z.depth && keys_of(r) > 0; ++h)
      gemm(b.ds + r * kChunkPanels * kBlock, b.k + (h * z.keys + kp0) * kBlock,
           keys_of(r), true, b.dq + (r * z.depth + h) * kBlock);
  for (int64_t c = 0; c < keys_of(rows - 1); ++c) {
    int64_t r = 0;  // the first panel of queries that sees this one of keys
    while (keys_of(r) <= c) ++r;
    const int64_t turned = (c * kChunkPanels + r) * kBlock;
    for (int64_t h = 0; h < z.depth; ++h) {
      const int64_t along = (h * kChunkPanels + r) * kBlock;
      const int64_t to = ((kp0 + c) * z.depth + h) * kBlock;
      gemm(b.p_turned + turned, b.go_along + along, rows - r, true, b.dv + to);
      gemm(b.ds_turned + turned, b.q_along + along, rows - r, true, b.dk + to);
    }
  }
}

// Blocks of sums [panel][depth] to rows of one head: written as bf16 or added
// in fp32.
template <bool kAdd>
REMESH_INLINE void put_gradient(const float* sums, int64_t rows, int64_t hd,
                                void* dst, int64_t at, int64_t stride) {
  const int64_t depth = amx_panels(hd);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < hd; j += 32) {
      const float* from =
          sums + (i / 32 * depth + j / 32) * kBlock + i % 32 * 32;
      const int64_t to = at + i * stride + j;
      if constexpr (kAdd) {
        float* f = static_cast<float*>(dst) + to;
        for (int64_t c = 0; c < least(hd - j, 32); ++c) f[c] += from[c];
      } else {
        put_row(round_pair(_mm512_load_ps(from), _mm512_load_ps(from + 16)),
                hd - j, static_cast<Bf16*>(dst) + to);
      }
    }
}

// What a chunk of queries [i0, i0 + n) of head h needs, packed.
REMESH_INLINE void pack_queries(const AttentionTask& t, const Sizes& z,
                                const Backward& b, int64_t h, int64_t i0,
                                int64_t n) {
  const AttentionSegment& s = t.segment;
  const int64_t hd = s.head_dim;
  const int64_t token = t.b * s.q_batch + i0;
  const Bf16* q = static_cast<const Bf16*>(t.q) + token * s.q_stride + h * hd;
  const Bf16* out =
      static_cast<const Bf16*>(t.out) + token * z.out_row + h * hd;
  const Bf16* go =
      static_cast<const Bf16*>(t.dout) + token * z.out_row + h * hd;
  const float* lse = t.lse + (t.b * s.num_heads + h) * s.lse_T + i0;
  for (int64_t r = 0; r < n; r += 32) {
    pack_rows(q + r * s.q_stride, s.q_stride, n - r, hd,
              b.q + r / 32 * z.depth * kBlock);
    pack_rows(go + r * z.out_row, z.out_row, n - r, hd,
              b.go + r / 32 * z.depth * kBlock);
  }
  pack_along(q, s.q_stride, n, hd, kChunkPanels, b.q_along);
  pack_along(go, z.out_row, n, hd, kChunkPanels, b.go_along);
  for (int64_t i = 0; i < kChunk; ++i) {
    b.lse[i] = i < n ? lse[i] : 0.0F;
    __m512 dot = _mm512_setzero_ps();
    for (int64_t j = 0; i < n && j < hd; j += 32) {
      const __mmask32 mask = first_mask(hd - j);
      const __m512i x = _mm512_maskz_loadu_epi16(mask, out + i * z.out_row + j);
      const __m512i y = _mm512_maskz_loadu_epi16(mask, go + i * z.out_row + j);
      // A bf16 is the upper half of an fp32.
      const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
      dot = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(x, 16),
                            (__m512)_mm512_slli_epi32(y, 16), dot);
      dot = _mm512_fmadd_ps((__m512)_mm512_and_si512(x, odd),
                            (__m512)_mm512_and_si512(y, odd), dot);
    }
    b.delta[i] = _mm512_reduce_add_ps(dot);
  }
}

template <bool kAdd>
REMESH_INLINE void backward(const AttentionTask& t) {
  const AttentionSegment& s = t.segment;
  const Tiles tiles;
  const Sizes z = sizes_of(t);
  Bump bump{reinterpret_cast<char*>(t.scratch)};
  const Backward b = place_backward(s, bump);
  Upcoming upcoming(t);
  const Bf16* k = static_cast<const Bf16*>(t.k) + z.kv;
  const Bf16* v = static_cast<const Bf16*>(t.v) + z.kv;
  pack_across(k, s.kv_stride, s.Tk, s.head_dim, b.kt);
  pack_across(v, s.kv_stride, s.Tk, s.head_dim, b.vt);
  pack_along(k, s.kv_stride, s.Tk, s.head_dim, z.keys, b.k);
  fill_zero(b.dk, z.keys * z.depth * kBlock);
  fill_zero(b.dv, z.keys * z.depth * kBlock);
  for (int64_t h = t.g * z.group; h < (t.g + 1) * z.group; ++h)
    for (int64_t i0 = 0; i0 < s.Tq; i0 += kChunk) {
      const int64_t n = least(s.Tq - i0, kChunk);
      pack_queries(t, z, b, h, i0, n);
      fill_zero(b.dq, kChunkPanels * z.depth * kBlock);
      const int64_t end = visible_keys(s, i0 + n - 1);
      for (int64_t k0 = first_chunk(s, i0); k0 < end; k0 += kChunk)
        backward_chunk(t, z, b, upcoming, i0, n, k0);
      put_gradient<kAdd>(b.dq, n, s.head_dim, t.dq,
                         (t.b * s.q_batch + i0) * t.dq_stride + h * s.head_dim,
                         t.dq_stride);
    }
  const int64_t to = t.b * s.kv_batch * t.dkv_stride + t.g * s.head_dim;
  put_gradient<kAdd>(b.dk, s.Tk, s.head_dim, t.dk, to, t.dkv_stride);
  put_gradient<kAdd>(b.dv, s.Tk, s.head_dim, t.dv, to, t.dkv_stride);
  _mm_sfence();
}

}  // namespace

int64_t amx_attention_scratch(const AttentionSegment& s) {
  Bump ahead{nullptr};
  Bump back{nullptr};
  (void)place_forward(s, ahead);
  (void)place_backward(s, back);
  return (ahead.at > back.at ? ahead.at : back.at) / 4;
}

void amx_attention(const AttentionTask& t) { forward<false>(t); }
void amx_attention_segment(const AttentionTask& t) { forward<true>(t); }
void amx_attention_backward(const AttentionTask& t) { backward<false>(t); }
void amx_attention_segment_backward(const AttentionTask& t) {
  backward<true>(t);
}

}  // namespace remesh::kernels
