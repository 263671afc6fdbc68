// Gathering: when to look for a state from which the next generation starts:
// once there are slots for a mesh and nobody is worth waiting for.
//
// A value without I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "coordinator/core/cluster_view.h"
#include "coordinator/core/failure_budget.h"
#include "coordinator/core/mesh_policy.h"
#include "coordinator/core/recovery.h"
#include "coordinator/core/room.h"
#include "coordinator/core/state_retention.h"

namespace remesh::core {

// Whether the states in memory are known of all who are waited for.
bool states_known(const ClusterView& view);

class Gathering {
 public:
  // What a WAITING job waits for; `text` says it to people.
  struct Wait {
    pb::JobStatus::WaitReason reason = pb::JobStatus::NOTHING;
    std::string text = {};
    Shortages short_of = {};       // SHARED_MEMORY
    MeshPolicy::Offer offer = {};  // WORKERS
  };
  struct Next {
    bool scan = false;
    // Why there is no mesh, if that is to be announced: the job has waited for
    // nothing or for something else, or the workers offer something else now.
    std::optional<std::string> no_mesh;
    // Why there is none, however many workers join.
    std::optional<std::string> impossible;
  };

  // join_window_ms: elastic.join_window_ms.
  explicit Gathering(int64_t join_window_ms)
      : join_window_ms_(join_window_ms) {}

  // Notes whether workers still join. REQUIRES: called after every input.
  void observe(const Roster& roster, int64_t now_ms);
  // Who joined later is not waited for: INT64_MAX, until workers have joined
  // for too long.
  int64_t joined_by_ms(int64_t now_ms) const;
  // No generation is planned before that time.
  void back_off(int64_t until_ms) { not_before_ms_ = until_ms; }
  // What to do now while there is no generation. job_finished: all of its steps
  // are finished.
  Next next(const ClusterView& view, const MeshPolicy& policy,
            const StateRetention& retention, const Recovery& recovery,
            bool job_finished);
  // The scan that next() asked for is there; false if it did not.
  bool end_scan() { return std::exchange(scanning_, false); }
  // What the job waits for until a generation begins, other than for a mesh.
  void wait_for(Wait what) {
    waiting_for_ = std::move(what);
    lacks_mesh_ = false;
    no_mesh_ = {};
  }
  // Looks again in a second. False if the same hosts were short before.
  bool wait_for_room(const Shortages& short_of, int64_t now_ms);
  const Wait& waiting_for() const {
    return lacks_mesh_ ? no_mesh_ : waiting_for_;
  }

  // Whether the next generation may keep replicas of its states.
  bool replicas_fit() const { return replicas_fit_; }

  void begin_generation() {
    wait_for({});
    replicas_fit_ = true;
  }
  // verdict: on its failure, if it failed. Those who were there continue at
  // once; who comes later makes a planned change.
  void end_generation(const FailureVerdict& verdict, int64_t now_ms);

 private:
  const int64_t join_window_ms_;
  int64_t joining_since_ms_ = -1;  // -1: nobody joined lately
  int64_t last_join_ms_ = 0;       // that observe() has seen
  int64_t not_before_ms_ = 0;
  bool waits_for_joins_ = true;
  bool finish_checked_ = false;  // scanned for the last step's checkpoint
  bool scanning_ = false;
  bool replicas_fit_ = true;  // unless a rank found that there is no room
  Wait waiting_for_;
  bool lacks_mesh_ = false;
  Wait no_mesh_;  // for workers, while it does or before
};

}  // namespace remesh::core
