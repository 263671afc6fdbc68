// Measured training runs as rows of a CSV file: what was trained, on what, and
// how fast. The header has the columns of kColumns, in any order; others are
// ignored. `tokens_per_s_per_gpu` is the measurement; rows without it and rows
// with verified=memory are skipped.
//
// What a row does not say follows from what it says, by the same rules for all
// rows (execution_of() in rows.cc).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "parallel/planner/layer_cost.h"
#include "proto/base/status.h"

namespace remesh::bench {

struct Row {
  int line = 0;  // of the file
  std::string source, model;
  std::string device;    // family: "A100"
  double memory_gb = 0;  // 0 if unknown
  int world = 1;
  planner::JobShape shape;   // B = 0: not given; microbatches follow
  int64_t global_batch = 0;  // sequences; 0: not given
  geometry::Layout layout;   // tp = 0: not given
  planner::Execution run;
  bool names_schedule = false;  // shape.schedule is what the note says
  // A rank's batch is split into as many microbatches as there are stages.
  bool splits_by_stages = false;
  double tokens_per_s = 0;  // measured, of one device
  bool multi_node_vtrain = false, single_node_vtrain = false;
};

// How many rows were left out because the planner knows no such thing: by what
// it is, "gpu H800", "dtype mixed".
using Skipped = std::map<std::string, int>;

// Fails, naming the file, line and column and what is allowed; also if no row
// is left. Rows with an unknown dtype are added to *skipped, if that is given.
Result<std::vector<Row>> read_rows(const std::string& path,
                                   Skipped* skipped = nullptr);
Result<std::vector<Row>> parse_rows(const std::string& text,
                                    const std::string& name,
                                    Skipped* skipped = nullptr);

}  // namespace remesh::bench
