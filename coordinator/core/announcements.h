// Announcements: the events that tell people what happened (proto/rundir/
// events.h), and their sentences. The coordinator sets the time and the
// generation of an event, and its step where that is the last finished one.
// Pure.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "coordinator/core/checkpoint_watch.h"
#include "coordinator/core/cluster_view.h"
#include "coordinator/core/cordoning.h"
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

// durable: at the time of the change.
pb::EventRecord event_of(const Roster::MembershipChange& change,
                         const pb::Durable& durable);
// seconds: since training was interrupted.
pb::EventRecord event_of(const Failure& failure, const ClusterView& view,
                         double seconds);
pb::EventRecord event_of(const CheckpointWatch::Result& result);
pb::EventRecord event_of(const pb::Cordon& begun, double unix_s);
pb::EventRecord event_of(const pb::LinkSearch& test);
std::vector<pb::EventRecord> events_of(const Cordoning::Changes& changes,
                                       double unix_s);
// Metrics of finished steps are lost.
pb::EventRecord gap_event(const StepLedger::Entry& gap);
pb::EventRecord skipped_event(const pb::StepMetrics& step);
// worker: who knows the generation; nothing: the metrics log does.
pb::EventRecord journal_behind_event(int64_t generation,
                                     std::optional<std::string> worker);
pb::EventRecord pin_released_event(const geometry::Layout& layout);

}  // namespace remesh::core
