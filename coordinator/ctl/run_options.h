// How `remesh run` and `remesh resume` were called, and the commands that do
// the same again.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "proto/job.pb.h"

namespace remesh::ctl {

struct RunOptions {
  std::string job_file;
  std::string run_dir;
  bool resume = false;
  bool accept_edits = false;
  int local_workers = 0;
  int slots_per_worker = 1;
  int64_t stop_timeout_s = 30;
  bool respawn = false;
  bool detach = false;
  bool json = false;  // with detach
  bool no_auth = false;
  std::string bind = "tcp://127.0.0.1:0";
  std::string advertise;
  std::vector<std::string> set;
};

// The options that both verbs have.
void add_run_options(CLI::App* c, RunOptions* o);

// How to get the slots that the job lacks.
std::string slots_hint(const pb::Job& job, const RunOptions& o,
                       const std::string& run_dir);
// The command that continues the run with the same workers, or as many as it
// needs.
std::string resume_command(const pb::Job& job, const RunOptions& o,
                           const std::string& run_dir);

}  // namespace remesh::ctl
