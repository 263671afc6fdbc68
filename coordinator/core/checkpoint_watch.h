// CheckpointWatch: what the ranks' reports say about saving: which checkpoint
// is the newest, which saves failed, and which ranks declined to stop because
// they could not save. A value without I/O.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/core/api.h"
#include "coordinator/core/cluster_view.h"
#include "proto/base/status.h"

namespace remesh::core {

class CheckpointWatch {
 public:
  struct Result {
    int64_t step = -1;  // that was saved, if error is empty
    std::string error;  // of a save that failed
    int rank = -1;      // that failed, and its worker
    std::string worker;
  };

  // What is new in the reports of the generation's members. An error is new
  // once by its code until a save succeeds, however many ranks and saves fail,
  // and kUnavailable once on each worker. Nothing is saved that not every rank
  // has committed: a later step than `committed` + 1 does not count yet.
  std::vector<Result> observe(const Roster& roster, int64_t generation,
                              int64_t committed);
  // That step was saved in an earlier life of the coordinator.
  void know(int64_t step) { newest_step_ = std::max(newest_step_, step); }
  // Newest saved step that was reported or is known; -1 if there is none.
  int64_t newest_step() const { return newest_step_; }
  // The job continues from that step: newer checkpoints, which could not be
  // used, are on an abandoned branch, and nobody waits for them any more. The
  // job may save these steps again. Nor is a step saved whose checkpoint turns
  // out to be damaged, or did not load. Returns the newest saved step, which
  // was `saved` so far.
  int64_t go_back(int64_t step, int64_t saved, const CheckpointsScanned& scan,
                  const pb::Refusals& refused);
  const std::string& last_error() const { return last_error_; }
  // The ranks ended because they could not save. Returns how often in a row.
  int64_t count_failed_end() { return ++failed_ends_; }

  // Stops that were declined so far do not count; call it before asking for
  // one. `finish` keeps them for a later life of the coordinator, which calls
  // adopt().
  void expect_stop(const Roster& roster, pb::Finish* finish);
  void adopt(const pb::Finish& finish) {
    declined_ = {finish.declined().begin(), finish.declined().end()};
  }
  // Whether a rank has declined a stop since the last call.
  bool stop_declined(const ClusterView& view);
  void end_generation() { declined_.clear(); }
  void begin_generation() { seen_.clear(); }  // its ranks count from 0

  // Checkpoints that the scan is the first to find damaged, or to find damaged
  // in another way.
  std::vector<InvalidCheckpoint> new_damages(const CheckpointsScanned& scan);

 private:
  int64_t newest_step_ = -1;
  std::set<std::pair<std::string, Code>> damages_;  // by path
  std::string last_error_;
  int64_t failed_ends_ = 0;  // since the newest save
  // The failure that a rank repeats in every report.
  struct Seen {
    Code code = Code::kOk;
    int64_t failed_saves = 0, declined_stops = 0;
    friend bool operator==(const Seen&, const Seen&) = default;
  };
  std::map<int, Seen> seen_;  // by rank
  // Since the newest save; "" for all workers.
  std::set<std::pair<Code, std::string>> announced_;
  std::map<int, int64_t> declined_;  // stops, by rank
};

}  // namespace remesh::core
