// Daemon: the shell around the coordinator's core. It passes events (messages,
// broken connections, scan results, time) to the pure core and performs the
// actions that the core returns, in order: journal, files, messages.
//
// Crash-only: the process may be killed at any instruction. The ranks continue
// to train, and the next coordinator on the same run directory takes over: it
// finds the state in the journal, the last step in metrics.jsonl and the port
// in coordinator.addr. SIGTERM and SIGINT do the same cleanly: the daemon exits
// and the job continues (`remesh stop` ends the job).
//
// Its own thread, which hears the network, waits for no disk. While journal,
// metrics or events cannot be written (disk full or not answering), nothing
// happens that depends on them: the workers are told what they were told
// before, fences and `remesh status` are answered, and the writes are tried
// again for as long as it takes.
//
// Threads: one, besides those of Outbox, Scanner and Syncer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parallel/planner/placement.h"
#include "proto/base/status.h"
#include "proto/job.pb.h"

namespace remesh::server {

struct DaemonOptions {
  pb::Job job;                   // resolved
  std::vector<std::string> set;  // the overrides that `job` was loaded with
  std::string run_dir;           // absolute; created if it does not exist
  // Port 0: that of the previous coordinator if it is free, else any free one.
  std::string bind = "tcp://127.0.0.1:0";
  std::string advertise;  // HOST or HOST:PORT for workers; "": as bound
  bool resume = false;
  bool accept_edits = false;  // of job.toml in the run directory, by hand
  bool no_auth = false;       // without keys: for a network without strangers
  // Make keys if the run has none. They are always made if only this machine
  // can connect.
  bool make_keys = false;
  planner::Machine core = planner::reference_core();  // core::Options::core
  bool log_to_stderr = false;
};

class Daemon {
 public:
  // Locks the run directory, opens journal and files, and listens. Fails with
  // AlreadyExists if another coordinator uses the directory, with
  // InvalidArgument if it contains a run that may not continue with this job,
  // or other files, with Ended if that run has ended and is not resumed. A
  // directory that was not a run before is not one after a failure either.
  static Result<std::unique_ptr<Daemon>> open(DaemonOptions options);
  virtual ~Daemon() = default;

  virtual const std::string& address() const = 0;  // advertised
  // Runs until the job ends (kExitOk: done or stopped, kExitFailed). A negative
  // value is minus the signal that ended the daemon.
  virtual int run() = 0;
  virtual const std::string& message() const = 0;  // why it ended
};

}  // namespace remesh::server
