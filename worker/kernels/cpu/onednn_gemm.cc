#include "worker/kernels/cpu/onednn_gemm.h"

#include <dnnl.hpp>
#include <map>
#include <unordered_map>

#include "proto/base/check.h"
#include "worker/kernels/cpu/amx_tiles.h"
#include "worker/kernels/cpu/workspace.h"

namespace remesh::kernels {
namespace {

dnnl::memory::data_type type_of(Dtype d) {
  return d == Dtype::kFp32 ? dnnl::memory::data_type::f32
                           : dnnl::memory::data_type::bf16;
}

dnnl::memory::desc matrix(int64_t rows, int64_t cols, Dtype d,
                          bool transposed) {
  return {
      {rows, cols},
      type_of(d),
      transposed ? dnnl::memory::format_tag::ba : dnnl::memory::format_tag::ab};
}

// A compiled GEMM with its argument list, of which only the data pointers
// change from call to call.
struct CompiledGemm {
  dnnl::matmul primitive;
  dnnl::memory a, b, c, scratch;
  std::unordered_map<int, dnnl::memory> arguments;
  int64_t scratch_bytes = 0;
};

}  // namespace

struct OnednnGemm::Impl {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::map<GemmKey, CompiledGemm> compiled;
  Workspace scratch;

  CompiledGemm make(const GemmKey& key) const;
};

CompiledGemm OnednnGemm::Impl::make(const GemmKey& key) const {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (key.add) {
    dnnl::post_ops ops;
    ops.append_sum(1.0F);
    attributes.set_post_ops(ops);
  }
  const dnnl::matmul::primitive_desc pd(
      dnnl::matmul::desc(matrix(key.m, key.k, key.in, key.a_transposed),
                         matrix(key.k, key.n, key.in, key.b_transposed),
                         matrix(key.m, key.n, key.out, false)),
      attributes, engine);
  CompiledGemm p;
  p.primitive = dnnl::matmul(pd);
  p.a = dnnl::memory(pd.src_desc(), engine, nullptr);
  p.b = dnnl::memory(pd.weights_desc(), engine, nullptr);
  p.c = dnnl::memory(pd.dst_desc(), engine, nullptr);
  p.scratch = dnnl::memory(pd.scratchpad_desc(), engine, nullptr);
  p.scratch_bytes = static_cast<int64_t>(pd.scratchpad_desc().get_size());
  p.arguments = {{DNNL_ARG_SRC, p.a},
                 {DNNL_ARG_WEIGHTS, p.b},
                 {DNNL_ARG_DST, p.c},
                 {DNNL_ARG_SCRATCHPAD, p.scratch}};
  return p;
}

OnednnGemm::OnednnGemm() : impl_(std::make_unique<Impl>()) {}
OnednnGemm::~OnednnGemm() = default;

void OnednnGemm::run(const GemmKey& key, const void* a, const void* b,
                     void* c) {
  if (key.m == 0 || key.n == 0) return;
  try {
    auto it = impl_->compiled.find(key);
    if (it == impl_->compiled.end())
      it = impl_->compiled.emplace(key, impl_->make(key)).first;
    CompiledGemm& p = it->second;
    // oneDNN takes all memory as mutable, but only writes C and the scratchpad.
    p.a.set_data_handle(const_cast<void*>(a));
    p.b.set_data_handle(const_cast<void*>(b));
    p.c.set_data_handle(c);
    p.scratch.set_data_handle(impl_->scratch.reserve_bytes(p.scratch_bytes));
    p.primitive.execute(impl_->stream, p.arguments);
    impl_->stream.wait();
  } catch (const dnnl::error& e) {
    // Shapes and types are our own, so a failure is a programmer error.
    CHECK_MSG(false, e.what());
  }
}

Bf16Hardware bf16_hardware() {
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::avx512_core_amx:
    case dnnl::cpu_isa::all:
      break;
    case dnnl::cpu_isa::avx512_core_bf16:
      return Bf16Hardware::kAvx512;
    default:
      return Bf16Hardware::kNone;
  }
  __builtin_cpu_init();
  if (amx_available()) return Bf16Hardware::kAmx;
  if (__builtin_cpu_supports("avx512bf16")) return Bf16Hardware::kAvx512;
  return Bf16Hardware::kNone;
}

}  // namespace remesh::kernels
