// Compiled for AMX (see CMakeLists.txt) and called only where it exists. As in
// simd_body.h no library templates are used: an inline function shared with
// other files could be merged into code that an older host cannot run.
#include "worker/kernels/amx_body.h"
#include "worker/kernels/amx_tiles.h"

namespace remesh::kernels {
namespace {

// What of both operands may stay in the second-level cache.
constexpr int64_t kBlockBytes = 640 << 10;
// Results beyond this are written past the caches.
constexpr int64_t kStreamBytes = 1 << 20;
// Depth of a block whose column panel stays in the first-level cache.
constexpr int64_t kBlockSteps = 16;
// A 32 x 32 block of a weight (rows o of out, columns i of in) into one step of
// each packing.
REMESH_INLINE void pack_weight_block(const float* w, int64_t ld, int64_t rows,
                                     int64_t cols, Bf16* forward,
                                     Bf16* backward) {
  const __mmask32 mask = first_mask(cols);
  const auto m0 = static_cast<__mmask16>(mask);
  const auto m1 = static_cast<__mmask16>(mask >> 16);
  __m512i v[32];
  for (int64_t i = 0; i < 32; ++i) {
    const float* row = w + i * ld;
    v[i] = i < rows ? round_pair(_mm512_maskz_loadu_ps(m0, row),
                                 m1 != 0 ? _mm512_maskz_loadu_ps(m1, row + 16)
                                         : _mm512_setzero_ps())
                    : _mm512_setzero_si512();
  }
  for (int64_t i = 0; i < 16; ++i) {
    _mm512_store_si512(backward + i * 32,
                       interleave(v[2 * i], v[2 * i + 1], true));
    _mm512_store_si512(backward + 512 + i * 32,
                       interleave(v[2 * i], v[2 * i + 1], false));
  }
  transpose16(v);
  transpose16(v + 16);
  for (int64_t i = 0; i < 16; ++i) {
    _mm512_store_si512(forward + i * 32, v[i]);
    _mm512_store_si512(forward + 512 + i * 32, v[16 + i]);
  }
}

// A finished 32 x 32 block of sums into `rows` x `cols` of C.
REMESH_INLINE void put_block(const float* sums, const AmxProduct& p,
                             int64_t row, int64_t col, bool stream) {
  const int64_t rows = least(p.m - row, 32);
  const __mmask32 mask = first_mask(p.n - col);
  const auto m0 = static_cast<__mmask16>(mask);
  const auto m1 = static_cast<__mmask16>(mask >> 16);
  for (int64_t i = 0; i < rows; ++i) {
    __m512 lo = _mm512_load_ps(sums + i * 32);
    __m512 hi = _mm512_load_ps(sums + i * 32 + 16);
    const int64_t at = (row + i) * p.n + col;
    if (stream && p.out == Dtype::kBf16) {
      _mm512_stream_si512(
          reinterpret_cast<__m512i*>(static_cast<Bf16*>(p.c) + at),
          round_pair(lo, hi));
      continue;
    }
    if (stream) {
      _mm512_stream_ps(static_cast<float*>(p.c) + at, lo);
      _mm512_stream_ps(static_cast<float*>(p.c) + at + 16, hi);
      continue;
    }
    if (p.out == Dtype::kBf16) {
      _mm512_mask_storeu_epi16(static_cast<Bf16*>(p.c) + at, mask,
                               round_pair(lo, hi));
      continue;
    }
    float* c = static_cast<float*>(p.c) + at;
    if (p.add) {
      lo = _mm512_add_ps(lo, _mm512_maskz_loadu_ps(m0, c));
      if (m1 != 0) hi = _mm512_add_ps(hi, _mm512_maskz_loadu_ps(m1, c + 16));
    }
    _mm512_mask_storeu_ps(c, m0, lo);
    if (m1 != 0) _mm512_mask_storeu_ps(c + 16, m1, hi);
  }
}

// How a product is cut: blocks of panels of rows and columns whose operands
// stay in the second-level cache, and of steps.
struct Cut {
  int64_t rows, cols, steps, block_steps;
  bool split;   // several blocks of steps
  bool direct;  // A is read where it lies
  bool stream;  // C is written past the caches
};

REMESH_INLINE Cut cut_of(const AmxProduct& p) {
  Cut c;
  c.steps = amx_panels(p.k);
  const int64_t blocks = (c.steps + kBlockSteps - 1) / kBlockSteps;
  c.block_steps = (c.steps + blocks - 1) / blocks;
  c.split = c.block_steps < c.steps;
  const int64_t fit = kBlockBytes / (c.steps * kStepBytes);
  c.rows = fit < 4 ? 4 : (fit > 16 ? 16 : fit);
  c.cols = c.split ? c.rows : amx_panels(p.n);
  // Rows a large power of two apart would fall on few sets of the caches.
  c.direct = !p.a_transposed && p.k % kAmxStep == 0 && p.k % 2048 != 0;
  c.stream = !p.add &&
             p.m * p.n * (p.out == Dtype::kFp32 ? 4 : 2) > kStreamBytes &&
             p.n % 32 == 0 && reinterpret_cast<uintptr_t>(p.c) % 64 == 0;
  return c;
}

REMESH_INLINE void pack_panel(const AmxProduct& p, int64_t panel, Bf16* dst) {
  const int64_t width = p.m - panel * 32;
  for (int64_t k = 0; k < p.k; k += 32, dst += 1024) {
    const int64_t depth = p.k - k;
    if (p.a_transposed)
      pack_step<true>(p.a + k * p.m + panel * 32, p.m, depth, width, dst);
    else
      pack_rows_step(p.a + panel * 32 * p.k + k, p.k, width, depth, dst);
  }
}

// One block of C: panels [m0, m1) x [n0, n1), over all steps.
class BlockProduct {
 public:
  BlockProduct(const AmxProduct& p, const Cut& cut, int64_t m0, int64_t m1,
               int64_t n0, int64_t n1, const Bf16* packed, float* sums)
      : p_(p),
        cut_(cut),
        m0_(m0),
        m1_(m1),
        n0_(n0),
        n1_(n1),
        packed_(packed),
        sums_(sums) {}

  REMESH_INLINE_MEMBER void run() {
    for (int64_t s0 = 0; s0 < cut_.steps; s0 += cut_.block_steps) {
      const int64_t steps = least(cut_.block_steps, cut_.steps - s0);
      for (int64_t n = n0_; n < n1_; ++n)
        for (int64_t m = m0_; m < m1_; ++m) panel(m, n, s0, steps);
    }
  }

 private:
  REMESH_INLINE_MEMBER bool whole_rows(int64_t m) const {
    return (m + 1) * 32 <= p_.m;
  }
  REMESH_INLINE_MEMBER Rows rows(int64_t m, int64_t s0) const {
    if (cut_.direct && whole_rows(m))
      return {reinterpret_cast<const char*>(p_.a + m * 32 * p_.k + s0 * 32),
              2 * p_.k, 64, 32 * p_.k};
    return {reinterpret_cast<const char*>(packed_) +
                ((m - m0_) * cut_.steps + s0) * kStepBytes,
            64, kStepBytes, kTileBytes};
  }
  REMESH_INLINE_MEMBER char* c_at(int64_t m, int64_t n) const {
    return static_cast<char*>(p_.c) +
           (m * 32 * p_.n + n * 32) * (p_.out == Dtype::kFp32 ? 4 : 2);
  }

  REMESH_INLINE_MEMBER void panel(int64_t m, int64_t n, int64_t s0,
                                  int64_t steps) {
    const char* b = reinterpret_cast<const char*>(p_.b) +
                    (n * cut_.steps + s0) * kStepBytes;
    const bool first = s0 == 0;
    const bool last = s0 + steps == cut_.steps;
    const int64_t each = (32 + steps - 1) / steps;
    Ahead next_a, next_b, next_c;
    // The panels of rows after the first come from afar the first time.
    if (n == n0_ && first && cut_.direct && m + 1 < m1_ && whole_rows(m + 1))
      next_a = {rows(m + 1, 0).at, 2 * p_.k, each, steps};
    const int64_t lines = (32 + m1_ - m0_ - 1) / (m1_ - m0_);
    if (n + 1 < n1_)
      next_b = {b + cut_.steps * kStepBytes + (m - m0_) * steps * lines * 64,
                lines * 64, 1, lines};
    const bool whole = whole_rows(m) && (n + 1) * 32 <= p_.n;
    const bool stream = cut_.stream && whole;
    if (!stream && m + 1 < m1_ && whole_rows(m + 1) && (first || last))
      next_c = {c_at(m + 1, n), p_.n * (p_.out == Dtype::kFp32 ? 4 : 2), each,
                p_.out == Dtype::kFp32 ? 2 : 1};
    if (!stream && p_.out == Dtype::kFp32 && whole) {
      panel_product(rows(m, s0), b, steps, p_.add || !first,
                    reinterpret_cast<float*>(c_at(m, n)), p_.n, next_a, next_b,
                    next_c);
      return;
    }
    float* sums =
        sums_ + (cut_.split ? ((n - n0_) * (m1_ - m0_) + m - m0_) * 1024 : 0);
    panel_product(rows(m, s0), b, steps, !first, sums, 32, next_a, next_b,
                  next_c);
    if (last) put_block(sums, p_, m * 32, n * 32, stream);
  }

  const AmxProduct& p_;
  const Cut& cut_;
  int64_t m0_, m1_, n0_, n1_;
  const Bf16* packed_;
  float* sums_;
};

}  // namespace

void amx_pack_weight(const float* w, int64_t out, int64_t in, int64_t o0,
                     int64_t o1, Bf16* forward, Bf16* backward) {
  const int64_t in_steps = amx_panels(in);
  const int64_t out_steps = amx_panels(out);
  for (int64_t o = o0; o < o1; o += 32)
    for (int64_t i = 0; i < in; i += 32)
      pack_weight_block(w + o * in + i, in, out - o, in - i,
                        forward + ((o / 32) * in_steps + i / 32) * 1024,
                        backward + ((i / 32) * out_steps + o / 32) * 1024);
}

void amx_pack_columns(const Bf16* x, int64_t depth, int64_t width, int64_t p0,
                      int64_t p1, Bf16* packed) {
  const int64_t steps = amx_panels(depth);
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t p = p0; p < p1; ++p)
      pack_step<false>(x + s * 32 * width + p * 32, width, depth - s * 32,
                       width - p * 32, packed + (p * steps + s) * 1024);
}

int64_t amx_scratch(const AmxProduct& p) {
  const Cut cut = cut_of(p);
  const int64_t sums = cut.split ? cut.rows * cut.cols : 1;
  return cut.rows * cut.steps * kStepBytes + sums * 4096;
}

void amx_product(const AmxProduct& p, int64_t m0, int64_t m1, int64_t n0,
                 int64_t n1, void* scratch) {
  const Tiles tiles;
  const Cut cut = cut_of(p);
  auto* packed = static_cast<Bf16*>(scratch);
  auto* sums = reinterpret_cast<float*>(static_cast<char*>(scratch) +
                                        cut.rows * cut.steps * kStepBytes);
  for (int64_t m = m0; m < m1; m += cut.rows) {
    const int64_t rows = least(cut.rows, m1 - m);
    for (int64_t i = 0; i < rows; ++i)
      if (!cut.direct || (m + i + 1) * 32 > p.m)
        pack_panel(p, m + i, packed + i * cut.steps * 1024);
    for (int64_t n = n0; n < n1; n += cut.cols)
      BlockProduct(p, cut, m, m + rows, n, least(n + cut.cols, n1), packed,
                   sums)
          .run();
  }
}

}  // namespace remesh::kernels
