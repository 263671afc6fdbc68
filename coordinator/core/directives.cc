#include "coordinator/core/directives.h"

#include "coordinator/core/cause.h"
#include "coordinator/core/durable.h"

namespace remesh::core {
namespace {

pb::Directive::Goal goal_for(const Directives::Inputs& in,
                             const std::string& name, const Roster::Member& m) {
  const pb::Durable& d = in.view.durable;
  if (terminal(d.phase())) return pb::Directive::SHUTDOWN;
  const bool part = participates(d, name, m.report.incarnation());
  if (m.leaving() &&
      (!part || !has_ranks(d, name) || d.phase() == pb::Durable::WAITING) &&
      !in.retention.needs_memory_of(in.view, in.policy, name))
    return pb::Directive::LEAVE;
  if (!part) return pb::Directive::IDLE;
  switch (d.phase()) {
    case pb::Durable::PREPARING:
      return pb::Directive::PREPARE;
    case pb::Durable::RUNNING:
      return pb::Directive::RUN;
    case pb::Durable::FINISHING:
      return pb::Directive::FINISH;
    case pb::Durable::ABORTING:
      return pb::Directive::ABORT;
    default:
      return pb::Directive::IDLE;
  }
}

}  // namespace

Roster::DirectiveKey Directives::wanted(const Inputs& in,
                                        const std::string& name,
                                        const Roster::Member& m) const {
  const pb::Durable& d = in.view.durable;
  Roster::DirectiveKey s{.incarnation = m.report.incarnation(),
                         .generation = d.generation(),
                         .goal = goal_for(in, name, m),
                         .checkpoint_request = checkpoint_request_};
  if (s.goal == pb::Directive::FINISH) s.save = d.finish().save();
  // Contributions that went to an earlier life of the coordinator; all others
  // are on their way.
  s.want_fences =
      in.adopted &&
      (s.goal == pb::Directive::RUN || s.goal == pb::Directive::FINISH) &&
      has_ranks(d, name) && in.fences.misses(name);
  return s;
}

SendDirective Directives::directive_of(const Inputs& in,
                                       const Roster::DirectiveKey& key,
                                       const std::string& name,
                                       const Roster::Member& m) {
  const pb::Durable& durable = in.view.durable;
  const pb::Job& job = in.options.job;
  SendDirective out;
  pb::Directive& d = out.directive;
  d.set_generation(key.generation);
  d.set_goal(key.goal);
  d.set_checkpoint_request(key.checkpoint_request);
  if (key.goal == pb::Directive::FINISH) d.set_save(key.save);
  if (key.goal == pb::Directive::SHUTDOWN) {
    d.set_reason(text_of(durable.cause()));
    // The job may be resumed. One answer for all: whoever does not keep states
    // removes those of dead workers of its host as well.
    d.set_keep_states(durable.phase() != pb::Durable::DONE &&
                      in.retention.has_unsaved_steps(in.view));
  }
  // Nobody has taken over what a worker holds that leaves a job without ranks.
  if (key.goal == pb::Directive::LEAVE)
    d.set_keep_states((durable.phase() == pb::Durable::WAITING ||
                       durable.phase() == pb::Durable::ABORTING) &&
                      in.retention.holds_unsaved_step(in.view, m));
  if (key.want_fences) d.set_want_fences(true);
  if (key.goal == pb::Directive::PREPARE) {
    if (!assignment_ || assignment_->generation() != key.generation)
      assignment_ =
          std::make_shared<const pb::Assignment>(durable.assignment());
    out.assignment = assignment_;
  }
  wire::set_protocol(in.options.protocol, &d);
  d.set_epoch(durable.epoch());
  d.set_proof(proof_of(in.options.secret, d.epoch(), d.generation()));
  d.set_worker(name);
  d.set_incarnation(key.incarnation);
  // What only the page cache has, the workers keep.
  d.set_metrics_acked(in.synced_step);
  d.set_report_every_ms(job.elastic().report_every_ms());
  d.set_dead_after_ms(job.elastic().dead_after_ms());
  d.set_job(job.job().name());
  d.set_run_dir(in.options.run_dir);
  d.set_want_hardware(in.policy.wants_hardware() && !m.hardware_known);
  if (in.retention.keeps_state()) d.set_state_job(durable.state_job());
  return out;
}

std::vector<SendDirective> Directives::due(const Inputs& in, Roster* roster) {
  constexpr int64_t kResendMs = 250;
  // Assignments are repeated once a link of 1 Gb/s can have delivered those of
  // all workers.
  constexpr int64_t kRanksPerMs = 4096;
  const pb::Assignment& a = in.view.durable.assignment();
  const int64_t delivery_ms =
      int64_t{a.ranks_size()} * a.workers_size() / kRanksPerMs;
  std::vector<SendDirective> out;
  for (const auto& [name, m] : roster->members()) {
    if (!m.reachable()) continue;
    const Roster::DirectiveKey key = wanted(in, name, m);
    const int64_t resend_ms =
        kResendMs + (key.goal == pb::Directive::PREPARE ? delivery_ms : 0);
    if (m.directive_ms >= 0 && key == m.last_sent &&
        in.view.now_ms - m.directive_ms < resend_ms)
      continue;
    out.push_back(directive_of(in, key, name, m));
    roster->note_directive(name, key, in.view.now_ms);
  }
  return out;
}

}  // namespace remesh::core
