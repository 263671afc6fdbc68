// Decisions at a step boundary: stop or continue, begin or commit a checkpoint.
// Pure functions of the agreed votes (agreement.h), which are the same on every
// rank, so every rank makes the same decision without communication.
#pragma once

#include <cstdint>
#include <optional>

#include "worker/engine/agreement.h"

namespace remesh::train {

using engine::StepVotes;

// Decides whether to stop, and whether to save first. The state is saved if any
// rank was asked to save; otherwise it is handed off in memory.
//
// If saving fails, the stop is declined once rather than at every step: it is
// ignored until the request is withdrawn or becomes forced. An in-memory
// handoff cannot fail, so it is never declined.
class StopPolicy {
 public:
  enum class Answer { kContinue, kStop, kMustStop };
  Answer on_step(const StepVotes& agreed);
  // Whether the last answer saves. False: a handoff, or no stop.
  bool saves() const { return saves_; }
  // The last stop was declined because saving failed. REQUIRES: saves().
  void declined();

 private:
  bool declined_ = false;
  bool saves_ = false;
};

// The state machine of background saves, at most one at a time:
//   idle -> writing (every rank writes its shard) -> ending (rank 0 commits, or
//   removes the files if a rank failed) -> idle
class SavePlan {
 public:
  enum class Phase { kIdle, kWriting, kEnding };
  struct Options {
    int64_t interval = 0;     // steps; 0: only on request
    int world = 1;            // number of ranks that write
    int64_t saved_step = -1;  // newest committed step; -1: none
  };
  struct Decision {
    bool commit = false;        // rank 0: commit the current save
    bool abandon = false;       // rank 0: remove it, since a shard failed
    std::optional<bool> ended;  // it ended; true: committed
    int64_t ended_step = 0;
    bool begin = false;    // begin a save of this step now
    bool skipped = false;  // one is due, but the previous one is not done
  };

  explicit SavePlan(const Options& options)
      : options_(options),
        saved_step_(options.saved_step),
        begun_step_(options.saved_step) {}

  // To be called after step `step`. With `stops_here` it begins no save, since
  // a synchronous save or the end follows.
  //
  // A save is due if a multiple of the interval has passed since the newest
  // save that was begun here or committed before. So a skipped save begins as
  // soon as the current one ends, and one that the previous generation did not
  // finish begins immediately. A failed one is not retried before the next
  // multiple. A requested checkpoint begins as soon as no save is in progress.
  Decision on_step(int64_t step, const StepVotes& agreed, bool stops_here);

  // The same transitions for a save for which all ranks wait.
  // REQUIRES: idle.
  void begin(int64_t step);
  // REQUIRES: writing; all shards are written or failed.
  void written();
  // REQUIRES: ending.
  void ended(bool committed);

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
