// The loops for AVX-512 (x86-64-v4).
#define REMESH_SIMD_LEVEL simd_v4
#define REMESH_SIMD_NAME "avx512"
#define REMESH_LANES 16
#define REMESH_ADAMW adamw_v4
#include "worker/kernels/cpu/simd_adamw_v4.h"
#include "worker/kernels/cpu/simd_body.h"
