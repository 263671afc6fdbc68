#include "coordinator/core/failure_budget.h"

#include <fmt/format.h>

#include <algorithm>

#include "coordinator/core/cordons.h"
#include "proto/base/exit_code.h"

namespace remesh::core {
namespace {

constexpr int64_t kFailuresBeforeBackoff = 3;
constexpr int64_t kFirstBackoffMs = 250;
constexpr int64_t kMaxBackoffMs = 30'000;

// What fails at the start may do so everywhere, for a short time.
constexpr int64_t kMaxHostsBackoffMs = 1000;

int64_t backoff_ms(int64_t failures) {
  if (failures < kFailuresBeforeBackoff) return 0;
  const int64_t doublings =
      std::min<int64_t>(failures - kFailuresBeforeBackoff, 10);
  return std::min(kMaxBackoffMs, kFirstBackoffMs << doublings);
}

}  // namespace

void count_failure(const pb::Cause& f, int64_t last_finished,
                   int64_t source_step, pb::FailureBudget* b) {
  if (last_finished > b->finished_step()) {
    reset_failures(b);
    b->set_setbacks(0);
    source_step = last_finished;  // from where others may fall back
  } else if (source_step > b->source_step()) {
    reset_failures(b);
  } else if (source_step < b->source_step()) {
    b->set_setbacks(b->setbacks() + 1);
  }
  b->set_finished_step(last_finished);
  b->set_source_step(source_step);
  b->set_failures(b->failures() + 1);
  const bool same =
      f.rank() >= 0 && b->last_rank() == f.rank() && b->last_step() == f.step();
  b->set_same_failures(same ? b->same_failures() + 1 : 1);
  const std::string host = f.hosts().empty() ? "" : f.hosts(0);
  if (!same || f.before_training()) b->set_last_hosts(0);
  if (b->last_hosts() == 0 || host != b->last_host())
    b->set_last_hosts(b->last_hosts() + 1);
  b->set_last_host(host);
  b->set_last_rank(f.rank());
  b->set_last_step(f.step());
}

FailureVerdict judge_failure(const pb::Cause& f, const pb::Elastic& elastic,
                             Consequence consequence, const pb::Source& source,
                             const pb::HostFaults& faults,
                             pb::FailureBudget* b) {
  FailureVerdict v;
  const bool cordoned = consequence == Consequence::kCordoned;
  const bool others_can_run =
      cordoned || consequence == Consequence::kOthersCanRun;
  // It says nothing about the job then: such failures end with the back-off of
  // the cordons. But if the same rank crashes in the same step on host after
  // host, it is the step.
  const int64_t most = elastic.max_failures_without_progress();
  const bool counts = !others_can_run || !f.at_start();
  // Hosts that failed one after another may all be at fault, not the job.
  const bool others_may_start =
      f.before_training() && consequence == Consequence::kSuspected &&
      std::ranges::none_of(faults.suspects(), [&](const pb::Cordon& c) {
        return std::ranges::count(f.hosts(), c.host()) > 0 &&
               c.failures() >= b->same_failures();
      });
  const bool follows_rank = b->last_hosts() >= most;
  if (others_can_run) b->set_same_failures(0);
  if (!counts) b->set_failures(b->failures() - 1);
  // Others take room, too, and return it: the next mesh waits until there is
  // enough. An older source makes room if this one is in memory.
  const bool no_room = f.exit_code() == kExitNoRoom &&
                       consequence == Consequence::kNone &&
                       source.kind() == pb::Source::MEMORY;
  if (!others_can_run && (source_is_bad(f, source) || no_room)) {
    v.bad_source = true;
    b->set_same_failures(0);  // the next source is a different one
  }
  if (!counts && !follows_rank) {
    const auto& all = faults.suspects();
    const auto hosts = std::ranges::count_if(all, [&](const auto& c) {
      return c.peer().empty() && !c.in_training() && c.failures() == 1 &&
             !is_cordoned(faults, c.host(), c.worker());
    });
    if (!cordoned)
      v.backoff_ms = std::min(kMaxHostsBackoffMs, backoff_ms(hosts));
    return v;
  }
  if (!others_can_run && f.exit_code() == kExitFailed) {
    v.reason = text_of(f);
  } else if (f.rank() >= 0 && !others_may_start &&
             b->same_failures() >= elastic.max_same_failures()) {
    v.reason = fmt::format(
        "{} (the same failure {} times {})", text_of(f), b->same_failures(),
        f.before_training() ? "before training began"
                            : fmt::format("at step {}", f.step()));
  } else if (follows_rank) {
    v.reason = fmt::format("{} (the same rank failed at step {} on {} hosts)",
                           text_of(f), f.step(), b->last_hosts());
  } else if (b->setbacks() >= most) {
    v.reason = fmt::format(
        "{} (the state was lost {} times without a newly finished step)",
        text_of(f), b->setbacks());
  } else if (b->failures() >= most && !cordoned) {
    v.reason =
        fmt::format("{} (the last of {} failures without a finished step)",
                    text_of(f), b->failures());
  } else {
    if (!cordoned) v.backoff_ms = backoff_ms(b->failures());
    return v;
  }
  v.give_up = true;
  return v;
}

int64_t wait_for_storage_ms(int64_t n) {
  return backoff_ms(n + kFailuresBeforeBackoff - 1);
}

void reset_failures(pb::FailureBudget* budget) {
  budget->set_failures(0);
  budget->set_same_failures(0);
}

}  // namespace remesh::core
