// Log files of the ranks below a run directory:
//   RUN/logs/gen-3/rank-0.log   written by the rank itself
//   RUN/logs/gen-3/rank-0.out   its stdout and stderr: messages of MPI
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace remesh::agent {

struct RankLogPaths {
  std::string log;
  std::string out;
};

// Creates the folder of the generation and removes those of all but the newest
// `keep` generations. Other workers may do the same concurrently.
Result<std::string> make_log_folder(const std::string& run_dir,
                                    int64_t generation, int keep);
RankLogPaths rank_log_paths(const std::string& folder, int rank);

// The last `lines` non-empty lines of both files, oldest first; those of the
// file that was modified last come last. Each is as in last_line().
std::vector<std::string> log_tail(const RankLogPaths& paths, size_t lines,
                                  size_t max_bytes);
// The last non-empty line of a text, without control characters and truncated
// to `max_bytes`; "" if there is none.
std::string last_line(std::string_view text, size_t max_bytes);

}  // namespace remesh::agent
