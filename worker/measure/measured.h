// From what was measured on a host to its description as a cluster, in which a
// device is a core (proto/cluster.proto, parallel/planner/local.h). Pure.
#pragma once

#include <string>
#include <vector>

#include "proto/cluster.pb.h"

namespace remesh::measure {

// y (rows, columns) = x (rows, inner) W^T.
struct GemmTime {
  double rows = 0, columns = 0, inner = 0;
  double seconds = 0;
};

// seconds = gap_s + 2 rows columns (inner + ramp) / flops.
struct GemmFit {
  double flops = 0;
  double ramp = 0;
  double gap_s = 0;
};
// Least squares of the relative errors; neither ramp nor gap is negative.
// REQUIRES: three or more times above 0, with different inner dimensions.
GemmFit fit_gemms(const std::vector<GemmTime>& times);

// All cores work at the same time, one rank each; means over the ranks.
struct Measured {
  std::string processor;
  int cores = 1;
  double memory_bytes = 0;     // of the host
  std::vector<GemmTime> fp32;  // one core
  std::vector<GemmTime> bf16;  // empty: bf16 is no faster here
  // As the cost model counts them; bf16: as for bf16 above.
  double attention_flops = 0, bf16_attention_flops = 0;
  double memory_bytes_per_s = 0;  // of the update of the weights
  // The defaults are usual for shared memory.
  int ranks = 2;                    // that exchanged messages
  double message_s = 4e-6;          // a few bytes to another rank
  double small_gather_s = 4e-6;     // a few bytes of all ranks to all
  double gather_bytes_per_s = 4e9;  // received by a rank
  double contention = 0.7;          // see Efficiency.contention
  double straggle = 0;              // see Efficiency.straggle
  double network_bytes_per_s = 0;   // of the host
};

// How the source of such a description begins, and all of it, which changes
// with the way in which hosts are measured.
inline constexpr char kMeasured[] = "measured by remesh plan measure";
inline constexpr char kSource[] =
    "measured by remesh plan measure as a training step computes and updates; "
    "a device is a core";
pb::Cluster describe(const Measured& measured);

}  // namespace remesh::measure
