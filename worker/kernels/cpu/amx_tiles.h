// GEMMs with bf16 operands on AMX tiles (Intel, "Architecture
// Instruction Set Extensions Programming Reference", ch. 3): the loops of one
// thread. Private to this folder; linear.cc distributes work to threads.
//
// A tile register holds 16 rows of 64 bytes. One instruction adds the product
// of a (16 rows, 32 deep) and a (32 deep, 16 columns) tile to a 16 x 16 fp32
// tile; the second operand has pairs of depth interleaved ("VNNI": row k / 2,
// column 2 n + k % 2). The loops work on panels of 32 rows or columns, that is
// 2 x 2 fp32 tiles, and steps of 32 in depth.
//
// A packed operand is [block of steps][panel][step][2 tiles][16][32] bf16,
// where short panels and steps are filled with zeros.
//
// Every element of a product is summed in an order that depends on the depth
// alone: neither the number of rows nor that of threads changes its bits.
// REQUIRES: amx_available() for everything below it.
#pragma once

#include <cstdint>

#include "worker/kernels/cpu/simd.h"
#include "worker/kernels/dtype.h"

namespace remesh::kernels {

// Whether the CPU has AMX with bf16 and the kernel lets this process use it.
bool amx_available();

constexpr int64_t kAmxPanel = 32;
constexpr int64_t kAmxStep = 32;

constexpr int64_t amx_panels(int64_t n) { return (n + 31) / 32; }
// Elements of a packed operand.
constexpr int64_t amx_packed(int64_t width, int64_t depth) {
  return amx_panels(width) * amx_panels(depth) * 1024;
}

// Rows [o0, o1) of a weight W (out, in), o0 a multiple of 32, packed as the
// second operand of x W^T (columns out, depth in) and of dy W (columns in,
// depth out).
void amx_pack_weight(const float* w, int64_t out, int64_t in, int64_t o0,
                     int64_t o1, Bf16* forward, Bf16* backward);

// Panels [p0, p1) of a second operand x (depth, width).
void amx_pack_columns(const Bf16* x, int64_t depth, int64_t width, int64_t p0,
                      int64_t p1, Bf16* packed);

// C (m, n) [+]= A (m, k) B (k, n); A and C dense, B packed.
struct AmxGemm {
  int64_t m = 0, n = 0, k = 0;
  const Bf16* a = nullptr;
  bool a_transposed = false;  // stored (k, m)
  const Bf16* b = nullptr;
  void* c = nullptr;
  Dtype out = Dtype::kFp32;
  bool add = false;  // REQUIRES: fp32 out
};
// Bytes of scratch a thread needs.
int64_t amx_scratch(const AmxGemm& p);
// Panels [m0, m1) of rows and [n0, n1) of columns.
void amx_gemm(const AmxGemm& p, int64_t m0, int64_t m1, int64_t n0, int64_t n1,
              void* scratch);

// Attention as SimdTyped<Bf16>'s functions of the same names, on tiles.
int64_t amx_attention_scratch(const AttentionSegment& s);  // floats
void amx_attention(const AttentionTask& t);
void amx_attention_backward(const AttentionTask& t);
void amx_attention_segment(const AttentionTask& t);
void amx_attention_segment_backward(const AttentionTask& t);

}  // namespace remesh::kernels
