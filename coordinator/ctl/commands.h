// The commands of `remesh` that look at a run or tell it something. Each
// returns the process's exit code and prints errors on stderr.
#pragma once

#include <string>
#include <vector>

#include "coordinator/ctl/exit.h"
#include "coordinator/ctl/plan_view.h"

namespace remesh::ctl {

struct StatusOptions {
  std::string run;
  bool watch = false;
  bool json = false;
};
// Exit code 3 when the coordinator does not answer; what the run's files say
// is shown then.
int status_command(const StatusOptions& options);
int drain_command(const std::string& worker, const std::string& run);
// layout: "dp1,tp2", or "auto".
int mesh_command(const std::string& layout, const std::string& run);
// slots: a number, or "all".
int scale_command(const std::string& slots, const std::string& run);
// Waits until the new checkpoint is committed, and prints its path.
int checkpoint_command(const std::string& run);
// Waits until the job has ended.
int stop_command(const std::string& run);

struct CkptOptions {
  std::string target;   // a run directory, or one checkpoint
  long long step = -1;  // of a run: which one; -1: the newest
  bool json = false;
};
int ckpt_list_command(const CkptOptions& options);
int ckpt_inspect_command(const CkptOptions& options);
// Exit code 3 when it does not verify.
int ckpt_verify_command(const CkptOptions& options);

struct TraceOptions {
  std::string run;
  std::string output;         // "": traces/gen-G.json of the run
  long long generation = -1;  // -1: the newest that has traces
};
int trace_command(const TraceOptions& options);

// Prints the mesh that a job would get. Exit code 3 when there is none.
int plan_command(const PlanOptions& options);

// Prints the job as it would run.
int job_check_command(const std::string& job_file,
                      const std::vector<std::string>& set);
int job_defaults_command();
// Becomes remesh-data; returns only when that fails.
int data_command(const std::vector<std::string>& arguments);

}  // namespace remesh::ctl
