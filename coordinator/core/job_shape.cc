#include "coordinator/core/job_shape.h"

#include "parallel/geometry/schedule.h"
#include "parallel/jobfile/jobfile.h"
#include "proto/base/check.h"

namespace remesh::core {

std::optional<planner::JobShape> shape_of(const pb::Job& job) {
  const pb::Train& t = job.train();
  const pb::Parallel& p = job.parallel();
  const auto schedule = geometry::parse_schedule(p.pipeline_schedule());
  planner::JobShape s;
  s.model = jobfile::model_config(job);
  const auto recompute = geometry::parse_recompute(t.recompute());
  if (!s.model.validate().ok() || !schedule.ok() || !recompute.ok())
    return std::nullopt;
  s.T = t.seq_len();
  s.B = t.local_batch_size();
  s.microbatches = t.global_batch_size() / t.local_batch_size();
  s.bf16 = t.dtype() == "bf16";
  s.zero_stage = static_cast<int>(p.zero_stage());
  s.shard_group = static_cast<int>(p.zero_shard_group());
  s.schedule = *schedule;
  s.chunks = static_cast<int>(p.pipeline_chunks());
  s.recompute = *recompute;
  s.recompute_every = static_cast<int>(t.recompute_every());
  const pb::Elastic& e = job.elastic();
  s.keep_state = e.keep_state();
  s.replicas = e.replicate_every() > 0 ? static_cast<int>(e.replicas()) : 0;
  s.replicate_every = e.replicate_every();
  return s;
}

planner::PlacementRequest placement_request(
    const pb::Job& job, const std::optional<planner::JobShape>& shape) {
  const pb::Parallel& p = job.parallel();
  planner::PlacementRequest r{
      .degrees = {.dp = static_cast<int>(p.data_parallel_degree()),
                  .tp = static_cast<int>(p.tensor_parallel_degree()),
                  .pp = static_cast<int>(p.pipeline_parallel_degree()),
                  .cp = static_cast<int>(p.context_parallel_degree())},
      .microbatches =
          job.train().global_batch_size() / job.train().local_batch_size(),
      .by_speed = p.microbatches() == "by_speed",
      .threads = static_cast<int>(job.train().threads()),
      .min_slots = static_cast<int>(job.elastic().min_slots()),
      .max_slots = static_cast<int>(job.elastic().max_slots()),
      .shape = shape};
  for (const std::string& text : job.elastic().layouts())
    if (const auto layout = geometry::Layout::parse(text); layout.ok())
      r.layouts.push_back(*layout);
  return r;
}

std::optional<planner::Machine> core_from(const std::string& hardware) {
  pb::Cluster cluster;
  if (!jobfile::parse_description(hardware, {.name = "hardware"}, &cluster)
           .ok())
    return std::nullopt;
  const planner::Machine m = planner::machine_of(cluster);
  constexpr double kLeast = 1e3;  // of any machine, a second
  for (const double rate :
       {m.flops, m.fp32_flops, m.attention_flops, m.memory_bytes_per_s,
        m.node_bytes_per_s, m.network_bytes_per_s})
    if (rate < kLeast) return std::nullopt;
  return m;
}

pb::Job job_on(const pb::Job& job, const planner::JobShape& shape,
               const geometry::Layout& layout) {
  pb::Job out = job;
  pb::Parallel* p = out.mutable_parallel();
  p->set_pipeline_chunks(planner::chunks_on(shape, layout));
  p->set_pipeline_schedule(
      geometry::schedule_name(planner::schedule_kind_on(shape, layout)));
  if (shape.shard_group != 0)
    p->set_zero_shard_group(planner::shard_group_on(shape, layout));
  return out;
}

double scheduled_bubble(const planner::JobShape& shape,
                        const geometry::Layout& layout) {
  if (layout.pp == 1) return 0;
  const geometry::PassCosts alike{};
  const int64_t most = planner::most_microbatches(shape, layout);
  const auto simulated = [&](int64_t n) {
    const auto timing = geometry::simulate(
        geometry::without_padding(planner::schedule_on(shape, layout, n), n),
        alike);
    CHECK(timing.ok());
    return timing->makespan;
  };
  const double makespan = planner::step_time(
      most, layout.pp, simulated, [](double, double) { return true; });
  return 1 - static_cast<double>(most) * planner::chunks_on(shape, layout) *
                 (alike.forward + alike.backward + alike.weight) / makespan;
}

}  // namespace remesh::core
