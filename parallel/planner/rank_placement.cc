#include "parallel/planner/rank_placement.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "proto/base/check.h"

namespace remesh::planner {
namespace {

// What is free of the hosts while slots are given away.
class FreeSlots {
 public:
  explicit FreeSlots(const std::vector<HostSlots>& hosts) {
    for (const HostSlots& h : hosts) free_.push_back(h.slots);
  }
  void take(int host) { --free_[static_cast<size_t>(host)]; }
  bool has(int host) const { return free_[static_cast<size_t>(host)] > 0; }
  // Of the hosts with a free slot the one with most of the peers, then one with
  // room for so many, then the first. peers: by host; empty: there are none.
  int best(const std::vector<int>& peers, int room) {
    while (free_[first_] == 0) CHECK(++first_ < free_.size());
    const auto wish = [&](size_t h) {
      return std::make_pair(peers.empty() ? 0 : peers[h], free_[h] >= room);
    };
    size_t best = first_;
    for (size_t h = first_ + 1; h < free_.size(); ++h) {
      if (peers.empty() && free_[best] >= room) break;
      if (free_[h] > 0 && wish(h) > wish(best)) best = h;
    }
    return static_cast<int>(best);
  }

 private:
  std::vector<int> free_;
  size_t first_ = 0;
};

}  // namespace

RankPlacer::RankPlacer(const PlacementRequest& q) : request_(q) {
  std::map<std::string_view, int> turns;  // first previous rank, by worker
  for (const pb::RankPlace& p : q.previous) {
    const auto [it, is_new] = turns.emplace(p.worker(), p.rank());
    if (!is_new) it->second = std::min(it->second, p.rank());
  }
  const auto turn_of = [&](const WorkerSlots& w) {
    const auto it = turns.find(w.worker);
    return it == turns.end() ? std::numeric_limits<int>::max() : it->second;
  };
  using Turn = std::tuple<int, std::string_view>;
  std::map<std::string_view, int> host_turns;
  std::vector<std::tuple<Turn, Turn, const WorkerSlots*>> order;
  for (const WorkerSlots& w : q.workers) {
    const auto [it, is_new] = host_turns.emplace(w.host, turn_of(w));
    if (!is_new) it->second = std::min(it->second, turn_of(w));
  }
  for (const WorkerSlots& w : q.workers)
    order.emplace_back(Turn(host_turns.at(w.host), w.host),
                       Turn(turn_of(w), w.worker), &w);
  std::ranges::sort(order);
  for (const auto& [host_turn, turn, w] : order) {
    if (hosts_.empty() || hosts_.back().name != w->host)
      hosts_.emplace_back().name = w->host;
    HostSlots& h = hosts_.back();
    h.workers.push_back(w);
    h.slots += w->slots;
    h.cores = std::max(h.cores, w->cores);
    h.memory_bytes = std::max(h.memory_bytes, w->memory_bytes);
  }
  std::erase_if(hosts_, [](const HostSlots& h) { return h.slots == 0; });
}

// Every worker that is still present gets its previous ranks.
void RankPlacer::keep_seats(std::vector<Seat>* seats) const {
  if (request_.previous.size() != seats->size()) return;
  std::map<std::string_view, std::pair<int, size_t>> workers;
  for (size_t h = 0; h < hosts_.size(); ++h)
    for (size_t w = 0; w < hosts_[h].workers.size(); ++w)
      workers[hosts_[h].workers[w]->worker] = {static_cast<int>(h), w};
  std::set<std::pair<const WorkerSlots*, int>> taken;
  for (const pb::RankPlace& p : request_.previous) {
    const auto it = workers.find(p.worker());
    const auto rank = static_cast<size_t>(p.rank());
    if (it == workers.end() || p.rank() < 0 || rank >= seats->size() ||
        (*seats)[rank].host >= 0)
      continue;
    const auto [host, index] = it->second;
    const WorkerSlots* w = hosts_[static_cast<size_t>(host)].workers[index];
    if (p.local_slot() >= 0 && p.local_slot() < w->slots &&
        taken.emplace(w, p.local_slot()).second)
      (*seats)[rank] = {host, w, p.local_slot()};
  }
}

std::vector<RankPlacer::Seat> RankPlacer::seats(
    const geometry::Layout& layout) const {
  std::vector<Seat> out(static_cast<size_t>(layout.world()));
  keep_seats(&out);
  FreeSlots free(hosts_);
  for (const Seat& s : out)
    if (s.host >= 0) free.take(s.host);
  const auto tp = static_cast<size_t>(layout.tp);
  for (size_t first = 0; first < out.size(); first += tp) {
    int vacant = 0;
    std::vector<int> peers;
    for (size_t r = first; r < first + tp; ++r) {
      if (out[r].host < 0) {
        ++vacant;
      } else {
        peers.resize(hosts_.size());
        ++peers[static_cast<size_t>(out[r].host)];
      }
    }
    int host = -1;
    for (size_t r = first; r < first + tp; ++r) {
      if (out[r].host >= 0) continue;
      if (host < 0 || !free.has(host)) host = free.best(peers, vacant);
      out[r].host = host;
      free.take(host);
    }
  }
  return out;
}

std::vector<int> RankPlacer::ranks_by_host(
    const geometry::Layout& layout) const {
  std::vector<int> out(hosts_.size());
  for (const Seat& s : seats(layout)) ++out[static_cast<size_t>(s.host)];
  return out;
}

std::vector<pb::RankPlace> RankPlacer::place(
    const geometry::Layout& layout) const {
  std::vector<Seat> seats = this->seats(layout);
  std::vector<int> ranks(hosts_.size());
  std::set<std::pair<const WorkerSlots*, int>> kept;
  for (const Seat& s : seats) {
    ++ranks[static_cast<size_t>(s.host)];
    if (s.worker != nullptr) kept.emplace(s.worker, s.slot);
  }
  struct Next {
    size_t worker = 0;
    int slot = 0;
  };
  std::vector<Next> next(hosts_.size());
  std::vector<pb::RankPlace> out(seats.size());
  for (size_t r = 0; r < seats.size(); ++r) {
    Seat& s = seats[r];
    const auto h = static_cast<size_t>(s.host);
    auto& [worker, slot] = next[h];
    while (s.worker == nullptr) {
      const WorkerSlots* w = hosts_[h].workers[worker];
      if (slot == w->slots) {
        ++worker;
        slot = 0;
      } else if (!kept.contains({w, slot++})) {
        s = {.host = s.host, .worker = w, .slot = slot - 1};
      }
    }
    out[r].set_rank(static_cast<int>(r));
    out[r].set_worker(s.worker->worker);
    out[r].set_local_slot(s.slot);
    out[r].set_threads(std::max(1, hosts_[h].cores / ranks[h]));
  }
  return out;
}

}  // namespace remesh::planner
