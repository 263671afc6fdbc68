// Preflight: what can be known before the first process of a run is started:
// each thing that the run needs on this host beside what there is.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/memory/segment_directory.h"
#include "coordinator/ctl/render.h"
#include "proto/job.pb.h"

namespace remesh::ctl {

struct PreflightOptions {
  pb::Job job;          // resolved
  std::string run_dir;  // need not exist
  int workers = 0;      // on this host; 0: the coordinator alone
  int slots_per_worker = 1;
  uint64_t state_job = 0;  // of the run; its states may be replaced. 0: none
  std::string shared = memory::kSharedMemory;  // where states are kept
};

struct Need {
  std::string what;    // "memory"
  std::string needed;  // "2 ranks x 34M"
  std::string here;    // "22.1G"
  // Why it does not suffice, and what to do; "": it does.
  std::string problem;
  bool fatal = false;  // the run cannot start
};

// Where the workers of this host keep temporary files.
std::string scratch_root();

// Reads /proc, limits and file systems of this host.
std::vector<Need> look_ahead(const PreflightOptions& options);

// A table, problems below their rows.
std::string needs_text(const std::vector<Need>& needs, const Style& style);
// An array of objects.
nlohmann::ordered_json needs_json(const std::vector<Need>& needs);
// The problems of what is fatal, one line each; "" if nothing is.
std::string fatal_text(const std::vector<Need>& needs);

}  // namespace remesh::ctl
