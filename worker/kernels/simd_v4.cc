// The loops for AVX-512 (x86-64-v4).
#include <immintrin.h>
#define REMESH_SIMD_LEVEL simd_v4
#define REMESH_SIMD_NAME "avx512"
#define REMESH_LANES 16
#define REMESH_STREAM_STORE(dst, src) _mm512_stream_ps(dst, _mm512_load_ps(src))
#define REMESH_STREAM_FENCE() _mm_sfence()
#include "worker/kernels/simd_body.h"
