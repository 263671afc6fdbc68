// What the files compiled for AMX share: tile registers, packing, the product
// of two panels. In an unnamed namespace, as simd_body.h says. Not a public
// header.
#pragma once

#include <immintrin.h>

#include "worker/kernels/cpu/amx_tiles.h"
#include "worker/kernels/cpu/simd_math.h"

namespace remesh::kernels {
namespace {

constexpr int64_t kStepBytes = 2048;
constexpr int64_t kTileBytes = 1024;

REMESH_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Eight full tiles; the registers are cleared and given back at the end.
class Tiles {
 public:
  Tiles() {
    alignas(64) struct {
      uint8_t palette, start_row, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.bytes[i] = 64;
      config.rows[i] = 16;
    }
    // The intrinsic declares only the first bytes to the compiler.
    __asm__ volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// 16 x 16 transpose of 32-bit elements.
REMESH_INLINE void transpose16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Interleaves columns 0..15 (low) or 16..31 of two rows of 32 bf16.
REMESH_INLINE __m512i interleave(__m512i even, __m512i odd, bool low) {
  const __m512i lo = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11,
                                      42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                      36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i hi = _mm512_add_epi16(lo, _mm512_set1_epi16(16));
  return _mm512_permutex2var_epi16(even, low ? lo : hi, odd);
}

REMESH_INLINE __mmask32 first_mask(int64_t n) {
  return n >= 32 ? ~0U : n <= 0 ? 0U : (1U << n) - 1U;
}

// One step of a panel of columns: rows k (of `depth` that exist) and columns
// (of `width`) of x, with pairs of rows interleaved.
REMESH_INLINE void pack_step(const Bf16* x, int64_t ld, int64_t depth,
                             int64_t width, Bf16* dst) {
  const __mmask32 mask = first_mask(width);
  for (int64_t i = 0; i < 16; ++i) {
    const __mmask32 even = 2 * i < depth ? mask : 0U;
    const __mmask32 odd = 2 * i + 1 < depth ? mask : 0U;
    const Bf16* row = x + 2 * i * ld;
    const __m512i a = _mm512_maskz_loadu_epi16(even, even != 0 ? row : x);
    const __m512i b = _mm512_maskz_loadu_epi16(odd, odd != 0 ? row + ld : x);
    _mm512_store_si512(dst + i * 32, interleave(a, b, true));
    _mm512_store_si512(dst + 512 + i * 32, interleave(a, b, false));
  }
}

// Eight rows of eight bf16 in each 128-bit lane, turned lane by lane.
REMESH_INLINE void turn_lanes(__m512i r[8]) {
  __m512i t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm512_unpacklo_epi16(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi16(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm512_unpacklo_epi32(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi32(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi32(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm512_unpacklo_epi64(r[i], r[i + 4]);
    t[2 * i + 1] = _mm512_unpackhi_epi64(r[i], r[i + 4]);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

// One step of a panel of rows that lie as columns: x (depth, rows), all of it
// there. Lanes are gathered by loads, which leaves few shuffles.
REMESH_INLINE void turn_full_step(const Bf16* x, int64_t ld, Bf16* dst) {
  for (int64_t c = 0; c < 32; c += 8) {
    __m512i r[8];
    for (int64_t i = 0; i < 8; ++i) {
      const auto quarter = [&](int64_t k) {
        return _mm_loadu_si128(
            reinterpret_cast<const __m128i*>(x + (k + i) * ld + c));
      };
      __m512i v = _mm512_castsi128_si512(quarter(0));
      v = _mm512_inserti32x4(v, quarter(8), 1);
      v = _mm512_inserti32x4(v, quarter(16), 2);
      r[i] = _mm512_inserti32x4(v, quarter(24), 3);
    }
    turn_lanes(r);
    for (int64_t i = 0; i < 8; ++i)
      _mm512_store_si512(dst + (c + i) * 32, r[i]);
  }
}

// One step of a panel of columns that lie as rows: x (columns, depth).
REMESH_INLINE void pack_transposed_step(const Bf16* x, int64_t ld,
                                        int64_t columns, int64_t depth,
                                        Bf16* dst) {
  const __mmask32 mask = first_mask(depth);
  for (int64_t half = 0; half < 2; ++half) {
    __m512i r[16];
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t column = half * 16 + i;
      r[i] = column < columns ? _mm512_maskz_loadu_epi16(mask, x + column * ld)
                              : _mm512_setzero_si512();
    }
    transpose16(r);
    for (int64_t i = 0; i < 16; ++i)
      _mm512_store_si512(dst + half * 512 + i * 32, r[i]);
  }
}

// One step of a panel of rows as they are.
REMESH_INLINE void pack_rows_step(const Bf16* x, int64_t ld, int64_t rows,
                                  int64_t depth, Bf16* dst) {
  const __mmask32 mask = first_mask(depth);
  for (int64_t i = 0; i < 32; ++i) {
    const __m512i v = i < rows ? _mm512_maskz_loadu_epi16(mask, x + i * ld)
                               : _mm512_setzero_si512();
    _mm512_store_si512(dst + i * 32, v);
  }
}

// As turn_full_step, of which `depth` and `rows` exist.
REMESH_INLINE void turn_step(const Bf16* x, int64_t ld, int64_t depth,
                             int64_t rows, Bf16* dst) {
  if (depth >= 32 && rows >= 32) {
    turn_full_step(x, ld, dst);
    return;
  }
  alignas(64) Bf16 part[1024];
  pack_rows_step(x, ld, depth, rows, part);
  turn_full_step(part, 32, dst);
}

REMESH_INLINE __m512i round_pair(__m512 low, __m512 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// How the tiles of a panel of rows lie, in bytes.
struct Rows {
  const char* at;
  int64_t row, step, tile;
};

// 32 x 32 of C (ld floats between rows) over `steps` steps; `load`: added to
// the old contents. kStream: rows are read past the first-level cache, which
// is the columns'. meanwhile(): other work, called once a step; the tiles leave
// the vector units idle.
template <bool kStream, typename F>
REMESH_INLINE void panel_gemm(const Rows& a, const char* b, int64_t steps,
                              bool load, float* c, int64_t ld,
                              const F& meanwhile) {
  const int64_t bytes = 4 * ld;
  if (load) {
    _tile_loadd(0, c, bytes);
    _tile_loadd(1, c + 16, bytes);
    _tile_loadd(2, c + 16 * ld, bytes);
    _tile_loadd(3, c + 16 * ld + 16, bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const char* pa = a.at;
  for (int64_t s = 0; s < steps; ++s) {
    if constexpr (kStream)
      _tile_stream_loadd(4, pa, a.row);
    else
      _tile_loadd(4, pa, a.row);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kStream)
      _tile_stream_loadd(5, pa + a.tile, a.row);
    else
      _tile_loadd(5, pa + a.tile, a.row);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    pa += a.step;
    b += kStepBytes;
    meanwhile();
  }
  _tile_stored(0, c, bytes);
  _tile_stored(1, c + 16, bytes);
  _tile_stored(2, c + 16 * ld, bytes);
  _tile_stored(3, c + 16 * ld + 16, bytes);
}

}  // namespace
}  // namespace remesh::kernels
