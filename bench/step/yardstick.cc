#include "bench/step/yardstick.h"

#include <immintrin.h>

#include <cstring>
#include <dnnl.hpp>
#include <functional>
#include <unordered_map>
#include <vector>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/median.h"
#include "worker/kernels/cpu/onednn_gemm.h"
#include "worker/kernels/cpu/parallel.h"
#include "worker/kernels/host_memory.h"

namespace remesh::bench {
namespace {

using kernels::Backend;
using kernels::Dtype;
using kernels::GemmKey;
using kernels::HostBlock;
using kernels::parallel_ranges;

HostBlock block(int64_t bytes) {
  HostBlock b(kernels::host_allocate(static_cast<size_t>(bytes)));
  CHECK_MSG(b != nullptr, "no memory for a measurement");
  // Zeros would need less power. Read as fp32 or bf16 this is 0.75.
  std::memset(b.get(), 0x3f, static_cast<size_t>(bytes));
  return b;
}

double seconds(const std::function<void()>& f) {
  const int64_t start = monotonic_ns();
  f();
  return seconds_since(start);
}

dnnl::memory::desc matrix(int64_t rows, int64_t cols, Dtype d,
                          dnnl::memory::format_tag tag) {
  return {{rows, cols},
          d == Dtype::kFp32 ? dnnl::memory::data_type::f32
                            : dnnl::memory::data_type::bf16,
          tag};
}

// A oneDNN GEMM whose second operand has the layout that oneDNN prefers.
class PackedGemm {
 public:
  PackedGemm(const GemmKey& key, void* a, void* b, void* c) {
    using Tag = dnnl::memory::format_tag;
    dnnl::primitive_attr attributes;
    if (key.add) {
      dnnl::post_ops ops;
      ops.append_sum(1.0F);
      attributes.set_post_ops(ops);
    }
    const dnnl::matmul::primitive_desc pd(
        dnnl::matmul::desc(matrix(key.m, key.k, key.in, Tag::ab),
                           matrix(key.k, key.n, key.in, Tag::any),
                           matrix(key.m, key.n, key.out, Tag::ab)),
        attributes, engine_);
    gemm_ = dnnl::matmul(pd);
    const dnnl::memory packed(pd.weights_desc(), engine_);
    dnnl::memory rows(
        matrix(key.k, key.n, key.in, key.b_transposed ? Tag::ba : Tag::ab),
        engine_, b);
    dnnl::memory to = packed;
    dnnl::reorder(rows, to).execute(stream_, rows, to);
    arguments_ = {{DNNL_ARG_SRC, {pd.src_desc(), engine_, a}},
                  {DNNL_ARG_WEIGHTS, packed},
                  {DNNL_ARG_DST, {pd.dst_desc(), engine_, c}}};
    stream_.wait();
  }
  void run() {
    gemm_.execute(stream_, arguments_);
    stream_.wait();
  }

 private:
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  dnnl::matmul gemm_;
  std::unordered_map<int, dnnl::memory> arguments_;
};

GemmKey key_of(const GemmShape& s) {
  GemmKey key{.in = s.operands, .out = s.result, .add = s.add};
  switch (s.pass) {
    case GemmPass::kForward:
      key.m = s.rows, key.n = s.out, key.k = s.in;
      key.b_transposed = true;
      break;
    case GemmPass::kInput:
      key.m = s.rows, key.n = s.in, key.k = s.out;
      break;
    case GemmPass::kWeight:
      key.m = s.out, key.n = s.in, key.k = s.rows;
      key.a_transposed = true;
      break;
  }
  return key;
}

// One call of the backend's own operation.
void run_own(Backend& b, const GemmShape& s, const kernels::Weight& w, void* x,
             void* y, void* dw) {
  switch (s.pass) {
    case GemmPass::kForward:
      b.linear(w, x, s.rows, s.result, y);
      break;
    case GemmPass::kInput:
      b.linear_backward_input(w, y, s.rows, s.result, s.add, x);
      break;
    case GemmPass::kWeight:
      b.linear_backward_weight(s.operands, y, x, s.rows, s.out, s.in,
                               static_cast<float*>(dw));
      break;
  }
  b.synchronize();
}

}  // namespace

GemmRates gemm_rates(Backend& backend, const GemmShape& s, int repeats) {
  constexpr auto kMost = static_cast<int64_t>(sizeof(float));
  const HostBlock x = block(s.rows * s.in * kMost);
  const HostBlock y = block(s.rows * s.out * kMost);
  const HostBlock master = block(s.out * s.in * kMost);
  const HostBlock dw = block(s.out * s.in * kMost);
  const auto weight = backend.make_weight(s.operands, s.out, s.in);
  CHECK_MSG(weight != nullptr, "no memory for a measurement");
  backend.load_weight(*weight, static_cast<const float*>(master.get()));
  const int before = omp_get_max_threads();
  omp_set_num_threads(backend.threads());

  // The pattern of block() is the same in bf16, so the master serves as both.
  void* const a = s.pass == GemmPass::kForward ? x.get() : y.get();
  void* const b = s.pass == GemmPass::kWeight ? x.get() : master.get();
  void* const c = s.pass == GemmPass::kForward ? y.get()
                  : s.pass == GemmPass::kInput ? x.get()
                                               : dw.get();
  const GemmKey key = key_of(s);
  kernels::OnednnGemm plain;
  std::unique_ptr<PackedGemm> packed;
  if (s.pass != GemmPass::kWeight)  // there the operands are no weights
    packed = std::make_unique<PackedGemm>(key, a, b, c);
  const std::vector<std::function<void()>> ways = {
      [&] { plain.run(key, a, b, c); },
      [&] {
        if (packed != nullptr) packed->run();
      },
      [&] { run_own(backend, s, *weight, x.get(), y.get(), dw.get()); }};
  std::vector<std::vector<double>> times(ways.size());
  for (int i = -1; i < repeats; ++i)
    for (size_t w = 0; w < ways.size(); ++w) {
      const double t = seconds(ways[w]);
      if (i >= 0) times[w].push_back(t);  // the first compiles
    }
  omp_set_num_threads(before);
  return {.plain = s.flops() / median(times[0]),
          .packed = packed != nullptr ? s.flops() / median(times[1]) : 0,
          .own = s.flops() / median(times[2])};
}

double memory_bandwidth(int threads, int repeats) {
  constexpr int64_t kFloats = int64_t{32} << 20;
  constexpr int64_t kStripe = 1024;
  const HostBlock a = block(kFloats * 4);
  const HostBlock b = block(kFloats * 4);
  const HostBlock c = block(kFloats * 4);
  auto* pa = static_cast<float*>(a.get());
  const auto* pb = static_cast<const float*>(b.get());
  const auto* pc = static_cast<const float*>(c.get());
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    const double triad = seconds([&] {
      parallel_ranges(threads, kFloats, 1, [&](int64_t i0, int64_t i1, int) {
        const __m128 half = _mm_set1_ps(0.5F);
        // Past the caches: an ordinary store reads what it overwrites.
        for (int64_t j = (i0 + 3) / 4 * 4; j + 4 <= i1; j += 4)
          _mm_stream_ps(pa + j,
                        _mm_add_ps(_mm_load_ps(pb + j),
                                   _mm_mul_ps(half, _mm_load_ps(pc + j))));
        _mm_sfence();
      });
    });
    const double read = seconds([&] {
      parallel_ranges(threads, kFloats, 1, [&](int64_t i0, int64_t i1, int) {
        float sums[kStripe] = {};
        for (int64_t j = i0; j + kStripe <= i1; j += kStripe)
#pragma omp simd
          for (int64_t k = 0; k < kStripe; ++k) sums[k] += pb[j + k];
        pa[i0] = sums[i0 % kStripe];
      });
    });
    best = std::max({best, 12.0 * static_cast<double>(kFloats) / triad,
                     4.0 * static_cast<double>(kFloats) / read});
  }
  return best;
}

}  // namespace remesh::bench
