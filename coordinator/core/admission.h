// Admission: what of a worker's message counts. Whoever reaches the port can
// send one, so each is checked before it changes anything, and a worker speaks
// only for the ranks and steps that it has a part in. No I/O.
#pragma once

#include <cstdint>
#include <optional>

#include "coordinator/core/api.h"
#include "coordinator/core/cluster_view.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::core {

// Time that workers have to find a restarted coordinator.
inline constexpr int64_t kReconnectSlackMs = 3000;

// Fails if the worker speaks no version of the protocol that is known here.
Status check_protocol(const pb::Report& report,
                      const wire::ProtocolRange& protocol);
// The report without what others' ranks do. Fails if it does not count.
// started_ms: when this life of the coordinator began.
Result<pb::Report> admit(const pb::Report& report, const ClusterView& view,
                         const Options& options, int64_t started_ms);
// Fails if the worker has no part in the fence.
Status check_fence(const pb::FenceIn& fence, const pb::Durable& durable);
// Whether the worker had a part in the generation, so that its metrics count.
bool may_know_steps(const pb::Report& report, int64_t generation,
                    bool keeps_state, const pb::Durable& durable);

// Says when an event tells of refused reports: once a minute at most.
class RefusalCount {
 public:
  // Counts one. If an event is due, the number since the last one.
  std::optional<int64_t> add(int64_t now_ms);
  bool told() const { return told_ms_.has_value(); }

 private:
  int64_t since_ = 0;
  std::optional<int64_t> told_ms_;
};

}  // namespace remesh::core
