// deal_mesh: which mesh a job gets from the slots there are, and which worker
// runs which rank. A pure function: the same request in any order of its
// workers gives the same deal.
//
// Degrees that are given are kept. Of the others those are chosen that use most
// slots; among meshes of one size, the one that fits into the hosts' memory and
// takes the least time by estimate_step() (cost.h). With preferred layouts the
// first for which the slots suffice is taken. Slots left over are hot spares.
//
// Ranks of one tensor-parallel group talk most, so they are put on one host
// where that can be done; a worker's ranks are contiguous as far as possible.
// A worker that had a place in the previous mesh of the same size gets the
// same ranks back, so that its state in memory serves again and only what
// really left moves. When the size changes, those who stay keep their order
// and come first, so that joiners take the last ranks.
//
// threads follows from how many ranks share a host, so a rank may get another
// number when the mesh changes or it moves to another host.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parallel/geometry/layout.h"
#include "parallel/planner/shape.h"
#include "proto/base/status.h"

namespace remesh::planner {

// What one live worker offers. cores is the worker's view of its host, so
// workers of one host share them; ranks of the host divide them.
struct WorkerSlots {
  std::string worker;  // unique name
  std::string host;
  int slots = 0;
  int cores = 0;
  uint64_t memory_bytes = 0;  // of the host; 0: not known
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

// One rank's place.
struct RankPlace {
  int rank = 0;
  std::string worker;
  int local_slot = 0;  // 0 .. slots-1 of that worker, each at most once
  int threads = 1;     // compute threads the rank may use
  friend bool operator==(const RankPlace&, const RankPlace&) = default;
};

struct DealRequest {
  std::vector<WorkerSlots> workers;
  Degrees degrees;
  int64_t microbatches = 1;  // of one global batch
  int min_slots = 1;         // refuse a smaller mesh
  int max_slots = -1;        // use no more; -1: no limit
  bool scaled = false;       // max_slots is a command's, not the job file's
  // The previous generation's places, for stability; may be empty, and may
  // name workers that are gone.
  std::vector<RankPlace> previous;
  // What the job asks of a mesh; without it any layout will do, and degrees
  // of the model's axes that are to be chosen are 1.
  std::optional<JobShape> shape;
  // When not empty, in place of the degrees: the preferred first.
  std::vector<geometry::Layout> layouts;
  friend bool operator==(const DealRequest&, const DealRequest&) = default;
};

struct Deal {
  geometry::Layout layout;
  std::vector<RankPlace> ranks;  // by rank, world() of them
  int spares = 0;                // slots left unused
  std::string reason;            // one line for people
};

// Fails: invalid_argument when the request can never be met (bad degrees, two
// workers of one name, dp above the number of microbatches, a model that cannot
// be cut that way, max_slots below min_slots), exhausted when there are too few
// slots now, or too little memory.
Result<Deal> deal_mesh(const DealRequest& request);

}  // namespace remesh::planner
