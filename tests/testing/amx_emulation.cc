// Makes the CPU backend take its AMX kernels, which amx_emulation.h runs in
// software. The linker puts this in place of bf16_hardware() (--wrap).
#include "worker/kernels/cpu/onednn_gemm.h"

// NOLINTBEGIN(readability-identifier-naming,bugprone-reserved-identifier)
extern "C" remesh::kernels::Bf16Hardware
__wrap__ZN6remesh7kernels13bf16_hardwareEv();
extern "C" remesh::kernels::Bf16Hardware
__real__ZN6remesh7kernels13bf16_hardwareEv();

// The emulation needs AVX-512 with bf16 itself.
remesh::kernels::Bf16Hardware __wrap__ZN6remesh7kernels13bf16_hardwareEv() {
  using remesh::kernels::Bf16Hardware;
  const Bf16Hardware real = __real__ZN6remesh7kernels13bf16_hardwareEv();
  return real == Bf16Hardware::kNone ? real : Bf16Hardware::kAmx;
}
// NOLINTEND(readability-identifier-naming,bugprone-reserved-identifier)
