#include "worker/train/boundary.h"

#include <algorithm>

#include "proto/base/check.h"

namespace remesh::train {

StopPolicy::Answer StopPolicy::on_step(const StepVotes& agreed) {
  const bool asked = agreed.stop > 0 || agreed.must_stop > 0;
  const bool handoff = asked && agreed.stop_saves <= 0;
  if (!asked) declined_ = false;
  const Answer answer = agreed.must_stop > 0                ? Answer::kMustStop
                        : !asked || (declined_ && !handoff) ? Answer::kContinue
                                                            : Answer::kStop;
  saves_ = answer != Answer::kContinue && !handoff;
  return answer;
}

void StopPolicy::declined() {
  CHECK(saves_);
  declined_ = true;
}

SavePlan::Decision SavePlan::on_step(int64_t step, const StepVotes& agreed,
                                     bool stops_here) {
  Decision d;
  if (phase_ == Phase::kWriting && agreed.shard_saved + agreed.shard_failed ==
                                       static_cast<double>(options_.world)) {
    d.commit = agreed.shard_failed == 0;
    d.abandon = !d.commit;
    written();
  } else if (phase_ == Phase::kEnding &&
             agreed.committed + agreed.gave_up > 0) {
    d.ended = agreed.committed > 0;
    d.ended_step = saving_step_;
    ended(*d.ended);
  }
  if (stops_here) return d;
  const bool asked = agreed.checkpoint_request > served_request_;
  if (!due(step) && !asked) return d;
  if (phase_ == Phase::kIdle) {
    d.begin = true;
    served_request_ = agreed.checkpoint_request;
    begin(step);
  } else {
    d.skipped = options_.interval > 0 && step % options_.interval == 0;
  }
  return d;
}

bool SavePlan::due(int64_t step) const {
  const int64_t n = options_.interval;
  return n > 0 && step / n > std::max<int64_t>(begun_step_, 0) / n;
}

void SavePlan::begin(int64_t step) {
  CHECK(phase_ == Phase::kIdle);
  phase_ = Phase::kWriting;
  saving_step_ = begun_step_ = step;
}

void SavePlan::written() {
  CHECK(phase_ == Phase::kWriting);
  phase_ = Phase::kEnding;
}

void SavePlan::ended(bool committed) {
  CHECK(phase_ == Phase::kEnding);
  phase_ = Phase::kIdle;
  if (committed) saved_step_ = saving_step_;
  saving_step_ = -1;
}

}  // namespace remesh::train
