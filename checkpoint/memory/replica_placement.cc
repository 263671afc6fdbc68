#include "checkpoint/memory/replica_placement.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "proto/base/check.h"

namespace remesh::memory {
namespace {

// The ranks of one replica group, and where their state is.
struct State {
  std::vector<int> members;
  std::set<std::string> hosts, workers;
};

std::vector<State> states_of(std::span<const RankHost> ranks,
                             std::span<const int> groups) {
  std::map<int, State> by_group;
  for (size_t r = 0; r < ranks.size(); ++r) {
    State& s = by_group[groups.empty() ? static_cast<int>(r) : groups[r]];
    s.members.push_back(static_cast<int>(r));
    s.hosts.insert(ranks[r].host);
    s.workers.insert(ranks[r].worker);
  }
  std::vector<State> out;
  for (auto& [unused, s] : by_group) out.push_back(std::move(s));
  return out;
}

// One more copy of every state that needs one: a bipartite matching of states
// to ranks (Kuhn 1955) that minimises the largest number kept by a rank.
class Round {
 public:
  // `kept`: how many replicas each rank keeps already.
  Round(std::span<const RankHost> ranks, const std::vector<State>& states,
        std::vector<size_t> kept)
      : ranks_(ranks),
        kept_(std::move(kept)),
        given_(ranks.size()),
        candidates_(states.size()),
        holder_(states.size(), -1) {}

  // A state that is in too few places looks for other hosts, and if there are
  // none for other workers, starting next to the sender.
  void want(size_t state, const State& s, int sender, size_t enough) {
    const int n = static_cast<int>(ranks_.size());
    for (const bool by_host : {true, false}) {
      if ((by_host ? s.hosts : s.workers).size() >= enough) continue;
      for (int i = 1; i < n; ++i) {
        const int r = (sender + i) % n;
        const RankHost& p = ranks_[static_cast<size_t>(r)];
        if (by_host ? !s.hosts.contains(p.host) : !s.workers.contains(p.worker))
          candidates_[state].push_back(r);
      }
      if (!candidates_[state].empty()) return;
    }
  }

  // The new holder of each state, or -1.
  const std::vector<int>& match() {
    size_t limit = 1;
    for (size_t s = 0; s < candidates_.size(); ++s) {
      if (candidates_[s].empty()) continue;
      while (true) {
        std::vector<bool> tried(ranks_.size(), false);
        if (place(s, limit, tried)) break;
        ++limit;
      }
    }
    return holder_;
  }

 private:
  bool place(size_t state, size_t limit, std::vector<bool>& tried) {
    for (const int r : candidates_[state]) {
      const auto at = static_cast<size_t>(r);
      if (!tried[at] && kept_[at] + given_[at].size() < limit) {
        given_[at].push_back(state);
        holder_[state] = r;
        return true;
      }
    }
    for (const int r : candidates_[state]) {
      const auto at = static_cast<size_t>(r);
      if (tried[at]) continue;
      tried[at] = true;
      for (size_t& other : given_[at])
        if (place(other, limit, tried)) {
          other = state;
          holder_[state] = r;
          return true;
        }
    }
    return false;
  }

  const std::span<const RankHost> ranks_;
  const std::vector<size_t> kept_;
  std::vector<std::vector<size_t>> given_;    // in this round, by rank
  std::vector<std::vector<int>> candidates_;  // by state, the best first
  std::vector<int> holder_;
};

}  // namespace

std::map<std::string, std::string> hosts_by_worker(const pb::Assignment& a) {
  std::map<std::string, std::string> hosts;
  for (int i = 0; i < a.workers_size(); ++i)
    hosts[a.workers(i)] = i < a.hosts_size() ? a.hosts(i) : a.workers(i);
  return hosts;
}

std::vector<RankHost> places_of(const pb::Assignment& a) {
  auto hosts = hosts_by_worker(a);
  std::vector<RankHost> out(static_cast<size_t>(a.ranks_size()));
  for (const pb::RankPlace& p : a.ranks()) {
    if (p.rank() < 0 || p.rank() >= a.ranks_size()) continue;
    const auto host = hosts.try_emplace(p.worker(), p.worker()).first;
    out[static_cast<size_t>(p.rank())] = {p.worker(), host->second};
  }
  return out;
}

ReplicaPlacement place_replicas(std::span<const RankHost> ranks,
                                std::span<const int> groups, int copies) {
  CHECK(copies >= 0 && (groups.empty() || groups.size() == ranks.size()));
  const auto enough = static_cast<size_t>(copies) + 1;
  ReplicaPlacement out;
  out.holders.resize(ranks.size());
  out.kept.resize(ranks.size());
  std::vector<State> states = states_of(ranks, groups);
  for (size_t turn = 0;; ++turn) {
    std::vector<size_t> kept;
    for (const auto& k : out.kept) kept.push_back(k.size());
    Round round(ranks, states, std::move(kept));
    const auto sender = [&](const State& s) {
      return s.members[turn % s.members.size()];
    };
    for (size_t i = 0; i < states.size(); ++i)
      round.want(i, states[i], sender(states[i]), enough);
    bool any = false;
    const std::vector<int>& holder = round.match();
    for (size_t i = 0; i < states.size(); ++i) {
      if (holder[i] < 0) continue;
      any = true;
      const RankHost& at = ranks[static_cast<size_t>(holder[i])];
      const int from = sender(states[i]);
      out.holders[static_cast<size_t>(from)].push_back(holder[i]);
      out.kept[static_cast<size_t>(holder[i])].push_back(from);
      states[i].hosts.insert(at.host);
      states[i].workers.insert(at.worker);
    }
    if (!any) break;
  }
  for (auto& k : out.kept) std::sort(k.begin(), k.end());
  return out;
}

}  // namespace remesh::memory
