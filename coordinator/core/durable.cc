#include "coordinator/core/durable.h"

#include <algorithm>
#include <map>
#include <string_view>

#include "coordinator/core/failure_budget.h"
#include "proto/base/text.h"

namespace remesh::core {

pb::Durable restore(const Options& options, bool keeps_state) {
  const auto& recent = options.recent_metrics;
  const int64_t known =
      std::max(recent.empty() ? 0 : recent.back().generation(),
               options.recorded_generation);
  pb::Durable d = options.restored.value_or(pb::Durable());
  const bool ended = terminal(d.phase());
  const bool resumed_since = ended && known > d.generation();
  d.set_generation(std::max(d.generation(), known));
  d.set_epoch(std::max(d.epoch() + 1, options.epoch_floor));
  if (options.resume || resumed_since) d.clear_stop();
  if (ended && (options.resume || resumed_since)) {
    d.set_phase(resumed_since ? pb::Durable::RUNNING : pb::Durable::WAITING);
    reset_failures(d.mutable_budget());
    d.clear_cause();
    d.clear_refusals();
    d.clear_host_faults();
    d.clear_drains();
  }
  if (d.run_id() == 0) d.set_run_id(options.run_id);
  // The run's number, which outlives its journal, so that without the journal
  // the workers' states still count as those of this run.
  if (keeps_state && d.state_job() == 0)
    d.set_state_job(std::max<uint64_t>(1, d.run_id()));
  if (!keeps_state) {
    d.clear_state_job();
    d.clear_rescue();
  }
  *d.mutable_job() = options.job;
  return d;
}

bool leave_unknown_generation(pb::Durable* d) {
  if (d->phase() == pb::Durable::WAITING ||
      d->assignment().generation() == d->generation())
    return false;
  d->set_phase(pb::Durable::WAITING);
  d->clear_assignment();
  d->clear_participants();
  d->clear_finish();
  return true;
}

bool terminal(pb::Durable::Phase phase) {
  return phase == pb::Durable::DONE || phase == pb::Durable::FAILED ||
         phase == pb::Durable::STOPPED;
}

std::string phase_text(pb::Durable::Phase phase) {
  return enum_text(pb::Durable::Phase_Name(phase));
}

bool participates(const pb::Durable& durable, const std::string& worker,
                  uint64_t incarnation) {
  const auto& all = durable.participants();
  const auto p = std::lower_bound(all.begin(), all.end(), worker,
                                  [](const auto& member, const auto& name) {
                                    return member.name() < name;
                                  });
  return p != all.end() && p->name() == worker &&
         p->incarnation() == incarnation;
}

bool is_assigned(const pb::Assignment& a, const std::string& worker) {
  return std::ranges::binary_search(a.workers(), worker);
}

bool has_ranks(const pb::Durable& durable, const std::string& worker) {
  const pb::Assignment& a = durable.assignment();
  // An assignment of an older release.
  if (a.num_ranks().empty() || a.num_ranks_size() != a.workers_size())
    return std::ranges::any_of(
        a.ranks(), [&](const auto& p) { return p.worker() == worker; });
  const auto w =
      std::lower_bound(a.workers().begin(), a.workers().end(), worker);
  return w != a.workers().end() && *w == worker &&
         a.num_ranks(static_cast<int>(w - a.workers().begin())) > 0;
}

std::set<std::string> hosts_with_ranks(const pb::Durable& durable) {
  std::set<std::string> hosts;
  for (const pb::Durable::Member& p : durable.participants())
    if (has_ranks(durable, p.name())) hosts.insert(p.host());
  return hosts;
}

void count_ranks(pb::Assignment* a) {
  std::map<std::string_view, int> counts;
  for (const pb::RankPlace& p : a->ranks()) ++counts[p.worker()];
  a->clear_num_ranks();
  for (const std::string& worker : a->workers())
    a->add_num_ranks(counts[worker]);
}

bool is_in_memory_of(const pb::Source& source, const std::string& worker) {
  const auto& states = source.states();
  return std::ranges::any_of(
      states, [&](const auto& h) { return h.worker() == worker; });
}

}  // namespace remesh::core
