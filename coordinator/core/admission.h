// Admission: what of a worker's message counts. Whoever reaches the port can
// send one, so each is checked before it changes anything, and a worker speaks
// only for the ranks and steps that it has a part in. No I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/core/api.h"
#include "coordinator/core/cluster_view.h"
#include "coordinator/core/rate_limit.h"
#include "proto/control.pb.h"

namespace remesh::core {

// Time that workers have to find a restarted coordinator.
inline constexpr int64_t kReconnectSlackMs = 3000;

// Whether the worker has a part in the fence, which limits::check() accepts.
bool takes_part(const pb::FenceIn& fence, const pb::Durable& durable);
// The report's metrics of generations in which the worker had a part. While no
// generation runs, also those of a worker that was declared dead.
std::vector<const pb::StepMetrics*> metrics_that_count(
    const pb::Report& report, bool keeps_state, const pb::Durable& durable);

// What reports and fences are taken, and who is told when one is not.
class Admission {
 public:
  // What of the report counts, which is without what others' ranks do; the
  // roster takes it. Otherwise what to answer, and the event that tells of it,
  // which is due once a minute at most; neither for a report that is stale.
  struct Verdict {
    std::optional<pb::Report> report;
    std::optional<pb::Refusal> refusal;
    std::optional<pb::EventRecord> event;
  };
  // protocol: what this coordinator speaks.
  explicit Admission(const wire::ProtocolRange& protocol);

  // key: that the sender proved to have; "": without keys.
  Verdict judge(const pb::Report& report, const std::string& key,
                const ClusterView& view, const Options& options);
  // Counts a message that is not taken, of which nobody is told.
  void drop() { ++dropped_; }
  uint64_t dropped() const { return dropped_; }

 private:
  Verdict refuse(const std::string& worker, const std::string& why,
                 pb::Refusal::Kind kind, int64_t now_ms);
  std::optional<pb::EventRecord> event(const std::string& worker,
                                       const std::string& why, int64_t now_ms);

  const wire::ProtocolRange protocol_;
  RateLimit lives_;  // of workers, by key
  uint64_t dropped_ = 0;
  int64_t suppressed_ = 0;  // refused since the last event
  std::optional<int64_t> last_event_ms_;
};

}  // namespace remesh::core
