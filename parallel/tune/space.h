// What `remesh tune` may try for a job on some hosts: meshes, micro-batches,
// recomputation, ZeRO stages and threads. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "parallel/geometry/family.h"
#include "parallel/geometry/layout.h"
#include "parallel/planner/placement.h"
#include "parallel/tune/tuner.h"
#include "proto/base/status.h"

namespace remesh::tune {

struct Setting {
  geometry::Layout layout;
  int64_t B = 1;  // sequences of a micro-batch
  geometry::Recompute recompute = geometry::Recompute::kNone;
  int zero_stage = 0;
  int threads = 1;  // of a rank

  // "dp2,tp2, micro-batch 4, ZeRO 1, recompute none, 1 thread".
  std::string text() const;
  // As keys of a job file: "train.local_batch_size=4". Degrees may be -1.
  std::vector<std::string> overrides() const;
  friend bool operator==(const Setting&, const Setting&) = default;
};

// The values of a setting as the tuner sees them, under these names.
const std::vector<std::string>& knob_names();

struct SpaceRequest {
  // With a shape: that of the job, which has its degrees and micro-batch.
  planner::PlacementRequest place;
  int threads = -1;             // of a rank in the job; -1: cores by ranks
  std::set<std::string> fixed;  // knobs that keep the value of the job's own
  // Candidates are the fastest of all by the cost model, up to this number and
  // one, the job's own.
  size_t most = 3000;
};

struct Space {
  std::vector<Setting> settings;
  std::vector<Candidate> candidates;  // of the settings, in their order
  size_t own = 0;                     // what the job does without tuning
  int64_t slots = 0;                  // that the job may use
  size_t too_large = 0;  // settings left out because memory does not suffice
  size_t too_slow = 0;   // settings left out beyond SpaceRequest::most
};

// Numbers of ranks divide the slots. Fails like place_mesh(), and with
// InvalidArgument, naming the knobs, for one that does not exist.
Result<Space> make_space(const SpaceRequest& request);

}  // namespace remesh::tune
