// The two logs of a run that programs and people read, line by line:
// metrics.jsonl (one finished step a line) and events.jsonl (one event a line).
//
// Pure functions. Doubles of metrics carry 17 significant digits, so that
// parsing gives back the same bits; NaN and infinities, which JSON lacks, are
// written as null and read as NaN. Text that is not UTF-8 (last words of a
// process) has its bad bytes replaced. A line ends without '\n' here.
#pragma once

#include <string>
#include <string_view>

#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::rundir {

std::string metrics_line(const pb::StepMetrics& metrics);
// Corrupt when the line is not what metrics_line writes. Unknown keys are
// passed over.
Result<pb::StepMetrics> parse_metrics_line(std::string_view line);

// Only the fields that are set are written.
std::string event_line(const pb::EventRecord& event);
Result<pb::EventRecord> parse_event_line(std::string_view line);

// "dp2" or "dp2 pp2 tp4".
std::string mesh_text(const pb::Mesh& mesh);

}  // namespace remesh::rundir
