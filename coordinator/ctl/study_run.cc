#include "coordinator/ctl/study_run.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "parallel/planner/projection.h"
#include "proto/base/json_reader.h"
#include "proto/base/text.h"

namespace remesh::ctl {
namespace {

using nlohmann::json;
using planner::SearchRequest;

int64_t count(JsonReader* s, const char* key, int64_t absent) {
  return s->integer(key, absent, 0, 1'000'000'000);
}

// What a trainer of devices does unless the run says otherwise: that of the
// assumed trainer of `remesh plan`.
planner::Execution execution_of(JsonReader* s) {
  planner::Execution x;
  const std::string precision = s->text("precision", "bf16");
  if (precision == "fp8")
    x.precision = planner::Precision::kFp8;
  else if (precision != "bf16")
    s->refuse("precision", "bf16 or fp8");
  x.row_scaled = s->flag("row_scaled", false);
  x.fused_attention = s->flag("fused_attention", true);
  x.tuned_attention = s->flag("tuned_attention", true);
  x.fused_kernels = s->flag("fused_kernels", true);
  x.sequence_parallel = s->flag("sequence_parallel", true);
  x.overlap_data = s->flag("overlap_data", true);
  x.overlap_tensor = s->flag("async_tp", false);
  x.overlap_pipeline = s->flag("overlap_pipeline", true);
  x.gradient_bytes = static_cast<double>(count(s, "gradient_bytes", 4));
  return x;
}

void read_batch(JsonReader* s, int64_t dp, SearchRequest* q) {
  q->T = count(s, "seq", 2048);
  const int64_t global = count(s, "global_batch", 0);
  const int64_t per_replica = count(s, "batch_per_replica", 0);
  const int64_t per_device = count(s, "batch_per_device", 0);
  if ((global > 0) + (per_replica > 0) + (per_device > 0) != 1)
    return s->refuse("global_batch",
                     "given, or instead batch_per_replica or batch_per_device");
  q->global_batch = global + per_replica * dp + per_device * q->devices;
}

planner::JobShape shape_of(JsonReader* s, const SearchRequest& q) {
  planner::JobShape shape{.model = q.model, .T = q.T, .bf16 = true};
  shape.B = count(s, "micro_batch", 1);
  shape.zero_stage = static_cast<int>(count(s, "zero", 0));
  if (shape.zero_stage > 3) s->refuse("zero", "from 0 to 3");
  shape.shard_group = static_cast<int>(count(s, "shard_group", 0));
  shape.chunks = static_cast<int>(count(s, "chunks", 1));
  if (const auto kind = geometry::parse_schedule(s->text("schedule", "1f1b"));
      kind.ok())
    shape.schedule = *kind;
  else
    s->refuse("schedule", kind.status().message());
  if (shape.chunks < 1 ||
      (shape.chunks > 1 && !geometry::traits_of(shape.schedule).interleaved))
    s->refuse("chunks", "at least 1, and 1 unless the schedule is interleaved");
  if (const auto r = geometry::parse_recompute(s->text("recompute", "none"));
      r.ok())
    shape.recompute = *r;
  else
    s->refuse("recompute", "none, selective or full");
  if (shape.B < 1 || q.global_batch % shape.B != 0)
    s->refuse(
        "micro_batch",
        fmt::format("a divisor of the {} sequences of a step", q.global_batch));
  else
    shape.microbatches = q.global_batch / shape.B;
  return shape;
}

// Floating-point operations as Megatron reports them, recomputation included:
// Narayanan et al., SC'21, equation 3, attention in full.
double megatron_flops(const planner::Plan& p) {
  const auto number = [](int64_t n) { return static_cast<double>(n); };
  const planner::JobShape& s = p.shape;
  const double q = number(s.model.q_dim()), T = number(s.T);
  const double tokens = number(s.microbatches * s.B) * T;
  geometry::Layout one;
  const double layer = planner::layer_elements(s, one) + 2 * q * T;
  const double passes = s.recompute == geometry::Recompute::kFull ? 4 : 3;
  return 2 * tokens *
         (passes * number(s.model.n_layers) * layer +
          3 * planner::vocabulary_elements(s, one));
}

}  // namespace

Result<StudyRun> StudyRuns::predict(const json& object) {
  JsonReader s(object, "");
  const std::string cluster_name = s.text("cluster", "");
  const std::string model_name = s.text("model", "");
  if (!clusters_.contains(cluster_name)) {
    ASSIGN_OR_RETURN(clusters_[cluster_name], find_cluster(cluster_name));
  }
  if (!models_.contains(model_name)) {
    ASSIGN_OR_RETURN(models_[model_name], find_model(model_name, {}));
  }
  const pb::Cluster& cluster = clusters_.at(cluster_name).cluster;
  StudyRun out{.plan = {},
               .busy_w = cluster.device().busy_w(),
               .idle_w = cluster.device().idle_w()};
  SearchRequest q{.machine = planner::machine_of(cluster),
                  .model = models_.at(model_name).model};
  q.devices = count(&s, "devices", 0);
  geometry::Layout l;
  constexpr int64_t kMostDegree = 1 << 20;  // devices
  l.tp = static_cast<int>(s.integer("tp", 1, 0, kMostDegree));
  l.pp = static_cast<int>(s.integer("pp", 1, 0, kMostDegree));
  l.cp = static_cast<int>(s.integer("cp", 1, 0, kMostDegree));
  const int64_t unit = int64_t{1} * l.tp * l.pp * l.cp;
  if (unit < 1 || q.devices < 1 || q.devices % unit != 0)
    s.refuse("devices", fmt::format("a multiple of tp x pp x cp = {}", unit));
  else
    l.dp = static_cast<int>(q.devices / unit);
  read_batch(&s, l.dp, &q);
  q.run = execution_of(&s);
  if (q.run.precision == planner::Precision::kFp8 && q.machine.fp8_flops == 0)
    s.refuse("precision", "bf16 on a device that has no fp8");
  out.peak_flops = planner::peak_flops(q.machine, q.run.precision);
  const planner::JobShape shape = shape_of(&s, q);
  s.refuse_unknown();
  RETURN_IF_ERROR(s.problem());
  ASSIGN_OR_RETURN(out.plan, planner::predict_plan(q, shape, l));
  out.too_large =
      static_cast<double>(out.plan.memory.total()) > q.machine.memory_bytes;
  return out;
}

Result<double> study_metric(const StudyRun& run, const std::string& name) {
  const planner::StepCost& c = run.plan.cost;
  const double devices = run.plan.layout.world();
  const double watts = planner::device_power_w(run.busy_w, run.idle_w, c.terms);
  const double flops = megatron_flops(run.plan) / c.total_s / devices;
  const std::map<std::string, double> metrics = {
      {"tokens_per_s", c.tokens_per_s},
      {"step_s", c.total_s},
      {"mfu", 100 * c.mfu},
      {"hfu", 100 * flops / run.peak_flops},
      {"tflops", flops / 1e12},
      {"watts", watts},
      {"joules_per_token", watts / c.tokens_per_s},
      {"memory_gb", static_cast<double>(run.plan.memory.total()) / 1e9},
      {"exposed", 100 * c.terms.exposed() / c.total_s},
      {"bubble", 100 * c.terms.bubble / c.total_s}};
  if (run.busy_w == 0 && (name == "watts" || name == "joules_per_token"))
    return invalid_argument(name +
                            ": the cluster's description has no device.busy_w");
  if (const auto it = metrics.find(name); it != metrics.end())
    return it->second;
  std::vector<std::string> known;
  for (const auto& [key, value] : metrics) known.push_back(key);
  return invalid_argument(
      fmt::format("unknown metric '{}'; known: {}", name, join(known)));
}

}  // namespace remesh::ctl
