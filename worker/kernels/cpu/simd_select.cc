#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "worker/kernels/cpu/amx_tiles.h"
#include "worker/kernels/cpu/simd.h"

namespace remesh::kernels {

std::vector<const SimdOps*> runnable_simd() {
  std::vector<const SimdOps*> levels = {&simd_base()};
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2"))
    return levels;
  levels.push_back(&simd_v3());
  if (!__builtin_cpu_supports("avx512f") ||
      !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512cd") ||
      !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl"))
    return levels;
  levels.push_back(&simd_v4());
  if (__builtin_cpu_supports("avx512bf16")) levels.push_back(&simd_v4_bf16());
  return levels;
}

const SimdOps& select_simd() { return *runnable_simd().back(); }

bool amx_available() {
  // Leaf 7 of CPUID (Intel SDM, volume 2A).
  constexpr unsigned kAmx = 1U << 24 | 1U << 22;  // AMX-TILE, AMX-BF16
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 ||
      // AMX is used with the loops of all four levels.
      (edx & kAmx) != kAmx || runnable_simd().size() < 4)
    return false;
  // Linux grants the large tile registers on request, for all threads of the
  // process (Documentation/arch/x86/xstate.rst).
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace remesh::kernels
