// Daemon: the coordinator's shell. It gives the pure core its events (messages,
// broken connections, scan results, time) and does what the core answers, in
// the order of the actions: journal, files, messages.
//
// Crash-only: the process may be killed at any instruction. The ranks train on
// meanwhile, and the next life on the same run directory takes over: it finds
// the state in the journal, the last step in metrics.jsonl, the port in
// coordinator.addr. SIGTERM and SIGINT do the same in an orderly way: the
// daemon ends, the job does not (`remesh stop` ends the job).
//
// When journal or metrics cannot be written (disk full), nothing that depends
// on it is done: the daemon tries for kWriteRetryMs and then ends with
// kExitRestart for its service manager to start it again.
//
// Threads: one, beside the scanner's own.
#pragma once

#include <memory>
#include <string>

#include "proto/base/status.h"
#include "proto/job.pb.h"

namespace remesh::server {

struct DaemonOptions {
  pb::Job job;            // resolved
  std::string run_dir;    // absolute; made when it is not there
  std::string bind;       // tcp://HOST:PORT, port 0: the one of the life
                          // before when it is free, else any free one
  std::string advertise;  // HOST or HOST:PORT for workers; "": as bound
  bool resume = false;
  bool log_to_stderr = false;
};

inline constexpr int64_t kWriteRetryMs = 10'000;

class Daemon {
 public:
  // Takes the run directory's lock, opens journal and files, listens. Fails
  // with already_exists when another coordinator has the directory, with
  // invalid_argument when the run in it is of another job.
  static Result<std::unique_ptr<Daemon>> open(DaemonOptions options);
  virtual ~Daemon() = default;

  virtual const std::string& address() const = 0;  // advertised
  // True when the run had ended before and is not resumed.
  virtual bool had_ended() const = 0;
  // Until the job ends (0 done or stopped, 3 failed) or kExitRestart. A
  // negative value is minus the signal that asked the daemon to end.
  virtual int run() = 0;
  virtual const std::string& message() const = 0;  // why it ended
};

}  // namespace remesh::server
