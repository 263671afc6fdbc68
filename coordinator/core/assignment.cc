#include "coordinator/core/assignment.h"

#include <string_view>

#include "coordinator/core/durable.h"
#include "coordinator/core/job_shape.h"

namespace remesh::core {
namespace {

std::vector<pb::Durable::Member> add_workers(const Roster& roster,
                                             pb::Assignment* a) {
  std::vector<pb::Durable::Member> participants;
  std::set<std::string_view> placed;
  for (const pb::RankPlace& p : a->ranks()) placed.insert(p.worker());
  for (const auto& [name, m] : roster.members()) {
    if (!m.alive || !m.reported || m.report.slots() < 1 ||
        (m.leaving() && !placed.contains(name)))
      continue;
    a->add_workers(name);
    a->add_hosts(m.report.host());
    pb::Durable::Member& p = participants.emplace_back();
    p.set_name(name);
    p.set_incarnation(m.report.incarnation());
    p.set_host(m.report.host());
    p.set_host_id(m.report.host_id());
    p.set_slots(m.report.slots());
    p.set_cores(m.report.cores());
    p.set_memory_bytes(m.report.memory_bytes());
  }
  count_ranks(a);
  return participants;
}

int64_t made_by(const Recovery::Decision& d, const pb::Durable& before) {
  const pb::Source& s = before.assignment().source();
  if (d.source.step() != s.step() || !s.has_made_by()) return d.generation;
  // The generation before only restored this state, or did not even begin.
  const bool restored_it = d.generation == before.assignment().generation();
  const bool same_states = s.kind() == pb::Source::MEMORY &&
                           s.states_size() > 0 &&
                           s.states(0).generation() == d.generation;
  return restored_it || same_states ? s.made_by() : d.generation;
}

}  // namespace

Plan make_plan(const Recovery::Decision& decision, const ClusterView& view,
               const Options& options,
               const std::optional<planner::JobShape>& shape,
               bool measure_links) {
  Plan out;
  pb::Assignment& a = out.assignment;
  const planner::Placement& placement = decision.placement;
  *a.mutable_source() = decision.source;
  if (decision.source.kind() != pb::Source::INIT)
    a.mutable_source()->set_made_by(made_by(decision, view.durable));
  *a.mutable_mesh() = mesh_of(placement.layout);
  if (!placement.prediction.empty()) a.set_prediction(placement.prediction);
  a.mutable_microbatches()->Assign(placement.shares.begin(),
                                   placement.shares.end());
  const auto threads = static_cast<int>(options.job.train().threads());
  for (const planner::RankPlace& p : placement.ranks) {
    pb::RankPlace* rank = a.add_ranks();
    rank->set_rank(p.rank);
    rank->set_worker(p.worker);
    rank->set_local_slot(p.local_slot);
    rank->set_threads(threads > 0 ? threads : p.threads);
  }
  *a.mutable_job() =
      shape ? job_on(options.job, *shape, placement.layout) : options.job;
  a.set_run_dir(options.run_dir);
  a.set_run_id(view.durable.run_id());
  if (!placement.ranks.empty())
    a.set_build(
        view.roster.members().at(placement.ranks[0].worker).report.build());
  if (measure_links && !view.times->knows_link(hosts_of(a, view.roster)))
    a.set_measure_link(true);
  out.participants = add_workers(view.roster, &a);
  return out;
}

void add_past_steps(const std::vector<pb::StepMetrics>& recent,
                    pb::Assignment* a) {
  // Their losses say nothing of what is a spike on these data.
  const pb::Job& job = a->job();
  const int64_t on_other_data =
      -(job.data().sequence_offset() / job.train().global_batch_size());
  for (const pb::StepMetrics& m : recent) {
    if (m.step() <= on_other_data) continue;
    pb::Assignment::PastStep* step = a->add_past_steps();
    step->set_loss(m.loss());
    if (m.skipped()) step->set_skipped(true);
  }
}

std::set<std::string> hosts_of(const pb::Assignment& a, const Roster& roster) {
  std::set<std::string> hosts;
  for (const pb::RankPlace& p : a.ranks())
    hosts.insert(roster.members().at(p.worker()).report.host());
  return hosts;
}

}  // namespace remesh::core
