// MeshPolicy: which mesh the job should have. It follows the keys of the job
// file and the slots of the live workers on hosts that are not cordoned
// (cordons.h), or a layout or number of slots that a command asked for
// (pb::MeshRequest). A pinned layout stays until another is pinned or until a
// generation is planned for which the slots do not suffice.
//
// Where the planner chooses the degrees of the model axes, it corrects the cost
// model by the steps that were measured, and a change of a running mesh has to
// be worth its pause.
//
// A value without I/O; its only state is a cache of placements.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/core/cluster_view.h"
#include "parallel/geometry/layout.h"
#include "parallel/planner/placement.h"
#include "parallel/planner/shape.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::core {

// The layout that a command pinned.
std::optional<geometry::Layout> pinned_layout(const pb::MeshRequest& request);

class MeshPolicy {
 public:
  // A change of mesh that the running generation should stop for. must: because
  // a worker leaves, so that neither a smaller mesh nor a lack of room is a
  // reason against it.
  struct MeshChange {
    std::string why;
    bool must = false;
  };

  // `core`: of the workers' hosts.
  MeshPolicy(const pb::Job& job, std::optional<planner::JobShape> shape,
             const planner::Machine& core = planner::reference_core());

  // The placement of the next generation: by the pinned layout if it fits,
  // otherwise by the job.
  Result<planner::Placement> place(const ClusterView& view) const;
  // The same if `layout` were pinned, without a fallback.
  Result<planner::Placement> place(const ClusterView& view,
                                   const geometry::Layout& layout) const;
  // planner::missing_slots() of the job's own meshes.
  int64_t missing_slots(const ClusterView& view) const;
  // What there is for a mesh. A job's place() without a pinned layout fails in
  // the same way for the same offer.
  struct Offer {
    std::map<std::string, int> slots;  // by worker
    int most = -1;                     // of them that may be used; -1: all
    // No ranks are placed there: host, and worker or "" for all of them.
    std::set<std::pair<std::string, std::string>> avoided;
    friend bool operator==(const Offer&, const Offer&) = default;
  };
  Offer offer(const ClusterView& view) const;
  // The placement of the newest generation once more, if all of its workers are
  // alive, leaving or not.
  std::optional<planner::Placement> place_as_before(
      const ClusterView& view) const;
  // Whether the job would stay on that placement: planned after it, the next
  // mesh is the same, with each rank on the same worker.
  bool stays_on(const ClusterView& view,
                const planner::Placement& placement) const;
  // A placement on the workers of that build on these hosts, leaving or not,
  // whatever a command asked for. With `fewer` slots than there are, the
  // largest worker giving up one at a time, so that a mesh may need all of the
  // hosts.
  std::optional<planner::Placement> place_on(const ClusterView& view,
                                             const std::string& build,
                                             const std::set<std::string>& hosts,
                                             int fewer) const;
  // How long no rescue may use the host, or this worker on it, from now;
  // nothing: ranks failed there too often.
  std::optional<int64_t> rescue_in_ms(const ClusterView& view,
                                      const std::string& host,
                                      const std::string& worker = "") const;
  // The builds of the workers that can be used. Ranks of two builds are never
  // mixed in a mesh: the first build is used, which offers the most slots or,
  // among equals, runs now. everyone: with those of workers that are leaving.
  std::vector<std::string> builds(const ClusterView& view, bool everyone) const;

  // Whether the running generation should stop, and why. No optional change is
  // wanted before not_before_ms.
  std::optional<MeshChange> wanted_change(const ClusterView& view,
                                          int64_t not_before_ms) const;
  // How the job differs from the one that the ranks of the newest generation
  // were started with: "train.steps 40 -> 80"; "" if it does not.
  const std::string& job_change(const pb::Durable& durable) const;
  // Whether the choice of a mesh depends on what the hosts' cores do.
  bool wants_hardware() const;
  // Whether to wait for workers that have joined and may still report it.
  bool awaits_hardware(const ClusterView& view) const;
  // The same, or for others: somebody joined within elastic.join_window_ms.
  bool awaits_joins(const ClusterView& view) const;

  // Commands: pin this layout ("auto": none) or use this number of slots (0:
  // all). Return whether that changes the request, which is the view's; a
  // command that is refused changes nothing.
  Result<bool> pin(const ClusterView& view, const std::string& layout,
                   pb::MeshRequest* request) const;
  Result<bool> scale(const ClusterView& view, int64_t slots,
                     pb::MeshRequest* request) const;
  // Notes that the mesh that a command asked for is the present one, now that
  // workers have left. Returns whether that is new.
  bool note_fulfilled(const ClusterView& view, pb::MeshRequest* request) const;
  // Whether a command may ask for this layout now.
  Status check_layout(const ClusterView& view,
                      const geometry::Layout& layout) const;
  // Whether some mesh of the job uses at most this number of slots, however
  // many there are; 0 means all slots and is always allowed.
  Status check_scale(const ClusterView& view, int64_t slots) const;

 private:
  // Whether no ranks are placed on the worker now.
  bool is_set_aside(const ClusterView& view, const std::string& host,
                    const std::string& worker, bool everyone) const;
  bool is_usable(const ClusterView& view, const std::string& worker,
                 const Roster::Member& member, bool everyone) const;
  // Notes in the request whether all that was asked for leads to another mesh
  // than the present one.
  void note_change(const ClusterView& view, pb::MeshRequest* request) const;
  std::optional<MeshChange> change_for_search(const ClusterView& view) const;
  bool wants_to_weigh(const ClusterView& view) const;
  bool time_to_look(const ClusterView& view) const;
  std::optional<std::string> gain_of(const ClusterView& view,
                                     const geometry::Layout& here,
                                     const geometry::Layout& wanted) const;
  planner::PlacementRequest request(const ClusterView& view) const;
  // everyone: also workers that are leaving or cordoned, and no limit from
  // scale.
  planner::PlacementRequest request(const ClusterView& view,
                                    const std::string& build,
                                    bool everyone) const;
  Result<planner::Placement> place(
      const planner::PlacementRequest& request) const;

  pb::Job job_;
  std::optional<planner::JobShape> shape_;
  planner::PlacementRequest asked_;  // of no workers
  bool chooses_axes_ = false;        // those of the model
  // The answers to the last requests, which are repeated at every input.
  mutable std::vector<
      std::pair<planner::PlacementRequest, Result<planner::Placement>>>
      cache_;
  mutable int64_t next_look_ms_ = 0;
  mutable int64_t compared_generation_ = 0;
  mutable std::string job_change_;
};

}  // namespace remesh::core
