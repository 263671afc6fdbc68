// The result of bench_step, and its two printed forms.
//
// Each kind of operation is compared with its roofline: its arithmetic at the
// measured GEMM rate or its memory traffic at the measured bandwidth, whichever
// takes longer.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "bench/step/profiling_backend.h"

namespace remesh::bench {

struct GemmFigures {
  double calls = 0, seconds = 0;  // a step
  GemmRates rates;
};

struct Report {
  std::string size, dtype, backend, cpu;
  int64_t batch = 0, seq = 0;
  int threads = 0;
  int64_t parameters = 0;
  double tokens = 0, flops = 0;       // of a step
  std::array<double, 3> step_s = {};  // quartiles
  double bandwidth = 0;               // bytes/s
  double first_loss = 0;
  uint64_t engine_bytes = 0;
  // Means over the measured steps.
  std::map<std::string, double> phases_s;
  std::map<std::string, OperationCost> operations;
  std::map<GemmShape, GemmFigures> gemms;
  double peer = 0;        // tokens/s, 0: not measured
  std::string peer_note;  // its BLAS, or why there is no ratio

  double rate() const { return tokens / step_s[1]; }
  // The best way to compute each GEMM, weighted by the FLOPs of a step.
  double gemm_rate() const;
  double gemm_share() const { return flops / step_s[1] / gemm_rate(); }
};

void print_text(const Report& r);
void print_json(const Report& r);  // one line

}  // namespace remesh::bench
