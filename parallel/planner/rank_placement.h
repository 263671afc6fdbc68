// RankPlacer: which slot of which worker each rank of a mesh gets. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/planner/placement.h"

namespace remesh::planner {

// The workers of one host.
struct HostSlots {
  std::string name;
  std::vector<const WorkerSlots*> workers;
  int slots = 0;
  int cores = 0;
  uint64_t memory_bytes = 0;  // 0 if unknown
};

// For meshes of one request, which must outlive it.
class RankPlacer {
 public:
  explicit RankPlacer(const PlacementRequest& request);

  // Those with slots in the order in which they are filled: by their first rank
  // in the previous mesh, new ones last, by name; and so are their workers.
  const std::vector<HostSlots>& hosts() const { return hosts_; }

  // Ranks that stay where they were keep their slots, then tensor-parallel
  // peers share a host if they can. The ranks of a host share its cores evenly.
  // REQUIRES: the workers offer as many slots as the layout has ranks.
  std::vector<pb::RankPlace> place(const geometry::Layout& layout) const;
  // How many of them each of hosts() has.
  std::vector<int> ranks_by_host(const geometry::Layout& layout) const;

 private:
  struct Seat {
    int host = -1;                        // of hosts(); -1: none
    const WorkerSlots* worker = nullptr;  // null: any of the host's slots
    int slot = -1;
  };
  std::vector<Seat> seats(const geometry::Layout& layout) const;
  void keep_seats(std::vector<Seat>* seats) const;

  const PlacementRequest& request_;
  std::vector<HostSlots> hosts_;
};

}  // namespace remesh::planner
