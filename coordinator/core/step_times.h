// StepTimes: how long steps, changes of mesh and the time between failures were
// in this run: what a better mesh is weighed by (mesh_policy.h).
//
// A value without I/O, in memory: a restarted coordinator begins with adopt().
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "parallel/planner/placement.h"
#include "proto/control.pb.h"

namespace remesh::core {

class StepTimes {
 public:
  explicit StepTimes(int64_t now_ms = 0) : began_ms_(now_ms) {}

  // Steps that follow are made on that mesh, on these hosts; lost_steps of them
  // are finished steps that are made again.
  void begin(const geometry::Layout& layout, std::set<std::string> hosts,
             int64_t lost_steps = 0);
  // Begins with the newest steps of a generation of an earlier life.
  void adopt(const pb::Durable& durable,
             const std::vector<pb::StepMetrics>& recent, int64_t now_ms);
  void add_step(double seconds, int64_t now_ms);
  // Bandwidth between its hosts, as its ranks measured it; 0 is ignored. What
  // was measured between others over an hour before is forgotten.
  void set_link(double bytes_per_s, int64_t now_ms);
  void add_failure() { ++failures_; }

  // Training is interrupted since now, if it is not yet: by the end of a
  // generation, until the next one makes a step.
  void interrupt(int64_t now_ms) {
    if (interrupted_ms_ < 0) interrupted_ms_ = now_ms;
  }
  // The generation continues.
  void forget_interruption() { interrupted_ms_ = -1; }
  // REQUIRES: training is interrupted.
  double interrupted_s(int64_t now_ms) const {
    return static_cast<double>(now_ms - interrupted_ms_) / 1000;
  }
  struct Pause {
    double seconds = 0;
    int64_t lost_steps = 0;
  };
  // Training goes on. Nothing if it was not interrupted.
  std::optional<Pause> resume(int64_t now_ms);

  // The meshes of which enough steps were made in the last hour, if all of
  // their hosts are among these. Changes rarely: small differences are ignored.
  std::vector<planner::MeasuredStep> measured(
      const std::set<std::string>& hosts, int64_t now_ms) const;
  // Between these hosts, as far as it was measured; 0: it was not.
  double link_bytes_per_s(const std::set<std::string>& hosts) const;
  // Also if there is no other host.
  bool knows_link(const std::set<std::string>& hosts) const;
  // Expected time without training when the mesh changes.
  double pause_s() const;
  // Expected time until a failure: as if there had been one more, and a day
  // more without one.
  double until_failure_s(int64_t now_ms) const;

 private:
  struct MeasuredMesh {
    planner::MeasuredStep step;
    int64_t at_ms = 0;  // of the last step
  };
  struct Link {
    double bytes_per_s = 0;
    int64_t at_ms = 0;
  };
  static void keep(double seconds, std::deque<double>* in);

  int64_t began_ms_ = 0;
  std::optional<MeasuredMesh> at_;  // step: of nothing yet
  int skip_ = 0;              // steps of a generation that are not counted
  std::deque<double> steps_;  // of the generation
  std::deque<double> pauses_;
  int64_t interrupted_ms_ = -1;  // since then
  int64_t lost_steps_ = 0;
  int64_t failures_ = 0;
  std::vector<MeasuredMesh> meshes_;
  std::map<std::set<std::string>, Link> links_;
};

}  // namespace remesh::core
