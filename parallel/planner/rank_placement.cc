#include "parallel/planner/rank_placement.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "proto/base/check.h"

namespace remesh::planner {
namespace {

// Assigns ranks to slots, host by host. Hosts and workers are ordered by their
// first rank in the previous mesh; new ones come last, by name. So ranks that
// stay keep their order, and without a previous mesh the order is that of the
// names.
class RankPlacer {
 public:
  RankPlacer(const PlacementRequest& q, const geometry::Layout& layout)
      : layout_(layout),
        places_(static_cast<size_t>(layout.world())),
        seats_(places_.size()) {
    std::map<std::string, int> turn;  // first previous rank by worker
    for (const pb::RankPlace& p : q.previous) {
      const auto [it, is_new] = turn.emplace(p.worker(), p.rank());
      if (!is_new) it->second = std::min(it->second, p.rank());
    }
    const auto turn_of = [&](const WorkerSlots& w) {
      const auto it = turn.find(w.worker);
      return it == turn.end() ? std::numeric_limits<int>::max() : it->second;
    };
    std::map<std::string, int> host_turn;
    for (const WorkerSlots& w : q.workers) {
      const auto [it, is_new] = host_turn.emplace(w.host, turn_of(w));
      if (!is_new) it->second = std::min(it->second, turn_of(w));
    }
    workers_ = q.workers;
    const auto before = [&](const WorkerSlots& a, const WorkerSlots& b) {
      const int ha = host_turn.at(a.host), hb = host_turn.at(b.host);
      const int ta = turn_of(a), tb = turn_of(b);
      return std::tie(ha, a.host, ta, a.worker) <
             std::tie(hb, b.host, tb, b.worker);
    };
    std::ranges::sort(workers_, before);
    for (size_t i = 0; i < workers_.size(); ++i) {
      const WorkerSlots& w = workers_[i];
      if (i == 0 || workers_[i - 1].host != w.host) hosts_.emplace_back();
      Host& host = hosts_.back();
      host.cores = std::max(host.cores, w.cores);
      const int seats = std::min(w.slots, layout.world());
      for (int s = 0; s < seats; ++s) host.free.insert({i, s});
      index_[w.worker] = i;
      host_of_.push_back(hosts_.size() - 1);
    }
  }

  std::vector<pb::RankPlace> run(const std::vector<pb::RankPlace>& previous) {
    if (previous.size() == places_.size()) keep(previous);
    const int tp = layout_.tp;
    for (int first = 0; first < layout_.world(); first += tp)
      fill_group(first, first + tp);
    // The ranks of a host share its cores evenly.
    for (pb::RankPlace& p : places_) {
      const Host& h = host_of(p.rank());
      p.set_threads(std::max(1, h.cores / h.ranks));
    }
    return std::move(places_);
  }

 private:
  using Seat = std::pair<size_t, int>;  // worker, slot
  struct Host {
    std::set<Seat> free;
    int cores = 0;
    int ranks = 0;
    int peers = 0;  // of the group that is being filled
  };

  bool vacant(int rank) const {
    return places_[static_cast<size_t>(rank)].worker().empty();
  }
  Host& host_of(int rank) {
    return hosts_[host_of_[seats_[static_cast<size_t>(rank)].first]];
  }
  void seat(int rank, Seat s) {
    seats_[static_cast<size_t>(rank)] = s;
    CHECK(host_of(rank).free.erase(s) == 1);
    ++host_of(rank).ranks;
    pb::RankPlace& place = places_[static_cast<size_t>(rank)];
    place.set_rank(rank);
    place.set_worker(workers_[s.first].worker);
    place.set_local_slot(s.second);
  }

  // Every worker that is still present gets its previous ranks.
  void keep(const std::vector<pb::RankPlace>& previous) {
    for (const pb::RankPlace& p : previous) {
      const auto it = index_.find(p.worker());
      if (p.rank() < 0 || p.rank() >= layout_.world() || !vacant(p.rank()) ||
          it == index_.end())
        continue;
      const Seat s{it->second, p.local_slot()};
      if (hosts_[host_of_[s.first]].free.count(s) == 1) seat(p.rank(), s);
    }
  }

  // Tensor-parallel peers [first, last): on the host that already has most of
  // them, else on the first with room for all vacant ones, else wherever slots
  // are free.
  void fill_group(int first, int last) {
    std::vector<int> todo;
    for (Host& h : hosts_) h.peers = 0;
    for (int r = first; r < last; ++r) {
      if (vacant(r))
        todo.push_back(r);
      else
        ++host_of(r).peers;
    }
    if (todo.empty()) return;
    std::vector<Host*> by_wish;
    for (Host& h : hosts_)
      if (!h.free.empty()) by_wish.push_back(&h);
    // A single peer has no preference.
    if (last - first > 1)
      std::ranges::stable_sort(by_wish, [&](const Host* a, const Host* b) {
        const auto wish = [&](const Host* h) {
          return std::make_pair(h->peers, h->free.size() >= todo.size());
        };
        return wish(a) > wish(b);
      });
    auto host = by_wish.begin();
    for (const int r : todo) {
      while ((*host)->free.empty()) {
        ++host;
        CHECK(host != by_wish.end());
      }
      seat(r, *(*host)->free.begin());
    }
  }

  geometry::Layout layout_;
  std::vector<pb::RankPlace> places_;  // by rank; vacant while worker is ""
  std::vector<Seat> seats_;            // by rank
  std::vector<WorkerSlots> workers_;
  std::vector<Host> hosts_;      // in order, some may be full
  std::vector<size_t> host_of_;  // by worker
  std::map<std::string, size_t> index_;
};

}  // namespace

std::vector<pb::RankPlace> place_ranks(const PlacementRequest& q,
                                       const geometry::Layout& layout) {
  return RankPlacer(q, layout).run(q.previous);
}

}  // namespace remesh::planner
