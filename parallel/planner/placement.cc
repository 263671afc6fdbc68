#include "parallel/planner/placement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>

#include "parallel/planner/choose.h"
#include "parallel/planner/local.h"
#include "parallel/planner/seating.h"
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

}  // namespace

Result<Placement> place_mesh(const PlacementRequest& request) {
  RETURN_IF_ERROR(check_request(request));
  const int64_t offered = offered_slots(request);
  ASSIGN_OR_RETURN(const LayoutChoice choice, choose_layout(request));
  Placement placement;
  placement.layout = choice.layout;
  placement.ranks = seat_ranks(request, choice.layout);
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
  placement.shares = shares_on(request, choice.layout, placement.ranks);
  placement.prediction = choice.prediction;
  if (!placement.shares.empty())
    placement.reason +=
        fmt::format("; {} microbatches", fmt::join(placement.shares, ", "));
  if (!choice.prediction.empty()) placement.reason += "; " + choice.prediction;
  return placement;
}

}  // namespace remesh::planner
