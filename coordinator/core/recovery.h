// Recovery: which state a new generation starts from, and why. The newest step
// that is complete wins, in the memory of the workers before checkpoints
// (state_choice.h); this file gathers the candidates and handles the cases in
// which the next mesh cannot reach the newest state:
//  * the workers that hold it are gone but may return: wait for them, up to
//    elastic.rejoin_wait_ms, in which they could be heard;
//  * it is on workers that are leaving or become spares: a rescue generation
//    runs once where the state is, and saves it;
//  * the listing lacks a checkpoint that was committed, which network file
//    systems do for as long as they cache it: scan again, for up to 30 s;
//  * the storage returns an error for a newer checkpoint: scan again, for up to
//    10 minutes, or for as long as there is nothing else to start from.
//
// A value without I/O; its only state is what it waits for, and since when.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "coordinator/core/api.h"
#include "coordinator/core/cluster_view.h"
#include "coordinator/core/mesh_policy.h"
#include "coordinator/core/state_choice.h"
#include "coordinator/core/step_ledger.h"
#include "parallel/geometry/param_table.h"

namespace remesh::core {

// The newest generation that the journal or a checkpoint knows.
int64_t newest_generation(const CheckpointsScanned& scan, int64_t journaled);

// One line for people: where a generation's state comes from.
std::string source_text(const pb::Source& source);

// Whether this checkpoint failed to load before.
bool refuses(const pb::Refusals& refusals, const std::string& checkpoint);

// Records that the source of the newest generation did not load, so that it is
// not chosen again. A state in memory of which a part is gone is not recorded:
// without that part another choice is made anyway.
void refuse_source(const pb::Source& source, const Roster& roster,
                   pb::Refusals* refusals);

// Whether every live holder of a part of that source has reported since its
// ranks ended: one that has not may be lost, and its part with it.
bool holders_answered(const ClusterView& view);

// Whether checkpoints did not load and the placement has a host on which no
// rank of the newest generation was. They may be sound, and the others bad, so
// they are not refused any more.
bool try_elsewhere(const planner::Placement& placement, const ClusterView& view,
                   pb::Refusals* refusals);

// `worker` was found dead. If it held a part of that source, this explains why
// the source did not load, and others may have what is needed. Returns whether
// the record changed.
bool forgive_source(const pb::Source& source, const std::string& worker,
                    pb::Refusals* refusals);

// A checkpoint that was refused because it could not be read is tried again.
// False if there is none.
bool forgive_unreadable(pb::Refusals* refusals);

// The checkpoint of that step was saved once more.
void forgive_checkpoint(int64_t step, pb::Refusals* refusals);

// Whether the workers that hold the parts of the generation's source say so.
bool source_is_there(const Roster& roster, const pb::Source& source);

// The first worker that has lost a part of the generation's source: it is dead,
// or says that it does not have it; "" if none. forgiving: workers that have
// not reported to this life of the coordinator yet may still do so.
std::string lost_source(const ClusterView& view, bool forgiving);

class Recovery {
 public:
  struct Inputs {
    const ClusterView& view;
    const StepLedger& ledger;
    const CheckpointsScanned& scan;
    const MeshPolicy& policy;
    // Workers with a part of the newest state that are not here.
    std::set<std::string> missing_holders;
  };
  struct Decision {
    enum class Kind { kRestore, kWait, kGiveUp };
    Kind kind = Kind::kRestore;
    // kGiveUp: the reason. kWait: for what, unless that was announced before.
    std::optional<std::string> why;
    int64_t rescan_ms = 0;  // kWait: scan again after this time
    // kRestore: the source and the placement, which differs from the wanted
    // one in a rescue.
    pb::Source source;
    int64_t generation = 0;  // that made the state; 0 if unknown or none
    planner::Placement placement;
    bool rescue = false;
  };

  // table: of the model whose states are kept in memory; nothing if the job
  // keeps none.
  Recovery(const pb::Job& job, std::optional<geometry::ParamTable> table);

  Decision decide(const Inputs& in, const planner::Placement& wanted);
  // Whether decide() asked to wait and nothing has changed since.
  bool waiting(const ClusterView& view,
               const std::set<std::string>& missing) const;
  void begin_generation() {
    awaited_.clear();
    had_time_.clear();
    awaits_rescue_ = false;
    listing_late_since_ms_ = unreadable_since_ms_ = -1;
  }
  // Null if it was made without one.
  const geometry::ParamTable* table() const {
    return table_ ? &*table_ : nullptr;
  }

  // The newest state, on whatever hosts.
  StateChoice newest(const Inputs& in) const;
  // The checkpoint of the last step, with which the job is done, whatever is
  // newer in memory or has a gap in its metrics; initial weights: there is
  // none.
  StateChoice saved_end(const Inputs& in) const;

 private:
  struct Option;  // a placement and the newest state it can start from

  // What may be restored. choose() sets its hosts.
  Inventory gather(const Inputs& in) const;
  StateChoice choose(Inventory& candidates, const Inputs& in,
                     const std::set<std::string>& hosts) const;
  std::optional<Option> rescue(Inventory& candidates, const Inputs& in,
                               const Option& option) const;
  std::set<std::string> hosts_needed(Inventory& candidates, const Inputs& in,
                                     int64_t step,
                                     const std::string& build) const;
  std::optional<std::string> no_checkpoint(const Inputs& in) const;
  std::optional<std::string> missing_checkpoint(const Inputs& in,
                                                int64_t chosen) const;
  // Whether a newer state than the best that can be read now may come within
  // reach soon (rescue_wait.cc).
  bool await_newer(Inventory& candidates, const Inputs& in,
                   const StateChoice& best, Decision* out);
  bool await_holders(const Inputs& in, const StateChoice& best, Decision* out);
  bool await_rescue(Inventory& candidates, const Inputs& in,
                    const StateChoice& best, Decision* out);
  int64_t time_left_ms(const ClusterView& v) const {  // to wait for holders
    return awaited_until_ms_ + v.roster.absent_ms() - v.now_ms;
  }
  bool await_listing(const Inputs& in, int64_t chosen,
                     const std::optional<std::string>& missing, Decision* out);
  bool await_readable(const Inputs& in, const StateChoice& chosen,
                      Decision* out);

  pb::Job job_;
  std::optional<geometry::ParamTable> table_;
  std::set<std::string> awaited_;
  std::set<std::string> had_time_;  // were missing: each prolongs it once
  int64_t awaited_until_ms_ = 0;    // less roster.absent_ms(), which adds to it
  int64_t listing_late_since_ms_ = -1;
  int64_t unreadable_since_ms_ = -1;
  bool awaits_rescue_ = false;
};

}  // namespace remesh::core
