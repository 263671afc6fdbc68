// AMX tiles in software, so that the kernels of the AMX files of
// worker/kernels/cpu are tested on processors without AMX. Those files are
// compiled again with this header in front (tests/testing/CMakeLists.txt); it
// replaces the intrinsics that they use. The arithmetic is that of TDPBF16PS
// (Intel, "Intel 64 and IA-32 Architectures Software Developer's Manual",
// volume 2): even and odd depths are summed separately, in fp32 with fused
// multiply-add. Denormal numbers are not flushed to zero.
//
// REQUIRES: AVX-512, and the only configuration that the kernels use: 8 tiles
// of 16 rows of 64 bytes.
#pragma once

#include <immintrin.h>

#include <cstdint>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps

namespace remesh::amx_emulation {

constexpr int kRows = 16;
constexpr int kTiles = 8;

struct State {
  bool configured = false;
  __m512i tile[kTiles][kRows];
};
inline thread_local State state;

[[noreturn]] inline void used_without_configuration() { __builtin_trap(); }

inline State& configured() {
  if (!state.configured) used_without_configuration();
  return state;
}

inline void load_config(const void* config) {
  const auto* bytes = static_cast<const uint8_t*>(config);
  const auto* row_bytes = reinterpret_cast<const uint16_t*>(bytes + 16);
  const uint8_t* rows = bytes + 48;
  for (int t = 0; t < kTiles; ++t)
    if (row_bytes[t] != 64 || rows[t] != kRows) __builtin_trap();
  state = {.configured = true, .tile = {}};
}
inline void release() { state.configured = false; }

inline void zero(int t) {
  for (__m512i& row : configured().tile[t]) row = _mm512_setzero_si512();
}
inline void load(int t, const void* base, int64_t stride) {
  const char* from = static_cast<const char*>(base);
  for (int r = 0; r < kRows; ++r)
    configured().tile[t][r] = _mm512_loadu_si512(from + r * stride);
}
inline void store(int t, void* base, int64_t stride) {
  char* to = static_cast<char*>(base);
  for (int r = 0; r < kRows; ++r)
    _mm512_storeu_si512(to + r * stride, configured().tile[t][r]);
}

// C (16 x 16 fp32) += A (16 rows of 32 depths) B (16 pairs of depths of 16
// columns).
inline void multiply(int c, int a, int b) {
  State& s = configured();
  const auto even = [](__m512i v) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
  };
  const auto odd = [](__m512i v) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
  };
  for (int m = 0; m < kRows; ++m) {
    alignas(64) int32_t pairs[16];
    _mm512_store_si512(pairs, s.tile[a][m]);
    __m512 sum_even = _mm512_setzero_ps();
    __m512 sum_odd = _mm512_setzero_ps();
    for (int k = 0; k < 16; ++k) {
      const __m512i pair = _mm512_set1_epi32(pairs[k]);
      const __m512i row = s.tile[b][k];
      sum_even = _mm512_fmadd_ps(even(pair), even(row), sum_even);
      sum_odd = _mm512_fmadd_ps(odd(pair), odd(row), sum_odd);
    }
    s.tile[c][m] = _mm512_castps_si512(_mm512_add_ps(
        _mm512_castsi512_ps(s.tile[c][m]), _mm512_add_ps(sum_even, sum_odd)));
  }
}

}  // namespace remesh::amx_emulation

#define _tile_loadconfig(config) remesh::amx_emulation::load_config(config)
#define _tile_release() remesh::amx_emulation::release()
#define _tile_zero(t) remesh::amx_emulation::zero(t)
#define _tile_loadd(t, base, stride) \
  remesh::amx_emulation::load(t, base, stride)
#define _tile_stream_loadd(t, base, stride) \
  remesh::amx_emulation::load(t, base, stride)
#define _tile_stored(t, base, stride) \
  remesh::amx_emulation::store(t, base, stride)
#define _tile_dpbf16ps(c, a, b) remesh::amx_emulation::multiply(c, a, b)
