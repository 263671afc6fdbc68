// RunFiles: the files of a run that its coordinator writes, open and locked.
#pragma once

#include <memory>
#include <string>

#include "coordinator/core/api.h"
#include "coordinator/rundir/line_file.h"
#include "coordinator/rundir/run_dir.h"
#include "coordinator/server/journal.h"
#include "coordinator/server/syncer.h"
#include "proto/base/file_system.h"
#include "proto/base/log.h"
#include "proto/base/status.h"

namespace remesh::server {

// Threads: once it is shared with an Outbox, whose writes own it, only the
// Outbox's thread uses journal, metrics and events. The lock is held as long as
// a write may still happen.
struct RunFiles {
  std::unique_ptr<FileSystem> fs = posix_file_system();
  std::unique_ptr<rundir::RunLock> lock;
  std::unique_ptr<Journal> journal;
  std::unique_ptr<rundir::LineFile> metrics;
  std::unique_ptr<rundir::LineFile> events;
  std::unique_ptr<Syncer> syncer;  // after the files it syncs
  bool has_ended = false;          // the event of the end has been written
  std::string run;                 // the directory, from open()
  // From claim(), and from whoever opens the socket, for check().
  pb::Job job;
  uint64_t run_id = 0;
  rundir::Endpoint endpoint;
  bool was_incomplete = false;  // when check() looked last

  // Journal, metrics and events. REQUIRES: the lock is held.
  Status open(const std::string& folder, Logger& log);
  // Ended, with how, if the run has ended. Writes the event of the end if the
  // coordinator that ended the job was killed before it did. A journal that is
  // older than metrics and events, such as one from a backup, proves no end.
  Status check_not_ended();
  // The newest in metrics and events when they were opened.
  int64_t recorded_generation() const;
  // What a coordinator has to know from them.
  void tell(core::Options* options) const;
  // The number in the journal or job.toml, or a new one if neither has one, for
  // which the folder of checkpoints is claimed (rundir::claim_folder()).
  // Notes both. A folder that the run has used before may be unusable now:
  // ranks can train without it, or continue from memory.
  Status claim(const pb::Job& job, Logger& log);
  // Not before the metrics that the state is based on are durable: workers
  // forget those of an older generation. Cancelled if another coordinator has
  // taken the run over or has written metrics: the state may have waited for a
  // full disk meanwhile, and does not know of them.
  Status persist(const pb::Durable& durable);
  // Is the run still this coordinator's? Like RunLock::check(). Then writes
  // again what somebody has removed of it, if the call before missed it, too,
  // and an event that names the files.
  Status check();
  // If it fails: is the run still this coordinator's? A file that is open on a
  // file system that has failed stays there when that is mounted again.
  Status append(const pb::StepMetrics& metrics);
  Status append(const pb::EventRecord& event);
};

}  // namespace remesh::server
