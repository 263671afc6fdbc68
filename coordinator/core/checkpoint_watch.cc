#include "coordinator/core/checkpoint_watch.h"

#include <algorithm>
#include <utility>

#include "coordinator/core/recovery.h"

namespace remesh::core {

std::vector<InvalidCheckpoint> CheckpointWatch::new_damages(
    const CheckpointsScanned& scan) {
  std::vector<InvalidCheckpoint> out;
  for (const InvalidCheckpoint& c : scan.invalid)
    if (!c.is_unreadable() && damages_.emplace(c.path, c.code).second)
      out.push_back(c);
  return out;
}

int64_t CheckpointWatch::go_back(int64_t step, int64_t saved,
                                 const CheckpointsScanned& scan,
                                 const pb::Refusals& refused) {
  const bool is_bad =
      std::ranges::count(scan.invalid, saved, &InvalidCheckpoint::step) > 0 ||
      std::ranges::count(refused.checkpoint_steps(), saved) > 0;
  if (saved <= step && !is_bad) return saved;
  int64_t newest = 0;
  for (const CheckpointInfo& c : scan.valid)
    if (c.step <= step && !refuses(refused, c.path))
      newest = std::max(newest, c.step);
  newest_step_ = std::min(newest_step_, newest);
  return newest;
}

std::vector<CheckpointWatch::Result> CheckpointWatch::observe(
    const Roster& roster, int64_t generation, int64_t committed) {
  std::vector<Result> out;
  for (const auto& [name, m] : roster.members()) {
    if (!m.reported || m.report.generation() != generation) continue;
    for (const pb::RankStatus& s : m.report.ranks()) {
      // Rank 0 commits.
      if (s.rank() == 0 && s.has_checkpoint_step() &&
          s.checkpoint_step() > newest_step_ &&
          s.checkpoint_step() <= committed + 1) {
        newest_step_ = s.checkpoint_step();
        last_error_.clear();
        failed_ends_ = 0;
        announced_.clear();
        out.push_back({.step = newest_step_});
      }
      const std::string& error = s.checkpoint_error();
      if (error.empty()) {
        if (!seen_.empty()) seen_.erase(s.rank());
        continue;
      }
      const Seen now{code_named(s.checkpoint_code()), s.failed_saves(),
                     s.declined_stops()};
      const auto [seen, is_new] = seen_.emplace(s.rank(), now);
      if (!is_new && std::exchange(seen->second, now) == now) continue;
      last_error_ = error;
      // A state that memory does not keep any more is that of one host.
      const bool own = now.code == Code::kUnavailable;
      if (!announced_.emplace(now.code, own ? name : "").second) continue;
      out.push_back({.error = error, .rank = s.rank(), .worker = name});
    }
  }
  return out;
}

void CheckpointWatch::expect_stop(const Roster& roster, pb::Finish* finish) {
  finish->clear_declined();
  for (const auto& [name, m] : roster.members())
    for (const pb::RankStatus& s : m.report.ranks()) {
      declined_[s.rank()] = s.declined_stops();
      if (s.declined_stops() > 0)
        (*finish->mutable_declined())[s.rank()] = s.declined_stops();
    }
}

bool CheckpointWatch::stop_declined(const ClusterView& view) {
  bool declined = false;
  for (const auto& [name, m] : view.roster.members()) {
    if (view.roster.live_participant(view.durable, name) == nullptr ||
        m.report.generation() != view.durable.generation())
      continue;
    for (const pb::RankStatus& s : m.report.ranks()) {
      int64_t& known = declined_[s.rank()];
      declined = declined || s.declined_stops() > known;
      known = std::max(known, s.declined_stops());
    }
  }
  return declined;
}

}  // namespace remesh::core
