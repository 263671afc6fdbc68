// Cordoning: which hosts are cordoned because of what has failed, and when they
// are used again. It counts failures on hosts and links (cordons.h), looks for
// a bad link (link_search.h), and never cordons hosts that the job cannot do
// without.
//
// Made for one decision: it changes the HostFaults that it is given and says
// what changed. No I/O.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "coordinator/core/assignment.h"
#include "coordinator/core/cluster_view.h"
#include "coordinator/core/cordons.h"
#include "coordinator/core/failure_budget.h"
#include "coordinator/core/mesh_policy.h"
#include "proto/base/status.h"

namespace remesh::core {

class Cordoning {
 public:
  // What the coordinator has to write down and announce.
  struct Changes {
    bool any = false;                   // of HostFaults
    std::vector<pb::LinkSearch> tests;  // hosts were set apart for a test
    bool search_ended = false;          // and found no link
    std::vector<pb::Cordon> begun;
    std::vector<pb::Cordon> ended;  // their time is over, or they are needed
  };
  // Borrows its members. `faults` are those of view.durable.
  struct Inputs {
    ClusterView view;
    const MeshPolicy& policy;
    const pb::Elastic& elastic;
    double unix_s = 0;
    double generation_s = 0;  // since the generation was planned
    bool stepped = false;     // the generation has committed a step
    pb::HostFaults* faults;
  };
  explicit Cordoning(const Inputs& in) : in_(in) {}

  // Counts the failure on the hosts or links that it is put down to, and
  // cordons those where it is one too many, unless nobody else could continue
  // the job. REQUIRES: the failure is counted (failure_budget.h).
  Consequence after(const pb::Cause& fault);
  // Counts the failure, does the same, and decides what follows for the job.
  // Refuses a source that did not load. Does nothing if ranks could not save,
  // and counts nothing for the job if no host can read its inputs: these are no
  // such failures.
  FailureVerdict judge(const pb::Cause& fault, pb::FailureBudget* budget,
                       pb::Refusals* refusals);
  // The generation made a step, its first in this life of the coordinator or
  // not: what failed before on the hosts of its ranks is over, they are proven,
  // and none of their links is bad. Returns whether anything changed.
  bool after_step(bool first);
  // Cordons hosts that have too little room for the states of the plan, unless
  // they are needed: without the others, or because of the states that they
  // alone hold. Returns whether it did.
  bool for_room(const Plan& plan);
  // What some hosts cannot load, and is refused, may be sound, and the hosts
  // bad. Cordons them if there are hosts that have not tried it, so that
  // nothing is refused any more; returns whether it did.
  bool for_loading(pb::Refusals* refusals);
  // Ends cordons and searches whose time is over. If the job waits and no mesh
  // is possible without the cordoned hosts, also those that remaining_alone_s()
  // allows to end. Returns whether any ended.
  bool end_in_time();
  // `name`: of a host, or of a worker that is cordoned or on a cordoned host.
  // Returns what is used again.
  Result<Site> lift(const std::string& name);

  const Changes& changes() const { return changes_; }

 private:
  bool awaits_inputs(const pb::Cause& fault) const;
  bool others_remain(const std::vector<Site>& failed,
                     const pb::Cause& fault) const;
  bool awaits_proven(const std::vector<Site>& failed) const;
  bool possible_with(const pb::HostFaults& faults) const;
  bool possible_without(const std::vector<Site>& sites,
                        pb::HostFaults faults) const;
  bool possible_without(const std::vector<Site>& sites) const {
    return possible_without(sites, *in_.faults);
  }
  bool needs_state_of(const std::set<std::string>& hosts) const;
  bool others_hold(const pb::Source& source,
                   const std::set<std::string>& hosts) const;
  void begin(const Site& site, const pb::Cause& fault);
  int64_t count(const Site& site, const pb::Cause& fault,
                double remembered_s = 0);
  FailureVerdict judge_unreadable(const pb::Cause& fault,
                                  pb::Refusals* refusals);
  Consequence after_broken(const pb::Cause& fault);
  Consequence after_lost_message(const pb::Cause& fault);
  bool cordon_found_host();
  bool next_link_test();
  void note_link_test(const std::set<std::string>& hosts);
  void end_needed();

  const Inputs in_;
  Changes changes_;
};

}  // namespace remesh::core
