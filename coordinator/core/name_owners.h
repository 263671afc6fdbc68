// NameOwners: which key may use which worker name: the first one that
// registered it. The journal keeps them. A value without I/O.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "coordinator/core/api.h"
#include "coordinator/core/roster.h"
#include "proto/control.pb.h"

namespace remesh::core {

class NameOwners {
 public:
  NameOwners() = default;
  explicit NameOwners(const pb::NameOwners& journaled);

  // The key that registered the name; "" if none has.
  std::string owner_of(const std::string& worker) const;
  std::vector<std::string> workers_of(const std::string& key) const;
  // claim: the right of `key` to names of others.
  bool may_use(const std::string& worker, const std::string& key, Claim claim,
               const Roster& roster) const;
  // Returns whether the journal's list changed. REQUIRES: may_use().
  bool add(const std::string& worker, const std::string& key,
           const Roster& roster, pb::NameOwners* journaled);

 private:
  std::map<std::string, std::string> keys_;  // by worker
};

}  // namespace remesh::core
