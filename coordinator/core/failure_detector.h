// FailureDetector: whether the running generation has failed, and why. It looks
// for ranks that ended, for participants that are gone, and for ranks that make
// no progress, in this order; cause.h tells the culprit from its victims.
//
// A value without I/O; its only state is the recent step times, from which the
// time limit for progress follows.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "coordinator/core/cause.h"
#include "coordinator/core/cluster_view.h"
#include "proto/control.pb.h"

namespace remesh::core {

// The generation's ranks as their workers last reported them.
std::vector<RankView> rank_views(const ClusterView& view);
// Whether a worker killed one of them.
bool killed_by_worker(const ClusterView& view);

class FailureDetector {
 public:
  explicit FailureDetector(const pb::Elastic& elastic) : elastic_(elastic) {}

  void end_generation() { has_stepped_ = false; }
  // The generation committed a step, possibly one that is computed again.
  // Whether it is the first.
  bool note_progress() { return !std::exchange(has_stepped_, true); }
  void note_step(double seconds);
  bool has_stepped() const { return has_stepped_; }

  std::optional<pb::Cause> find(const ClusterView& view) const;
  // A participant with ranks that is dead or has been restarted.
  std::optional<pb::Cause> find_lost_worker(const ClusterView& view) const;
  // Why a generation cannot be prepared: a lost worker, a lost part of its
  // source, or a journal that is older than what its workers know. adopted: it
  // was started in an earlier life of the coordinator; forgiving: workers may
  // still have to find this one.
  std::optional<pb::Cause> find_unprepared(const ClusterView& view,
                                           bool adopted, bool forgiving) const;
  // A worker that has ended the generation that the journal says runs, and was
  // told to wait for the next one: the journal is older than that. It would be
  // waited for without end.
  std::optional<pb::Cause> find_ended_before(const ClusterView& view) const;
  // The first cause once all reports of the abort are in: victims of a death
  // can be reported before it is.
  pb::Cause settle(const pb::Cause& noticed, const ClusterView& view) const;
  // While a generation is aborted: whether it is known why its ranks could not
  // load their source, if that is the cause.
  bool source_fate_known(const ClusterView& view) const;

  // A worker that has not reported for this long may have any progress.
  int64_t silent_ms() const;

 private:
  std::optional<pb::Cause> find_exit(const ClusterView& view) const;
  std::optional<pb::Cause> find_hang(const ClusterView& view) const;
  int64_t hang_after_ms(const ClusterView& view) const;

  pb::Elastic elastic_;
  std::deque<double> step_times_;  // seconds, of the last steps
  bool has_stepped_ = false;       // in this generation
};

}  // namespace remesh::core
