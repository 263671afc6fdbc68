// Buddies: which ranks keep replicas of whose state, so that a lost host takes
// nothing with it. Pure; every rank computes the same.
//
// A state is safe against the loss of any k hosts when it lies on k + 1. Data-
// parallel ranks that hold the same (content class, geometry/sharding.h) are
// copies of each other already: only what is missing is added. Where there are
// too few hosts, all of them have a copy, and further copies lie on other
// workers, until there are k + 1 or every worker has one: so with min(k,
// hosts - 1) hosts lost, or min(k, workers - 1) workers, each state is left.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace remesh::memory {

struct RankPlace {
  std::string worker;
  std::string host;
};

struct Placement {
  std::vector<std::vector<int>> holders;  // by rank: who keep its replica
  std::vector<std::vector<int>> kept;     // by rank: whose replicas it keeps
};

// content: the content class of each rank; empty: all differ. copies: k.
// Replicas are dealt evenly over the ranks as far as hosts allow.
// REQUIRES: content is empty or as long as ranks; copies >= 0; a worker is on
// one host.
Placement place_replicas(std::span<const RankPlace> ranks,
                         std::span<const int> content, int copies);

}  // namespace remesh::memory
