// Compiled for AMX (see CMakeLists.txt) and called only where it exists. As in
// simd_body.h no library templates are used: an inline function shared with
// other files could be merged into code that an older host cannot run.
#include "worker/kernels/amx_body.h"
#include "worker/kernels/amx_tiles.h"

namespace remesh::kernels {
namespace {

// Steps up to which the depth is not cut, and of a block where it is: a panel
// of so many columns stays in the first-level cache.
constexpr int64_t kWholeSteps = 24;
constexpr int64_t kBlockSteps = 16;
// Panels of a block of C. Where the depth is cut, its sums (4 KB for 32 x 32)
// stay in the second-level cache beside the operands.
constexpr int64_t kBlockRows = 16;
constexpr int64_t kSplitRows = 12;
constexpr int64_t kSplitCols = 24;
// Results beyond this are written past the caches.
constexpr int64_t kStreamBytes = 1 << 20;
// A 32 x 32 block of a weight (rows o of out, columns i of in) into one step of
// each packing.
REMESH_INLINE void pack_weight_block(const float* w, int64_t ld, int64_t rows,
                                     int64_t cols, Bf16* forward,
                                     Bf16* backward) {
  // Past the caches: nobody reads them before the next step.
  const auto put = [](Bf16* to, __m512i v) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), v);
  };
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
    put(backward + i * 32, interleave(v[2 * i], v[2 * i + 1], true));
    put(backward + 512 + i * 32, interleave(v[2 * i], v[2 * i + 1], false));
  }
  transpose16(v);
  transpose16(v + 16);
  for (int64_t i = 0; i < 16; ++i) {
    put(forward + i * 32, v[i]);
    put(forward + 512 + i * 32, v[16 + i]);
  }
}

// How a product is cut. A block of C stays in the second-level cache while the
// depth is walked in blocks of steps, of which a panel of columns stays in the
// first.
struct Cut {
  int64_t rows, cols;  // panels of a block of C
  int64_t steps, block_steps;
  bool direct;  // A is read where it lies
  bool stream;  // C is written past the caches
  bool split() const { return block_steps < steps; }
  int64_t packed() const { return rows * block_steps * 1024; }
};

REMESH_INLINE Cut cut_of(const AmxProduct& p) {
  const auto even = [](int64_t n, int64_t most) {
    const int64_t blocks = (n + most - 1) / most;
    return (n + blocks - 1) / blocks;
  };
  Cut c;
  c.steps = amx_panels(p.k);
  c.block_steps = c.steps <= kWholeSteps ? c.steps : even(c.steps, kBlockSteps);
  c.cols = amx_panels(p.n);
  c.rows = kBlockRows;
  if (c.split()) {
    c.cols = even(c.cols, kSplitCols);
    c.rows = kSplitRows;
  }
  // Rows a large power of two apart would fall on few sets of the caches.
  c.direct = !p.a_transposed && p.k % kAmxStep == 0 && p.k % 2048 != 0;
  c.stream = !p.add &&
             p.m * p.n * (p.out == Dtype::kFp32 ? 4 : 2) > kStreamBytes &&
             p.n % 32 == 0 && reinterpret_cast<uintptr_t>(p.c) % 64 == 0;
  return c;
}

// Memory that later steps will want, fetched into the second-level cache a few
// lines a step: rows of `lines` cache lines. Few lines can be on their way at
// a time, and the hardware sees no pattern in short runs far apart.
struct Ahead {
  const char* row = nullptr;
  int64_t stride = 0;  // bytes between rows
  int64_t rows = 0, lines = 0;
  int64_t each = 0;  // lines a step
  int64_t line = 0;  // of the row

  REMESH_INLINE_MEMBER void fetch() {
    for (int64_t i = 0; i < each && rows > 0; ++i) {
      _mm_prefetch(row + line * 64, _MM_HINT_T1);
      if (++line < lines) continue;
      line = 0;
      row += stride;
      --rows;
    }
  }
};

// A finished block of sums on its way to C, a few rows at a time.
struct Finished {
  const float* sums = nullptr;
  char* c = nullptr;
  int64_t rows = 0;  // still to go
};

class Multiplication {
 public:
  Multiplication(const AmxProduct& p, void* scratch)
      : p_(p),
        cut_(cut_of(p)),
        c_row_(p.n * (p.out == Dtype::kFp32 ? 4 : 2)),
        packed_(static_cast<Bf16*>(scratch)),
        sums_(reinterpret_cast<float*>(packed_ + cut_.packed())) {}

  // Panels [m0, m1) x [n0, n1) of C.
  REMESH_INLINE_MEMBER void run(int64_t m0, int64_t m1, int64_t n0,
                                int64_t n1) {
    for (int64_t n = n0; n < n1; n += cut_.cols)
      for (int64_t m = m0; m < m1; m += cut_.rows) {
        // What follows this block: more rows, or the first again.
        const bool more = m + cut_.rows < m1;
        const bool again = n + cut_.cols < n1;
        const int64_t next = more ? m + cut_.rows : m0;
        block(m, least(m + cut_.rows, m1), n, least(n + cut_.cols, n1), next,
              more || again ? least(next + cut_.rows, m1) : next);
      }
    put_rows(32);
    if (cut_.stream) _mm_sfence();
  }

 private:
  REMESH_INLINE_MEMBER bool whole_rows(int64_t m) const {
    return (m + 1) * 32 <= p_.m;
  }
  REMESH_INLINE_MEMBER char* c_at(int64_t m, int64_t n) const {
    return static_cast<char*>(p_.c) + m * 32 * c_row_ +
           n * (p_.out == Dtype::kFp32 ? 128 : 64);
  }

  // Rows [next0, next1) are those of the next block.
  REMESH_INLINE_MEMBER void block(int64_t m0, int64_t m1, int64_t n0,
                                  int64_t n1, int64_t next0, int64_t next1) {
    for (int64_t s0 = 0; s0 < cut_.steps; s0 += cut_.block_steps) {
      const int64_t steps = least(cut_.block_steps, cut_.steps - s0);
      for (int64_t s = 0; s < steps; ++s)
        for (int64_t m = m0; m < m1; ++m)
          if (!cut_.direct || !whole_rows(m))
            pack(m, s0 + s, packed_ + ((m - m0) * steps + s) * 1024);
      const int64_t products = (n1 - n0) * (m1 - m0) * steps;
      Ahead ahead_a = s0 + steps < cut_.steps
                          ? rows_ahead(m0, m1, s0 + steps, products)
                          : rows_ahead(next0, next1, 0, products);
      for (int64_t n = n0; n < n1; ++n) {
        Ahead ahead_b;
        if (n + 1 < n1)
          ahead_b = {columns(n + 1, s0), 0, 1, 32 * steps,
                     (32 + m1 - m0 - 1) / (m1 - m0)};
        for (int64_t m = m0; m < m1; ++m) {
          const Rows rows = cut_.direct && whole_rows(m)
                                ? direct_rows(m, s0)
                                : Rows{reinterpret_cast<const char*>(
                                           packed_ + (m - m0) * steps * 1024),
                                       64, kStepBytes, kTileBytes};
          const int64_t slot =
              cut_.split() ? (n - n0) * (m1 - m0) + m - m0 : (turn_ ^= 1);
          panel(m, n, rows, s0, steps, sums_ + slot * 1024, ahead_a, ahead_b);
        }
      }
    }
  }

  // Steps from s0 on of panels [m0, m1) of rows, over `products` steps.
  REMESH_INLINE_MEMBER Ahead rows_ahead(int64_t m0, int64_t m1, int64_t s0,
                                        int64_t products) const {
    if (m0 >= m1) return {};
    const int64_t steps = least(cut_.block_steps, cut_.steps - s0);
    const int64_t each = ((m1 - m0) * steps * 32 + products - 1) / products;
    if (p_.a_transposed)
      return {reinterpret_cast<const char*>(p_.a + s0 * 32 * p_.m + m0 * 32),
              2 * p_.m, least(steps * 32, p_.k - s0 * 32), m1 - m0, each};
    return {reinterpret_cast<const char*>(p_.a + m0 * 32 * p_.k + s0 * 32),
            2 * p_.k, least((m1 - m0) * 32, p_.m - m0 * 32), steps, each};
  }

  REMESH_INLINE_MEMBER void panel(int64_t m, int64_t n, const Rows& rows,
                                  int64_t s0, int64_t steps, float* sums,
                                  Ahead& ahead_a, Ahead& ahead_b) {
    const bool last = s0 + steps == cut_.steps;
    const bool whole = whole_rows(m) && (n + 1) * 32 <= p_.n;
    const int64_t each = (32 + steps - 1) / steps;
    Ahead ahead_c;
    if (last && whole && !cut_.stream)
      ahead_c = {c_at(m, n), c_row_, 32, p_.out == Dtype::kFp32 ? 2 : 1,
                 p_.out == Dtype::kFp32 ? 2 * each : each};
    panel_product<true>(rows, columns(n, s0), steps, s0 > 0, sums, 32, [&] {
      ahead_a.fetch();
      ahead_b.fetch();
      ahead_c.fetch();
      put_rows(each);
    });
    if (!last) return;
    if (whole)
      finished_ = {sums, c_at(m, n), 32};
    else
      put_part(sums, m * 32, n * 32);
  }

  REMESH_INLINE_MEMBER Rows direct_rows(int64_t m, int64_t s0) const {
    return {reinterpret_cast<const char*>(p_.a + m * 32 * p_.k + s0 * 32),
            2 * p_.k, 64, 32 * p_.k};
  }
  REMESH_INLINE_MEMBER const char* columns(int64_t n, int64_t s0) const {
    return reinterpret_cast<const char*>(p_.b) +
           (n * cut_.steps + s0) * kStepBytes;
  }

  // A step of a panel of rows.
  REMESH_INLINE_MEMBER void pack(int64_t m, int64_t step, Bf16* dst) const {
    const int64_t k = step * 32;
    const int64_t width = p_.m - m * 32;
    if (!p_.a_transposed) {
      pack_rows_step(p_.a + m * 32 * p_.k + k, p_.k, width, p_.k - k, dst);
      return;
    }
    turn_step(p_.a + k * p_.m + m * 32, p_.m, p_.k - k, width, dst);
  }

  // Up to `count` rows of the block that was finished last.
  REMESH_INLINE_MEMBER void put_rows(int64_t count) {
    for (; count > 0 && finished_.rows > 0; --count, --finished_.rows) {
      const __m512 lo = _mm512_load_ps(finished_.sums);
      const __m512 hi = _mm512_load_ps(finished_.sums + 16);
      auto* f = reinterpret_cast<float*>(finished_.c);
      if (p_.out == Dtype::kBf16) {
        if (cut_.stream)
          _mm512_stream_si512(reinterpret_cast<__m512i*>(finished_.c),
                              round_pair(lo, hi));
        else
          _mm512_storeu_si512(finished_.c, round_pair(lo, hi));
      } else if (cut_.stream) {
        _mm512_stream_ps(f, lo);
        _mm512_stream_ps(f + 16, hi);
      } else if (p_.add) {
        _mm512_storeu_ps(f, _mm512_add_ps(_mm512_loadu_ps(f), lo));
        _mm512_storeu_ps(f + 16, _mm512_add_ps(_mm512_loadu_ps(f + 16), hi));
      } else {
        _mm512_storeu_ps(f, lo);
        _mm512_storeu_ps(f + 16, hi);
      }
      finished_.sums += 32;
      finished_.c += c_row_;
    }
  }

  // A finished block of which only a part lies in C.
  REMESH_INLINE_MEMBER void put_part(const float* sums, int64_t row,
                                     int64_t col) const {
    const int64_t rows = least(p_.m - row, 32);
    const __mmask32 mask = first_mask(p_.n - col);
    const auto m0 = static_cast<__mmask16>(mask);
    const auto m1 = static_cast<__mmask16>(mask >> 16);
    for (int64_t i = 0; i < rows; ++i) {
      __m512 lo = _mm512_load_ps(sums + i * 32);
      __m512 hi = _mm512_load_ps(sums + i * 32 + 16);
      const int64_t at = (row + i) * p_.n + col;
      if (p_.out == Dtype::kBf16) {
        _mm512_mask_storeu_epi16(static_cast<Bf16*>(p_.c) + at, mask,
                                 round_pair(lo, hi));
        continue;
      }
      float* c = static_cast<float*>(p_.c) + at;
      if (p_.add) {
        lo = _mm512_add_ps(lo, _mm512_maskz_loadu_ps(m0, c));
        if (m1 != 0) hi = _mm512_add_ps(hi, _mm512_maskz_loadu_ps(m1, c + 16));
      }
      _mm512_mask_storeu_ps(c, m0, lo);
      if (m1 != 0) _mm512_mask_storeu_ps(c + 16, m1, hi);
    }
  }

  const AmxProduct& p_;
  const Cut cut_;
  const int64_t c_row_;  // bytes
  Bf16* packed_;
  float* sums_;
  int64_t turn_ = 0;
  Finished finished_;
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
  _mm_sfence();
}

void amx_pack_columns(const Bf16* x, int64_t depth, int64_t width, int64_t p0,
                      int64_t p1, Bf16* packed) {
  const int64_t steps = amx_panels(depth);
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t p = p0; p < p1; ++p)
      pack_step(x + s * 32 * width + p * 32, width, depth - s * 32,
                width - p * 32, packed + (p * steps + s) * 1024);
}

int64_t amx_scratch(const AmxProduct& p) {
  const Cut cut = cut_of(p);
  return 2 * cut.packed() + 4096 * (cut.split() ? cut.rows * cut.cols : 2);
}

void amx_product(const AmxProduct& p, int64_t m0, int64_t m1, int64_t n0,
                 int64_t n1, void* scratch) {
  const Tiles tiles;
  Multiplication(p, scratch).run(m0, m1, n0, n1);
}

}  // namespace remesh::kernels
