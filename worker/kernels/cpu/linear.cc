#include "worker/kernels/cpu/linear.h"

#include "worker/kernels/cpu/amx_tiles.h"
#include "worker/kernels/cpu/parallel.h"

namespace remesh::kernels {
namespace {

class CpuWeight final : public Weight {
 public:
  CpuWeight(Dtype d, int64_t out, int64_t in, HostBlock forward,
            HostBlock backward, uint64_t bytes)
      : Weight(d, out, in),
        forward_(std::move(forward)),
        backward_(std::move(backward)),
        bytes_(bytes) {}
  uint64_t bytes() const override { return bytes_; }

  // Packed for AMX both ways, when backward() is set; else (out, in).
  Bf16* forward() const { return static_cast<Bf16*>(forward_.get()); }
  Bf16* backward() const { return static_cast<Bf16*>(backward_.get()); }
  void view(const float* master) { master_ = master; }
  // (out, in) of dtype.
  const void* values() const {
    return forward_ != nullptr ? forward_.get()
                               : static_cast<const void*>(master_);
  }

 private:
  HostBlock forward_, backward_;
  uint64_t bytes_;
  const float* master_ = nullptr;
};

const CpuWeight& own(const Weight& w) {
  return static_cast<const CpuWeight&>(w);
}

// Makes oneDNN use as many threads as the backend owns, for this call.
class ThreadScope {
 public:
  explicit ThreadScope(int threads) : before_(omp_get_max_threads()) {
    if (before_ != threads) omp_set_num_threads(threads);
    changed_ = before_ != threads;
  }
  ~ThreadScope() {
    if (changed_) omp_set_num_threads(before_);
  }
  ThreadScope(const ThreadScope&) = delete;
  ThreadScope& operator=(const ThreadScope&) = delete;

 private:
  int before_;
  bool changed_ = false;
};

}  // namespace

CpuLinear::CpuLinear(int threads, const SimdOps& simd)
    : threads_(threads), simd_(simd), bf16_(bf16_hardware()) {}

std::unique_ptr<Weight> CpuLinear::make_weight(Dtype d, int64_t out,
                                               int64_t in) const {
  CHECK(out > 0 && in > 0);
  HostBlock forward, backward;
  size_t bytes = 0;
  if (d == Dtype::kBf16) {
    const bool packed = bf16_ == Bf16Hardware::kAmx;
    const size_t each =
        static_cast<size_t>(packed ? amx_packed(out, in) : out * in) *
        sizeof(Bf16);
    forward.reset(host_allocate(each));
    if (packed) backward.reset(host_allocate(each));
    if (forward == nullptr || (packed && backward == nullptr)) return nullptr;
    bytes = packed ? 2 * each : each;
  }
  return std::make_unique<CpuWeight>(d, out, in, std::move(forward),
                                     std::move(backward), bytes);
}

void CpuLinear::load_weight(Weight& weight, const float* master) const {
  auto& w = static_cast<CpuWeight&>(weight);
  if (w.dtype() == Dtype::kFp32) {
    w.view(master);
  } else if (w.backward() != nullptr) {
    parallel_ranges(threads_, amx_panels(w.out()), 1,
                    [&](int64_t p0, int64_t p1, int) {
                      amx_pack_weight(master, w.out(), w.in(), p0 * kAmxPanel,
                                      std::min(p1 * kAmxPanel, w.out()),
                                      w.forward(), w.backward());
                    });
  } else {
    parallel_ranges(threads_, w.out() * w.in(), 8192,
                    [&](int64_t i0, int64_t i1, int) {
                      simd_.to_bf16(i1 - i0, master + i0, w.forward() + i0);
                    });
  }
}

void CpuLinear::forward(const Weight& weight, const void* x, int64_t rows,
                        Dtype out, void* y) {
  const CpuWeight& w = own(weight);
  const GemmKey key{.m = rows,
                    .n = w.out(),
                    .k = w.in(),
                    .in = w.dtype(),
                    .out = out,
                    .b_transposed = true};
  if (w.backward() != nullptr) return amx(key, x, w.forward(), nullptr, y);
  if (rows == 1 && w.dtype() == Dtype::kFp32)
    return matvec(static_cast<const float*>(w.values()), w.out(), w.in(),
                  static_cast<const float*>(x), static_cast<float*>(y));
  gemm(key, x, w.values(), y);
}

// Reads the weight once, as fast as memory allows. A thread takes longer to
// wake than for a small matrix.
void CpuLinear::matvec(const float* m, int64_t rows, int64_t n, const float* x,
                       float* y) const {
  constexpr int64_t kElements = 1 << 16;  // worth a thread
  parallel_ranges(threads_, ceil_div(rows, kMatvecRows),
                  ceil_div(kElements, n * kMatvecRows),
                  [&](int64_t i0, int64_t i1, int) {
                    const int64_t r0 = i0 * kMatvecRows;
                    const int64_t r1 = std::min(rows, i1 * kMatvecRows);
                    simd_.matvec(r1 - r0, n, m + r0 * n, x, y + r0);
                  });
}

void CpuLinear::backward_input(const Weight& weight, const void* dy,
                               int64_t rows, Dtype out, bool add, void* dx) {
  const CpuWeight& w = own(weight);
  const GemmKey key{.m = rows,
                    .n = w.in(),
                    .k = w.out(),
                    .in = w.dtype(),
                    .out = out,
                    .add = add};
  if (w.backward() != nullptr) return amx(key, dy, w.backward(), nullptr, dx);
  gemm(key, dy, w.values(), dx);
}

void CpuLinear::backward_weight(Dtype d, const void* dy, const void* x,
                                int64_t rows, int64_t out, int64_t in,
                                float* dw) {
  const GemmKey key{.m = out,
                    .n = in,
                    .k = rows,
                    .in = d,
                    .out = Dtype::kFp32,
                    .a_transposed = true,
                    .add = true};
  if (d == Dtype::kBf16 && bf16_ == Bf16Hardware::kAmx)
    return amx(key, dy, nullptr, static_cast<const Bf16*>(x), dw);
  gemm(key, dy, x, dw);
}

void CpuLinear::gemm(const GemmKey& key, const void* a, const void* b,
                     void* c) {
  const ThreadScope scope(threads_);
  gemm_.run(key, a, b, c);
}

void CpuLinear::amx(const GemmKey& key, const void* a, const Bf16* packed,
                    const Bf16* columns, void* c) {
  AmxGemm p{.m = key.m,
            .n = key.n,
            .k = key.k,
            .a = static_cast<const Bf16*>(a),
            .a_transposed = key.a_transposed,
            .b = packed,
            .c = c,
            .out = key.out,
            .add = key.add};
  const int64_t rows = amx_panels(p.m);
  const int64_t cols = amx_panels(p.n);
  if (p.m == 0 || p.k == 0) return;
  if (columns != nullptr) {
    auto* const to = static_cast<Bf16*>(columns_.reserve_bytes(
        amx_packed(p.n, p.k) * static_cast<int64_t>(sizeof(Bf16))));
    parallel_ranges(threads_, cols, 1, [&](int64_t p0, int64_t p1, int) {
      amx_pack_columns(columns, p.k, p.n, p0, p1, to);
    });
    p.b = to;
  }
  const int64_t each = ceil_div(amx_scratch(p), 64) * 64;
  auto* scratch = static_cast<char*>(scratch_.reserve_bytes(each * threads_));
  // Split the longer side: fewer panels would leave threads idle.
  const bool by_rows = rows >= cols || rows >= 8 * threads_;
  parallel_ranges(threads_, by_rows ? rows : cols, 1,
                  [&](int64_t i0, int64_t i1, int thread) {
                    amx_gemm(p, by_rows ? i0 : 0, by_rows ? i1 : rows,
                             by_rows ? 0 : i0, by_rows ? cols : i1,
                             scratch + thread * each);
                  });
}

}  // namespace remesh::kernels
