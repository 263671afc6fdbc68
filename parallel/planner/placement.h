// place_mesh: which mesh a job gets from the available slots, and which worker
// runs which rank. A pure function: the result does not depend on the order of
// the workers in the request.
//
// Given degrees are kept. The others are chosen to use the most slots; among
// meshes of one size, the one that fits into the hosts' memory and takes the
// least time by predict_step() (local.h). More slots do not always pay: where
// the model axes are chosen, a smaller mesh that was measured to be clearly
// faster than the large one gets the hosts on which it ran. With preferred
// layouts the first one for which there are enough slots is taken. Remaining
// slots are hot spares.
//
// Ranks of one tensor-parallel group communicate most, so they are placed on
// one host where possible; a worker's ranks are contiguous as far as possible.
// A worker that had a place in the previous mesh of the same size gets the same
// ranks again, so that its state in memory is reused and only the state of lost
// ranks moves. When the size changes, workers that stay keep their order and
// come first, and workers that join take the last ranks.
//
// The number of threads follows from how many ranks share a host, so it may
// change for a rank when the mesh changes or the rank moves to another host.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "parallel/geometry/layout.h"
#include "parallel/planner/description.h"
#include "parallel/planner/shape.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::pb {

// Of a PlacementRequest, and for tests.
inline bool operator==(const RankPlace& a, const RankPlace& b) {
  return a.rank() == b.rank() && a.worker() == b.worker() &&
         a.local_slot() == b.local_slot() && a.threads() == b.threads();
}

}  // namespace remesh::pb

namespace remesh::planner {

// What one live worker offers. cores is the worker's view of its host, so
// workers of one host share them; ranks of the host divide them.
struct WorkerSlots {
  std::string worker;  // unique name
  std::string host;
  int slots = 0;
  int cores = 0;
  uint64_t memory_bytes = 0;    // of the host; 0 if unknown
  std::optional<Machine> core;  // of the host, if it was measured
  friend bool operator==(const WorkerSlots&, const WorkerSlots&) = default;
};

// Degrees of the mesh; -1 means "choose".
struct Degrees {
  int dp = -1;
  int tp = -1;
  int pp = -1;
  int cp = -1;
  friend bool operator==(const Degrees&, const Degrees&) = default;
};

// What a step took on a mesh.
struct MeasuredStep {
  geometry::Layout layout;
  double seconds = 0;
  std::set<std::string> hosts;  // on which its ranks were
  friend bool operator==(const MeasuredStep&, const MeasuredStep&) = default;
};

// For hosts that nobody has measured: local.cc says where its rates come from.
Machine reference_core();

struct PlacementRequest {
  std::vector<WorkerSlots> workers;
  // A core of hosts that have none of their own above; node_devices: cores of
  // the host that was measured, which share its link to the network.
  Machine core = reference_core();
  double link_bytes_per_s = 0;  // of a host, measured; 0: as the cores say
  Degrees degrees;
  int64_t microbatches = 1;  // of one global batch
  // Data-parallel ranks on slow hosts get fewer of them, by the hosts' cores.
  bool by_speed = false;
  int threads = 0;      // of each rank; 0: its share of the cores
  int min_slots = 1;    // refuse a smaller mesh
  int max_slots = -1;   // use no more; -1: no limit
  bool scaled = false;  // max_slots comes from `remesh scale`
  // The previous generation's places, for stability; may be empty, and may
  // name workers that have left.
  std::vector<pb::RankPlace> previous;
  // What the job requires of a mesh. Without it any layout is accepted, and
  // model axes whose degree is to be chosen get 1.
  std::optional<JobShape> shape;
  // Correct what the cost model says: expected_step_s() in local.h.
  std::vector<MeasuredStep> measured;
  // When not empty, replaces the degrees; in order of preference.
  std::vector<geometry::Layout> layouts;
  friend bool operator==(const PlacementRequest&,
                         const PlacementRequest&) = default;
};

struct Placement {
  geometry::Layout layout;
  std::vector<pb::RankPlace> ranks;  // by rank, world() of them
  geometry::Shares shares;           // of the microbatches; empty: even
  int spares = 0;                    // slots left unused
  std::string reason;                // one line for people
  // By the cost model: "predicted 0.4 s a step, ..."; "" if it had no choice.
  std::string prediction;
};

// Whether the cost model has more to choose than the number of replicas.
bool chooses_model_axes(const PlacementRequest& request);

// Slots beside those offered that the smallest mesh would need, whatever its
// memory; 0: enough are offered.
int64_t missing_slots(const PlacementRequest& request);

// Fails: invalid_argument when the request can never be met (bad degrees, two
// workers with one name, dp above the number of microbatches, a model that
// cannot be sharded that way, max_slots below min_slots), exhausted when there
// are too few slots now, too little memory, or no mesh of the slots offered
// that runs the job.
Result<Placement> place_mesh(const PlacementRequest& request);

}  // namespace remesh::planner
