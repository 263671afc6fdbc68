// Commands: what operators ask of the job, and when that is over. Each is
// checked, then changes the durable state or asks the ranks for something. No
// I/O.
#pragma once

#include <optional>
#include <string>

#include "coordinator/core/cluster_view.h"
#include "coordinator/core/cordoning.h"
#include "coordinator/core/directives.h"
#include "coordinator/core/mesh_policy.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::core {

// Borrows its members. Those that commands change are parts of view.
struct CommandInputs {
  ClusterView view;
  const MeshPolicy& policy;
  std::optional<pb::Mesh> mesh;  // the present one or, before a mesh, the last
  Cordoning* cordons;
  Directives* directives;
  Roster* roster;
  pb::Drains* drains;
  pb::StopRequest* stop;
  pb::MeshRequest* mesh_request;
};

// Carries out a command. Returns the event that announces it if what the
// journal keeps has changed. Fails, and changes nothing, with the reason.
Result<std::optional<pb::EventRecord>> carry_out(const pb::Command& command,
                                                 const CommandInputs& in);
// done: how that went. status: since then.
pb::Reply reply_to(const pb::Command& command, const Status& done,
                   pb::JobStatus status);

// The job continues. Whoever asked it to stop can make room and ask again.
// Returns the event.
pb::EventRecord decline_stop(const std::string& why, pb::StopRequest* request);
// Unpins a layout that does not run yet and does not fit any more because slots
// were lost. Returns the event; nothing if there is no such layout.
std::optional<pb::EventRecord> release_unfit_pin(const ClusterView& view,
                                                 const MeshPolicy& policy,
                                                 pb::MeshRequest* request);
// The next generation has this mesh, which ends the wait for one that was asked
// for. Unpins a layout that is another one. Returns the event, if so.
std::optional<pb::EventRecord> release_other_pin(const geometry::Layout& mesh,
                                                 pb::MeshRequest* request);
// Drops the number of slots that was asked for: it was accepted for a layout
// that was pinned, and admits none of the job's own, as `why` says. Returns the
// event; nothing if no number was asked for.
std::optional<pb::EventRecord> release_scale(const std::string& why,
                                             pb::MeshRequest* request);

}  // namespace remesh::core
