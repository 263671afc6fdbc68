// `remesh run`: a coordinator and local workers as children, followed until
// the job has ended, and all stopped again.
#pragma once

#include <string>
#include <vector>

namespace remesh::ctl {

struct RunOptions {
  std::string job_file;
  std::string run_dir;
  bool resume = false;
  int local_workers = 0;
  int slots_per_worker = 1;
  bool respawn = false;
  std::string bind = "tcp://127.0.0.1:0";
  std::string advertise;
  std::vector<std::string> set;
};

// Exit code: 0 done or stopped, 2 usage or bad job file, 3 the job cannot
// continue (the reason is the last line), 130 interrupted.
int run_job(const RunOptions& options);

}  // namespace remesh::ctl
