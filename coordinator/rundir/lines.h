// The lines of metrics.jsonl (one per finished step) and events.jsonl (one per
// event): JSON objects whose keys are the fields of pb::StepMetrics and
// pb::EventRecord that are set, in the order of their declaration.
//
// Pure functions. A double is written so that parsing gives back the same bits;
// NaN and infinities, which JSON lacks, are written as null and read as NaN. A
// digest is written as 16 hexadecimal digits, because readers of JSON keep 53
// bits of a number. Bytes that are not UTF-8 (in the last output of a process)
// are replaced. A line has no '\n' here.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "proto/base/log.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::rundir {

// Adds gemm_efficiency, flops_per_s over gemm_flops_per_s, if both are known.
std::string metrics_line(const pb::StepMetrics& metrics);
// Corrupt if metrics_line() cannot have written it. Unknown keys are ignored.
Result<pb::StepMetrics> parse_metrics_line(std::string_view line);

// At most kMaxEventBytes: long texts are cut.
std::string event_line(const pb::EventRecord& event);
inline constexpr size_t kMaxEventBytes = 64 << 10;
Result<pb::EventRecord> parse_event_line(std::string_view line);

// The fields of an event that are set, for a log line that is named after it:
// all but its name, and the time, which the line has. A list is joined.
std::vector<Kv> event_fields(const pb::EventRecord& event);

// "dp2" or "dp2,pp2,tp4".
std::string mesh_text(const pb::Mesh& mesh);
// "running", "not answering", "given up".
std::string state_text(pb::JobStatus::State state);
std::string state_text(pb::WorkerStatus::State state);

}  // namespace remesh::rundir
