// The failure budget: whether the job tries again after a failure, when, or
// gives up. Pure.
//
// The job gives up when a rank says that it cannot continue, when the same rank
// fails at the same step elastic.max_same_failures times in a row, or after
// elastic.max_failures_without_progress failures without a finished step. While
// hosts remain that have not failed, those that have are cordoned instead
// (cordons.h), and what fails on them before a step is not counted: however
// many there are, each of them fails a few times. But if the same rank crashes
// in the same step on so many hosts one after another, the job gives up. Ranks
// that end because a checkpoint could not be saved, or because no host can read
// the data set or the checkpoint, are no such failure: the job waits for room
// or for the storage, however long it takes.
//
// Functions of pb::FailureBudget, which the journal keeps.
#pragma once

#include <cstdint>
#include <string>

#include "coordinator/core/cause.h"
#include "proto/control.pb.h"

namespace remesh::core {

struct FailureVerdict {
  bool unsaved = false;     // the ranks could not save; the rest is not set
  bool unreadable = false;  // no host could read its inputs; no failure
  bool give_up = false;
  std::string reason;      // why, if give_up
  int64_t backoff_ms = 0;  // until the next attempt, otherwise
  // The source that the generation started from did not load.
  bool bad_source = false;
  // A rank found that there is no room for its states, and no host is cordoned
  // for that.
  bool no_room = false;
};

// What a failure means for the sites (cordons.h) that it is put down to.
enum class Consequence {
  kNone,
  kSuspected,     // counted there; not often enough for a cordon
  kOthersCanRun,  // the same, and others could run the job in their place
  kCordoned,      // the next generation runs without them
};

// Counts the failure. When a step was finished since the failure before, the
// count begins again; last_finished comes from the metrics log, so that this
// holds across restarts of the coordinator. So it does while lost steps are
// made again, when the generation that failed had begun at a later step than
// the one before it; how often it began at an earlier one is counted, too.
void count_failure(const pb::Cause& failure, int64_t last_finished,
                   int64_t source_step, pb::FailureBudget* budget);
// source, faults: of the generation that failed; of the hosts, with this
// failure. REQUIRES: the failure is counted.
FailureVerdict judge_failure(const pb::Cause& failure,
                             const pb::Elastic& elastic,
                             Consequence consequence, const pb::Source& source,
                             const pb::HostFaults& faults,
                             pb::FailureBudget* budget);

// Until the next attempt after the storage has failed n times in a row (n >=
// 1), when a checkpoint was saved or the inputs were read.
int64_t wait_for_storage_ms(int64_t n);

// Failures in a row are counted from zero again.
void reset_failures(pb::FailureBudget* budget);

}  // namespace remesh::core
