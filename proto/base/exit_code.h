// The exit codes of every program of remesh. They cross processes: a worker
// reads those of its ranks, `remesh run` those of both daemons, and scripts and
// service managers those of `remesh`.
#pragma once

#include <string_view>

#include "proto/base/status.h"

namespace remesh {

enum ExitCode : int {
  kExitOk = 0,          // done, or stopped as requested
  kExitInternal = 1,    // rank: any other failure; the next generation starts
                        // from the newest state
  kExitUsage = 2,       // invalid arguments, job file or input
  kExitFailed = 3,      // permanent failure: a retry would fail again; rank:
                        // the same; its host is cordoned, or, if no other
                        // hosts are left, the job fails
  kExitEnded = 4,       // the run has ended or was never started; `remesh
                        // run`: it was stopped before its last step
  kExitNotFound = 5,    // a file, run, worker or checkpoint does not exist
  kExitBadSource = 65,  // rank: the state to start from does not load; its
                        // host is cordoned, or the next generation starts
                        // from an older state
  kExitNoRoom = 66,     // rank: its host has too little shared memory; replicas
                        // are given up, then the host is cordoned
  kExitWorld = 67,      // rank: the MPI world differs from the mesh, or a peer
                        // is gone; a victim, never the cause
  kExitSaveFailed = 68,  // rank: it had to stop and could not save; the job
                         // waits for room and continues from the state in
                         // memory
  kExitOrphan = 69,      // rank: its worker daemon is gone
  kExitUnreadable = 70,  // rank: the data set or a checkpoint cannot be read
                         // now; its host is cordoned, or, if no other hosts
                         // are left, a job that has made steps waits and tries
                         // again
  kExitTryAgain = 75,    // temporary failure: the same command may succeed
                         // later; coordinator: restart the daemon
  kExitInterrupted = 130,
};

// For the help of programs that people start.
inline constexpr std::string_view kExitCodesHelp =
    "Exit codes: 0 success; 2 usage error or invalid job file; 3 cannot "
    "continue (the\nlast line has the reason); 4 the run has ended, was "
    "stopped "
    "before its last step, or\nwas not started; 5 a file, run, worker or "
    "checkpoint does not exist; 75 temporary\nfailure, try again; 130 "
    "interrupted by a signal.";

ExitCode exit_code_of(const Status& status);

// On stderr. What cannot be printed, on a full disk or a closed pipe, is lost;
// fmt::print() would throw.
void print_error(std::string_view text);

// Prints "PROGRAM: message" on stderr; returns the exit code. For main().
ExitCode exit_with(std::string_view program, const Status& status);

}  // namespace remesh
