#include "parallel/planner/deal.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <tuple>

#include "proto/base/text.h"

namespace remesh::planner {
namespace {

std::string count(int64_t n, const char* what, const char* plural = "s") {
  return fmt::format("{} {}{}", n, what, n == 1 ? "" : plural);
}

struct Axis {
  const char* key;
  int asked;
  int executable;
};

Status check_request(const DealRequest& q) {
  const Axis axes[] = {
      {"parallel.data_parallel_degree", q.degrees.dp, q.executable.dp},
      {"parallel.tensor_parallel_degree", q.degrees.tp, q.executable.tp},
      {"parallel.pipeline_parallel_degree", q.degrees.pp, q.executable.pp},
      {"parallel.context_parallel_degree", q.degrees.cp, q.executable.cp}};
  for (const Axis& a : axes) {
    if (a.asked != -1 && a.asked < 1)
      return invalid_argument(
          fmt::format("{} = {}: must be at least 1, or -1 to have it chosen",
                      a.key, a.asked));
    if (a.executable >= 1 && a.asked > a.executable)
      return invalid_argument(fmt::format(
          "{} = {}: trainers of this version run degrees up to {}; set {} or "
          "-1",
          a.key, a.asked, a.executable,
          a.executable == 1 ? "1" : fmt::format("1 to {}", a.executable)));
  }
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

std::string offers(const DealRequest& q) {
  if (q.workers.empty()) return "no worker is there";
  std::vector<std::string> parts;
  for (const WorkerSlots& w : q.workers)
    parts.push_back(fmt::format("{}: {}", w.worker, w.slots));
  std::sort(parts.begin(), parts.end());
  constexpr size_t kShown = 8;
  if (parts.size() > kShown) {
    const size_t more = parts.size() - kShown;
    parts.resize(kShown);
    parts.push_back(fmt::format("and {} more workers", more));
  }
  return join(parts);
}

struct Choice {
  geometry::Layout layout;
  std::string limit;  // what keeps the mesh from being larger, or ""
};

Result<Choice> choose_layout(const DealRequest& q, int64_t offered) {
  const auto fixed = [](int degree) { return degree == -1 ? 1 : degree; };
  Choice c;
  c.layout.tp = fixed(q.degrees.tp);
  c.layout.pp = fixed(q.degrees.pp);
  c.layout.cp = fixed(q.degrees.cp);
  const int64_t unit = int64_t{1} * c.layout.tp * c.layout.pp * c.layout.cp;
  const int64_t most = q.executable.dp >= 1
                           ? std::min<int64_t>(q.executable.dp, q.microbatches)
                           : q.microbatches;
  const std::string one_each =
      fmt::format("the global batch has {} and a data-parallel rank needs one",
                  count(q.microbatches, "microbatch", "es"));
  if (q.degrees.dp > q.microbatches)
    return invalid_argument(
        fmt::format("parallel.data_parallel_degree = {}: {}; set 1 to {}, or "
                    "-1 to have it chosen",
                    q.degrees.dp, one_each, q.microbatches));
  const int64_t largest = (q.degrees.dp == -1 ? most : q.degrees.dp) * unit;
  const int64_t least = (q.degrees.dp == -1 ? 1 : q.degrees.dp) * unit;
  if (largest < q.min_slots)
    return invalid_argument(fmt::format(
        "elastic.min_slots = {}: the mesh has at most {} ranks ({})",
        q.min_slots, largest,
        q.degrees.dp == -1 ? one_each
                           : std::string("by the degrees in [parallel]")));
  if (q.max_slots != -1 && least > q.max_slots)
    return invalid_argument(
        fmt::format("elastic.max_slots = {}: the degrees in [parallel] need "
                    "{} slots",
                    q.max_slots, least));
  const int64_t usable =
      q.max_slots == -1 ? offered : std::min<int64_t>(offered, q.max_slots);
  const int64_t needed =
      std::max<int64_t>(least, (q.min_slots + unit - 1) / unit * unit);
  if (q.max_slots != -1 && needed > q.max_slots)
    return invalid_argument(
        fmt::format("elastic.max_slots = {}: at least {} slots are needed for "
                    "elastic.min_slots = {} in multiples of {}",
                    q.max_slots, needed, q.min_slots, unit));
  if (usable < needed)
    return exhausted(fmt::format(
        "too few slots: {} offered ({}), needs {} ({})", offered, offers(q),
        needed,
        needed == least && q.degrees.dp != -1 ? "the degrees in [parallel]"
        : needed == least && unit > 1         ? "tp x pp x cp"
                                              : "elastic.min_slots"));
  const int64_t dp =
      q.degrees.dp == -1 ? std::min(most, usable / unit) : q.degrees.dp;
  if (dp * unit > std::numeric_limits<int>::max())
    return invalid_argument("the mesh is too large");
  c.layout.dp = static_cast<int>(dp);
  if (q.degrees.dp != -1)
    c.limit = fmt::format("parallel.data_parallel_degree = {}", q.degrees.dp);
  else if (dp == q.microbatches)
    c.limit = count(q.microbatches, "microbatch", "es");
  else if (dp == most)
    c.limit = fmt::format("trainers of this version run dp up to {}", most);
  else if (usable < offered && (dp + 1) * unit > usable)
    c.limit = fmt::format("elastic.max_slots = {}", q.max_slots);
  else if (unit > 1)
    c.limit = fmt::format("multiples of {} slots", unit);
  return c;
}

// Who sits where. Slots are handed out host by host; a host's and a worker's
// turn is that of its first rank in the previous mesh, new ones come last by
// name. So ranks that stay keep their order, and without a previous mesh the
// order is that of the names.
class Seating {
 public:
  Seating(const DealRequest& q, const geometry::Layout& layout)
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
      for (int s = 0; s < workers_[i].slots; ++s) free.insert({i, s});
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

  // Everyone who is still there gets the ranks it had.
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

  // Tensor-parallel peers [first, last): on the host where most of them sit
  // already, else on the first with room for all that are vacant, else
  // wherever slots are free.
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
    // One peer alone has no wish.
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
  std::vector<std::string> hosts_;  // in the order of their turn, some full
  std::map<std::string, size_t> index_;
  std::map<std::string, std::set<Seat>> free_;  // by host
};

}  // namespace

Result<Deal> deal_mesh(const DealRequest& request) {
  RETURN_IF_ERROR(check_request(request));
  int64_t offered = 0;
  for (const WorkerSlots& w : request.workers) offered += w.slots;
  ASSIGN_OR_RETURN(const Choice choice, choose_layout(request, offered));
  Deal deal;
  deal.layout = choice.layout;
  deal.ranks = Seating(request, choice.layout).run(request.previous);
  deal.spares = static_cast<int>(offered - choice.layout.world());
  std::set<std::string> used;
  for (const RankPlace& p : deal.ranks) used.insert(p.worker);
  deal.reason = fmt::format("{}: {} of {} on {}", deal.layout.to_string(),
                            deal.layout.world(), count(offered, "slot"),
                            count(static_cast<int64_t>(used.size()), "worker"));
  if (deal.spares > 0)
    deal.reason +=
        fmt::format(", {} ({})", count(deal.spares, "spare"), choice.limit);
  return deal;
}

}  // namespace remesh::planner
