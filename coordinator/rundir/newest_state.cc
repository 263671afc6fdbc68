#include "coordinator/rundir/newest_state.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>

#include "checkpoint/manifest/conversions.h"
#include "checkpoint/manifest/scan.h"
#include "checkpoint/memory/segment.h"
#include "checkpoint/memory/segment_directory.h"
#include "coordinator/core/job_shape.h"
#include "coordinator/core/recovery.h"
#include "coordinator/core/state_choice.h"
#include "coordinator/rundir/first_steps.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/rundir/run_id.h"

namespace remesh::rundir {
namespace {

double touched_at(const std::string& path) {
  struct stat st {};
  return stat(path.c_str(), &st) == 0 ? static_cast<double>(st.st_mtime) : 0;
}

std::vector<core::Holding> states_here(uint64_t job) {
  std::vector<core::Holding> out;
  for (const std::string& folder : memory::state_folders())
    for (const memory::SegmentFile& f : memory::list_segments(folder, job)) {
      const auto segment = memory::StateSegment::open(
          f.path, job, memory::StateSegment::Mode::kRead);
      if (!segment.ok()) continue;
      for (const auto& c : (*segment)->contents().states) {
        out.push_back({manifest::holding_of(c.info, f.path), c.info.sharding});
        out.back().info.set_worker(folder);
      }
    }
  return out;
}

core::Inventory inventory_of(FileSystem& fs, const std::string& run,
                             const pb::Job& job, const pb::Durable* journal) {
  core::Inventory in;
  in.first_steps = branches_of(run, journal);
  const uint64_t id = journal != nullptr && journal->run_id() != 0
                          ? journal->run_id()
                          : run_id_of(fs, run);
  const auto found =
      manifest::scan(fs, checkpoints_path(run, job.checkpoint().folder()));
  if (found.ok())
    for (const manifest::Found& f : *found)
      if (f.status.ok() && manifest::check_run(f.manifest, id).ok() &&
          (journal == nullptr || !core::refuses(journal->refusals(), f.path)))
        in.checkpoints.push_back({f.step, f.manifest.generation(), f.path});
  if (journal == nullptr) return in;
  for (const pb::Refusals::State& s : journal->refusals().states())
    in.refused.emplace(s.generation(), s.step());
  if (job.elastic().keep_state() && journal->state_job() != 0)
    in.holdings = states_here(journal->state_job());
  return in;
}

}  // namespace

std::vector<core::FirstStep> branches_of(const std::string& run,
                                         const pb::Durable* journal) {
  std::vector<core::FirstStep> out = first_steps(metrics_path(run));
  if (journal != nullptr)
    for (const auto& a : journal->branches().abandoned())
      out.push_back({a.generation(), a.step(), a.after()});
  return out;
}

NewestState newest_state(FileSystem& fs, const std::string& run,
                         const pb::Job& job, const pb::Durable* journal) {
  core::Inventory in = inventory_of(fs, run, job, journal);
  std::optional<geometry::ParamTable> table;
  if (const auto shape = core::shape_of(job))
    table = geometry::ParamTable::make(shape->model);
  if (!table) in.holdings.clear();
  core::Inventory saved = in;
  saved.holdings.clear();
  const core::StateChoice c = choose_state(table ? &*table : nullptr, in);
  NewestState out{.step = std::max(last_finished_step(run), c.step),
                  .source = c.kind,
                  .state_step = c.step,
                  .path = c.path,
                  .checkpoint_step = choose_state(nullptr, saved).step};
  for (const size_t i : c.sources) {
    const double until =
        touched_at(in.holdings[i].info.segment()) + memory::kStateKeptS;
    if (out.kept_until == 0 || until < out.kept_until) out.kept_until = until;
    out.folders.insert(in.holdings[i].info.worker());
  }
  return out;
}

std::string state_text(const NewestState& n) {
  switch (n.source) {
    case pb::Source::INIT:
      break;
    case pb::Source::CHECKPOINT:
      return fmt::format("step {} is in checkpoint {}", n.state_step,
                         short_path(n.path));
    case pb::Source::MEMORY:
      return fmt::format("step {} is in the memory of this host until {}",
                         n.state_step, time_of_day(n.kept_until));
  }
  return "";
}

}  // namespace remesh::rundir
