// Round numbers, so that terms can be computed by hand.
#pragma once

#include "parallel/planner/description.h"
#include "parallel/planner/shape.h"
#include "tests/testing/llama.h"

namespace remesh::planner {

inline Machine round_machine() {
  return {.flops = 1e14,
          .fp32_flops = 5e13,
          .fp8_flops = 2e14,
          .attention_flops = 5e13,
          .tuned_attention_flops = 6e13,
          .memory_bytes_per_s = 1e12,
          .memory_bytes = 80e9,
          .peak_flops = 2e14,
          .peak_fp8_flops = 4e14,
          .cores = 100,
          .launch_s = 1e-6,
          .gemm_gap_s = 3e-6,
          .straggle = 0.01,
          .node_devices = 8,
          .node_bytes_per_s = 1e11,
          .network_bytes_per_s = 1e10,
          .collective_base_s = 1e-5,
          .node_hop_s = 1e-6,
          .network_hop_s = 1e-5};
}

inline JobShape gpt(int64_t microbatches) {
  JobShape s;
  s.model = geometry::llama(4096, 32, 32, 32, 16384, 51200);
  s.model.arch = "gpt";
  s.T = 2048;
  s.B = 1;
  s.microbatches = microbatches;
  return s;
}

}  // namespace remesh::planner
