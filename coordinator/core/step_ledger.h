// StepLedger: which steps are finished, and their metrics. A step is finished
// once: in order, after every rank has committed it, or when a state that
// includes it is restored.
//
// Metrics are kept by the generation that made the step, because the same step
// computed again on another mesh has other values. They come from reports,
// which prove nothing by themselves, and from the newest steps that a committed
// checkpoint lists, which proves that every rank committed them.
//
// A value without I/O: methods return what to append to the metrics log.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "coordinator/core/api.h"

namespace remesh::core {

class StepLedger {
 public:
  // A finished step, or steps whose metrics are lost, or both: the gap comes
  // before the step.
  struct Entry {
    int64_t gap_first = 0;  // 0: no gap
    int64_t gap_last = 0;
    std::optional<pb::StepMetrics> metrics;
  };
  using Entries = std::vector<Entry>;

  // Twice the losses that a rank looks back at (worker/train/step_policy.h).
  static constexpr int64_t kRecentUpdates = 128;

  StepLedger() = default;
  // recent: the newest of the metrics log, in order. branches: as journaled.
  StepLedger(int64_t last_finished, const std::vector<pb::StepMetrics>& recent,
             std::vector<FirstStep> first_steps,
             const pb::Branches& branches = {});

  // A step of a generation's history that another one made: the newest of them.
  struct Origin {
    int64_t generation = 0;
    int64_t step = 0;
  };

  // A generation continues from a state in memory, if its source is one: its
  // history has the steps up to that, which may not be finished yet. Notes it,
  // also for the journal.
  void continue_from_source(const pb::Assignment& assignment,
                            pb::Branches* branches);
  // Where the generation continued, if the step there is not finished and not
  // beyond `step`.
  std::optional<Origin> origin(int64_t generation, int64_t step) const;

  void report(const pb::StepMetrics& metrics);
  // Of a generation that the journal may have forgotten.
  void report(const pb::Branches::Origin& origin);
  // Replaces what earlier scans proved.
  void prove(const std::vector<CheckpointInfo>& checkpoints);
  // Finishes the reported steps of the generation up to the committed one.
  Entries advance(int64_t generation, int64_t committed);
  // Finishes all steps up to the one of a restored state of the generation.
  Entries restore(int64_t generation, int64_t step);
  // The steps up to a state of `generation` are to be finished, from which
  // generation `next` continues. Generations between the two began before that:
  // their versions of these steps are their own. Abandons them, also for the
  // journal; false if there are none.
  bool abandon_between(int64_t generation, int64_t step, int64_t next,
                       pb::Branches* branches);
  void forget_finished();

  // The last step before and including which all metrics of the generation's
  // history are known.
  int64_t last_known(int64_t generation) const;
  int64_t last_finished() const { return last_finished_; }
  // The metrics of the newest finished step that has any; null: none has.
  const pb::StepMetrics* last_metrics() const {
    return recent_.empty() ? nullptr : &recent_.back();
  }
  // The newest steps up to that one of a state of `generation` of which
  // kRecentUpdates made their update, in order, as the newest generation made
  // them, without those whose metrics are lost. The newest of the checkpoints
  // up to that step has older ones.
  std::vector<pb::StepMetrics> before(
      int64_t generation, int64_t step,
      const std::vector<CheckpointInfo>& checkpoints) const;
  const std::vector<FirstStep>& first_steps() const { return first_steps_; }

 private:
  using Steps = std::map<int64_t, pb::StepMetrics>;

  const pb::StepMetrics* find(int64_t generation, int64_t step) const;
  Entry finish(const pb::StepMetrics& metrics);
  void remember(const pb::StepMetrics& metrics);
  void redo(const pb::StepMetrics& metrics);
  // The generation that finished the step; 0: not known.
  int64_t finisher(int64_t step) const;

  static constexpr size_t kMostRecent = 4096;
  static constexpr size_t kMostGenerations = 64;
  int64_t last_finished_ = 0;
  // The newest finished ones, and those that were made again.
  std::deque<pb::StepMetrics> recent_;
  Steps redone_;
  int64_t recent_updates_ = 0;
  std::vector<FirstStep> first_steps_;
  // By generation, then by step; only steps that are not finished. Reports may
  // also concern earlier generations: a worker that was silent may return with
  // newer steps than the log has, and with their state.
  std::map<int64_t, Steps> reported_, proven_;
  std::map<int64_t, Origin> origins_;  // by generation
};

}  // namespace remesh::core
