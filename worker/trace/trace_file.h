// A rank's spans as Chrome trace JSON ("Trace Event Format", Google 2016),
// which Perfetto and chrome://tracing open: the one writer of all such files.
//
// pid is the rank; lanes are tids: 0 what the training thread does, spans
// inside each other; then operations that run beside it, as many lanes as run
// at once. Times are microseconds of unix time, whole, so that ranks of one
// clock fit together. Pure, but for write_at_once().
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "proto/base/status.h"
#include "worker/board/flight.h"

namespace remesh::trace {

// One of a file. Pointers must outlive the call that takes it.
struct FileSpan {
  board::Lane lane = board::Lane::kCompute;
  std::string_view name;
  const char* category = "";
  std::string_view group;  // "": none
  int64_t begin_us = 0, end_us = 0;
  std::vector<std::pair<const char*, int64_t>> args;
};

// The text in quotes; what is not UTF-8 becomes U+FFFD.
std::string json_text(std::string_view text);

// The whole file. `about`: members of "otherData", as JSON without braces.
// Spans of the compute lane must lie inside each other or apart.
std::string trace_json(int rank, std::vector<FileSpan> spans,
                       const std::string& about);

// Writes `folder`/`name` at once (a file beside it is renamed); makes the
// folder. Fails with the path.
Status write_at_once(const std::string& folder, const std::string& name,
                     std::string_view text);

}  // namespace remesh::trace
