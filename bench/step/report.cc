#include "bench/step/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

namespace remesh::bench {
namespace {

struct Bound {
  double seconds;
  const char* by;
};

Bound bound_of(const Report& r, const OperationCost& c) {
  const double arithmetic = c.flops / r.gemm_rate;
  const double memory = c.bytes / r.bandwidth;
  if (arithmetic > memory) return {arithmetic, "GEMM"};
  return {memory, "memory"};
}

std::vector<std::pair<std::string, OperationCost>> by_time(const Report& r) {
  std::vector<std::pair<std::string, OperationCost>> v;
  for (const auto& [name, c] : r.operations)
    if (c.seconds > 0) v.emplace_back(name, c);
  std::sort(v.begin(), v.end(), [](const auto& a, const auto& b) {
    return a.second.seconds > b.second.seconds;
  });
  return v;
}

}  // namespace

void print_text(const Report& r) {
  fmt::print("size={} params={:.1f}M dtype={} backend: {}\n", r.size,
             static_cast<double>(r.parameters) / 1e6, r.dtype, r.backend);
  fmt::print("step={:.4f}s tokens/s={:.0f} GFLOP/s={:.1f}\n", r.step_s,
             r.rate(), r.flops / r.step_s / 1e9);
  fmt::print(
      "plain GEMMs {:.1f} GFLOP/s: the step runs at {:.1f} % of that; "
      "memory {:.1f} GB/s\n",
      r.gemm_rate / 1e9, 100 * r.gemm_share(), r.bandwidth / 1e9);
  fmt::print("phases\n");
  for (const auto& [name, s] : r.phases_s)
    fmt::print("  {:<19} {:8.1f} ms {:5.1f} %\n", name, s * 1e3,
               100 * s / r.step_s);
  fmt::print("{:<21} {:>11} {:>7} {:>9} {:>7} {:>10}  {}\n", "operations",
             "time", "share", "GFLOP/s", "GB/s", "bound", "by");
  for (const auto& [name, c] : by_time(r)) {
    const Bound b = bound_of(r, c);
    fmt::print("  {:<19} {:8.1f} ms {:5.1f} % {:9.0f} {:7.1f} {:7.1f} ms  {}\n",
               name, c.seconds * 1e3, 100 * c.seconds / r.step_s,
               c.flops / c.seconds / 1e9, c.bytes / c.seconds / 1e9,
               b.seconds * 1e3, b.by);
  }
  if (r.has_peer && r.peer > 0)
    fmt::print("peer (batch {}) tokens/s={:.0f}, ratio {:.2f}\n", r.peer_batch,
               r.peer, r.rate() / r.peer);
}

void print_json(const Report& r) {
  nlohmann::json operations_s = nlohmann::json::object();
  nlohmann::json bounds = nlohmann::json::object();
  for (const auto& [name, c] : r.operations) {
    operations_s[name] = c.seconds;
    const Bound b = bound_of(r, c);
    bounds[name] = {{"seconds", b.seconds},
                    {"by", b.by},
                    {"flops", c.flops},
                    {"bytes", c.bytes}};
  }
  nlohmann::json j = {{"size", r.size},
                      {"batch", r.batch},
                      {"seq", r.seq},
                      {"threads", r.threads},
                      {"dtype", r.dtype},
                      {"backend", r.backend},
                      {"tokens_per_s", r.rate()},
                      {"step_s", r.step_s},
                      {"gflops", r.flops / r.step_s / 1e9},
                      {"gemm_gflops", r.gemm_rate / 1e9},
                      {"gemm_share", r.gemm_share()},
                      {"bandwidth_gbs", r.bandwidth / 1e9},
                      {"loss", r.loss},
                      {"stage_bytes", r.stage_bytes},
                      {"phases_s", r.phases_s},
                      {"operations_s", operations_s},
                      {"bounds", bounds}};
  if (r.has_peer) {
    j["peer_tokens_per_s"] = r.peer;
    j["peer_batch"] = r.peer_batch;
    if (r.peer > 0) j["ratio"] = r.rate() / r.peer;
  }
  fmt::print("{}\n", j.dump());
}

}  // namespace remesh::bench
