#include "coordinator/core/gathering.h"

#include <utility>

namespace remesh::core {

bool states_known(const ClusterView& view) {
  return view.roster.inventories_known(view.durable.generation(),
                                       view.joined_by_ms);
}

void Gathering::observe(const Roster& roster, int64_t now_ms) {
  const int64_t previous = std::exchange(last_join_ms_, roster.last_join_ms());
  if (now_ms - last_join_ms_ >= join_window_ms_)
    joining_since_ms_ = -1;
  else if (joining_since_ms_ < 0 ||
           last_join_ms_ - previous >= join_window_ms_)  // a stall ended
    joining_since_ms_ = now_ms;
}

// Daemons that crash in a loop and a busy spot market must not delay the others
// without end.
int64_t Gathering::joined_by_ms(int64_t now_ms) const {
  constexpr int64_t kMostWindows = 10;
  return joining_since_ms_ >= 0 &&
                 now_ms - joining_since_ms_ >= kMostWindows * join_window_ms_
             ? now_ms - join_window_ms_
             : INT64_MAX;
}

bool Gathering::wait_for_room(const Shortages& short_of, int64_t now_ms) {
  constexpr int64_t kLookAgainMs = 1000;
  back_off(now_ms + kLookAgainMs);
  const bool known = same_hosts(waiting_for().short_of, short_of);
  wait_for({pb::JobStatus::SHARED_MEMORY, to_text(short_of), short_of});
  return !known;
}

void Gathering::end_generation(const FailureVerdict& v, int64_t now_ms) {
  waits_for_joins_ = finish_checked_ = false;
  if (v.no_room) replicas_fit_ = false;
  if (v.backoff_ms > 0) not_before_ms_ = now_ms + v.backoff_ms;
}

Gathering::Next Gathering::next(const ClusterView& view,
                                const MeshPolicy& policy,
                                const StateRetention& retention,
                                const Recovery& recovery, bool job_finished) {
  if (scanning_) return {};
  if (job_finished && !finish_checked_) {
    // The job ends if the last step's state is saved, too.
    scanning_ = finish_checked_ = view.now_ms >= not_before_ms_;
    return {.scan = scanning_};
  }
  const auto placed = policy.place(view);
  if (!placed.ok() && placed.status().code() == Code::kInvalidArgument)
    return {.impossible = placed.status().message()};
  lacks_mesh_ = !placed.ok();
  if (lacks_mesh_) {
    waits_for_joins_ = true;
    const std::string why = placed.status().message();
    const Wait before =
        std::exchange(no_mesh_, {.reason = pb::JobStatus::WORKERS,
                                 .text = why,
                                 .offer = policy.offer(view)});
    if (before.reason == no_mesh_.reason && before.offer == no_mesh_.offer)
      return {};
    return {.no_mesh = why};
  }
  if (view.now_ms < not_before_ms_) return {};
  const std::set<std::string> missing = retention.missing_holders(view);
  const bool keeps_state = retention.keeps_state();
  const bool all_back = keeps_state &&
                        view.durable.assignment().ranks_size() > 0 &&
                        missing.empty();
  if (waits_for_joins_ && !all_back && policy.awaits_joins(view)) return {};
  scanning_ =
      !keeps_state || (states_known(view) && !recovery.waiting(view, missing));
  return {.scan = scanning_};
}

}  // namespace remesh::core
