// The types of GEMMs by name, and the default of --dtype.
#pragma once

#include <string>

#include "worker/kernels/cpu/onednn_gemm.h"

namespace remesh::bench {

// "bf16" where the processor has instructions for it, else "fp32".
inline const char* default_dtype() {
  return kernels::bf16_hardware() == kernels::Bf16Hardware::kNone ? "fp32"
                                                                  : "bf16";
}

inline kernels::Dtype dtype_of(const std::string& name) {
  return name == "bf16" ? kernels::Dtype::kBf16 : kernels::Dtype::kFp32;
}

}  // namespace remesh::bench
