// Pipeline schedules as data: for each rank the list of passes it runs, in
// order. Nothing here runs or communicates; an executor walks the list, and
// simulate() predicts whether the lists can finish, how long they take and how
// many activations they hold.
//
// A model chunk is a contiguous run of layers. With v chunks a rank, rank r
// holds the chunks of virtual stages r, r + pp, r + 2 pp, ... Forward of a
// microbatch goes through virtual stages 0 .. pp * v - 1, backward returns.
//
// Sources: GPipe (Huang et al. 2019); 1F1B (PipeDream-Flush, Narayanan et al.
// 2021); interleaved 1F1B (Narayanan et al., SC'21, section 2.2); ZB-H1 (Qi et
// al., Zero Bubble Pipeline Parallelism, 2023).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace remesh::geometry {

enum class ScheduleKind { kGpipe, k1F1B, kInterleaved1F1B, kZbH1 };
// "gpipe", "1f1b", "interleaved", "zb-h1".
const char* schedule_name(ScheduleKind kind);
Result<ScheduleKind> parse_schedule(std::string_view name);

enum class Pass {
  kForward,
  kBackward,  // gradient of the input; of the weights too unless split
  kWeight,    // gradient of the weights, only in split schedules
};

struct PipeOp {
  Pass pass = Pass::kForward;
  int microbatch = 0;
  int chunk = 0;  // of this rank, 0 .. chunks - 1
  friend bool operator==(const PipeOp&, const PipeOp&) = default;
};

struct Schedule {
  ScheduleKind kind = ScheduleKind::k1F1B;
  int pp = 1;
  int num_microbatches = 1;
  int chunks = 1;               // v, model chunks per rank
  bool split_backward = false;  // there are kWeight ops
  std::vector<std::vector<PipeOp>> ranks;

  int num_stages() const { return pp * chunks; }  // virtual stages
  int stage(int rank, int chunk) const { return chunk * pp + rank; }
  // "F0 F1 B0 ..." of one rank; chunk as a suffix, "F0.1", when v > 1.
  std::string to_string(int rank) const;
};

// Fails, naming what is allowed: pp, num_microbatches and chunks at least 1;
// chunks > 1 for interleaved only, which needs a multiple of pp microbatches.
Result<Schedule> make_schedule(ScheduleKind kind, int pp, int num_microbatches,
                               int chunks = 1);

// Time of one pass of one chunk, in any one unit. A backward that is not split
// takes backward + weight.
struct PassCosts {
  double forward = 1;
  double backward = 1;
  double weight = 1;
  double transfer = 0;  // a message between neighbouring stages
};

struct PipeTiming {
  double makespan = 0;
  std::vector<double> busy;    // by rank
  double bubble_share = 0;     // idle time of all ranks / (pp * makespan)
  double bubble_overhead = 0;  // makespan / busiest rank's work - 1
  // Most (microbatch, chunk) pairs whose activations a rank holds at once:
  // from the start of forward to the end of the last backward pass.
  std::vector<int> peak_live;
};

// Simulates the lists: an op starts when its rank is free and its inputs have
// arrived; sending takes none of the sender's time. Fails, naming rank and op,
// when the lists are not a schedule (an op missing, twice or out of range) or
// cannot finish (deadlock).
Result<PipeTiming> simulate(const Schedule& schedule, const PassCosts& costs);

// --- layers to stages ------------------------------------------------------

// Costs in units of one transformer block's.
struct LayerCosts {
  double embedding = 0;
  double head = 0;  // final norm, projection and loss
};

// Contiguous split of n_layers blocks over `stages` stages of at least one
// block each; the first also bears the embedding and the last the head.
// Minimises the largest load, then balances the others.
// Returns stages + 1 bounds: stage s has blocks [b[s], b[s + 1]).
// Fails when there are fewer layers than stages.
Result<std::vector<int64_t>> split_layers(int64_t n_layers, int stages,
                                          const LayerCosts& costs = {});

}  // namespace remesh::geometry
