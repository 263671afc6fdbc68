// What the coordinator asks of each worker.
#include "coordinator/core/coordinator.h"
#include "coordinator/core/durable.h"

namespace remesh::core {

pb::Directive::Goal Coordinator::goal_for(const std::string& name,
                                          const Roster::Member& m) const {
  if (terminal(durable_.phase())) return pb::Directive::SHUTDOWN;
  const bool part = participates(durable_, name, m.report.incarnation());
  if (m.leaving() &&
      (!part || !has_ranks(durable_, name) ||
       durable_.phase() == pb::Durable::WAITING) &&
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

Roster::Said Coordinator::what_to_say(const std::string& name,
                                      const Roster::Member& m) const {
  Roster::Said s{.incarnation = m.report.incarnation(),
                 .generation = durable_.generation(),
                 .goal = goal_for(name, m),
                 .checkpoint_request = checkpoint_request_};
  if (s.goal == pb::Directive::FINISH) {
    s.must_stop = durable_.finish().must_stop();
    s.save = durable_.finish().save();
  }
  // Contributions that went to an earlier life of the coordinator; all others
  // are on their way.
  s.want_fences =
      durable_.generation() == adopted_generation_ &&
      (s.goal == pb::Directive::RUN || s.goal == pb::Directive::FINISH) &&
      has_ranks(durable_, name) && fences_.misses(name);
  return s;
}

pb::Directive Coordinator::directive_of(const Roster::Said& said,
                                        const std::string& name,
                                        const Roster::Member& m) {
  pb::Directive d;
  d.set_generation(said.generation);
  d.set_goal(said.goal);
  d.set_checkpoint_request(said.checkpoint_request);
  if (said.goal == pb::Directive::FINISH) {
    d.set_must_stop(said.must_stop);
    d.set_save(said.save);
  }
  if (said.goal == pb::Directive::SHUTDOWN) {
    d.set_reason(failure_of(durable_.cause()).text());
    // A failed job may be mended and resumed, also where it went back to a
    // state that is older than the last finished step.
    d.set_keep_states(durable_.phase() == pb::Durable::FAILED
                          ? has_unsaved_steps()
                          : durable_.phase() == pb::Durable::STOPPED &&
                                holds_unsaved_step(m));
  }
  if (said.want_fences) d.set_want_fences(true);
  if (said.goal == pb::Directive::PREPARE)
    *d.mutable_assignment() = durable_.assignment();
  wire::set_protocol(options_.protocol, &d);
  d.set_epoch(durable_.epoch());
  d.set_proof(proof_of(options_.secret, d.epoch(), d.generation()));
  d.set_seq(++directive_seq_);
  d.set_worker(name);
  d.set_incarnation(said.incarnation);
  // What only the page cache has, the workers keep.
  d.set_metrics_acked(synced_step_);
  d.set_report_every_ms(options_.job.elastic().report_every_ms());
  d.set_dead_after_ms(options_.job.elastic().dead_after_ms());
  d.set_job(options_.job.job().name());
  d.set_want_hardware(policy_.wants_hardware() && !m.hardware_known);
  if (keeps_state()) d.set_state_job(durable_.state_job());
  return d;
}

// A directive is sent when it says something new, and repeated in case it was
// lost: assignments once a link of 1 Gb/s can have delivered those of all
// workers.
void Coordinator::send_directives() {
  constexpr int64_t kResendMs = 250;
  constexpr int64_t kRanksPerMs = 4096;
  const pb::Assignment& a = durable_.assignment();
  const int64_t delivery_ms =
      int64_t{a.ranks_size()} * a.workers_size() / kRanksPerMs;
  for (const auto& [name, m] : roster_.members()) {
    if (!m.reachable()) continue;
    const Roster::Said said = what_to_say(name, m);
    const int64_t resend_ms =
        kResendMs + (said.goal == pb::Directive::PREPARE ? delivery_ms : 0);
    if (m.directive_ms >= 0 && said == m.said &&
        now_ms_ - m.directive_ms < resend_ms)
      continue;
    act(SendDirective{directive_of(said, name, m)});
    roster_.note_directive(name, said, now_ms_);
  }
}

}  // namespace remesh::core
