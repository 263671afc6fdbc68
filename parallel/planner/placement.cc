#include "parallel/planner/placement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "parallel/planner/choose.h"
#include "parallel/planner/local.h"
#include "parallel/planner/memory.h"
#include "parallel/planner/rank_placement.h"
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
          fmt::format("duplicate worker name '{}'", w.worker));
    if (w.slots < 0)
      return invalid_argument(fmt::format(
          "worker '{}': {} slots, must be 0 or more", w.worker, w.slots));
  }
  return ok_status();
}

// Hosts whose memory is known in groups of about the same memory for a slot,
// those with the least first; without the group with the most.
std::vector<std::vector<std::string>> by_memory(const PlacementRequest& q) {
  constexpr double kAlike = 1.25;
  constexpr size_t kMost = 8;  // choosing a mesh takes milliseconds
  struct Host {
    double slots = 0, memory = 0;
  };
  std::map<std::string, Host> hosts;
  for (const WorkerSlots& w : q.workers) {
    Host& h = hosts[w.host];
    h.slots += w.slots;
    h.memory = std::max(h.memory, static_cast<double>(w.memory_bytes));
  }
  std::vector<std::pair<double, std::string>> order;
  for (const auto& [name, h] : hosts)
    if (h.slots > 0 && h.memory > 0)
      order.emplace_back(h.memory / h.slots, name);
  std::ranges::sort(order);
  std::vector<std::vector<std::string>> out;
  double least = 0;
  for (auto& [share, name] : order) {
    if (out.empty() || share > kAlike * least) {
      least = share;
      out.emplace_back();
    }
    out.back().push_back(std::move(name));
  }
  if (!out.empty()) out.pop_back();
  out.resize(std::min(out.size(), kMost));
  return out;
}

// A host with little memory must not keep the others from a mesh that they can
// run: those with the least are left out as long as more ranks fit without
// them. *q: without them.
Result<LayoutChoice> choose(PlacementRequest* q,
                            std::vector<std::string>* left_out) {
  bool short_of_memory = false;
  std::optional<MemoryPredictor> memory;
  if (q->shape) memory.emplace(*q->shape);
  MemoryPredictor* const known = memory ? &*memory : nullptr;
  auto best = choose_layout(*q, known, &short_of_memory);
  PlacementRequest fewer = *q;
  std::vector<std::string> without;
  for (const std::vector<std::string>& hosts : by_memory(*q)) {
    if (!short_of_memory) break;
    without.insert(without.end(), hosts.begin(), hosts.end());
    std::erase_if(fewer.workers, [&](const WorkerSlots& w) {
      return std::ranges::find(hosts, w.host) != hosts.end();
    });
    if (best.ok() && offered_slots(fewer) <= best->layout.world()) break;
    auto next = choose_layout(fewer, known, &short_of_memory);
    if (!next.ok() ||
        (best.ok() && next->layout.world() <= best->layout.world()))
      continue;
    best = std::move(next);
    *q = fewer;
    *left_out = without;
  }
  return best;
}

}  // namespace

Result<Placement> place_mesh(const PlacementRequest& given) {
  RETURN_IF_ERROR(check_request(given));
  const int64_t offered = offered_slots(given);
  PlacementRequest request = given;
  std::vector<std::string> left_out;
  ASSIGN_OR_RETURN(const LayoutChoice choice, choose(&request, &left_out));
  if (!choice.hosts.empty())
    request = only_on(std::move(request), choice.hosts);
  Placement placement;
  placement.layout = choice.layout;
  placement.ranks = RankPlacer(request).place(choice.layout);
  placement.spares = static_cast<int>(offered - choice.layout.world());
  std::set<std::string> used;
  for (const pb::RankPlace& p : placement.ranks) used.insert(p.worker());
  placement.reason =
      fmt::format("{}: {} of {} on {}", placement.layout.to_string(),
                  placement.layout.world(), plural(offered, "slot"),
                  plural(static_cast<int64_t>(used.size()), "worker"));
  if (placement.spares > 0)
    placement.reason += fmt::format(
        ", {} ({})", plural(placement.spares, "spare"), choice.limit);
  if (!left_out.empty())
    placement.reason +=
        fmt::format("; {} not used: too little memory for a rank on each slot",
                    join(left_out));
  placement.shares = shares_on(request, choice.layout, placement.ranks);
  placement.prediction = choice.prediction;
  if (!placement.shares.empty())
    placement.reason +=
        fmt::format("; {} microbatches", fmt::join(placement.shares, ", "));
  if (!choice.prediction.empty()) placement.reason += "; " + choice.prediction;
  return placement;
}

}  // namespace remesh::planner
