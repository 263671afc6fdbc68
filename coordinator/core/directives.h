// Directives: what the coordinator asks of each worker, and when it says so
// again. No I/O.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/core/api.h"
#include "coordinator/core/cluster_view.h"
#include "coordinator/core/fence_relay.h"
#include "coordinator/core/mesh_policy.h"
#include "coordinator/core/state_retention.h"

namespace remesh::core {

class Directives {
 public:
  // Borrows its members.
  struct Inputs {
    ClusterView view;
    const Options& options;
    const MeshPolicy& policy;
    const StateRetention& retention;
    const FenceRelay& fences;
    // Fences may have been contributed to an earlier life of the coordinator.
    bool adopted = false;
    int64_t synced_step = 0;  // whose metrics survive a crash of the host
  };

  void request_checkpoint() { ++checkpoint_request_; }
  // Those to send now, of which the roster takes a note. A directive is sent
  // when it says something new, and repeated in case it was lost.
  std::vector<SendDirective> due(const Inputs& in, Roster* roster);

 private:
  Roster::DirectiveKey wanted(const Inputs& in, const std::string& name,
                              const Roster::Member& m) const;
  SendDirective directive_of(const Inputs& in, const Roster::DirectiveKey& key,
                             const std::string& name, const Roster::Member& m);

  int64_t checkpoint_request_ = 0;                    // number of the last one
  std::shared_ptr<const pb::Assignment> assignment_;  // prepared last
};

}  // namespace remesh::core
