#include "parallel/planner/local.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "parallel/planner/choose.h"
#include "parallel/planner/rank_placement.h"

namespace remesh::planner {

// GEMMs and memory were measured on two cores without AMX (211 GFLOP/s in fp32,
// copies at 12 GB/s), the network is Ethernet of 1 Gb/s. The others are
// estimates.
Machine reference_core() {
  return {.flops = 1e11,
          .fp32_flops = 1e11,
          .attention_flops = 4e10,
          .fp32_attention_flops = 4e10,
          .tuned_attention_flops = 4e10,
          .memory_bytes_per_s = 6e9,
          .peak_flops = 1e11,
          .cores = 1,
          .gemm_gap_s = 1e-6,
          .gemm_ramp = 16,
          .contention = 0.7,
          .node_devices = 2,
          .node_bytes_per_s = 4e9,
          .network_bytes_per_s = 6e7,
          .collective_base_s = 2e-6,
          .node_hop_s = 2e-6,
          .network_hop_s = 3e-5};
}

Execution engine_execution(const JobShape& s) {
  return {.precision = s.bf16 ? Precision::k16 : Precision::k32,
          .overlap_pipeline = true,
          .gradient_bytes = 4,
          .weight_bytes = 4,
          .message_bytes = 4,
          .sum_bytes = 4,
          .accumulates = true,
          .balanced_stages = true,
          .recomputes_attention = true};
}

namespace {

double gemm_flops(const PlacementRequest& q, const Machine& m) {
  return q.shape && q.shape->bf16 ? m.flops : m.fp32_flops;
}

// Cores that a rank keeps busy on a host that `ranks` of them share.
double busy_cores(const PlacementRequest& q, int cores, int64_t ranks) {
  if (cores <= 0) return 1;
  const double share = static_cast<double>(cores) / static_cast<double>(ranks);
  return q.threads > 0 ? std::min<double>(q.threads, share)
                       : std::min(share, std::max(1.0, std::floor(share)));
}

// A host as a mesh sees it.
struct Host {
  std::string name;
  int first = std::numeric_limits<int>::max();  // of its previous ranks
  int64_t slots = 0;
  int cores = 0;
  uint64_t memory = 0;
  const Machine* slowest = nullptr;  // of its cores
  double link = 0;
};

// In the order in which place_ranks() takes them: as in the previous mesh, new
// ones by name.
std::vector<Host> host_order(const PlacementRequest& q) {
  std::map<std::string, int> first;  // previous rank, by worker
  for (const pb::RankPlace& p : q.previous) {
    const auto [it, fresh] = first.emplace(p.worker(), p.rank());
    if (!fresh) it->second = std::min(it->second, p.rank());
  }
  std::map<std::string, Host> by_name;
  for (const WorkerSlots& w : q.workers) {
    Host& h = by_name[w.host];
    h.name = w.host;
    if (const auto it = first.find(w.worker); it != first.end())
      h.first = std::min(h.first, it->second);
    h.slots += w.slots;
    h.cores = std::max(h.cores, w.cores);
    h.memory = std::max(h.memory, w.memory_bytes);
    const Machine& m = w.core ? *w.core : q.core;
    if (h.slowest == nullptr || gemm_flops(q, m) < gemm_flops(q, *h.slowest))
      h.slowest = &m;
    const double link = m.network_bytes_per_s * m.node_devices;
    h.link = h.link == 0 ? link : std::min(h.link, link);
  }
  std::vector<Host> out;
  for (auto& [name, h] : by_name)
    if (h.slots > 0) out.push_back(std::move(h));
  std::ranges::stable_sort(
      out, [](const Host& a, const Host& b) { return a.first < b.first; });
  return out;
}

void scale_rates(double by, Machine* m) {
  for (double Machine::*rate :
       {&Machine::flops, &Machine::fp32_flops, &Machine::fp8_flops,
        &Machine::attention_flops, &Machine::fp32_attention_flops,
        &Machine::tuned_attention_flops, &Machine::memory_bytes_per_s,
        &Machine::peak_flops})
    m->*rate *= by;
}

}  // namespace

Machine rank_machine(const PlacementRequest& q, int64_t world) {
  // The hosts that a mesh of that size fills. All wait for the slowest rank; so
  // they do for the slowest link.
  const Machine* slowest = nullptr;
  int64_t per_host = 1, left = world;
  double cores = 1, memory = 0, network = 0;
  for (const Host& h : host_order(q)) {
    if (left <= 0) break;
    const int64_t ranks = std::min(h.slots, left);
    left -= ranks;
    per_host = std::max(per_host, ranks);
    const double busy = busy_cores(q, h.cores, ranks);
    if (slowest == nullptr ||
        busy * gemm_flops(q, *h.slowest) < cores * gemm_flops(q, *slowest)) {
      slowest = h.slowest;
      cores = busy;
    }
    network = network == 0 ? h.link : std::min(network, h.link);
    if (h.memory == 0) continue;
    const double share =
        static_cast<double>(h.memory) / static_cast<double>(ranks);
    memory = memory == 0 ? share : std::min(memory, share);
  }
  Machine m = slowest != nullptr ? *slowest : q.core;
  if (q.link_bytes_per_s > 0) network = q.link_bytes_per_s;
  if (network > 0) m.network_bytes_per_s = network / m.node_devices;
  scale_rates(cores, &m);
  m.memory_bytes = memory;
  m.network_bytes_per_s *=
      static_cast<double>(m.node_devices) / static_cast<double>(per_host);
  m.node_devices = static_cast<int>(per_host);
  return m;
}

void match_hosts(PlacementRequest* q) {
  if (!q->shape) return;
  const auto lacks_bf16 = [&](const WorkerSlots& w) {
    const Machine& m = w.core ? *w.core : q->core;
    return m != reference_core() && m.flops == m.fp32_flops;
  };
  if (std::ranges::any_of(q->workers, lacks_bf16)) q->shape->bf16 = false;
}

double rank_memory(const PlacementRequest& q, const geometry::Layout& l) {
  std::map<std::string, std::string> host_of;
  std::map<std::string, uint64_t> memory;
  for (const WorkerSlots& w : q.workers) {
    host_of[w.worker] = w.host;
    memory[w.host] = std::max(memory[w.host], w.memory_bytes);
  }
  std::map<std::string, double> ranks;
  for (const pb::RankPlace& p : place_ranks(q, l)) ++ranks[host_of[p.worker()]];
  double least = 0;
  for (const auto& [host, n] : ranks) {
    const double share = static_cast<double>(memory[host]) / n;
    if (share > 0) least = least == 0 ? share : std::min(least, share);
  }
  return least;
}

namespace {

// What the replicas of a mesh do in a unit of time; empty if that is not known
// of all hosts.
std::vector<double> replica_speeds(const PlacementRequest& q,
                                   const geometry::Layout& l,
                                   const std::vector<pb::RankPlace>& places) {
  std::map<std::string, const WorkerSlots*> workers;
  for (const WorkerSlots& w : q.workers) workers[w.worker] = &w;
  std::vector<double> speeds(static_cast<size_t>(l.dp), 0);
  for (const pb::RankPlace& p : places) {
    const WorkerSlots& w = *workers.at(p.worker());
    if (!w.core) return {};
    const int threads =
        q.threads > 0 ? std::min(q.threads, p.threads()) : p.threads();
    const double rate = threads * gemm_flops(q, *w.core);
    double& slowest = speeds[static_cast<size_t>(l.coord(p.rank()).dp)];
    slowest = slowest == 0 ? rate : std::min(slowest, rate);
  }
  return speeds;
}

}  // namespace

geometry::Shares shares_on(const PlacementRequest& q, const geometry::Layout& l,
                           const std::vector<pb::RankPlace>& places) {
  if (!q.by_speed || !q.shape || l.dp == 1) return {};
  const std::vector<double> speeds = replica_speeds(q, l, places);
  return speeds.empty() ? geometry::Shares{}
                        : geometry::shares_by_speed(q.microbatches, speeds);
}

// With uneven shares all replicas take about as long as the one that takes
// longest: that many microbatches, on a machine of its speed.
StepCost predict_step(const PlacementRequest& q, const geometry::Layout& l) {
  Machine m = rank_machine(q, l.world());
  JobShape shape = *q.shape;
  if (q.by_speed && l.dp > 1) {
    const std::vector<pb::RankPlace> places = place_ranks(q, l);
    shape.shares = shares_on(q, l, places);
    if (!shape.shares.empty()) {
      const auto speeds = replica_speeds(q, l, places);
      const double slowest = *std::ranges::min_element(speeds);
      scale_rates(
          static_cast<double>(most_microbatches(shape, l)) / slowest /
              geometry::slowest_share(q.microbatches, shape.shares, speeds),
          &m);
    }
  }
  return predict_step(m, shape, l, engine_execution(shape));
}

ModelError model_error(const PlacementRequest& q) {
  constexpr double kUsual = 0.22;  // of the logarithm: a quarter
  const int64_t slots = offered_slots(q);
  double sum = 0, squares = 0, n = 0;
  for (const MeasuredStep& m : q.measured) {
    if (m.layout.world() > slots || !admit(*q.shape, m.layout).ok()) continue;
    const double error =
        std::log(m.seconds / predict_step(q, m.layout).total_s);
    sum += error;
    squares += error * error;
    ++n;
  }
  if (n == 0) return {};
  const double mean = sum / n;
  const double spread = std::sqrt(std::max(0.0, squares / n - mean * mean));
  return {.factor = std::exp(mean),
          .uncertainty = std::exp(std::max(kUsual, spread))};
}

std::optional<double> measured_step_s(const PlacementRequest& q,
                                      const geometry::Layout& l) {
  for (const MeasuredStep& m : q.measured)
    if (m.layout == l) return m.seconds;
  return std::nullopt;
}

double expected_step_s(const PlacementRequest& q, const geometry::Layout& l) {
  if (const auto measured = measured_step_s(q, l)) return *measured;
  const ModelError e = model_error(q);
  return e.factor * e.uncertainty * predict_step(q, l).total_s;
}

}  // namespace remesh::planner
