#include "parallel/planner/local.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "parallel/planner/seating.h"

namespace remesh::planner {

// GEMMs and memory were measured on two cores without AMX (211 GFLOP/s in fp32,
// copies at 12 GB/s), the network is Ethernet of 1 Gb/s. The others are
// estimates.
Machine reference_core() {
  return {.flops = 1e11,
          .fp32_flops = 1e11,
          .attention_flops = 4e10,
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
          .accumulates = true,
          .balanced_stages = true};
}

namespace {

// By host, the ranks there in a mesh of that size. Which hosts those are does
// not depend on the degrees, or hardly.
std::map<std::string, int64_t> ranks_of_hosts(const PlacementRequest& q,
                                              int64_t world) {
  std::map<std::string, int64_t> ranks, slots;
  int64_t offered = 0;
  for (const WorkerSlots& w : q.workers) {
    offered += w.slots;
    slots[w.host] += w.slots;
  }
  if (world >= offered) {
    for (const auto& [host, n] : slots)
      if (n > 0) ranks[host] = std::min(n, world);
    return ranks;
  }
  std::map<std::string, std::string> host_of;
  for (const WorkerSlots& w : q.workers) host_of[w.worker] = w.host;
  for (const RankPlace& p : seat_ranks(q, {.dp = static_cast<int>(world)}))
    ++ranks[host_of[p.worker]];
  return ranks;
}

// All wait for the slowest; so they do for the slowest link.
Machine slowest_core(const PlacementRequest& q,
                     const std::map<std::string, int64_t>& ranks) {
  const Machine* slowest = nullptr;
  double network = 0;  // of a host
  for (const WorkerSlots& w : q.workers) {
    if (!ranks.contains(w.host)) continue;
    const Machine& m = w.core ? *w.core : q.core;
    if (slowest == nullptr || m.fp32_flops < slowest->fp32_flops) slowest = &m;
    const double link = m.network_bytes_per_s * m.node_devices;
    network = network == 0 ? link : std::min(network, link);
  }
  Machine out = slowest != nullptr ? *slowest : q.core;
  if (q.link_bytes_per_s > 0) network = q.link_bytes_per_s;
  if (network > 0) out.network_bytes_per_s = network / out.node_devices;
  return out;
}

void scale_rates(double by, Machine* m) {
  for (double Machine::*rate :
       {&Machine::flops, &Machine::fp32_flops, &Machine::fp8_flops,
        &Machine::attention_flops, &Machine::tuned_attention_flops,
        &Machine::memory_bytes_per_s, &Machine::peak_flops})
    m->*rate *= by;
}

}  // namespace

Machine rank_machine(const PlacementRequest& q, int64_t world) {
  struct Host {
    int cores = 0;
    uint64_t memory = 0;
  };
  std::map<std::string, Host> hosts;
  for (const WorkerSlots& w : q.workers) {
    Host& h = hosts[w.host];
    h.cores = std::max(h.cores, w.cores);
    h.memory = std::max(h.memory, w.memory_bytes);
  }
  const std::map<std::string, int64_t> ranks_there = ranks_of_hosts(q, world);
  int64_t per_host = 1;
  double cores = 0, memory = 0;
  for (const auto& [name, ranks] : ranks_there) {
    const Host& h = hosts[name];
    per_host = std::max(per_host, ranks);
    cores += h.cores;
    if (h.memory == 0) continue;
    const double share =
        static_cast<double>(h.memory) / static_cast<double>(ranks);
    memory = memory == 0 ? share : std::min(memory, share);
  }
  Machine m = slowest_core(q, ranks_there);
  const double share = cores > 0 ? cores / static_cast<double>(world) : 1;
  scale_rates(share, &m);
  m.memory_bytes = memory;
  m.network_bytes_per_s *=
      static_cast<double>(m.node_devices) / static_cast<double>(per_host);
  m.node_devices = static_cast<int>(per_host);
  return m;
}

namespace {

// What the replicas of a mesh do in a unit of time; empty if that is not known
// of all hosts.
std::vector<double> replica_speeds(const PlacementRequest& q,
                                   const geometry::Layout& l,
                                   const std::vector<RankPlace>& places) {
  std::map<std::string, const WorkerSlots*> workers;
  for (const WorkerSlots& w : q.workers) workers[w.worker] = &w;
  std::vector<double> speeds(static_cast<size_t>(l.dp), 0);
  for (const RankPlace& p : places) {
    const WorkerSlots& w = *workers.at(p.worker);
    if (!w.core) return {};
    const double rate =
        p.threads * (q.shape->bf16 ? w.core->flops : w.core->fp32_flops);
    double& slowest = speeds[static_cast<size_t>(l.coord(p.rank).dp)];
    slowest = slowest == 0 ? rate : std::min(slowest, rate);
  }
  return speeds;
}

}  // namespace

geometry::Shares shares_on(const PlacementRequest& q, const geometry::Layout& l,
                           const std::vector<RankPlace>& places) {
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
    const std::vector<RankPlace> places = seat_ranks(q, l);
    shape.shares = shares_on(q, l, places);
    if (!shape.shares.empty()) {
      const auto speeds = replica_speeds(q, l, places);
      const double slowest = *std::min_element(speeds.begin(), speeds.end());
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
  int64_t slots = 0;
  for (const WorkerSlots& w : q.workers) slots += w.slots;
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
          .doubt = std::exp(std::max(kUsual, spread))};
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
  return e.factor * e.doubt * predict_step(q, l).total_s;
}

}  // namespace remesh::planner
