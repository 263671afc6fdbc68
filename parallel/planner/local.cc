#include "parallel/planner/local.h"

#include <algorithm>
#include <map>
#include <string>

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

Machine rank_machine(const PlacementRequest& q, int64_t world) {
  struct Host {
    int64_t slots = 0;
    int cores = 0;
    uint64_t memory = 0;
  };
  std::map<std::string, Host> hosts;
  for (const WorkerSlots& w : q.workers) {
    Host& h = hosts[w.host];
    h.slots += w.slots;
    h.cores = std::max(h.cores, w.cores);
    h.memory = std::max(h.memory, w.memory_bytes);
  }
  int64_t per_host = 1;
  double cores = 0, memory = 0;
  for (const auto& [name, h] : hosts) {
    const int64_t ranks = std::min(h.slots, world);
    if (ranks == 0) continue;
    per_host = std::max(per_host, ranks);
    cores += h.cores;
    if (h.memory == 0) continue;
    const double share =
        static_cast<double>(h.memory) / static_cast<double>(ranks);
    memory = memory == 0 ? share : std::min(memory, share);
  }
  Machine m = q.core;
  const double share = cores > 0 ? cores / static_cast<double>(world) : 1;
  for (double Machine::*rate :
       {&Machine::flops, &Machine::fp32_flops, &Machine::fp8_flops,
        &Machine::attention_flops, &Machine::tuned_attention_flops,
        &Machine::memory_bytes_per_s, &Machine::peak_flops})
    m.*rate *= share;
  m.memory_bytes = memory;
  m.network_bytes_per_s *=
      static_cast<double>(q.core.node_devices) / static_cast<double>(per_host);
  m.node_devices = static_cast<int>(per_host);
  return m;
}

StepCost predict_step(const PlacementRequest& q, const geometry::Layout& l) {
  return predict_step(rank_machine(q, l.world()), *q.shape, l,
                      engine_execution(*q.shape));
}

}  // namespace remesh::planner
