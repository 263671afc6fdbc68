// Announcements: the events that tell people what happened (proto/rundir/
// events.h), and their sentences. The coordinator sets the time and the
// generation of an event, and its step where that is the last finished one.
// Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/core/api.h"
#include "coordinator/core/checkpoint_watch.h"
#include "coordinator/core/cluster_view.h"
#include "coordinator/core/cordoning.h"
#include "coordinator/core/gathering.h"
#include "coordinator/core/step_ledger.h"
#include "proto/control.pb.h"
#include "proto/rundir/events.h"

namespace remesh::core {

// Fields of an event that are not set are left out.
struct EventFields {
  std::optional<std::string> worker = {}, host = {}, cause = {}, detail = {};
};
pb::EventRecord event(const events::EventKind& kind,
                      const EventFields& fields = {});

// A life of the coordinator begins with this state; `members`: that it waits
// for.
std::vector<pb::EventRecord> start_events(const Options& options,
                                          const pb::Durable& durable,
                                          size_t members);
// before: the mesh that this one replaces. why: of its placement.
pb::EventRecord mesh_event(const pb::Assignment& next,
                           const std::optional<pb::Mesh>& before,
                           int64_t last_finished, const std::string& why);
// The first step of a generation.
pb::EventRecord training_event(const ClusterView& view, int64_t step,
                               const StepTimes::Pause& before);
// The job has ended in that phase. `why` is the cause, unless it is empty.
pb::EventRecord end_event(pb::Durable::Phase phase, const std::string& why,
                          const std::string& unreached,
                          const std::string& only_in_memory);
// Why the job is refused: it was given fewer steps than are done. where: if not
// in the metrics log, the state that has them; "" otherwise.
std::string too_few_steps(int64_t given, int64_t done,
                          const std::string& where);
// durable: at the time of the change.
pb::EventRecord event_of(const Roster::MembershipChange& change,
                         const pb::Durable& durable);
// seconds: since training was interrupted.
pb::EventRecord event_of(const pb::Cause& failure, const ClusterView& view,
                         double seconds);
pb::EventRecord event_of(const CheckpointWatch::Result& result);
pb::EventRecord event_of(const Gathering::Wait& wait);
pb::EventRecord event_of(const pb::Cordon& begun, double unix_s);
pb::EventRecord event_of(const pb::LinkSearch& test);
std::vector<pb::EventRecord> events_of(const Cordoning::Changes& changes,
                                       double unix_s);
// Metrics of finished steps are lost.
pb::EventRecord gap_event(const StepLedger::Entry& gap);
pb::EventRecord skipped_event(const pb::StepMetrics& step);
// worker: who knows the generation; nothing: the metrics or the events do.
pb::EventRecord journal_behind_event(
    int64_t generation, std::optional<std::string> worker = std::nullopt);
pb::EventRecord pin_released_event(const geometry::Layout& layout);
// What the job waits for, until it tries again.
Gathering::Wait no_inputs(const pb::Durable& durable, int64_t wait_ms);
Gathering::Wait unsaved_end(const StepLedger& ledger,
                            const CheckpointWatch& checkpoints,
                            const std::string& why, int64_t wait_ms);
// What a stop waits for.
std::string unsaved_text(int64_t step);

}  // namespace remesh::core
