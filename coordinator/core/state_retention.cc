#include "coordinator/core/state_retention.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "coordinator/core/admission.h"
#include "coordinator/core/durable.h"
#include "coordinator/core/survival.h"
#include "proto/base/text.h"

namespace remesh::core {

std::set<std::string> hosts_of(const planner::Placement& placement,
                               const Roster& roster) {
  std::set<std::string> hosts;
  for (const pb::RankPlace& p : placement.ranks)
    hosts.insert(roster.members().at(p.worker()).report.host());
  return hosts;
}

void StateRetention::observe(const ClusterView& view) {
  if (handed_off_) return;
  const pb::Assignment& a = view.durable.assignment();
  const int64_t committed = view.roster.committed_step(view.durable);
  handed_off_ = committed > a.source().step() ||
                (committed == a.source().step() &&
                 a.source().kind() == pb::Source::MEMORY && !makes_replicas(a));
}

std::set<std::string> StateRetention::missing_holders(
    const ClusterView& view) const {
  std::set<std::string> missing;
  const pb::Assignment& a = view.durable.assignment();
  const auto look_for = [&](const std::string& worker) {
    const Roster::Member* m = view.roster.find_alive(worker);
    if (m == nullptr || !m->reported) missing.insert(worker);
  };
  for (const std::string& worker : a.workers())
    if (has_ranks(view.durable, worker)) look_for(worker);
  if (!handed_off_)
    for (const pb::StateHolding& h : a.source().states()) look_for(h.worker());
  return missing;
}

bool StateRetention::expects_generation(const ClusterView& view,
                                        const MeshPolicy& policy) const {
  return policy.place(view).ok() ||
         view.now_ms - view.phase_since_ms < elastic_.rejoin_wait_ms() ||
         view.roster.others_may_return(elastic_.rejoin_wait_ms(), view.now_ms);
}

bool StateRetention::needs_memory_of(const ClusterView& view,
                                     const MeshPolicy& policy,
                                     const std::string& worker) const {
  const Roster::Member& m = view.roster.members().at(worker);
  if (!keeps_state_ || m.sent_away) return false;
  const pb::Durable& d = view.durable;
  const auto& held = m.report.holdings();
  if (d.phase() == pb::Durable::WAITING || d.phase() == pb::Durable::ABORTING)
    return holds_unsaved_step(view, m) && expects_generation(view, policy);
  if (handed_off_) return false;
  const pb::Source& source = d.assignment().source();
  const bool from_memory = source.kind() == pb::Source::MEMORY;
  // Before the generation has made a step, not only the holders of its source
  // are needed: another copy of that state is the only replica of it, and a
  // newer state becomes complete if those who have the rest of it return. What
  // a worker holds may not be known yet.
  return !m.report.has_inventory() || is_in_memory_of(source, worker) ||
         std::any_of(held.begin(), held.end(), [&](const auto& h) {
           return h.step() > source.step() ||
                  (from_memory && h.step() == source.step());
         });
}

bool StateRetention::must_save_to_finish(const ClusterView& view,
                                         const MeshPolicy& policy) const {
  if (!keeps_state_ || view.durable.stop().asked()) return true;
  const auto next = policy.place(view);
  if (!next.ok()) return true;
  return !survives_on(view.durable.assignment(), hosts_of(*next, view.roster));
}

bool StateRetention::must_save_before_stop(const ClusterView& view,
                                           const MeshPolicy& policy) const {
  if (view.durable.stop().discards() || !has_unsaved_steps(view)) return false;
  const auto& members = view.roster.members();
  const bool held =
      std::any_of(members.begin(), members.end(), [&](const auto& m) {
        return m.second.alive && holds_unsaved_step(view, m.second);
      });
  return held && expects_generation(view, policy);
}

bool StateRetention::awaits_unsaved_steps(const ClusterView& view) const {
  return !view.durable.stop().discards() && has_unsaved_steps(view) &&
         (view.now_ms - view.phase_since_ms < elastic_.rejoin_wait_ms() ||
          view.now_ms - view.roster.started_ms() < kReconnectSlackMs);
}

bool StateRetention::has_unsaved_steps(const ClusterView& view) const {
  if (!keeps_state_ || view.saved_step >= view.last_finished) return false;
  const auto& members = view.roster.members();
  return std::any_of(members.begin(), members.end(),
                     [&](const auto& m) {
                       return m.second.alive &&
                              holds_unsaved_step(view, m.second);
                     }) ||
         !missing_holders(view).empty();
}

// Also steps whose metrics were not heard.
bool StateRetention::holds_unsaved_step(const ClusterView& view,
                                        const Roster::Member& m) const {
  const auto& held = m.report.holdings();
  return keeps_state_ &&
         (!m.report.has_inventory() ||
          std::any_of(held.begin(), held.end(), [&](const auto& h) {
            return h.step() > view.saved_step;
          }));
}

std::string StateRetention::only_in_memory(const ClusterView& view) const {
  if (!has_unsaved_steps(view)) return "";
  int64_t step = -1;
  std::vector<std::string> holders;
  for (const auto& [name, m] : view.roster.members())
    for (const pb::StateHolding& h : m.report.holdings()) {
      const int64_t finished = std::min(h.step(), view.last_finished);
      if (!m.alive || finished <= view.saved_step || finished < step) continue;
      if (finished > step) holders.clear();
      step = finished;
      if (holders.empty() || holders.back() != name) holders.push_back(name);
    }
  if (holders.empty()) return "";
  return fmt::format("step {} is in no checkpoint, but in the memory of {}",
                     step, join(holders));
}

}  // namespace remesh::core
