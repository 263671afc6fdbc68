// Writes a rank's spans as Chrome trace JSON ("Trace Event Format", Google
// 2016), which Perfetto and chrome://tracing open. Writes all such files.
//
// The pid is the rank and the tid a lane: tid 0 is the training thread, whose
// spans nest; the others are overlapped operations, as many lanes as run
// concurrently. Times are integer microseconds of unix time, so ranks with a
// common clock line up. Pure, except for write_atomically().
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "proto/base/status.h"
#include "worker/board/flight.h"

namespace remesh::trace {

// One span of a file. Pointers must outlive the call that takes it.
struct FileSpan {
  board::Lane lane = board::Lane::kCompute;
  std::string_view name;
  const char* category = "";
  std::string_view group;  // "": none
  int64_t begin_us = 0, end_us = 0;
  std::vector<std::pair<const char*, int64_t>> args;
};

// The text as a JSON string. Invalid UTF-8 becomes U+FFFD.
std::string json_text(std::string_view text);

// The contents of a file. `about` has the members of "otherData", as JSON
// without braces. Spans of the compute lane must nest or be disjoint.
std::string trace_json(int rank, std::vector<FileSpan> spans,
                       const std::string& about);

// Atomically replaces `folder`/`name` by a rename; creates the folder. Errors
// name the path.
Status write_atomically(const std::string& folder, const std::string& name,
                        std::string_view text);

}  // namespace remesh::trace
