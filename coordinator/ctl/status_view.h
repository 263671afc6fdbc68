// `remesh status` as text and as JSON: pure functions of the coordinator's
// reply and of what facts_of_run() reads.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/ctl/render.h"
#include "proto/base/memory_use.h"
#include "proto/control.pb.h"

namespace remesh::ctl {

// Parallel settings of a job on its mesh: "ZeRO 2, 1f1b, recompute full".
std::string settings_text(const pb::Parallel& parallel,
                          const std::string& recompute, int64_t recompute_every,
                          const pb::Mesh& mesh);
// "running"; of a job that waits also for what: "waiting for shared memory".
std::string state_text(const pb::JobStatus& s);
// "journal: the disk is full, for 12.0s".
std::string problem_text(const pb::JobStatus::Problem& problem);
// The four degrees.
nlohmann::ordered_json mesh_json(const pb::Mesh& mesh);
// Bytes by purpose, and "total".
nlohmann::ordered_json memory_json(const MemoryUse& memory);
// For the cells of tables: "12M", "1.5G" in units of 2^20 and 2^30 bytes.
std::string bytes_text(uint64_t bytes);

// Aligned columns, two spaces apart, indented by two.
std::string table(std::vector<std::vector<std::string>> rows);

// What the files of a run add to what its coordinator says.
struct RunFacts {
  double now = 0;      // unix seconds; 0: unknown, shows no time
  double began = 0;    // when the run was started first; 0: unknown
  double left_s = -1;  // until the last step; negative: unknown
  std::optional<pb::StepMetrics> validated;   // newest with a validation loss
  std::optional<pb::EventRecord> checkpoint;  // newest that was saved
  std::vector<std::string> members;  // of a mixture: those that are validated
};
// `metrics`, `events`: the newest of the run, in order.
RunFacts facts_of(const std::vector<pb::StepMetrics>& metrics,
                  const std::vector<pb::EventRecord>& events, int64_t steps,
                  double now);

// The complete page.
std::string status_text(const pb::JobStatus& s, const RunFacts& facts,
                        const Style& style);

// What the files of a run say without its coordinator.
pb::JobStatus status_of_files(const std::string& run);
// The facts of the run, as far as its folder is visible here.
RunFacts facts_of_run(const pb::JobStatus& s);

// One JSON object, with the keys that proto/PROTOCOL.md lists.
std::string status_json(const pb::JobStatus& s, const RunFacts& facts);

}  // namespace remesh::ctl
