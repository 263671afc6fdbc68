#include "parallel/planner/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <tuple>

#include "parallel/planner/choose.h"
#include "proto/base/text.h"

namespace remesh::planner {
namespace {

Status check_request(const PlacementRequest& q) {
  const std::pair<const char*, int> axes[] = {{"data", q.degrees.dp},
                                              {"tensor", q.degrees.tp},
                                              {"pipeline", q.degrees.pp},
                                              {"context", q.degrees.cp}};
  for (const auto& [name, degree] : axes)
    if (degree != -1 && degree < 1)
      return invalid_argument(fmt::format(
          "parallel.{}_parallel_degree = {}: must be at least 1, or -1 to "
          "have it chosen",
          name, degree));
  if (q.microbatches < 1)
    return invalid_argument(
        fmt::format("{} microbatches in the global batch: needs 1 or more",
                    q.microbatches));
  if (q.min_slots < 1)
    return invalid_argument(
        fmt::format("elastic.min_slots = {}: must be at least 1", q.min_slots));
  if (q.max_slots != -1 && q.max_slots < q.min_slots)
    return invalid_argument(fmt::format(
        "elastic.max_slots = {}: must be at least elastic.min_slots = {}, or "
        "-1 for no bound",
        q.max_slots, q.min_slots));
  std::set<std::string> names;
  for (const WorkerSlots& w : q.workers) {
    if (!names.insert(w.worker).second)
      return invalid_argument(
          fmt::format("worker '{}' is there twice", w.worker));
    if (w.slots < 0)
      return invalid_argument(fmt::format(
          "worker '{}': {} slots, must be 0 or more", w.worker, w.slots));
  }
  return ok_status();
}

// Assigns ranks to slots, host by host. Hosts and workers are ordered by their
// first rank in the previous mesh; new ones come last, by name. So ranks that
// stay keep their order, and without a previous mesh the order is that of the
// names.
class Seating {
 public:
  Seating(const PlacementRequest& q, const geometry::Layout& layout)
      : layout_(layout), places_(static_cast<size_t>(layout.world())) {
    std::map<std::string, int> turn;  // first previous rank by worker
    for (const RankPlace& p : q.previous) {
      const auto [it, is_new] = turn.emplace(p.worker, p.rank);
      if (!is_new) it->second = std::min(it->second, p.rank);
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
    const auto order = [&](const WorkerSlots& w) {
      return std::make_tuple(host_turn.at(w.host), w.host, turn_of(w),
                             w.worker);
    };
    std::sort(workers_.begin(), workers_.end(),
              [&](const WorkerSlots& a, const WorkerSlots& b) {
                return order(a) < order(b);
              });
    for (size_t i = 0; i < workers_.size(); ++i) {
      index_[workers_[i].worker] = i;
      std::set<Seat>& free = free_[workers_[i].host];
      const int seats = std::min(workers_[i].slots, layout.world());
      for (int s = 0; s < seats; ++s) free.insert({i, s});
      if (hosts_.empty() || hosts_.back() != workers_[i].host)
        hosts_.push_back(workers_[i].host);
    }
  }

  std::vector<RankPlace> run(const std::vector<RankPlace>& previous) {
    if (previous.size() == places_.size()) keep(previous);
    const int tp = layout_.tp;
    for (int first = 0; first < layout_.world(); first += tp)
      fill_group(first, first + tp);
    set_threads();
    return places_;
  }

 private:
  using Seat = std::pair<size_t, int>;  // worker, slot

  bool vacant(int rank) const {
    return places_[static_cast<size_t>(rank)].worker.empty();
  }
  void seat(int rank, const std::string& host, Seat s) {
    CHECK(free_.at(host).erase(s) == 1);
    places_[static_cast<size_t>(rank)] = {.rank = rank,
                                          .worker = workers_[s.first].worker,
                                          .local_slot = s.second};
  }

  // Every worker that is still present gets its previous ranks.
  void keep(const std::vector<RankPlace>& previous) {
    for (const RankPlace& p : previous) {
      const auto it = index_.find(p.worker);
      if (p.rank < 0 || p.rank >= layout_.world() || !vacant(p.rank) ||
          it == index_.end())
        continue;
      const std::string& host = workers_[it->second].host;
      const Seat s{it->second, p.local_slot};
      if (free_.at(host).count(s) == 1) seat(p.rank, host, s);
    }
  }

  // Tensor-parallel peers [first, last): on the host that already has most of
  // them, else on the first with room for all vacant ones, else wherever slots
  // are free.
  void fill_group(int first, int last) {
    std::vector<int> todo;
    std::map<std::string, int> seated;
    for (int r = first; r < last; ++r) {
      if (vacant(r))
        todo.push_back(r);
      else
        ++seated[host_of(r)];
    }
    if (todo.empty()) return;
    std::erase_if(hosts_, [&](const auto& h) { return free_.at(h).empty(); });
    std::vector<std::string> by_wish = hosts_;
    // A single peer has no preference.
    if (last - first > 1)
      std::stable_sort(by_wish.begin(), by_wish.end(),
                       [&](const std::string& a, const std::string& b) {
                         const auto wish = [&](const std::string& h) {
                           const auto it = seated.find(h);
                           return std::make_pair(
                               it == seated.end() ? 0 : it->second,
                               free_.at(h).size() >= todo.size());
                         };
                         return wish(a) > wish(b);
                       });
    auto host = by_wish.begin();
    for (const int r : todo) {
      while (free_.at(*host).empty()) {
        ++host;
        CHECK(host != by_wish.end());
      }
      seat(r, *host, *free_.at(*host).begin());
    }
  }

  const std::string& host_of(int rank) const {
    const auto& place = places_[static_cast<size_t>(rank)];
    return workers_[index_.at(place.worker)].host;
  }

  // The ranks of a host share its cores evenly.
  void set_threads() {
    std::map<std::string, int> cores, ranks;
    for (const WorkerSlots& w : workers_)
      cores[w.host] = std::max(cores[w.host], w.cores);
    for (const RankPlace& p : places_) ++ranks[host_of(p.rank)];
    for (RankPlace& p : places_) {
      const std::string& h = host_of(p.rank);
      p.threads = std::max(1, cores.at(h) / ranks.at(h));
    }
  }

  geometry::Layout layout_;
  std::vector<RankPlace> places_;  // by rank; vacant while worker is ""
  std::vector<WorkerSlots> workers_;
  std::vector<std::string> hosts_;  // in order, some may be full
  std::map<std::string, size_t> index_;
  std::map<std::string, std::set<Seat>> free_;  // by host
};

}  // namespace

Result<Placement> place_mesh(const PlacementRequest& request) {
  RETURN_IF_ERROR(check_request(request));
  int64_t offered = 0;
  for (const WorkerSlots& w : request.workers) offered += w.slots;
  ASSIGN_OR_RETURN(const LayoutChoice choice, choose_layout(request, offered));
  Placement placement;
  placement.layout = choice.layout;
  placement.ranks = Seating(request, choice.layout).run(request.previous);
  placement.spares = static_cast<int>(offered - choice.layout.world());
  std::set<std::string> used;
  for (const RankPlace& p : placement.ranks) used.insert(p.worker);
  placement.reason =
      fmt::format("{}: {} of {} on {}", placement.layout.to_string(),
                  placement.layout.world(), count(offered, "slot"),
                  count(static_cast<int64_t>(used.size()), "worker"));
  if (placement.spares > 0)
    placement.reason += fmt::format(
        ", {} ({})", count(placement.spares, "spare"), choice.limit);
  return placement;
}

}  // namespace remesh::planner
