// The events of a run: all that RUN/events.jsonl may contain.
//
// To add one, add a constant and its entry in event_kinds() here, emit it, and
// run `tests/lint.sh docs --write`, which makes the table of proto/PROTOCOL.md.
// `remesh run` and `remesh status` print an event that they have no sentence
// for as its name and fields.
//
// Every event has the fields time (unix seconds), event (its name), generation
// (the newest one planned) and step (the last finished step); `fields` of an
// EventKind lists the others. pb::EventRecord (control.proto) declares them
// all.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "proto/control.pb.h"

namespace remesh::events {

// How an event is shown.
enum class Tone { kNotice, kGood, kBad };

struct EventKind {
  const char* name;
  Tone tone;
  std::string_view fields;   // beside time, event, generation and step
  std::string_view meaning;  // one sentence for people

  friend bool operator==(const std::string& event, const EventKind& kind) {
    return event == kind.name;
  }
};

// ------------------------------------------------------------- coordinator

inline constexpr EventKind kCoordinatorStarted{
    "coordinator_started", Tone::kNotice, "", "A new run began."};
inline constexpr EventKind kCoordinatorRestarted{
    "coordinator_restarted", Tone::kNotice, "detail",
    "A coordinator took over a run that had begun before, after a crash or a "
    "stop."};
inline constexpr EventKind kJobChanged{
    "job_changed", Tone::kNotice, "detail",
    "The run continues with other settings; `detail` has each key, before "
    "and after."};
inline constexpr EventKind kForked{
    "forked", Tone::kNotice, "detail",
    "The run was made from a checkpoint of another one."};
inline constexpr EventKind kLearningRateChanged{
    "learning_rate_changed", Tone::kBad, "detail",
    "Another `train.steps` changes the learning rate of the next step."};
inline constexpr EventKind kJournalBehind{
    "journal_behind", Tone::kNotice, "worker, detail",
    "A worker, or without `worker` the metrics log, knows a later generation "
    "than the journal."};
inline constexpr EventKind kMetricsDamaged{
    "metrics_damaged", Tone::kBad, "detail",
    "`metrics.jsonl` has lines that are not metrics; they stay where they "
    "are."};
inline constexpr EventKind kScanFailed{
    "scan_failed", Tone::kBad, "cause",
    "The checkpoint folder cannot be listed; retried every second."};
inline constexpr EventKind kEventsLost{
    "events_lost", Tone::kBad, "detail",
    "Nothing could be written for so long that events were dropped."};

// ----------------------------------------------------------------- workers

inline constexpr EventKind kWorkerJoined{"worker_joined", Tone::kNotice,
                                         "worker, detail", "A worker joined."};
inline constexpr EventKind kWorkerRefused{
    "worker_refused", Tone::kBad, "worker, cause",
    "A message of a worker was refused because of its key or name; at most "
    "one event a second."};
inline constexpr EventKind kWorkerBack{
    "worker_back", Tone::kNotice, "worker, detail",
    "A worker that had been declared dead reported again."};
inline constexpr EventKind kWorkerLeaving{
    "worker_leaving", Tone::kNotice, "worker",
    "A worker received SIGTERM and finishes its step."};
inline constexpr EventKind kWorkerLeft{"worker_left", Tone::kNotice, "worker",
                                       "A worker left cleanly."};
inline constexpr EventKind kWorkerLost{
    "worker_lost", Tone::kBad, "worker, cause",
    "A worker was declared dead, or given up because it does not end its "
    "ranks."};
inline constexpr EventKind kCutOff{
    "coordinator_cut_off", Tone::kBad, "detail",
    "No worker of several hosts is heard; nobody is declared dead for that."};
inline constexpr EventKind kCutOffEnded{
    "coordinator_heard", Tone::kGood, "detail",
    "A worker is heard again; `detail` says after how long."};
inline constexpr EventKind kDrain{
    "drain", Tone::kNotice, "worker",
    "`remesh drain`: the worker finishes its step and leaves."};
inline constexpr EventKind kHostCordoned{
    "host_cordoned", Tone::kBad, "host, cause, seconds, detail",
    "No ranks are placed on this host for `seconds`: ranks failed there, it "
    "was silent repeatedly, messages are lost between it and another host, or "
    "it has too little room for the states."};
inline constexpr EventKind kLinkSearch{
    "link_search", Tone::kNotice, "cause, detail",
    "Collectives of many hosts hang: the next mesh is without some of the "
    "hosts, to find the link at which messages are lost."};
inline constexpr EventKind kHostUncordoned{
    "host_uncordoned", Tone::kNotice, "host, detail",
    "Ranks may be placed on the host again: the time is over, or `remesh "
    "uncordon`."};

// ------------------------------------------------------------- generations

inline constexpr EventKind kWaiting{
    "waiting", Tone::kNotice, "detail",
    "No generation can start yet: there are too few slots, or too little "
    "memory."};
inline constexpr EventKind kWaitingForState{
    "waiting_for_state", Tone::kNotice, "detail",
    "No generation starts yet: a worker that holds finished steps may still "
    "return, or a committed checkpoint is not listed yet."};
inline constexpr EventKind kWaitingForRoom{
    "waiting_for_room", Tone::kBad, "detail",
    "A checkpoint, or the states in memory, do not fit; the job waits and "
    "tries again."};
inline constexpr EventKind kMesh{
    "mesh", Tone::kNotice,
    "mesh, from, source, source_kind, lost_steps, detail",
    "A generation was planned: its mesh, the mesh before, the state that it "
    "starts from (`source_kind`: init, checkpoint or memory), and why."};
inline constexpr EventKind kTraining{
    "training", Tone::kGood, "mesh, seconds, lost_steps, digest",
    "The first step after a change finished; `seconds` is how long training "
    "was interrupted."};
inline constexpr EventKind kStepSkipped{
    "step_skipped", Tone::kBad, "cause",
    "`step` made no update, because its loss or gradient norm was not finite "
    "or its loss a spike (`train.max_skipped_steps`)."};
inline constexpr EventKind kFailure{
    "failure", Tone::kBad,
    "cause, worker, rank, host, signal, exit_code, doing, last_log, "
    "flight_record, seconds",
    "A generation was aborted; names the rank or worker that failed first, "
    "never a victim. `cause` says what happened to it, `signal` or "
    "`exit_code` how it ended. All ranks have ended: training has been "
    "interrupted for `seconds` by then."};
inline constexpr EventKind kGenerationEnded{
    "generation_ended", Tone::kNotice, "detail",
    "All ranks stopped at a step boundary."};
inline constexpr EventKind kChangePutOff{
    "change_put_off", Tone::kNotice, "cause, detail",
    "A planned change was postponed: saving failed, or the states of the "
    "next mesh do not fit."};
inline constexpr EventKind kReportRefused{
    "report_refused", Tone::kBad, "worker, cause, detail",
    "A report was refused: its content is impossible, another worker has its "
    "name or started later, it has another version of the protocol or a later "
    "generation without proof, or there are too many workers, or too many new "
    "ones at once; at most one event a minute."};
inline constexpr EventKind kMetricsGap{
    "metrics_gap", Tone::kBad, "detail",
    "Steps finished whose metrics are lost."};

// --------------------------------------------------------------- checkpoints

inline constexpr EventKind kCheckpoint{
    "checkpoint", Tone::kGood, "",
    "A checkpoint was committed; `step` is its step."};
inline constexpr EventKind kCheckpointFailed{
    "checkpoint_failed", Tone::kBad, "rank, worker, cause",
    "A rank could not save; each cause once until a save succeeds."};
inline constexpr EventKind kCheckpointDamaged{
    "checkpoint_damaged", Tone::kBad, "cause",
    "A checkpoint cannot be used, and why; a later save, of a higher step, "
    "removes it unless it is kept."};

// ------------------------------------------------------------------ commands

inline constexpr EventKind kMeshAsked{
    "mesh_asked", Tone::kNotice, "mesh, from, detail",
    "`remesh mesh` pinned or unpinned the layout."};
inline constexpr EventKind kMeshReleased{
    "mesh_released", Tone::kNotice, "detail",
    "The pinned layout does not fit any more and was unpinned."};
inline constexpr EventKind kScaleAsked{
    "scale_asked", Tone::kNotice, "detail",
    "`remesh scale` set the number of slots."};
inline constexpr EventKind kScaleReleased{
    "scale_released", Tone::kNotice, "detail",
    "The number of slots admits no mesh; all slots are used again."};
inline constexpr EventKind kStopRequested{
    "stop_requested", Tone::kNotice, "detail",
    "`remesh stop`, or the first Ctrl-C of `remesh run`: the job saves, "
    "unless the detail says otherwise, and ends."};
inline constexpr EventKind kStopDeclined{
    "stop_declined", Tone::kBad, "cause",
    "The job could not be saved, so it did not stop."};

// ------------------------------------------------------------------- the end

inline constexpr EventKind kJobDone{"job_done", Tone::kGood, "",
                                    "All steps are done."};
inline constexpr EventKind kJobStopped{
    "job_stopped", Tone::kNotice, "cause, detail",
    "The job stopped as requested, or for `cause`: it was given fewer steps "
    "than it has made; `detail` names workers that were not reached, and a "
    "state that is only in memory."};
inline constexpr EventKind kJobFailed{
    "job_failed", Tone::kBad, "cause, detail",
    "The job cannot continue; `detail` names workers that were not reached, "
    "and a state that is only in memory."};

// All of the above.
std::span<const EventKind> event_kinds();

// The tone of the event of that name; kNotice if it is unknown, which is how
// programs of different versions read each other's files.
Tone tone_of(std::string_view name);

// DONE, STOPPED or FAILED if this is the name of the event that ends a job, its
// last one; otherwise UNKNOWN.
pb::JobStatus::State outcome_of(const std::string& name);

}  // namespace remesh::events
