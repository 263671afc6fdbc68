// What the coordinator asks of each worker.
#include "coordinator/core/coordinator.h"
#include "coordinator/core/durable.h"

namespace remesh::core {

pb::Directive::Goal Coordinator::goal_for(const std::string& name,
                                          const Roster::Member& m) const {
  if (terminal(durable_.phase())) return pb::Directive::SHUTDOWN;
  const bool part = participates(durable_, name, m.report.incarnation());
  const bool idle = !part || !has_ranks(durable_, name) ||
                    durable_.phase() == pb::Durable::WAITING;
  if (m.leaving() && idle &&
      !retention_.needs_memory_of(view(), policy_, name,
                                  checkpoints_.newest_step(),
                                  ledger_.last_finished()))
    return pb::Directive::LEAVE;
  if (!part) return pb::Directive::IDLE;
  switch (durable_.phase()) {
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

pb::Directive Coordinator::directive_for(const std::string& name,
                                         const Roster::Member& m) const {
  pb::Directive d;
  d.set_generation(durable_.generation());
  d.set_goal(goal_for(name, m));
  switch (d.goal()) {
    case pb::Directive::SHUTDOWN:
      d.set_reason(durable_.cause());
      // A failed job may be mended and resumed, also where it went back to a
      // state that is older than the last finished step.
      d.set_keep_states(durable_.phase() == pb::Durable::FAILED
                            ? has_unsaved_steps()
                            : durable_.phase() == pb::Durable::STOPPED &&
                                  holds_unsaved_step(m));
      break;
    case pb::Directive::FINISH:
      d.set_must_stop(durable_.must_stop());
      d.set_save(durable_.finish_saves());
      break;
    default:
      break;
  }
  d.set_checkpoint_request(checkpoint_request_);
  // Contributions that went to an earlier life of the coordinator; all others
  // are on their way.
  if (durable_.generation() == adopted_generation_ &&
      (d.goal() == pb::Directive::RUN || d.goal() == pb::Directive::FINISH) &&
      has_ranks(durable_, name) && fences_.misses(name))
    d.set_want_fences(true);
  return d;
}

// A directive is sent when it says something new, and repeated in case it was
// lost.
void Coordinator::send_directives() {
  constexpr int64_t kResendMs = 250;
  for (const auto& [name, m] : roster_.members()) {
    if (!m.reachable()) continue;
    pb::Directive d = directive_for(name, m);
    const Roster::Said said = {.incarnation = m.report.incarnation(),
                               .generation = d.generation(),
                               .goal = d.goal(),
                               .must_stop = d.must_stop(),
                               .save = d.save(),
                               .want_fences = d.want_fences(),
                               .checkpoint_request = d.checkpoint_request()};
    if (m.directive_ms >= 0 && said == m.said &&
        now_ms_ - m.directive_ms < kResendMs)
      continue;
    if (d.goal() == pb::Directive::PREPARE)
      *d.mutable_assignment() = durable_.assignment();
    wire::set_protocol(options_.protocol, &d);
    d.set_epoch(durable_.epoch());
    d.set_proof(proof_of(options_.secret, d.epoch(), d.generation()));
    d.set_seq(++directive_seq_);
    d.set_worker(name);
    d.set_incarnation(m.report.incarnation());
    // What only the page cache has, the workers keep.
    d.set_metrics_acked(synced_step_);
    d.set_report_every_ms(options_.job.elastic().report_every_ms());
    d.set_dead_after_ms(options_.job.elastic().dead_after_ms());
    d.set_job(options_.job.job().name());
    d.set_want_hardware(policy_.wants_hardware() && !m.hardware_known);
    if (keeps_state()) d.set_state_job(durable_.state_job());
    roster_.note_directive(name, said, now_ms_);
    act(SendDirective{std::move(d)});
  }
}

}  // namespace remesh::core
