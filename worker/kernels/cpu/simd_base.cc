// The loops for any x86-64 (SSE2).
#define REMESH_SIMD_LEVEL simd_base
#define REMESH_SIMD_NAME "sse2"
#define REMESH_LANES 4
#include "worker/kernels/cpu/simd_body.h"
