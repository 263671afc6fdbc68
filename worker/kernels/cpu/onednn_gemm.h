// GEMMs by oneDNN, one compiled primitive for each shape.
//
// Private to this folder; <dnnl.hpp> stays in the .cc file. One OnednnGemm
// belongs to one thread at a time. It uses as many worker threads as OpenMP
// would use for the caller (the backend sets it).
#pragma once

#include <cstdint>
#include <memory>

#include "worker/kernels/dtype.h"

namespace remesh::kernels {

// C (m, n) [+]= A (m, k) B (k, n), all dense. a_transposed: A is stored
// (k, m); b_transposed: B is stored (n, k).
struct GemmKey {
  int64_t m = 0, n = 0, k = 0;
  Dtype in = Dtype::kFp32;
  Dtype out = Dtype::kFp32;
  bool a_transposed = false;
  bool b_transposed = false;
  bool add = false;
  friend auto operator<=>(const GemmKey&, const GemmKey&) = default;
};

class OnednnGemm {
 public:
  OnednnGemm();
  ~OnednnGemm();
  void run(const GemmKey& key, const void* a, const void* b, void* c);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Which hardware oneDNN has for bf16 GEMMs on this host (AVX512-BF16, AMX or
// none).
enum class Bf16Hardware { kNone, kAvx512, kAmx };
Bf16Hardware bf16_hardware();

}  // namespace remesh::kernels
