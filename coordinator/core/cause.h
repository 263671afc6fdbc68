// Root causes: which rank of a generation failed or got stuck first, and how to
// describe it, as pure functions of what the workers report about all ranks.
//
// When one rank of a mesh dies, the others die as a consequence or wait for it
// forever; these victims are never named. Dead ranks are ordered by how they
// ended, then by when. Stuck ranks are ordered by what each waits for: the
// culprit is not waiting, or others wait for it and it waits for none of them.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "proto/control.pb.h"

namespace remesh::core {

// Two hosts, in alphabetical order.
using Link = std::pair<std::string, std::string>;

// Of nothing in particular.
pb::Cause cause_of(const std::string& what);
// Not a fault, but a change of plan.
pb::Cause change_of_plan(const std::string& why);
// "rank 1 on worker w2: killed by signal 9 (SIGKILL)".
std::string text_of(const pb::Cause& cause);
std::vector<Link> links_of(const pb::Cause& cause);
void set_links(const std::vector<Link>& links, pb::Cause* cause);

// A rank as its worker last reported it. Borrows the status.
struct RankView {
  const pb::RankStatus* status = nullptr;
  std::string worker;
  std::string host;
  int64_t stalled_ms = 0;    // without progress
  int64_t exit_seen_ms = 0;  // its end was first reported, by our clock
};

// Killed by a signal that no peer's death explains.
bool died_of_itself(const pb::RankStatus& status);

// Whether the ranks could not load what their generation starts from, for
// whatever reason.
bool source_is_bad(const pb::Cause& failure, const pb::Source& source);

// Codes that say what is wrong, as opposed to how a process ended: 3, 65, 66.
bool tells_why(int exit_code);

// Whether the rank ended as that other one, which failed first, and not as its
// victim: with an exit code that says why, or by a signal, or before it was
// connected to any other rank.
bool died_like(const pb::RankStatus& status, const pb::RankStatus& first);

// The index of the rank that failed first, of those that were not killed in an
// abort. A signal outweighs an error message, which outweighs an exit without
// one; an abort or such an exit while waiting for others comes last, because
// that is how MPI ends the peers of a dead rank. Among equals the earliest: on
// one host by its clock, between hosts by when the coordinator heard of it.
std::optional<size_t> first_death(const std::vector<RankView>& ranks);

// "rank 1 on worker w2".
std::string rank_name(const RankView& rank);

// How it died: "killed by signal 9 (SIGKILL); it was at step 12, ...".
std::string death_text(const RankView& rank);

struct Stuck {
  size_t rank = 0;  // the one to blame
  // Every rank waits for another, so a message was lost. Then `rank` is only a
  // witness: the one that waits in the earliest operation.
  bool lost_message = false;
  std::vector<size_t> cycle;  // then: ranks that wait only for each other
};
// Finds the rank to blame among ranks that are alive and stalled. REQUIRES: at
// least one.
Stuck find_stuck(const std::vector<RankView>& ranks);
// The rank to blame: "no progress for 5.0 s at step 12, ...", or that a message
// was lost.
std::string stuck_text(const std::vector<RankView>& ranks, const Stuck& stuck);
// If a message was lost: between which hosts that may have been. Ranks that
// exchange messages know it.
std::vector<Link> silent_links(const std::vector<RankView>& ranks,
                               const Stuck& stuck);
// The hosts of the collective if it was one, and so may be any two of them.
std::set<std::string> silent_hosts(const std::vector<RankView>& ranks,
                                   const Stuck& stuck);

// If the rank ended because it could not reach the peer that it waited for, and
// nothing that is known ended that one: the link between their hosts.
std::vector<Link> broken_link(const std::vector<RankView>& ranks,
                              const RankView& dead);
// The same for a rank that could not connect to all others: all hosts of
// the plan, since some may not have reported yet.
std::set<std::string> unconnected_hosts(const pb::Assignment& plan,
                                        const RankView& dead);

// Adds the details of the rank that a failure event names.
void fill_failure(const RankView& rank, pb::EventRecord* event);

}  // namespace remesh::core
