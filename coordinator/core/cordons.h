// Cordons: hosts that get no ranks for a while because of what failed there.
//
// Failures are counted by site (HostFaults.suspects): by host or, if ranks of a
// worker fail beside others of its host that have not failed, by worker. Enough
// of them in a row cordon the site (HostFaults.cordons), after a failed start
// for at least ten times as long as that took; the next failure after the
// cordon has ended cordons it again, for twice as long. The first finished step
// of a mesh with ranks there clears the count. A cordon with a peer concerns
// the link between two hosts: either host alone works, so one of them is
// enough.
//
// Hosts that took part in the newest generation that made a step are proven.
// What fails at the start of a mesh that adds others is put down to the others.
//
// Functions of pb::HostFaults, which the journal keeps. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "coordinator/core/cause.h"
#include "coordinator/core/cluster_view.h"
#include "proto/control.pb.h"

namespace remesh::core {

// What failures are counted on.
struct Site {
  std::string host;
  std::string worker;  // "": all workers of the host
  std::string peer;    // the link to this host; "": the host itself
  // Failures of ranks that had made steps: they say nothing about a start.
  bool in_training = false;
  auto operator<=>(const Site&) const = default;
};

// The sites that a failure is put down to.
struct Blame {
  std::vector<Site> sites;
  int64_t enough = 1;  // failures in a row there that cordon them
  // Seconds during which a finished step does not clear the count.
  double remembered_s = 0;
  // Others could run the job in place of the sites, so that the failure says
  // nothing about the job.
  bool others_can_run = false;
};

// A host where the job failed so often without a finished step between is at
// fault even after its cordon, in which it could recover.
inline constexpr int64_t kAtFault = 3;

// Where the failure happened: its hosts or, where another worker of the host
// has not failed, its workers.
std::vector<Site> sites_of(const pb::Cause& failure, const ClusterView& view);
// Whether failures there concern this worker.
bool concerns(const Site& site, const std::string& host,
              const std::string& worker);
bool concerns(const pb::Cordon& cordon, const std::string& host,
              const std::string& worker);
// The failure at the start of a mesh of proven hosts and others, as that of the
// others: of those that failed or, if it is between hosts, of those that failed
// so before.
pb::Cause of_unproven(pb::Cause failure, const pb::HostFaults& faults);
bool is_proven(const pb::HostFaults& faults, const std::string& host);

// sites: those of the failure. others_can_run: a mesh without them is possible
// now. REQUIRES: the failure is counted (failure_budget.h).
Blame blame_for(const pb::Cause& failure, const std::vector<Site>& sites,
                const ClusterView& view, const pb::Elastic& elastic,
                bool others_can_run);

// Hosts that failed like this since the last step of a mesh with them.
std::set<std::string> hosts_failed_alike(const pb::HostFaults& faults,
                                         const pb::Cause& failure);
// Whether the worker failed like this, and is cordoned for it or at fault.
bool failed_alike(const pb::HostFaults& faults, const std::string& host,
                  const std::string& worker, const pb::Cause& failure);

// Whether ranks failed in the same way on that host: with the same one of the
// exit codes that say why (cause.h), or with none of them.
bool is_alike(const pb::Cordon& cordon, const pb::Cause& failure);

// A rescue uses a cordoned host that alone holds the newest state: at once, up
// to elastic.max_same_failures failures there, and then for at least this time
// in all, since what its ranks lack may come back.
inline constexpr int64_t kRescueMs = 60'000;
// After that many failures, how long it waits; nothing: it is too late.
std::optional<int64_t> rescue_wait_ms(int64_t failures,
                                      const pb::Elastic& elastic);

// worker "": whether none of the host's workers gets ranks.
bool is_cordoned(const pb::HostFaults& faults, const std::string& host,
                 const std::string& worker = "");
// Why no ranks are placed on the worker; "" if it is not cordoned.
std::string cordon_reason(const pb::HostFaults& faults, const std::string& host,
                          const std::string& worker);
// "h2", or "worker w3 on h2".
std::string site_text(const pb::Cordon& cordon);
// "no ranks are placed on h2 (cordoned: ...)", for what the job waits for; "".
std::string cordons_text(const pb::HostFaults& faults);
// Until the cordon ends; at most its full time, should the clock have been set
// back.
double remaining_s(const pb::Cordon& cordon, double now_s);
// Until it ends if the job cannot run without the site: nobody else pays for
// what a failed start costs, and ranks that die in training make steps.
double remaining_alone_s(const pb::Cordon& cordon, double now_s);

// Failures in a row there.
int64_t failures_of(const pb::HostFaults& faults, const Site& site);
// Adds this one and returns failures_of(). In training, it ends the rows of
// other hosts and workers if ranks die on half of the hosts or more.
int64_t suspect(const Site& site, const pb::Cause& failure, double remembered_s,
                double now_s, pb::HostFaults* faults);
// Begins a cordon, or begins again. Returns it.
pb::Cordon cordon(const Site& site, const pb::Cause& failure, double now_s,
                  pb::HostFaults* faults);
// Ends cordons whose time is over. Returns them.
std::vector<pb::Cordon> end_cordons(double now_s, pb::HostFaults* faults);
// Ends the cordons of the host and its workers, or of this worker alone; false
// if there was none.
bool end_cordon(const Site& site, pb::HostFaults* faults);
// The same, and forgets the failures there.
bool uncordon(const Site& site, pb::HostFaults* faults);
// A mesh with ranks on these hosts has finished its first step: deaths soon
// after it continue their rows there.
void begin_training(const std::set<std::string>& hosts, double now_s,
                    pb::HostFaults* faults);
// A mesh with ranks on these workers of these hosts has finished a step.
// Returns whether a count was cleared.
bool clear_suspects(const std::set<std::string>& hosts,
                    const std::set<std::string>& workers, double now_s,
                    pb::HostFaults* faults);

}  // namespace remesh::core
