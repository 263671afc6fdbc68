// Pipeline schedules as data: for each rank the list of passes it runs, in
// order. Nothing here runs or communicates; an executor walks the list, and
// simulate() predicts whether the lists can finish, how long they take and how
// many activations they hold.
//
// A model chunk is a contiguous run of layers. With v chunks per rank, rank r
// holds the chunks of virtual stages r, r + pp, r + 2 pp, ... Forward of a
// microbatch visits virtual stages 0 .. pp * v - 1, backward the reverse.
//
// Sources: GPipe (Huang et al. 2019); 1F1B (PipeDream-Flush, Narayanan et al.
// 2021); interleaved 1F1B (Narayanan et al., SC'21, section 2.2); ZB-H1 (Qi et
// al., Zero Bubble Pipeline Parallelism, 2023).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace remesh::geometry {

// A new schedule is an entry here, its lists and traits in schedule.cc, and its
// name in the allowed values of parallel.pipeline_schedule (proto/job.proto).
enum class ScheduleKind { kGpipe, k1F1B, kInterleaved1F1B, kZbH1 };

struct Schedule;
struct PassCosts;

struct ScheduleTraits {
  ScheduleKind kind;
  const char* name;     // "gpipe", "1f1b", "interleaved", "zb-h1"
  bool interleaved;     // a rank may have several model chunks
  bool split_backward;  // the lists have kWeight ops
  // Writes Schedule::ranks; everything else is set.
  void (*fill)(Schedule&);
  // Idle time of a rank in a step, in the time of its passes (all its chunks),
  // for each pipeline rank but the first.
  double (*bubble)(const PassCosts&);
};
const ScheduleTraits& traits_of(ScheduleKind kind);
inline const char* schedule_name(ScheduleKind kind) {
  return traits_of(kind).name;
}
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
  bool split_backward = false;  // the lists have kWeight ops
  std::vector<std::vector<PipeOp>> ranks;

  int num_stages() const { return pp * chunks; }  // virtual stages
  int stage(int rank, int chunk) const { return chunk * pp + rank; }
  // The last pass of a microbatch in a chunk.
  Pass last_pass() const {
    return split_backward ? Pass::kWeight : Pass::kBackward;
  }
  // "F0 F1 B0 ..." of one rank; chunk as a suffix, "F0.1", when v > 1.
  std::string to_string(int rank) const;
};

// Fails, naming what is allowed: pp, num_microbatches and chunks at least 1;
// chunks > 1 for interleaved schedules only, which need a multiple of pp
// microbatches.
Result<Schedule> make_schedule(ScheduleKind kind, int pp, int num_microbatches,
                               int chunks = 1);

// The schedule that all ranks of a step follow. It is made for the largest of
// the data-parallel ranks' shares (batch.h), of `most` microbatches, rounded up
// to a multiple of pp where a rank has several chunks. A rank with fewer
// microbatches skips the passes of those it does not have: the last ones, and
// leaving out all passes of a microbatch breaks no dependency. So uneven shares
// fit every schedule. Fails like make_schedule().
Result<Schedule> step_schedule(ScheduleKind kind, int pp, int chunks,
                               int64_t most);
// The passes that a rank with n microbatches runs of it.
Schedule without_padding(Schedule schedule, int64_t n);
// Forward passes alone, of at least n microbatches, in an order that every rank
// of the pipeline can keep.
Schedule forward_schedule(int pp, int chunks, int64_t n);

// Most microbatches of each chunk of a rank whose activations are held at once.
std::vector<int> slots_needed(const Schedule& schedule, int rank);

// Time of one pass of one chunk, in any one unit. A backward that is not split
// takes backward + weight.
struct PassCosts {
  double forward = 1;
  double backward = 1;
  double weight = 1;
  double transfer = 0;  // a message between neighbouring stages
};
double pass_cost(const Schedule& schedule, const PassCosts& costs, Pass pass);

struct PipeTiming {
  double makespan = 0;
  std::vector<double> busy;  // by rank
  double bubble_share = 0;   // idle time of all ranks / (pp * makespan)
};

// Simulates the lists: an op starts when its rank is free and its inputs
// have arrived; sending takes no time of the sender. Fails, naming rank and op,
// when the lists are not a schedule (an op missing, twice or out of range) or
// cannot finish (deadlock).
Result<PipeTiming> simulate(const Schedule& schedule, const PassCosts& costs);
// The same where op number n of a rank takes length(rank, n).
using PassLength = std::function<double(int rank, size_t n)>;
Result<PipeTiming> replay(const Schedule& schedule, const PassLength& length,
                          double transfer = 0);

// --- layers to stages ------------------------------------------------------

// Costs in units of one transformer block's.
struct LayerCosts {
  double embedding = 0;
  double head = 0;  // final norm, projection and loss
};

// Contiguous split of n_layers blocks over `stages` stages of at least one
// block each. The first also has the embedding, the last the head. Minimises
// the largest load, then makes the loads as even as possible. Returns stages +
// 1 bounds: stage s has blocks [b[s], b[s + 1]). Fails when there are fewer
// layers than stages.
Result<std::vector<int64_t>> split_layers(int64_t n_layers, int stages,
                                          const LayerCosts& costs = {});

}  // namespace remesh::geometry
