#include "worker/measure/measured.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "proto/base/check.h"

namespace remesh::measure {
namespace {

// Coefficients of the seconds: a constant, of 2 rows columns, and of 2 rows
// columns inner.
using Vector = std::array<double, 3>;

Vector terms_of(const GemmTime& t) {
  const double outputs = 2 * t.rows * t.columns;
  return {1, outputs, outputs * t.inner};
}

// The least-squares solution with only the terms in `used`, by the normal
// equations and Gaussian elimination.
Vector solve(const std::vector<GemmTime>& times,
             const std::vector<size_t>& used) {
  const size_t n = used.size();
  std::vector<std::vector<double>> a(n, std::vector<double>(n + 1));
  for (const GemmTime& t : times) {
    const Vector x = terms_of(t);
    for (size_t i = 0; i < n; ++i) {
      const double xi = x[used[i]] / t.seconds;
      for (size_t j = 0; j < n; ++j) a[i][j] += xi * x[used[j]] / t.seconds;
      a[i][n] += xi;
    }
  }
  for (size_t i = 0; i < n; ++i) {
    for (size_t k = i + 1; k < n; ++k) {
      const double factor = a[k][i] / a[i][i];
      for (size_t j = i; j <= n; ++j) a[k][j] -= factor * a[i][j];
    }
  }
  Vector out{};
  for (size_t i = n; i-- > 0;) {
    double sum = a[i][n];
    for (size_t j = i + 1; j < n; ++j) sum -= a[i][j] * out[used[j]];
    out[used[i]] = sum / a[i][i];
  }
  return out;
}

double squared_error(const std::vector<GemmTime>& times, const Vector& c) {
  double sum = 0;
  for (const GemmTime& t : times) {
    const Vector x = terms_of(t);
    const double seconds = c[0] * x[0] + c[1] * x[1] + c[2] * x[2];
    sum += std::pow(seconds / t.seconds - 1, 2);
  }
  return sum;
}

}  // namespace

GemmFit fit_gemms(const std::vector<GemmTime>& times) {
  CHECK(times.size() >= 3);
  Vector best{};
  double error = std::numeric_limits<double>::infinity();
  // The best one without negative terms has some of them at 0.
  for (const auto& used :
       std::vector<std::vector<size_t>>{{0, 1, 2}, {0, 2}, {1, 2}, {2}}) {
    const Vector c = solve(times, used);
    if (c[0] < 0 || c[1] < 0 || !(c[2] > 0)) continue;
    const double e = squared_error(times, c);
    if (e >= error) continue;
    best = c;
    error = e;
  }
  return {.flops = 1 / best[2], .ramp = best[1] / best[2], .gap_s = best[0]};
}

pb::Cluster describe(const Measured& m) {
  constexpr double kTera = 1e12, kGiga = 1e9, kMicro = 1e-6;
  const GemmFit fp32 = fit_gemms(m.fp32);
  const GemmFit bf16 = m.bf16.empty() ? fp32 : fit_gemms(m.bf16);
  pb::Cluster out;
  pb::Device& d = *out.mutable_device();
  d.set_name(m.processor);
  d.set_source(kSource);
  d.set_memory_gb(m.memory_bytes / m.cores / kGiga);
  d.set_memory_gb_per_s(m.memory_bytes_per_s / kGiga);
  d.set_peak_tflops(bf16.flops / kTera);
  d.set_peak_fp32_tflops(fp32.flops / kTera);
  pb::Node& n = *out.mutable_node();
  n.set_devices(m.cores);
  n.set_gb_per_s(m.gather_bytes_per_s / kGiga);
  // A gather of n ranks takes the start and n - 1 steps, a message the start
  // and one step.
  const double hop_s = m.ranks > 2
                           ? (m.small_gather_s - m.message_s) / (m.ranks - 2)
                           : m.message_s / 2;
  const double hop = std::clamp(hop_s, 0.0, m.message_s);
  n.set_hop_us(hop / kMicro);
  n.set_base_us((m.message_s - hop) / kMicro);
  n.set_overlap_tensor(false);
  constexpr double kNetworkHopUs = 30;  // TCP over Ethernet
  out.mutable_network()->set_gb_per_s(m.network_bytes_per_s / m.cores / kGiga);
  out.mutable_network()->set_hop_us(kNetworkHopUs);
  pb::Efficiency& e = *out.mutable_efficiency();
  // The rates are those that were reached.
  e.set_gemm(1);
  e.set_memory(1);
  e.set_node(1);
  e.set_network(1);
  e.set_fp32_attention(std::min(1.0, m.attention_flops / fp32.flops));
  const double attention =
      m.bf16_attention_flops > 0
          ? std::min(1.0, m.bf16_attention_flops / bf16.flops)
          : e.fp32_attention();
  e.set_attention(attention);
  e.set_tuned_attention(attention);
  e.set_launch_us(0);
  e.set_gap_us(fp32.gap_s / kMicro);
  e.set_gemm_ramp(fp32.ramp);
  e.set_contention(std::clamp(m.contention, 0.0, 1.0));
  e.set_straggle(std::clamp(m.straggle, 0.0, 1.0));
  return out;
}

}  // namespace remesh::measure
