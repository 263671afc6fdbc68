// CpuLinear: the CPU backend's linear layers. bf16 GEMMs run on AMX tiles where
// the host has them (amx_tiles.h), with weights packed once at each load;
// everything else runs in oneDNN. Private to this folder; the contracts are
// those of backend.h.
//
// fp32 weights are read from the master. Belongs to one thread at a time.
#pragma once

#include <cstdint>
#include <memory>

#include "worker/kernels/backend.h"
#include "worker/kernels/cpu/onednn_gemm.h"
#include "worker/kernels/cpu/simd.h"
#include "worker/kernels/cpu/workspace.h"

namespace remesh::kernels {

class CpuLinear {
 public:
  CpuLinear(int threads, const SimdOps& simd);

  Bf16Hardware bf16() const { return bf16_; }
  std::unique_ptr<Weight> make_weight(Dtype d, int64_t out, int64_t in) const;
  void load_weight(Weight& w, const float* master) const;
  void forward(const Weight& w, const void* x, int64_t rows, Dtype out,
               void* y);
  void backward_input(const Weight& w, const void* dy, int64_t rows, Dtype out,
                      bool add, void* dx);
  void backward_weight(Dtype d, const void* dy, const void* x, int64_t rows,
                       int64_t out, int64_t in, float* dw);

 private:
  // y (rows) = m (rows, n) x.
  void matvec(const float* m, int64_t rows, int64_t n, const float* x,
              float* y) const;
  void gemm(const GemmKey& key, const void* a, const void* b, void* c);
  // The same on tiles, with the second operand packed, or from `columns`, which
  // all threads pack first.
  void amx(const GemmKey& key, const void* a, const Bf16* packed,
           const Bf16* columns, void* c);

  int threads_;
  const SimdOps& simd_;
  Bf16Hardware bf16_;
  OnednnGemm gemm_;
  Workspace scratch_, columns_;
};

}  // namespace remesh::kernels
