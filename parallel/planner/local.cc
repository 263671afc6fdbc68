#include "parallel/planner/local.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "parallel/planner/choose.h"

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
          .accumulation_bytes = 8,
          .message_bytes = 4,
          .sum_bytes = 4,
          .accumulates = true,
          .sums_in_ring = true,
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

// The smaller of a share, 0 if unknown, and that of a rank of the host.
double least_share(double least, const HostSlots& h, int64_t ranks) {
  if (h.memory_bytes == 0 || ranks == 0) return least;
  const double share =
      static_cast<double>(h.memory_bytes) / static_cast<double>(ranks);
  return least == 0 ? share : std::min(least, share);
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

RankShares::RankShares(const PlacementRequest& q) : request_(q), placer_(q) {
  for (const HostSlots& host : placer_.hosts()) {
    Host& h = hosts_.emplace_back();
    for (const WorkerSlots* w : host.workers) {
      const Machine& m = w->core ? *w->core : q.core;
      if (h.slowest == nullptr || gemm_flops(q, m) < gemm_flops(q, *h.slowest))
        h.slowest = &m;
      const double link = m.network_bytes_per_s * m.node_devices;
      h.link = h.link == 0 ? link : std::min(h.link, link);
    }
  }
}

Machine RankShares::machine(int64_t world) const {
  const PlacementRequest& q = request_;
  // The hosts that a mesh of that size fills. All wait for the slowest rank; so
  // they do for the slowest link.
  const Machine* slowest = nullptr;
  int64_t per_host = 1, left = world;
  double cores = 1, memory = 0, network = 0;
  for (size_t i = 0; i < hosts_.size() && left > 0; ++i) {
    const HostSlots& h = placer_.hosts()[i];
    const int64_t ranks = std::min<int64_t>(h.slots, left);
    left -= ranks;
    per_host = std::max(per_host, ranks);
    const double busy = busy_cores(q, h.cores, ranks);
    if (slowest == nullptr || busy * gemm_flops(q, *hosts_[i].slowest) <
                                  cores * gemm_flops(q, *slowest)) {
      slowest = hosts_[i].slowest;
      cores = busy;
    }
    network = network == 0 ? hosts_[i].link : std::min(network, hosts_[i].link);
    memory = least_share(memory, h, ranks);
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

double RankShares::memory(const geometry::Layout& l) const {
  const std::vector<int> ranks = placer_.ranks_by_host(l);
  double least = 0;
  for (size_t i = 0; i < ranks.size(); ++i)
    least = least_share(least, placer_.hosts()[i], ranks[i]);
  return least;
}

Machine rank_machine(const PlacementRequest& q, int64_t world) {
  return RankShares(q).machine(world);
}

double rank_memory(const PlacementRequest& q, const geometry::Layout& l) {
  return RankShares(q).memory(l);
}

void match_hosts(PlacementRequest* q) {
  if (!q->shape) return;
  const auto lacks_bf16 = [&](const WorkerSlots& w) {
    const Machine& m = w.core ? *w.core : q->core;
    return m != reference_core() && m.flops == m.fp32_flops;
  };
  if (std::ranges::any_of(q->workers, lacks_bf16)) q->shape->bf16 = false;
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
    const std::vector<pb::RankPlace> places = RankPlacer(q).place(l);
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
