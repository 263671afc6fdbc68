#include "coordinator/core/assignment.h"

#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "coordinator/core/durable.h"
#include "coordinator/core/job_shape.h"
#include "coordinator/core/state_retention.h"

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

pb::Assignment assign(const Recovery::Decision& decision,
                      const PlanInputs& in) {
  const ClusterView& view = in.view;
  const pb::Job& job = in.options.job;
  pb::Assignment a;
  const planner::Placement& placement = decision.placement;
  *a.mutable_source() = decision.source;
  if (decision.source.kind() != pb::Source::INIT)
    a.mutable_source()->set_made_by(made_by(decision, view.durable));
  *a.mutable_mesh() = mesh_of(placement.layout);
  if (!placement.prediction.empty()) a.set_prediction(placement.prediction);
  a.mutable_microbatches()->Assign(placement.shares.begin(),
                                   placement.shares.end());
  const auto threads = static_cast<int>(job.train().threads());
  a.mutable_ranks()->Assign(placement.ranks.begin(), placement.ranks.end());
  if (threads > 0)
    for (pb::RankPlace& p : *a.mutable_ranks()) p.set_threads(threads);
  *a.mutable_job() = in.shape ? job_on(job, *in.shape, placement.layout) : job;
  a.set_run_dir(in.options.run_dir);
  if (!in.options.data_id.empty()) a.set_data_id(in.options.data_id);
  a.set_run_id(view.durable.run_id());
  if (decision.rescue) a.set_rescue(true);
  if (!placement.ranks.empty())
    a.set_build(
        view.roster.members().at(placement.ranks[0].worker()).report.build());
  if (in.policy.wants_hardware() &&
      !view.times->knows_link(hosts_of(placement, view.roster)))
    a.set_measure_link(true);
  return a;
}

}  // namespace

Plan make_plan(const Recovery::Decision& decision, const PlanInputs& in,
               bool replicas, const pb::Assignment* running) {
  Plan out{.assignment = assign(decision, in)};
  pb::Assignment& a = out.assignment;
  out.participants = add_workers(in.view.roster, &a);
  if (in.table == nullptr) return out;
  if (running != nullptr) start_from(*running, *in.table, &a);
  std::string given_up;
  out.short_of =
      fit_room(*in.table, in.view.roster, replicas, &a, &given_up, running);
  if (!given_up.empty())
    a.mutable_source()->mutable_reason()->append("; " + given_up);
  return out;
}

Plan plan_of_change(const PlanInputs& in) {
  if (in.table == nullptr || in.view.durable.rescue()) return {};
  auto placed = in.policy.place(in.view);
  if (!placed.ok()) return {};
  return make_plan({.placement = std::move(placed).value()}, in,
                   /*replicas=*/true, &in.view.durable.assignment());
}

bool must_save_for_change(const PlanInputs& in,
                          const StateRetention& retention) {
  return in.view.roster.committed_step(in.view.durable) >
             in.options.job.train().steps() ||
         retention.must_save_to_finish(in.view, in.policy) ||
         !plan_of_change(in).short_of.empty();
}

void adopt_plan(Plan plan, const pb::Job& job, pb::Durable* d) {
  d->set_generation(plan.assignment.generation());
  d->mutable_participants()->Assign(plan.participants.begin(),
                                    plan.participants.end());
  *d->mutable_assignment() = std::move(plan.assignment);
  *d->mutable_assignment_job() = job;
}

std::optional<pb::Mesh> mesh_before(const pb::Durable& durable,
                                    const StepLedger& ledger) {
  if (durable.assignment().ranks_size() > 0) return durable.assignment().mesh();
  const auto* last = ledger.last_metrics();
  if (last && last->has_mesh()) return last->mesh();
  return std::nullopt;
}

void add_past_steps(const StepLedger& ledger, int64_t generation,
                    const std::vector<CheckpointInfo>& checkpoints,
                    pb::Assignment* a) {
  // Their losses say nothing of what is a spike on these data.
  const pb::Job& job = a->job();
  const int64_t on_other_data =
      -(job.data().sequence_offset() / job.train().global_batch_size());
  for (const pb::StepMetrics& m :
       ledger.before(generation, a->source().step(), checkpoints)) {
    if (m.step() <= on_other_data) continue;
    pb::Assignment::PastStep* step = a->add_past_steps();
    step->set_loss(m.loss());
    if (m.skipped()) step->set_skipped(true);
  }
}

}  // namespace remesh::core
