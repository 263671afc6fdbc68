#include "bench/memory/changes.h"

#include <fmt/format.h>

#include <algorithm>

#include "bench/job_settings.h"
#include "coordinator/core/job_shape.h"
#include "parallel/jobfile/jobfile.h"
#include "parallel/planner/memory.h"
#include "worker/kernels/cpu/onednn_gemm.h"

namespace remesh::bench {
namespace {

using geometry::Layout;

constexpr int64_t kPatienceMs = 600'000;
constexpr int64_t kSteps = 3;

testing::Settings settings_of(const ChangeOptions& o) {
  const ModelOptions& m = o.model;
  testing::Settings s = {
      {"train.steps", "100000000"},
      {"train.seq_len", std::to_string(m.seq)},
      {"train.local_batch_size", std::to_string(m.batch)},
      {"train.global_batch_size", std::to_string(2 * m.batch)},
      {"train.dtype", "\"" + m.dtype + "\""},
      {"parallel.zero_stage", "1"},
      {"elastic.keep_state", o.keep_state ? "true" : "false"},
      {"elastic.dead_after_ms", "60000"},
      {"checkpoint.interval", "0"}};
  if (!m.size.empty()) set_model(m.size, s);
  return s;
}

// The sum over the ranks of a mesh.
template <typename F>
uint64_t sum_of(const F& predict, const planner::JobShape& s, const Layout& l) {
  uint64_t sum = 0;
  for (int r = 0; r < l.world(); ++r) sum += predict(s, l, r);
  return sum;
}

uint64_t training_bytes(const planner::JobShape& s, const Layout& l, int rank) {
  return planner::predict_memory(s, l, rank).total() +
         planner::predict_workspace(s, l, /*threads=*/1);
}

// A running job. The functions return an error if it does not do as it is told.
class Job {
 public:
  Job(const ChangeOptions& o,
      const std::function<void(const ChangeRow&)>& report)
      : options_(o),
        report_(report),
        cluster_(data_.path(), settings_of(o)),
        host_(cluster_.folder(),
              {cluster_.state_folder("w1"), cluster_.state_folder("w2")}) {}

  Status begin();
  // The peak of a few steps of the current mesh.
  Status train();
  Status save();
  // Through the state in memory or, if none is kept, through a checkpoint.
  Status change(const std::string& to);
  // Ends the job and continues it from its checkpoint.
  Status restart();
  Status end();

 private:
  void start();
  Status await(bool done, const std::string& what) const;
  Status await_command(const testing::Finished& f, const char* what) const;
  Status await_mesh(int64_t generation);
  // Of the newest generation: "init", "checkpoint" or "memory".
  std::string last_source_kind() const;
  void report(const std::string& name, Phase phase, uint64_t besides);

  const ChangeOptions options_;
  const std::function<void(const ChangeRow&)>& report_;
  const testing::TinyData data_;
  testing::Cluster cluster_;
  HostMemory host_;
  planner::JobShape shape_;
  Layout layout_{.dp = 2};
  std::string mesh_ = "dp2";
  uint64_t old_state_ = 0;  // of the mesh before
};

void Job::start() {
  for (const char* name : {"w1", "w2"}) cluster_.start_worker({name});
}

Status Job::await(bool done, const std::string& what) const {
  return done ? ok_status()
              : unavailable(fmt::format("{}\n{}", what, cluster_.describe()));
}

Status Job::await_command(const testing::Finished& f, const char* what) const {
  return await(f.exit.code == 0,
               fmt::format("{}: exit code {}, signal {}: {}", what, f.exit.code,
                           f.exit.signal, f.output));
}

// Waits for some steps of a later generation.
Status Job::await_mesh(int64_t generation) {
  RETURN_IF_ERROR(await(
      testing::wait_until([&] { return cluster_.generation() > generation; },
                          kPatienceMs) &&
          cluster_.wait_for_step(cluster_.last_step() + kSteps, kPatienceMs),
      "the mesh does not train"));
  const testing::Json mesh = cluster_.metrics().back()["mesh"];
  const Layout found{.dp = mesh.value("dp", 1),
                     .pp = mesh.value("pp", 1),
                     .tp = mesh.value("tp", 1),
                     .cp = mesh.value("cp", 1)};
  return await(found == layout_, "the mesh is another one");
}

std::string Job::last_source_kind() const {
  const auto meshes = cluster_.events_named("mesh");
  return meshes.empty() ? "" : meshes.back().value("source_kind", "");
}

// What was measured since the last row.
void Job::report(const std::string& name, Phase phase, uint64_t besides) {
  const auto world = static_cast<uint64_t>(layout_.world());
  HostPeak peak = host_.take();
  peak.total -= std::min(peak.total - peak.shared, options_.base * world);
  report_({.name = name,
           .phase = phase,
           .training = sum_of(training_bytes, shape_, layout_),
           .besides = besides,
           .peak = peak});
}

Status Job::begin() {
  cluster_.start_coordinator();
  start();
  RETURN_IF_ERROR(await(cluster_.wait_for_dp(2, 0, kPatienceMs),
                        "the mesh does not train"));
  // The second worker may have joined a mesh of the first one.
  RETURN_IF_ERROR(await_mesh(cluster_.generation() - 1));
  host_.take();
  ASSIGN_OR_RETURN(const pb::Job job,
                   jobfile::load_job(cluster_.run_dir() + "/job.toml"));
  const auto shape = core::shape_of(job);
  if (!shape) return internal("the job has no model");
  shape_ = *shape;
  shape_.packed = kernels::bf16_hardware() == kernels::Bf16Hardware::kAmx;
  return ok_status();
}

Status Job::train() {
  RETURN_IF_ERROR(
      await(cluster_.wait_for_step(cluster_.last_step() + kSteps, kPatienceMs),
            "the mesh does not train"));
  report(mesh_ + " training", Phase::kTraining, old_state_);
  return ok_status();
}

Status Job::save() {
  host_.take();
  const auto f =
      cluster_.remesh({"checkpoint", "save", cluster_.run_dir()}, kPatienceMs);
  RETURN_IF_ERROR(await_command(f, "no checkpoint was saved"));
  report(mesh_ + " save", Phase::kSave,
         sum_of(planner::predict_save, shape_, layout_));
  return ok_status();
}

Status Job::change(const std::string& to) {
  const std::string name = mesh_ + " to " + to;
  old_state_ = sum_of(planner::predict_segments, shape_, layout_);
  mesh_ = to;
  const int64_t g = cluster_.generation();
  ASSIGN_OR_RETURN(layout_, Layout::parse(to));
  const size_t meshes = cluster_.events_named("mesh").size();
  host_.take();
  const auto f = cluster_.remesh({"mesh", to, cluster_.run_dir()}, kPatienceMs);
  RETURN_IF_ERROR(await_command(f, "the mesh was refused"));
  if (!options_.keep_state) {
    // The old ranks end first.
    RETURN_IF_ERROR(
        await(cluster_.wait_for_event("mesh", meshes + 1, kPatienceMs),
              "no mesh was planned"));
    host_.take();
  }
  RETURN_IF_ERROR(await_mesh(g));
  const char* const source = options_.keep_state ? "memory" : "checkpoint";
  RETURN_IF_ERROR(
      await(last_source_kind() == source, "the state came from elsewhere"));
  report(name, options_.keep_state ? Phase::kChange : Phase::kRestore,
         old_state_);
  return train();
}

Status Job::restart() {
  RETURN_IF_ERROR(end());
  RETURN_IF_ERROR(
      await(host_.shared() == 0, "the ended job left its state in memory"));
  const int64_t g = cluster_.generation();
  host_.take();
  cluster_.start_coordinator({"--resume"});
  start();
  RETURN_IF_ERROR(await_mesh(g));
  RETURN_IF_ERROR(await(last_source_kind() == "checkpoint",
                        "the state came from elsewhere"));
  old_state_ = 0;
  report(mesh_ + " restore", Phase::kRestore, 0);
  return train();
}

Status Job::end() {
  const auto f = cluster_.remesh({"stop", cluster_.run_dir()}, kPatienceMs);
  bool ended = f.exit.code == 0 && cluster_.coordinator().wait_ms(kPatienceMs);
  for (const char* name : {"w1", "w2"})
    ended = ended && cluster_.worker(name).wait_ms(kPatienceMs);
  return await(ended, "the job does not end");
}

}  // namespace

Status measure_changes(const ChangeOptions& options,
                       const std::function<void(const ChangeRow&)>& report) {
  Job job(options, report);
  RETURN_IF_ERROR(job.begin());
  RETURN_IF_ERROR(job.train());
  if (options.only_training) return job.end();
  RETURN_IF_ERROR(job.save());
  if (!options.keep_state) {
    RETURN_IF_ERROR(job.change("tp2"));
    return job.end();
  }
  for (const char* to : {"tp2", "pp2", "dp1", "dp2"})
    RETURN_IF_ERROR(job.change(to));
  RETURN_IF_ERROR(job.restart());
  return job.end();
}

Result<uint64_t> measure_base(ChangeOptions options) {
  options.model.size = "";
  options.only_training = true;
  uint64_t base = 0;
  RETURN_IF_ERROR(measure_changes(options, [&](const ChangeRow& row) {
    base = (row.peak.total - std::min(row.peak.total, row.training)) / 2;
  }));
  return base;
}

}  // namespace remesh::bench
