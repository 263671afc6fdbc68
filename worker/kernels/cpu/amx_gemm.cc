// Compiled for AMX (see CMakeLists.txt) and called only where it exists. As in
// simd_body.h no library templates are used: an inline function shared with
// other files could be merged into code that an older host cannot run.
#include "worker/kernels/cpu/amx_body.h"
#include "worker/kernels/cpu/amx_tiles.h"

namespace remesh::kernels {
namespace {

// Steps up to which the depth is not split, and per block when it is: a panel
// of this many columns stays in the first-level cache.
constexpr int64_t kWholeSteps = 24;
constexpr int64_t kBlockSteps = 16;
// Panels of a block of C. When the depth is split, its sums (4 KB for 32 x 32)
// stay in the second-level cache with the operands.
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
  // Past the caches: they are not read before the next step.
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

// How a GEMM is tiled. A block of C stays in the second-level cache while the
// depth is traversed in blocks of steps, of which a panel of columns stays in
// the first-level cache.
struct Cut {
  int64_t rows, cols;  // panels of a block of C
  int64_t steps, block_steps;
  bool direct;  // A is read in place
  bool stream;  // C is written past the caches
  bool split() const { return block_steps < steps; }
  int64_t packed() const { return rows * block_steps * 1024; }
};

// n split into equal parts of at most `most`.
REMESH_INLINE int64_t even(int64_t n, int64_t most) {
  const int64_t parts = (n + most - 1) / most;
  return (n + parts - 1) / parts;
}

// Steps of a block of the depth.
REMESH_INLINE int64_t block_steps(int64_t steps) {
  return steps <= kWholeSteps ? steps : even(steps, kBlockSteps);
}

// Elements before a step of a panel in a packed second operand. Data read
// together are stored together: panels a large power of two apart would map to
// few sets of the caches.
REMESH_INLINE int64_t packed_at(int64_t panels, int64_t steps, int64_t panel,
                                int64_t step) {
  const int64_t each = block_steps(steps);
  const int64_t first = step - step % each;
  return (first * panels + panel * least(each, steps - first) + step - first) *
         1024;
}

REMESH_INLINE Cut cut_of(const AmxGemm& p) {
  Cut c;
  c.steps = amx_panels(p.k);
  c.block_steps = block_steps(c.steps);
  c.cols = amx_panels(p.n);
  c.rows = kBlockRows;
  if (c.split()) {
    c.cols = even(c.cols, kSplitCols);
    c.rows = kSplitRows;
  }
  // Rows a large power of two apart would map to few sets of the caches.
  c.direct = !p.a_transposed && p.k % kAmxStep == 0 && p.k % 2048 != 0;
  c.stream = !p.add &&
             p.m * p.n * (p.out == Dtype::kFp32 ? 4 : 2) > kStreamBytes &&
             p.n % 32 == 0 && reinterpret_cast<uintptr_t>(p.c) % 64 == 0;
  return c;
}

// How a row of C receives its sums.
enum class Put { kBf16, kBf16Stream, kFp32, kFp32Stream, kFp32Add };

REMESH_INLINE Put put_of(const AmxGemm& p, const Cut& cut) {
  if (p.add) return Put::kFp32Add;
  if (p.out == Dtype::kFp32) return cut.stream ? Put::kFp32Stream : Put::kFp32;
  return cut.stream ? Put::kBf16Stream : Put::kBf16;
}

// 32 sums.
template <Put kPut>
REMESH_INLINE void put_row(const float* sums, char* c) {
  __m512 lo = _mm512_load_ps(sums);
  __m512 hi = _mm512_load_ps(sums + 16);
  auto* f = reinterpret_cast<float*>(c);
  if constexpr (kPut == Put::kBf16) {
    _mm512_storeu_si512(c, round_pair(lo, hi));
  } else if constexpr (kPut == Put::kBf16Stream) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(c), round_pair(lo, hi));
  } else if constexpr (kPut == Put::kFp32Stream) {
    _mm512_stream_ps(f, lo);
    _mm512_stream_ps(f + 16, hi);
  } else {
    if constexpr (kPut == Put::kFp32Add) {
      lo = _mm512_add_ps(_mm512_loadu_ps(f), lo);
      hi = _mm512_add_ps(_mm512_loadu_ps(f + 16), hi);
    }
    _mm512_storeu_ps(f, lo);
    _mm512_storeu_ps(f + 16, hi);
  }
}

// Prefetches memory of later steps into the second-level cache, a few lines per
// step: only few can be in flight at a time, and the hardware finds no pattern
// in short runs far apart. Each step fetches `lines` lines `apart` bytes apart,
// and the next step continues `on` bytes further.
struct Ahead {
  const char* at = nullptr;
  int64_t lines = 0, apart = 0, on = 0;

  REMESH_INLINE_MEMBER void fetch() {
    for (int64_t i = 0; i < lines; ++i)
      _mm_prefetch(at + i * apart, _MM_HINT_T1);
    at += on;
  }
};

// Rows of a finished block of sums that are being written to C.
struct Finished {
  const float* sums = nullptr;
  char* c = nullptr;
  int64_t rows = 0;  // remaining
};

// A block of C over a block of the depth.
struct Stage {
  int64_t m0, m1, n0, n1;  // panels
  int64_t s0, steps;
  bool empty() const { return n0 == n1; }
};

// All other work overlaps with tile operations and uses few instructions: a
// step of the tiles takes about 80 cycles, and slower work would stall them.
template <Put kPut>
class Multiplication {
 public:
  Multiplication(const AmxGemm& p, void* scratch)
      : p_(p),
        cut_(cut_of(p)),
        c_row_(p.n * kElement),
        packed_(static_cast<Bf16*>(scratch)),
        sums_(reinterpret_cast<float*>(packed_ + cut_.packed())) {}

  // Panels [m0, m1) x [n0, n1) of C.
  REMESH_INLINE_MEMBER void run(int64_t m0, int64_t m1, int64_t n0,
                                int64_t n1) {
    m0_ = m0;
    m1_ = m1;
    n1_ = n1;
    cut_.rows = even(m1 - m0, cut_.rows);
    Stage now = stage(m0, n0, 0);
    while (!now.empty()) {
      const Stage next = after(now);
      pack(now);
      multiply(now, next);
      now = next;
    }
    put_rest();
    if (kStream) _mm_sfence();
  }

 private:
  static constexpr bool kStream =
      kPut == Put::kBf16Stream || kPut == Put::kFp32Stream;
  static constexpr int64_t kElement =
      kPut == Put::kBf16 || kPut == Put::kBf16Stream ? 2 : 4;

  REMESH_INLINE_MEMBER bool whole_rows(int64_t m) const {
    return (m + 1) * 32 <= p_.m;
  }
  REMESH_INLINE_MEMBER bool direct(int64_t m) const {
    return cut_.direct && whole_rows(m);
  }
  REMESH_INLINE_MEMBER char* c_at(int64_t m, int64_t n) const {
    return static_cast<char*>(p_.c) + m * 32 * c_row_ + n * 32 * kElement;
  }
  REMESH_INLINE_MEMBER const char* columns(int64_t n, int64_t s0) const {
    return reinterpret_cast<const char*>(
        p_.b + packed_at(amx_panels(p_.n), cut_.steps, n, s0));
  }
  // The place where panel m of a stage is packed.
  REMESH_INLINE_MEMBER Bf16* packed(const Stage& t, int64_t m) const {
    return packed_ + (m - t.m0) * t.steps * 1024;
  }
  REMESH_INLINE_MEMBER Rows rows_of(const Stage& t, int64_t m) const {
    if (direct(m))
      return {reinterpret_cast<const char*>(p_.a + m * 32 * p_.k + t.s0 * 32),
              2 * p_.k, 64, 32 * p_.k};
    return {reinterpret_cast<const char*>(packed(t, m)), 64, kStepBytes,
            kTileBytes};
  }

  // Empty past the end.
  REMESH_INLINE_MEMBER Stage stage(int64_t m, int64_t n, int64_t s) const {
    if (n >= n1_) return {};
    return {m, least(m + cut_.rows, m1_),
            n, least(n + cut_.cols, n1_),
            s, least(cut_.block_steps, cut_.steps - s)};
  }
  REMESH_INLINE_MEMBER Stage after(const Stage& t) const {
    if (t.empty()) return t;
    if (t.s0 + t.steps < cut_.steps) return stage(t.m0, t.n0, t.s0 + t.steps);
    if (t.m1 < m1_) return stage(t.m1, t.n0, 0);
    return stage(m0_, t.n1, 0);
  }

  REMESH_INLINE_MEMBER void multiply(const Stage& now, const Stage& next) {
    const int64_t count = now.m1 - now.m0;
    const int64_t b_lines = (32 + count - 1) / count;
    const int64_t columns_count = now.n1 - now.n0;
    const int64_t a_lines = (32 + columns_count - 1) / columns_count;
    for (int64_t n = now.n0; n < now.n1; ++n) {
      const char* b = columns(n, now.s0);
      Ahead b_ahead;
      if (n + 1 < now.n1)
        b_ahead = {columns(n + 1, now.s0), b_lines, 64, b_lines * 64};
      else if (!next.empty())
        b_ahead = {columns(next.n0, next.s0), b_lines, 64, b_lines * 64};
      for (int64_t m = now.m0; m < now.m1; ++m) {
        const int64_t slot = cut_.split() ? (n - now.n0) * count + m - now.m0
                                          : (sums_turn_ ^= 1);
        panel(now, m, n, b, sums_ + slot * 1024,
              rows_ahead(next, next.m0 + m - now.m0, n - now.n0, a_lines),
              b_ahead);
        b_ahead.at += now.steps * b_ahead.on;
      }
    }
  }

  // The part-th `lines` of every 32 lines of a panel of rows.
  REMESH_INLINE_MEMBER Ahead rows_ahead(const Stage& t, int64_t m, int64_t part,
                                        int64_t lines) const {
    const int64_t row = part * lines;
    if (m >= t.m1 || row >= 32) return {};
    if (p_.a_transposed)
      return {reinterpret_cast<const char*>(p_.a + (t.s0 * 32 + row) * p_.m +
                                            m * 32),
              lines, 2 * p_.m, 64 * p_.m};
    return {
        reinterpret_cast<const char*>(p_.a + (m * 32 + row) * p_.k + t.s0 * 32),
        lines, 2 * p_.k, 64};
  }

  // The rows of a stage that are not read in place.
  REMESH_INLINE_MEMBER void pack(const Stage& t) const {
    if (direct(t.m1 - 1)) return;
    for (int64_t s = 0; s < t.steps; ++s)
      for (int64_t m = t.m0; m < t.m1; ++m) {
        const int64_t k = (t.s0 + s) * 32;
        if (p_.a_transposed && k + 32 <= p_.k && whole_rows(m))
          turn_full_step(p_.a + k * p_.m + m * 32, p_.m,
                         packed(t, m) + s * 1024);
        else if (!direct(m))
          pack_part(m * 32, k, packed(t, m) + s * 1024);
      }
  }
  // A step of a panel of rows that may end before it.
  __attribute__((noinline)) void pack_part(int64_t m, int64_t k,
                                           Bf16* dst) const {
    if (p_.a_transposed)
      turn_step(p_.a + k * p_.m + m, p_.m, p_.k - k, p_.m - m, dst);
    else
      pack_rows_step(p_.a + m * p_.k + k, p_.k, p_.m - m, p_.k - k, dst);
  }

  REMESH_INLINE_MEMBER void panel(const Stage& t, int64_t m, int64_t n,
                                  const char* columns, float* sums, Ahead a,
                                  Ahead b) {
    const bool last = t.s0 + t.steps == cut_.steps;
    const bool whole = whole_rows(m) && (n + 1) * 32 <= p_.n;
    // All of it is written before these sums are stored, perhaps in its place.
    Finished before = finished_;
    const int64_t pairs = t.steps >= 16 ? 1 : (16 + t.steps - 1) / t.steps;
    Ahead c;
    int64_t c_rows = 0;
    // The sums to which the next panel adds; the last panel has no successor.
    const char* next_sums =
        t.s0 > 0 ? reinterpret_cast<const char*>(sums + 1024) : nullptr;
    if (!kStream && last && whole) {
      c = {c_at(m, n), kElement / 2, 64, c_row_};
      c_rows = 32;
    }
    panel_gemm<true>(rows_of(t, m), columns, t.steps, t.s0 > 0, sums, 32, [&] {
      a.fetch();
      b.fetch();
      for (int64_t i = 0; i < pairs && before.rows > 0; ++i) put_two(before);
      for (int64_t i = 0; i < pairs && c_rows > 0; ++i) {
        c.fetch();
        c.fetch();
        c_rows -= 2;
      }
      if (next_sums != nullptr) {
        for (int64_t i = 0; i < 4; ++i)
          _mm_prefetch(next_sums + i * 64, _MM_HINT_T0);
        next_sums += 256;
      }
    });
    finished_ = {};
    if (!last) return;
    if (whole)
      finished_ = {sums, c_at(m, n), 32};
    else
      put_part(sums, m * 32, n * 32);
  }

  REMESH_INLINE_MEMBER void put_two(Finished& f) const {
    put_row<kPut>(f.sums, f.c);
    put_row<kPut>(f.sums + 32, f.c + c_row_);
    f.sums += 64;
    f.c += 2 * c_row_;
    f.rows -= 2;
  }
  REMESH_INLINE_MEMBER void put_rest() {
    while (finished_.rows > 0) put_two(finished_);
  }

  // A finished block of which only a part is in C.
  __attribute__((noinline)) void put_part(const float* sums, int64_t row,
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

  const AmxGemm& p_;
  Cut cut_;
  const int64_t c_row_;  // bytes
  Bf16* packed_;
  float* sums_;
  int64_t m0_ = 0, m1_ = 0, n1_ = 0;
  int64_t sums_turn_ = 0;
  Finished finished_;
};

template <Put kPut>
__attribute__((noinline)) void multiply(const AmxGemm& p, int64_t m0,
                                        int64_t m1, int64_t n0, int64_t n1,
                                        void* scratch) {
  Multiplication<kPut>(p, scratch).run(m0, m1, n0, n1);
}

}  // namespace

void amx_pack_weight(const float* w, int64_t out, int64_t in, int64_t o0,
                     int64_t o1, Bf16* forward, Bf16* backward) {
  const int64_t in_steps = amx_panels(in);
  const int64_t out_steps = amx_panels(out);
  for (int64_t o = o0; o < o1; o += 32)
    for (int64_t i = 0; i < in; i += 32)
      pack_weight_block(
          w + o * in + i, in, out - o, in - i,
          forward + packed_at(out_steps, in_steps, o / 32, i / 32),
          backward + packed_at(in_steps, out_steps, i / 32, o / 32));
  _mm_sfence();
}

void amx_pack_columns(const Bf16* x, int64_t depth, int64_t width, int64_t p0,
                      int64_t p1, Bf16* packed) {
  const int64_t steps = amx_panels(depth);
  const int64_t panels = amx_panels(width);
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t p = p0; p < p1; ++p) {
      const Bf16* from = x + s * 32 * width + p * 32;
      pack_step(from, width, depth - s * 32, width - p * 32,
                packed + packed_at(panels, steps, p, s));
    }
}

int64_t amx_scratch(const AmxGemm& p) {
  const Cut cut = cut_of(p);
  return 2 * cut.packed() + 4096 * (cut.split() ? cut.rows * cut.cols : 2);
}

void amx_gemm(const AmxGemm& p, int64_t m0, int64_t m1, int64_t n0, int64_t n1,
              void* scratch) {
  const Tiles tiles;
  switch (put_of(p, cut_of(p))) {
    case Put::kBf16:
      return multiply<Put::kBf16>(p, m0, m1, n0, n1, scratch);
    case Put::kBf16Stream:
      return multiply<Put::kBf16Stream>(p, m0, m1, n0, n1, scratch);
    case Put::kFp32:
      return multiply<Put::kFp32>(p, m0, m1, n0, n1, scratch);
    case Put::kFp32Stream:
      return multiply<Put::kFp32Stream>(p, m0, m1, n0, n1, scratch);
    case Put::kFp32Add:
      return multiply<Put::kFp32Add>(p, m0, m1, n0, n1, scratch);
  }
}

}  // namespace remesh::kernels
