#include "bench/step/step_report.h"

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
  const double arithmetic = c.flops / r.gemm_rate();
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

const char* name_of(GemmPass pass) {
  switch (pass) {
    case GemmPass::kForward:
      return "forward";
    case GemmPass::kInput:
      return "input";
    case GemmPass::kWeight:
      return "weight";
  }
  return "";
}

void print_gemms(const Report& r) {
  fmt::print("{:<9} {:>19} {:>6} {:>7} | GFLOP/s {:>7} {:>8} {:>8} {:>8}\n",
             "GEMM", "rows x out x in", "calls", "FLOPs", "step", "plain",
             "packed", "own");
  double all = 0;
  for (const auto& [s, g] : r.gemms) all += g.calls * s.flops();
  for (const auto& [s, g] : r.gemms)
    fmt::print(
        "  {:<7} {:>19} {:>6.0f} {:>5.1f} % | {:>15.0f} {:>8.0f} {:>8} "
        "{:>8.0f}\n",
        name_of(s.pass), fmt::format("{} x {} x {}", s.rows, s.out, s.in),
        g.calls, 100 * g.calls * s.flops() / all,
        g.calls * s.flops() / g.seconds / 1e9, g.rates.plain / 1e9,
        g.rates.packed > 0 ? fmt::format("{:.0f}", g.rates.packed / 1e9) : "-",
        g.rates.own / 1e9);
}

}  // namespace

double Report::gemm_rate() const {
  double all = 0, seconds = 0;
  for (const auto& [s, g] : gemms) {
    all += g.calls * s.flops();
    seconds += g.calls * s.flops() / g.rates.best();
  }
  return all / seconds;
}

void print_text(const Report& r) {
  fmt::print("size={} params={:.1f}M dtype={} cpu={}, backend: {}\n", r.size,
             static_cast<double>(r.parameters) / 1e6, r.dtype, r.cpu,
             r.backend);
  fmt::print("step={:.4f}s ({:.4f}-{:.4f}) tokens/s={:.0f} GFLOP/s={:.1f}\n",
             r.step_s[1], r.step_s[0], r.step_s[2], r.rate(),
             r.flops / r.step_s[1] / 1e9);
  fmt::print(
      "its GEMMs at best {:.1f} GFLOP/s: the step runs at {:.1f} % of that; "
      "memory {:.1f} GB/s\n",
      r.gemm_rate() / 1e9, 100 * r.gemm_share(), r.bandwidth / 1e9);
  double mean_s = 0;
  for (const auto& [name, s] : r.phases_s) mean_s += s;
  const auto share = [&](double s) { return 100 * s / mean_s; };
  fmt::print("phases (means)\n");
  for (const auto& [name, s] : r.phases_s)
    fmt::print("  {:<19} {:8.1f} ms {:5.1f} %\n", name, s * 1e3, share(s));
  fmt::print("{:<21} {:>11} {:>7} {:>9} {:>7} {:>10}  {}\n", "operations",
             "time", "share", "GFLOP/s", "GB/s", "bound", "by");
  for (const auto& [name, c] : by_time(r)) {
    const Bound b = bound_of(r, c);
    fmt::print("  {:<19} {:8.1f} ms {:5.1f} % {:9.0f} {:7.1f} {:7.1f} ms  {}\n",
               name, c.seconds * 1e3, share(c.seconds),
               c.flops / c.seconds / 1e9, c.bytes / c.seconds / 1e9,
               b.seconds * 1e3, b.by);
  }
  print_gemms(r);
  if (r.peer > 0)
    fmt::print("peer tokens/s={:.0f}, ratio {:.2f}; {}\n", r.peer,
               r.rate() / r.peer, r.peer_note);
  else
    fmt::print("no ratio to a peer: {}\n", r.peer_note);
}

void print_json(const Report& r) {
  nlohmann::json operations = nlohmann::json::object();
  for (const auto& [name, c] : r.operations) {
    const Bound b = bound_of(r, c);
    operations[name] = {{"seconds", c.seconds},
                        {"flops", c.flops},
                        {"bytes", c.bytes},
                        {"bound_s", b.seconds},
                        {"bound_by", b.by}};
  }
  nlohmann::json gemms = nlohmann::json::array();
  for (const auto& [s, g] : r.gemms)
    gemms.push_back({{"pass", name_of(s.pass)},
                     {"rows", s.rows},
                     {"out", s.out},
                     {"in", s.in},
                     {"calls", g.calls},
                     {"seconds", g.seconds},
                     {"plain_gflops", g.rates.plain / 1e9},
                     {"packed_gflops", g.rates.packed / 1e9},
                     {"own_gflops", g.rates.own / 1e9}});
  nlohmann::json j = {{"size", r.size},
                      {"batch", r.batch},
                      {"seq", r.seq},
                      {"threads", r.threads},
                      {"dtype", r.dtype},
                      {"cpu", r.cpu},
                      {"backend", r.backend},
                      {"tokens_per_s", r.rate()},
                      {"step_s", r.step_s},
                      {"gflops", r.flops / r.step_s[1] / 1e9},
                      {"gemm_gflops", r.gemm_rate() / 1e9},
                      {"gemm_share", r.gemm_share()},
                      {"bandwidth_gbs", r.bandwidth / 1e9},
                      {"first_loss", r.first_loss},
                      {"engine_bytes", r.engine_bytes},
                      {"phases_s", r.phases_s},
                      {"operations", operations},
                      {"gemms", gemms},
                      {"peer", r.peer_note}};
  if (r.peer > 0) {
    j["peer_tokens_per_s"] = r.peer;
    j["ratio"] = r.rate() / r.peer;
  }
  fmt::print("{}\n", j.dump());
}

}  // namespace remesh::bench
