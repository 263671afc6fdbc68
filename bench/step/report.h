// The result of bench_step, and its two printed forms.
//
// Each kind of operation is compared with its roofline: its arithmetic at the
// measured GEMM rate or its memory traffic at the measured bandwidth, whichever
// takes longer.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "bench/step/profiling_backend.h"

namespace remesh::bench {

struct Report {
  std::string size, dtype, backend;
  int64_t batch = 0, seq = 0;
  int threads = 0;
  int64_t parameters = 0;
  double tokens = 0, flops = 0;  // of a step
  double step_s = 1e30;          // the best
  double gemm_rate = 0;          // FLOP/s of plain GEMMs
  double bandwidth = 0;          // bytes/s
  double loss = 0;
  uint64_t stage_bytes = 0;
  std::map<std::string, double> phases_s;
  std::map<std::string, OperationCost> operations;
  bool has_peer = false;
  int64_t peer_batch = 0;
  double peer = 0;  // tokens/s, 0: failed

  double rate() const { return tokens / step_s; }
  double gemm_share() const { return flops / step_s / gemm_rate; }
};

void print_text(const Report& r);
void print_json(const Report& r);  // one line

}  // namespace remesh::bench
