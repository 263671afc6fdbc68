// The loops for AVX2 and FMA (x86-64-v3).
#include <immintrin.h>
#define REMESH_SIMD_LEVEL simd_v3
#define REMESH_SIMD_NAME "avx2"
#define REMESH_LANES 8
#define REMESH_STREAM_STORE(dst, src) _mm256_stream_ps(dst, _mm256_load_ps(src))
#define REMESH_STREAM_FENCE() _mm_sfence()
#include "worker/kernels/cpu/simd_body.h"
