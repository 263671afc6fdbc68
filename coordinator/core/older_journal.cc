// What the coordinator does when others know more than the journal, which was
// lost or put back from a backup.
#include <fmt/format.h>

#include "coordinator/core/coordinator.h"
#include "coordinator/core/durable.h"
#include "proto/base/keyed_hash.h"

namespace remesh::core {

// The newest generation is not the one that the journal has the plan of, so it
// is not known who takes part in it, nor which ranks must commit a step. It
// ends, and the next one starts from what the workers and checkpoints have. Who
// must be waited for is not known either: all have time to find this
// coordinator.
void Coordinator::leave_unknown_generation() {
  if (durable_.phase() == pb::Durable::WAITING) return;
  durable_.set_phase(pb::Durable::WAITING);
  durable_.clear_assignment();
  durable_.clear_participants();
  durable_.clear_finish();
  not_before_ms_ = now_ms_ + kReconnectSlackMs;
}

// True if a worker has ended the generation that the journal says runs, and was
// told to wait for the next one: the journal is older than that. It would be
// waited for without end.
bool Coordinator::abort_ended_before() {
  if (durable_.generation() != adopted_generation_ ||
      now_ms_ - started_ms_ < kReconnectSlackMs)
    return false;
  for (const auto& [name, m] : roster_.members()) {
    const pb::Report& r = m.report;
    if (roster_.live_participant(durable_, name) == nullptr || !m.reported ||
        !has_ranks(durable_, name) || r.generation() != durable_.generation() ||
        r.busy() || r.state() != pb::Report::IDLE)
      continue;
    abort({.what = fmt::format("worker {} has ended generation {}, which the "
                               "journal says runs",
                               name, durable_.generation()),
           .is_fault = false});
    return true;
  }
  return false;
}

uint64_t proof_of(const std::string& secret, uint64_t epoch,
                  int64_t generation) {
  return keyed_hash(secret, fmt::format("{} {}", epoch, generation));
}

// False if the report has a later epoch or generation than the journal and
// nothing shows that a coordinator of this run used these numbers. A worker of
// a release without proofs is believed while all workers find this coordinator,
// if it takes part in the journal's generation, which it could end anyway.
bool Coordinator::believes_numbers(const pb::Report& r) const {
  return (r.generation() <= durable_.generation() &&
          r.coordinator_epoch() <= durable_.epoch()) ||
         r.proof() ==
             proof_of(options_.secret, r.coordinator_epoch(), r.generation()) ||
         (options_.restored && now_ms_ - started_ms_ < kReconnectSlackMs &&
          participates(*options_.restored, r.worker(), r.incarnation()));
}

// The journal was lost or rolled back. Generation numbers are never reused: a
// generation that was planned since has a number that its workers may know from
// before, so it ends.
void Coordinator::skip_to_generation_of(const pb::Report& r) {
  durable_.set_generation(r.generation());
  emit_journal_behind(r.worker());
  const pb::Durable::Phase phase = durable_.phase();
  if (phase == pb::Durable::PREPARING || phase == pb::Durable::RUNNING ||
      phase == pb::Durable::FINISHING || phase == pb::Durable::ABORTING)
    abort({.what = fmt::format("worker {} knows generation {}, which "
                               "the journal does not",
                               r.worker(), r.generation()),
           .is_fault = false});
  else
    persist();
}

// worker: who knows the generation; "": the metrics log does.
void Coordinator::emit_journal_behind(const std::string& worker) {
  pb::EventRecord e = event(events::kJournalBehind);
  if (!worker.empty()) e.set_worker(worker);
  e.set_detail(
      fmt::format("generation {} was used before; numbering continues above it",
                  durable_.generation()));
  emit(std::move(e));
}

}  // namespace remesh::core
