#include "coordinator/server/run_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "coordinator/core/announcements.h"
#include "coordinator/core/durable.h"
#include "coordinator/rundir/claim_folder.h"
#include "coordinator/rundir/first_steps.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/lines.h"
#include "proto/base/clock.h"
#include "proto/base/text.h"
#include "proto/rundir/events.h"
#include "proto/rundir/run_id.h"

namespace remesh::server {
namespace {

// Workers keep and repeat the metrics of this time.
constexpr int kSyncPeriodMs = 300;

}  // namespace

Status RunFiles::open(const std::string& folder, Logger& log) {
  run = folder;
  ASSIGN_OR_RETURN(journal, Journal::open(*fs, rundir::journal_path(run)));
  ASSIGN_OR_RETURN(metrics,
                   rundir::LineFile::open(
                       rundir::metrics_path(run), [](std::string_view line) {
                         return rundir::parse_metrics_line(line).ok();
                       }));
  ASSIGN_OR_RETURN(events,
                   rundir::LineFile::open(
                       rundir::events_path(run), [](std::string_view line) {
                         return rundir::parse_event_line(line).ok();
                       }));
  for (const auto* file : {metrics.get(), events.get()})
    if (file->cut_bytes() > 0)
      log.warn("torn_tail_removed", {{"bytes", file->cut_bytes()}});
  syncer = std::make_unique<Syncer>(metrics->sync_fd(), events->sync_fd(),
                                    kSyncPeriodMs);
  // An earlier coordinator may not have come to sync its last lines.
  const auto last = rundir::parse_metrics_line(metrics->last_line());
  syncer->wrote(last.ok() ? last.value().step() : 0, metrics->size());
  return ok_status();
}

Status RunFiles::check_not_ended() {
  if (!journal->restored() || !core::terminal(journal->restored()->phase()))
    return ok_status();
  auto end = rundir::end_of_run(run);
  const pb::Durable& d = *journal->restored();
  if (!end && recorded_generation() > d.generation()) return ok_status();
  if (!end) {
    const auto last = rundir::parse_metrics_line(metrics->last_line());
    const int64_t step = last.ok() ? last->step() : 0;
    // A stop by request needs no explanation.
    const bool explained =
        d.phase() == pb::Durable::FAILED || step > d.job().train().steps();
    pb::EventRecord e =
        core::end_event(d.phase(), explained ? d.cause().what() : "", "", "");
    e.set_time(unix_seconds());
    e.set_generation(d.generation());
    e.set_step(step);
    RETURN_IF_ERROR(append(e));
    end = rundir::end_of_run(run);
  }
  // The coordinator was killed before it did. Workers that have not heard of
  // the end would look for it there.
  rundir::remove_endpoint(*fs, run);
  return ended(run + ": " +
               (end ? rundir::end_text(*end, run)
                    : "the run has ended; to continue: remesh resume " +
                          rundir::typed_path(run)));
}

int64_t RunFiles::recorded_generation() const {
  const auto metric = rundir::parse_metrics_line(metrics->last_line());
  const auto event = rundir::parse_event_line(events->last_line());
  return std::max(metric.ok() ? metric->generation() : 0,
                  event.ok() ? event->generation() : 0);
}

void RunFiles::tell(core::Options* o) const {
  o->data_id = rundir::data_id_of(o->job);
  o->restored = journal->restored();
  o->recorded_generation = recorded_generation();
  o->recent_metrics = rundir::recent_metrics(run);
  if (!o->recent_metrics.empty())
    o->last_finished_step = o->recent_metrics.back().step();
  o->first_steps =
      rundir::first_steps(rundir::metrics_path(run), &o->damaged_lines);
}

Status RunFiles::claim(const pb::Job& of, Logger& log) {
  job = of;
  const auto& restored = journal->restored();
  run_id = restored ? restored->run_id() : 0;
  if (run_id == 0) run_id = rundir::run_id_of(*fs, run);
  if (run_id == 0) run_id = rundir::new_run_id(run);
  const std::string& folder = job.checkpoint().folder();
  Status claimed =
      rundir::claim_folder(run, rundir::checkpoints_path(run, folder), run_id);
  const bool had_it =
      restored && restored->job().checkpoint().folder() == folder;
  if (claimed.ok() || !had_it || claimed.code() == Code::kInvalidArgument)
    return claimed;
  log.warn("checkpoint_folder_unusable", {{"cause", claimed.message()}});
  return ok_status();
}

Status RunFiles::persist(const pb::Durable& durable) {
  RETURN_IF_ERROR(lock->check());
  RETURN_IF_ERROR(metrics->check_end());
  RETURN_IF_ERROR(syncer->sync_metrics());
  return journal->persist(durable);
}

Status RunFiles::check() {
  RETURN_IF_ERROR(lock->check());
  std::vector<std::string> names;
  const auto note = [&](bool restored, const char* name) {
    if (restored) names.emplace_back(name);
  };
  const auto removed = [&](const std::string& path) {
    return fs->look_up(path).code() == Code::kNotFound;
  };
  // Somebody who removes the whole directory may not have come to its end.
  const bool some_removed =
      removed(rundir::journal_path(run)) ||
      removed(rundir::metrics_path(run)) || removed(rundir::events_path(run)) ||
      removed(rundir::job_path(run)) || removed(rundir::endpoint_path(run));
  was_incomplete = some_removed && !was_incomplete;
  if (was_incomplete) return ok_status();
  ASSIGN_OR_RETURN(const bool of_journal, journal->put_back());
  note(of_journal, "journal");
  ASSIGN_OR_RETURN(const bool of_metrics, metrics->put_back());
  note(of_metrics, "metrics.jsonl");
  ASSIGN_OR_RETURN(const bool of_events, events->put_back());
  note(of_events, "events.jsonl");
  if (removed(rundir::job_path(run))) {
    RETURN_IF_ERROR(rundir::write_job(*fs, job, run, run_id));
    note(true, "job.toml");
  }
  if (removed(rundir::endpoint_path(run))) {
    RETURN_IF_ERROR(rundir::write_endpoint(*fs, run, endpoint));
    note(true, "coordinator.addr");
  }
  if (names.empty()) return ok_status();
  pb::EventRecord event;
  event.set_event(events::kFilesRestored.name);
  event.set_time(unix_seconds());
  event.set_detail(fmt::format(
      "{}: removed or replaced by somebody, and written again", join(names)));
  return append(event);
}

Status RunFiles::append(const pb::StepMetrics& m) {
  Status written = metrics->append(rundir::metrics_line(m) + "\n");
  if (!written.ok()) {
    // Later, it may be the path alone that leads to a file system that works.
    RETURN_IF_ERROR(lock->check());
    return written;
  }
  syncer->wrote(m.step(), metrics->size());
  return ok_status();
}

Status RunFiles::append(const pb::EventRecord& event) {
  // The last event says how the run has ended.
  if (has_ended) return ok_status();
  RETURN_IF_ERROR(events->append(rundir::event_line(event) + "\n"));
  has_ended = events::outcome_of(event.event()) != pb::JobStatus::UNKNOWN;
  syncer->touch();
  return ok_status();
}

}  // namespace remesh::server
