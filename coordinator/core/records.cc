// What the coordinator records: members, steps and checkpoints.
#include "coordinator/core/coordinator.h"
#include "coordinator/core/durable.h"

namespace remesh::core {

void Coordinator::announce(const Roster::Changes& changes) {
  using Kind = Roster::MembershipChange::Kind;
  for (const Roster::MembershipChange& c : changes) {
    const bool over = terminal(durable_.phase());
    if (!over || c.kind == Kind::kLeaving) emit(event_of(c, durable_));
    if (c.sent_away && finish_drain(c.worker, c.incarnation, &durable_) &&
        !over)
      persist();
    if (!over && c.kind == Kind::kLost &&
        forgive_source(durable_.assignment().source(), c.worker,
                       durable_.mutable_refusals()))
      persist();
  }
}

void Coordinator::finish_steps(int64_t committed) {
  // Steps that are computed again, or that an earlier life recorded, also show
  // that the generation makes progress.
  if (committed > durable_.assignment().source().step()) {
    detector_.note_progress();
    clear_suspicion();
  }
  if (durable_.assignment().measure_link())
    times_.set_link(roster_.link_bytes_per_s(durable_.generation()), now_ms_);
  if (backlog_full_) return;
  for (const auto& entry : ledger_.advance(durable_.generation(), committed)) {
    record(entry);
    detector_.note_step(entry.metrics->step_s());
    times_.add_step(entry.metrics->step_s(), now_ms_);
    if (durable_.phase() != pb::Durable::RUNNING) continue;
    if (const auto pause = times_.resume(now_ms_))
      emit(training_event(view(), entry.metrics->step(), *pause));
  }
}

// The mesh works: what failed on its hosts before is over.
void Coordinator::clear_suspicion() {
  const pb::HostFaults& faults = durable_.host_faults();
  if (faults.suspects().empty() && !faults.has_link_search()) return;
  Cordoning cordons = cordoning();
  cordons.after_step(hosts_with_ranks(durable_));
  apply(cordons.changes());
}

void Coordinator::record(const StepLedger::Entry& entry) {
  if (entry.gap_first > 0) emit(gap_event(entry));
  if (!entry.metrics) return;
  act(AppendMetrics{*entry.metrics});
  if (entry.metrics->skipped()) emit(skipped_event(*entry.metrics));
}

void Coordinator::watch_checkpoints(int64_t committed) {
  for (const CheckpointWatch::Result& r :
       checkpoints_.observe(roster_, durable_.generation(),
                            std::max(ledger_.last_finished(), committed))) {
    if (r.error.empty()) {
      failed_saves_ = 0;
      durable_.set_saved_step(std::max(durable_.saved_step(), r.step));
      if (durable_.refusals().checkpoints_size() > 0)
        forgive_checkpoint(r.step, durable_.mutable_refusals());
    }
    emit(event_of(r));
  }
}

}  // namespace remesh::core
