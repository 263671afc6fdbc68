// The default of --dtype.
#pragma once

#include "worker/kernels/cpu/onednn_gemm.h"

namespace remesh::bench {

// "bf16" where the processor has instructions for it, else "fp32".
inline const char* default_dtype() {
  return kernels::bf16_hardware() == kernels::Bf16Hardware::kNone ? "fp32"
                                                                  : "bf16";
}

}  // namespace remesh::bench
