#include "coordinator/ctl/plan_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "coordinator/core/job_shape.h"
#include "coordinator/ctl/render.h"
#include "coordinator/ctl/status_view.h"
#include "parallel/geometry/shard_table.h"
#include "parallel/planner/local.h"
#include "proto/base/json_output.h"
#include "proto/base/text.h"

namespace remesh::ctl {
namespace {

using geometry::Layout;

// The request that the coordinator would make for identical hosts.
Result<planner::PlacementRequest> request_of(const pb::Job& job,
                                             const PlanOptions& o) {
  planner::PlacementRequest r =
      core::placement_request(job, core::shape_of(job));
  if (!r.shape)
    return invalid_argument("the job's [model] section is incomplete");
  constexpr int64_t kMostSlots = 1 << 20;  // as many ranks as a mesh may have
  if (int64_t{o.slots} * o.hosts > kMostSlots)
    return invalid_argument(
        fmt::format("--slots {} on --hosts {}: at most {} slots in all",
                    o.slots, o.hosts, kMostSlots));
  r.core = o.core;
  for (int h = 0; h < o.hosts; ++h)
    r.workers.push_back({.worker = fmt::format("host{}", h),
                         .host = fmt::format("host{}", h),
                         .slots = o.slots,
                         .cores = o.cores,
                         .memory_bytes = static_cast<uint64_t>(
                             o.memory_gib * 1024 * 1024 * 1024)});
  planner::match_hosts(&r);
  if (!o.layout.empty()) {
    ASSIGN_OR_RETURN(const Layout l, Layout::parse(o.layout));
    RETURN_IF_ERROR(planner::admit(*r.shape, l));
    r.layouts = {l};
  }
  return r;
}

std::string stages_text(const planner::JobShape& shape, const Layout& l) {
  const int chunks = planner::chunks_on(shape, l);
  const auto bounds =
      geometry::stage_bounds(shape.model, l.pp * chunks, shape.T);
  std::string out;
  for (int r = 0; r < l.pp; ++r) {
    std::vector<std::string> parts;
    if (r == 0) parts.push_back("embedding");
    for (int c = 0; c < chunks; ++c) {
      const int stage = c * l.pp + r;
      const auto s = static_cast<size_t>(stage);
      const int64_t first = (*bounds)[s], last = (*bounds)[s + 1] - 1;
      parts.push_back(first == last ? fmt::format("layer {}", first)
                                    : fmt::format("layers {}-{}", first, last));
    }
    if (r == l.pp - 1) parts.push_back("head");
    out += fmt::format("  stage {}: {}\n", r, join(parts));
  }
  return out;
}

std::string prediction_table(const planner::JobShape& shape, const Layout& l) {
  std::string out = fmt::format("  {:<8}{:>9}{:>11}{:>11}{:>13}{:>9}{:>9}\n",
                                "stage", "weights", "gradients", "optimizer",
                                "activations", "buffers", "total");
  for (int pp = 0; pp < l.pp; ++pp) {
    const MemoryUse m = planner::predict_memory(shape, l, l.rank({.pp = pp}));
    out += fmt::format("  {:<8}{:>9}{:>11}{:>11}{:>13}{:>9}{:>9}\n", pp,
                       bytes_text(m.weights), bytes_text(m.gradients),
                       bytes_text(m.optimizer), bytes_text(m.activations),
                       bytes_text(m.buffers), bytes_text(m.total()));
  }
  return out;
}

// What comes on top of the table, for the rank with most of it.
std::string besides_text(const planner::JobShape& shape, const Layout& l,
                         int threads) {
  uint64_t save = 0, segments = 0;
  for (int pp = 0; pp < l.pp; ++pp) {
    const int rank = l.rank({.pp = pp});
    save = std::max(save, planner::predict_save(shape, l, rank));
    segments = std::max(segments, planner::predict_segments(shape, l, rank));
  }
  std::string out =
      "  besides: " +
      format_bytes(planner::predict_workspace(shape, l, threads)) +
      " inside of operations, " + format_bytes(save) + " to save a checkpoint";
  if (segments > 0)
    out += ", " + format_bytes(segments) +
           " of old state while another mesh takes over";
  return out + "\n";
}

// With the update, and the wait for the slowest rank.
double computing_s(const planner::Terms& t) {
  return t.compute() + t.optimizer + t.straggle;
}

// Tokens of a step.
double tokens_of(const planner::JobShape& shape) {
  return static_cast<double>(shape.microbatches * shape.B * shape.T);
}

int64_t num_parameters(const geometry::ModelConfig& model) {
  return geometry::ParamTable::make(model).num_elements();
}

std::string plan_json(const pb::Job& job,
                      const planner::PlacementRequest& request,
                      const planner::Placement& placement) {
  const planner::JobShape& shape = *request.shape;
  const Layout& l = placement.layout;
  const planner::StepCost e = planner::predict_step(request, l);
  nlohmann::ordered_json out{
      {"mesh", mesh_json(core::mesh_of(l))},
      {"reason", placement.reason},
      {"spares", placement.spares},
      {"parameters", num_parameters(shape.model.base())},
      {"trained", num_parameters(shape.model)},
      {"step_s", e.total_s},
      {"tokens_per_s", tokens_of(shape) / e.total_s},
      {"run_s", e.total_s * static_cast<double>(job.train().steps())},
      {"compute_s", computing_s(e.terms)},
      {"bubble_s", e.terms.bubble},
      {"exposed_s", e.terms.exposed()}};
  auto stages = nlohmann::ordered_json::array();
  for (int pp = 0; pp < l.pp; ++pp) {
    const int rank = l.rank({.pp = pp});
    stages.push_back(memory_json(planner::predict_memory(shape, l, rank)));
    stages.back()["save"] = planner::predict_save(shape, l, rank);
  }
  out["memory_by_stage"] = std::move(stages);
  return json_output(out);
}

}  // namespace

Result<std::string> plan_text(const pb::Job& job, const PlanOptions& o) {
  ASSIGN_OR_RETURN(const planner::PlacementRequest request, request_of(job, o));
  ASSIGN_OR_RETURN(const planner::Placement placement,
                   planner::place_mesh(request));
  const planner::JobShape& shape = *request.shape;
  if (o.json) return plan_json(job, request, placement);
  const Layout& l = placement.layout;
  std::string out = fmt::format(
      "model {}: {} parameters",
      job.model().flavor() == "custom" ? job.model().arch()
                                       : job.model().flavor(),
      short_number(static_cast<double>(num_parameters(shape.model.base()))));
  if (shape.model.lora.rank > 0)
    out += fmt::format(
        ", frozen, and {} in adapters",
        short_number(static_cast<double>(num_parameters(shape.model))));
  out += "\n";
  out += "mesh " + placement.reason + "\n";
  pb::Job on_mesh = core::job_on(job, shape, l);
  out += "  " +
         settings_text(on_mesh.parallel(), on_mesh.train().recompute(),
                       on_mesh.train().recompute_every(), core::mesh_of(l)) +
         "\n";
  const int64_t most = planner::most_microbatches(shape, l);
  out += fmt::format(
      "  {} microbatches of {} x {} tokens per step, {} per data-parallel "
      "rank\n",
      shape.microbatches, shape.B, shape.T,
      shape.microbatches % l.dp == 0 ? fmt::format("{}", most)
                                     : fmt::format("{} or {}", most - 1, most));
  if (l.pp > 1) {
    out += stages_text(shape, l);
    out += fmt::format("  scheduled bubble: {:.1f} %\n",
                       100 * core::scheduled_bubble(shape, l));
  }
  const planner::StepCost e = planner::predict_step(request, l);
  out += fmt::format(
      "  estimated: {} a step, {} tokens/s, {} for {} steps ({:.0f} % compute, "
      "{:.0f} % bubble, {:.0f} % exposed communication)\n",
      format_duration(e.total_s), short_number(tokens_of(shape) / e.total_s),
      format_duration(e.total_s * static_cast<double>(job.train().steps())),
      job.train().steps(), 100 * computing_s(e.terms) / e.total_s,
      100 * e.terms.bubble / e.total_s, 100 * e.terms.exposed() / e.total_s);
  if (o.slots > o.cores)
    out += fmt::format("  note: {} slots share the {} cores of a host\n",
                       o.slots, o.cores);
  out += "predicted memory of a rank:\n" + prediction_table(shape, l) +
         besides_text(shape, l,
                      request.threads > 0 ? request.threads
                                          : std::max(1, o.cores / o.slots));
  if (o.memory_gib > 0)
    out +=
        fmt::format("  available: {:.1f} GiB for each of a host's {} ranks\n",
                    o.memory_gib / std::min(o.slots, l.world()),
                    std::min(o.slots, l.world()));
  return out;
}

}  // namespace remesh::ctl
