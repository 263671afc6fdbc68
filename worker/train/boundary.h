// What is decided at a step boundary: stop or go on, begin a checkpoint, commit
// one. Pure: functions of the agreed facts (agreement.h), which are the same on
// every rank, so every rank takes the same decision without asking.
#pragma once

#include <cstdint>
#include <optional>

#include "worker/engine/agreement.h"

namespace remesh::train {

using engine::Facts;

// Whether to stop here, and whether to save first: it is saved when any rank
// was asked to; else the state is handed over in memory.
//
// A stop that could not save is refused once, not at every step: it is
// forgotten until nobody asks any more, or somebody insists. A hand-over has
// nothing that could fail, and so is never refused.
class StopPolicy {
 public:
  enum class Answer { kGoOn, kStop, kMustStop };
  Answer on_step(const Facts& agreed);
  // Of the last answer. False: a hand-over, or no stop at all.
  bool saves() const { return saves_; }
  // The stop just answered was refused since saving failed. REQUIRES: saves().
  void refused();

 private:
  bool refused_ = false;
  bool saves_ = false;
};

// The life of background saves, at most one at a time:
//   idle -> writing (every rank its shard) -> ending (rank 0 commits, or
//   removes what was written when a rank failed) -> idle
class SavePlan {
 public:
  enum class Phase { kIdle, kWriting, kEnding };
  struct Options {
    int64_t interval = 0;     // steps; 0: only when asked for
    int world = 1;            // ranks that write
    int64_t saved_step = -1;  // newest committed step there is; -1: none
  };
  struct Decision {
    bool commit = false;        // rank 0: complete the save under way
    bool abandon = false;       // rank 0: remove it; a shard failed
    std::optional<bool> ended;  // it ended; true: it counts
    int64_t ended_step = 0;
    bool begin = false;    // begin a save of this step now
    bool skipped = false;  // one became due, and the one before is not done
  };

  explicit SavePlan(const Options& options)
      : options_(options),
        saved_step_(options.saved_step),
        begun_step_(options.saved_step) {}

  // After step `step`. `stops_here`: none is begun, since a synchronous save or
  // the end follows.
  //
  // A save is due when a multiple of the interval has gone by since the newest
  // one that was begun here or committed before. So one that was skipped is
  // made up for as soon as none is under way, and one that the generation
  // before could not finish at once; one that failed is not tried again before
  // the next multiple. A checkpoint asked for by number is begun as soon as
  // none is under way.
  Decision on_step(int64_t step, const Facts& agreed, bool stops_here);

  // The same transitions for a save that everybody waits for.
  // REQUIRES: idle.
  void begin(int64_t step);
  // REQUIRES: writing; all shards are written or failed.
  void written();
  // REQUIRES: ending.
  void ended(bool counts);

  Phase phase() const { return phase_; }
  int64_t saving_step() const { return saving_step_; }
  // Newest step that is in a committed checkpoint of this run, or -1.
  int64_t saved_step() const { return saved_step_; }

 private:
  bool due(int64_t step) const;

  Options options_;
  Phase phase_ = Phase::kIdle;
  int64_t saving_step_ = -1;
  int64_t saved_step_;
  int64_t begun_step_;
  double served_request_ = 0;
};

}  // namespace remesh::train
