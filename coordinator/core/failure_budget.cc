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

void count_failure(const Failure& f, int64_t last_finished, pb::Durable* d) {
  if (last_finished > d->finished_at_failure()) reset_failures(d);
  d->set_finished_at_failure(last_finished);
  d->set_failures(d->failures() + 1);
  const bool same = f.rank >= 0 && d->last_failure_rank() == f.rank &&
                    d->last_failure_step() == f.step;
  d->set_same_failures(same ? d->same_failures() + 1 : 1);
  const std::string host = f.hosts.empty() ? "" : f.hosts[0];
  if (!same || f.before_training) d->set_last_failure_hosts(0);
  if (d->last_failure_hosts() == 0 || host != d->last_failure_host())
    d->set_last_failure_hosts(d->last_failure_hosts() + 1);
  d->set_last_failure_host(host);
  d->set_last_failure_rank(f.rank);
  d->set_last_failure_step(f.step);
}

FailureVerdict judge_failure(const Failure& f, const pb::Elastic& elastic,
                             Consequence consequence, pb::Durable* d) {
  FailureVerdict v;
  const bool cordoned = consequence == Consequence::kCordoned;
  const bool hosts_alone = cordoned || consequence == Consequence::kHostsAlone;
  // It says nothing about the job then: such failures end with the back-off of
  // the cordons. But if the same rank crashes in the same step on host after
  // host, it is the step.
  const int64_t most = elastic.max_failures_without_progress();
  const bool counts = !hosts_alone || !f.at_start;
  const bool follows_rank = d->last_failure_hosts() >= most;
  if (hosts_alone) d->set_same_failures(0);
  if (!counts) d->set_failures(d->failures() - 1);
  // The same mesh is tried once more, without replicas.
  const bool no_room =
      f.exit_code == kExitNoRoom && consequence == Consequence::kNone;
  const bool from_memory =
      d->assignment().source().kind() == pb::Source::MEMORY;
  if (!hosts_alone &&
      (source_is_bad(f, d->assignment()) || (no_room && from_memory))) {
    v.bad_source = true;
    d->set_same_failures(0);  // the next source is a different one
  }
  if (!counts && !follows_rank) {
    const auto& all = d->suspects();
    const auto hosts =
        std::count_if(all.begin(), all.end(), [&](const auto& c) {
          return c.peer().empty() && c.failures() == 1 &&
                 !is_cordoned(*d, c.host());
        });
    if (!cordoned)
      v.backoff_ms = std::min(kMaxHostsBackoffMs, backoff_ms(hosts));
    return v;
  }
  if (!hosts_alone &&
      (f.exit_code == kExitFailed || (no_room && !from_memory))) {
    v.reason = f.text();
  } else if (f.rank >= 0 && d->same_failures() >= elastic.max_same_failures()) {
    v.reason = fmt::format("{} (the same failure {} times at step {})",
                           f.text(), d->same_failures(), f.step);
  } else if (follows_rank) {
    v.reason = fmt::format("{} (the same rank failed at step {} on {} hosts)",
                           f.text(), f.step, d->last_failure_hosts());
  } else if (d->failures() >= most) {
    v.reason =
        fmt::format("{} (the last of {} failures without a finished step)",
                    f.text(), d->failures());
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
