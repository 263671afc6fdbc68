// FenceRelay: collects what the workers contribute to the PMIx fences of one
// generation. A fence is complete when every worker with ranks has contributed;
// its result is the contributions in the order of the assignment's workers.
// A value without I/O.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "proto/control.pb.h"

namespace remesh::core {

class FenceRelay {
 public:
  struct Delivery {
    std::vector<std::string> workers;  // that receive the result
    pb::FenceOut result;
  };

  // Adds a contribution. Returns the result if the fence is complete: for all
  // workers when this contribution completes it, for this one alone when it
  // repeats a contribution (its answer was lost). Otherwise no receivers.
  Delivery add(const pb::FenceIn& contribution, const pb::Durable& durable);
  // Whether some fence was begun to which the worker has not contributed.
  bool misses(const std::string& worker) const;
  void clear() { fences_.clear(); }

 private:
  // By index, then by worker.
  std::map<int64_t, std::map<std::string, std::string>> fences_;
};

}  // namespace remesh::core
