#include "bench/planner/prediction.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <strings.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "parallel/jobfile/jobfile.h"
#include "parallel/planner/memory.h"
#include "proto/base/file_system.h"

namespace remesh::bench {
namespace {

constexpr std::string_view kSuffix = ".toml";
// GPT-3, Llama 1 and 2 were trained with about so many tokens a step.
constexpr int64_t kTokensPerStep = 4 << 20;

// The row with every choice made: layout, micro-batch and schedule.
std::vector<Row> candidates(const Row& row) {
  std::vector<int64_t> batches{row.shape.B};
  if (row.shape.B == 0) batches = {1, 2, 4, 8, 16};
  if (row.shape.B == 0 && row.splits_by_stages && row.layout.pp > 1)
    batches = {
        std::max<int64_t>(1, row.global_batch / row.layout.dp / row.layout.pp)};
  std::vector<int> chunks{row.shape.chunks};
  if (row.shape.B == 0 && !row.names_schedule) chunks = {1, 2};
  std::vector<std::pair<int, int>> degrees{{row.layout.tp, row.layout.pp}};
  if (row.layout.tp == 0) {
    degrees.clear();
    for (const int tp : {1, 2, 4, 8})
      for (const int pp : {1, 2, 4, 8}) degrees.emplace_back(tp, pp);
  }
  std::vector<Row> out;
  for (const auto& [tp, pp] : degrees)
    for (const int64_t batch : batches) {
      Row r = row;
      r.layout.tp = tp;
      r.layout.pp = pp;
      const int model = tp * pp * r.layout.cp;
      if (row.layout.tp == 0) r.layout.dp = r.world / model;
      if (r.layout.dp < 1 || r.layout.world() != r.world ||
          r.shape.model.n_heads % tp != 0 || pp > r.shape.model.n_layers)
        continue;
      if (r.global_batch == 0) r.global_batch = kTokensPerStep / r.shape.T;
      r.shape.B = batch;
      r.shape.microbatches = std::max<int64_t>(
          r.layout.dp, r.global_batch / std::max<int64_t>(1, batch));
      if (!out.empty() && r.global_batch < batch * r.layout.dp) continue;
      for (const int v : chunks) {
        // As in the planner's search.
        if (v > 1 && v != row.shape.chunks &&
            (pp == 1 || int64_t{1} * v * pp > r.shape.model.n_layers ||
             r.shape.microbatches % (r.layout.dp * pp) != 0))
          continue;
        r.shape.chunks = v;
        r.shape.schedule = v > 1 ? geometry::ScheduleKind::kInterleaved1F1B
                                 : row.shape.schedule;
        out.push_back(r);
      }
    }
  return out;
}

}  // namespace

Result<std::vector<ClusterFile>> read_clusters(const std::string& folder) {
  ASSIGN_OR_RETURN(const auto names, posix_file_system()->list(folder));
  std::vector<ClusterFile> out;
  for (const std::string& name : names) {
    if (!name.ends_with(kSuffix)) continue;
    ClusterFile c{.name = name.substr(0, name.size() - kSuffix.size())};
    RETURN_IF_ERROR(
        jobfile::load_description(path_join(folder, name), &c.cluster));
    out.push_back(std::move(c));
  }
  return out;
}

Result<size_t> cluster_of(const std::vector<ClusterFile>& clusters,
                          const Row& row) {
  size_t best = clusters.size();
  double distance = 0;
  std::set<std::string> known;
  for (size_t i = 0; i < clusters.size(); ++i) {
    const pb::Device& d = clusters[i].cluster.device();
    known.insert(d.name());
    if (d.name() != row.device) continue;
    const bool plain =
        strcasecmp(clusters[i].name.c_str(), row.device.c_str()) == 0;
    const double off = row.memory_gb > 0
                           ? std::fabs(d.memory_gb() - row.memory_gb)
                       : plain ? -std::numeric_limits<double>::infinity()
                               : -d.memory_gb();
    if (best == clusters.size() || off < distance) {
      best = i;
      distance = off;
    }
  }
  if (best == clusters.size())
    return not_found(
        fmt::format("line {}: no cluster has the device '{}'; there are {}; a "
                    "description of another belongs to them, in the folder of "
                    "--clusters",
                    row.line, row.device, fmt::join(known, ", ")));
  return best;
}

planner::StepCost predict(const planner::Machine& machine, const Row& row) {
  planner::StepCost best;
  bool best_fits = false;
  for (const Row& r : candidates(row)) {
    const bool open = row.shape.B == 0 || row.layout.tp == 0;
    const planner::Parts parts =
        planner::parts_of(machine, r.shape, r.layout, r.run);
    const bool fits =
        !open ||
        static_cast<double>(
            planner::predict_worst_memory(r.shape, r.layout, r.run, parts)
                .total()) < planner::kUsable * machine.memory_bytes;
    if (best_fits && !fits) continue;
    const planner::StepCost c =
        planner::predict_step(machine, r.shape, r.layout, r.run, parts);
    if ((fits && !best_fits) || c.tokens_per_s > best.tokens_per_s) best = c;
    best_fits = best_fits || fits;
  }
  return best;
}

}  // namespace remesh::bench
