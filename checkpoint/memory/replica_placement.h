// Replica placement: which ranks keep replicas of which other ranks' state, so
// that the loss of a host loses no state. Pure; every rank and the coordinator
// compute the same placement.
//
// A state survives the loss of any k hosts if k + 1 hosts hold it. The ranks of
// a replica group (geometry/sharding.h) hold copies of each other already, so
// only the missing copies are added. When there are too few hosts, each of them
// gets a copy, and further copies go to other workers, until k + 1 workers or
// all of them hold one: every state survives the loss of min(k, hosts - 1)
// hosts, or of min(k, workers - 1) workers.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "proto/control.pb.h"

namespace remesh::memory {

struct RankHost {
  std::string worker;
  std::string host;
};

// The host of each worker; the worker's name if the assignment does not tell,
// so that such a worker is a host of its own.
std::map<std::string, std::string> hosts_by_worker(
    const pb::Assignment& assignment);
// The place of each rank.
std::vector<RankHost> places_of(const pb::Assignment& assignment);

struct ReplicaPlacement {
  std::vector<std::vector<int>> holders;  // by rank: who keeps its replicas
  std::vector<std::vector<int>> kept;     // by rank: whose replicas it keeps
};

// groups: the replica group of each rank; if empty, each rank is its own.
// copies: k. Replicas are spread evenly over the ranks as far as hosts allow.
// REQUIRES: groups is empty or as long as ranks; copies >= 0; a worker is on
// one host.
ReplicaPlacement place_replicas(std::span<const RankHost> ranks,
                                std::span<const int> groups, int copies);

}  // namespace remesh::memory
