#include "coordinator/core/failure_budget.h"

#include <fmt/format.h>

#include <algorithm>

#include "proto/base/exit_code.h"

namespace remesh::core {
namespace {

constexpr int64_t kFailuresBeforeBackoff = 3;
constexpr int64_t kFirstBackoffMs = 250;
constexpr int64_t kMaxBackoffMs = 30'000;

int64_t backoff_ms(int64_t failures) {
  if (failures < kFailuresBeforeBackoff) return 0;
  const int64_t doublings =
      std::min<int64_t>(failures - kFailuresBeforeBackoff, 10);
  return std::min(kMaxBackoffMs, kFirstBackoffMs << doublings);
}

}  // namespace

void count_failure(const Failure& f, int64_t last_finished, pb::Durable* d) {
  if (last_finished > d->finished_at_failure()) reset_failures(d);
  d->set_finished_at_failure(last_finished);
  d->set_failures(d->failures() + 1);
  const bool same = f.rank >= 0 && d->last_failure_rank() == f.rank &&
                    d->last_failure_step() == f.step;
  d->set_same_failures(same ? d->same_failures() + 1 : 1);
  d->set_last_failure_rank(f.rank);
  d->set_last_failure_step(f.step);
}

FailureVerdict judge_failure(const Failure& f, const pb::Elastic& elastic,
                             Consequence consequence, pb::Durable* d) {
  FailureVerdict v;
  const bool cordoned = consequence == Consequence::kCordoned;
  if (cordoned) {
    d->set_same_failures(0);
    // It says nothing about the step. Such failures end with the back-off of
    // the cordon, not with the job.
    if (f.before_training) d->set_failures(d->failures() - 1);
  }
  // The same mesh is tried once more, without replicas.
  const bool no_room =
      f.exit_code == kExitNoRoom && consequence != Consequence::kSuspected;
  const bool from_memory =
      d->assignment().source().kind() == pb::Source::MEMORY;
  if (!cordoned &&
      (f.exit_code == kExitBadSource || (no_room && from_memory))) {
    v.bad_source = true;
    d->set_same_failures(0);  // the next source is a different one
  }
  if (!cordoned && (f.exit_code == kExitFailed || (no_room && !from_memory))) {
    v.reason = f.text;
  } else if (f.rank >= 0 && d->same_failures() >= elastic.max_same_failures()) {
    v.reason = fmt::format("{} (the same failure {} times at step {})", f.text,
                           d->same_failures(), f.step);
  } else if (d->failures() >= elastic.max_failures_without_progress()) {
    v.reason =
        fmt::format("{} (the last of {} failures without a finished step)",
                    f.text, d->failures());
  } else {
    if (!cordoned) v.backoff_ms = backoff_ms(d->failures());
    return v;
  }
  v.give_up = true;
  return v;
}

int64_t wait_for_room_ms(int64_t n) {
  return backoff_ms(n + kFailuresBeforeBackoff - 1);
}

void reset_failures(pb::Durable* durable) {
  durable->set_failures(0);
  durable->set_same_failures(0);
}

}  // namespace remesh::core
