// Which steps and checkpoints the coordinator records.
#include <fmt/format.h>

#include "coordinator/core/coordinator.h"

namespace remesh::core {

void Coordinator::finish_steps(int64_t committed) {
  // Steps that are computed again, or that an earlier life recorded, also show
  // that the generation makes progress.
  if (committed > durable_.assignment().source().step()) {
    detector_.note_progress();
    clear_suspicion();
  }
  if (durable_.assignment().measure_link())
    times_.set_link(roster_.link_bytes_per_s(durable_.generation()));
  if (backlog_full_) return;
  for (const auto& entry : ledger_.advance(durable_.generation(), committed)) {
    record(entry);
    detector_.note_step(entry.metrics->step_s());
    if (entry.metrics->generation() == durable_.generation())
      times_.add_step(entry.metrics->step_s());
    if (change_began_ms_ >= 0 && durable_.phase() == pb::Durable::RUNNING)
      emit_training(entry.metrics->step());
  }
}

void Coordinator::record(const StepLedger::Entry& entry) {
  if (entry.gap_first > 0) {
    pb::EventRecord e = event(events::kMetricsGap);
    e.set_step(entry.gap_first - 1);
    e.set_detail(
        fmt::format("the metrics of the finished steps {} to {} are lost",
                    entry.gap_first, entry.gap_last));
    emit(std::move(e));
  }
  if (!entry.metrics) return;
  act(AppendMetrics{*entry.metrics});
  if (!entry.metrics->skipped()) return;
  pb::EventRecord e = event(events::kStepSkipped);
  e.set_step(entry.metrics->step());
  e.set_cause(fmt::format("the loss is {:.4g} and the gradient norm {:.4g}",
                          entry.metrics->loss(), entry.metrics->grad_norm()));
  emit(std::move(e));
}

void Coordinator::emit_training(int64_t step) {
  pb::EventRecord e = event(events::kTraining);
  e.set_step(step);
  *e.mutable_mesh() = durable_.assignment().mesh();
  e.set_seconds(static_cast<double>(now_ms_ - change_began_ms_) / 1000);
  times_.add_pause(e.seconds());
  e.set_lost_steps(lost_steps_);
  if (const auto digest = roster_.restored_digest(durable_.generation()))
    e.set_digest(*digest);
  emit(std::move(e));
  change_began_ms_ = -1;
  lost_steps_ = 0;
}

// Gives the generation the recorded steps up to its source. If it continues
// from another branch, the last of them are not those of its own history.
void Coordinator::add_past_steps(pb::Assignment* a) const {
  if (options_.job.train().max_skipped_steps() == 0) return;
  for (const pb::StepMetrics& m : ledger_.recent()) {
    if (m.step() > a->source().step()) break;
    pb::Assignment::PastStep* step = a->add_past_steps();
    step->set_loss(m.loss());
    if (m.skipped()) step->set_skipped(true);
  }
}

void Coordinator::watch_checkpoints(int64_t committed) {
  for (const CheckpointWatch::Result& r :
       checkpoints_.observe(roster_, durable_.generation(),
                            std::max(ledger_.last_finished(), committed))) {
    pb::EventRecord e = event(r.error.empty() ? events::kCheckpoint
                                              : events::kCheckpointFailed);
    if (r.error.empty()) {
      failed_saves_ = 0;
      durable_.set_saved_step(std::max(durable_.saved_step(), r.step));
      e.set_step(r.step);
    } else {
      e.set_rank(r.rank);
      e.set_worker(r.worker);
      e.set_cause(r.error);
    }
    emit(std::move(e));
  }
}

}  // namespace remesh::core
