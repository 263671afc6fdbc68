// Log files of the ranks below a run directory:
//   RUN/logs/gen-3/rank-0.log   written by the rank itself
//   RUN/logs/gen-3/rank-0.out   its stdout and stderr: messages of MPI
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace remesh::agent {

struct RankLogPaths {
  std::string log;
  std::string out;
};

// Removes the folders of all but the newest `keep` generations up to that one.
// Other workers may do the same concurrently.
void remove_old_logs(const std::string& run_dir, int64_t generation, int keep);
// The files that the ranks print to, opened for writing and closed by the
// destructor.
class RankOutputs {
 public:
  RankOutputs() = default;
  ~RankOutputs();
  RankOutputs(const RankOutputs&) = delete;
  RankOutputs& operator=(const RankOutputs&) = delete;
  // Creates the folder too. A full disk is no error: the ranks can do without.
  Status open(const std::string& folder, const std::vector<int>& ranks);
  int fd(int rank) const;  // -1: not open

 private:
  std::map<int, int> fds_;
};
RankLogPaths rank_log_paths(const std::string& folder, int rank);

// The last `lines` non-empty lines of both files, oldest first; those of the
// file that was modified last come last. Each is as in last_lines().
std::vector<std::string> log_tail(const RankLogPaths& paths, size_t lines,
                                  size_t max_bytes);
// The last `lines` non-empty lines of a text, newest first, each without
// control characters and truncated to `max_bytes`.
std::vector<std::string> last_lines(std::string_view text, size_t lines,
                                    size_t max_bytes);

}  // namespace remesh::agent
