// What `remesh tune` prints and draws. Pure.
#pragma once

#include <string>
#include <vector>

#include "coordinator/ctl/study.h"
#include "parallel/tune/space.h"
#include "parallel/tune/tuner.h"
#include "proto/job.pb.h"

namespace remesh::ctl {

struct TuneReport {
  const tune::Space& space;
  const tune::Tuner& tuner;
  const pb::Job& job;               // what was tuned
  std::vector<std::string> errors;  // of the trials; "" of those that ran
  std::string file;                 // of the job, as typed
};

// "dp2,pp1,tp2, micro-batch 4, ...: 0.512 s a step (0.60 s predicted)".
std::string trial_text(const TuneReport& report, size_t trial);

// How far the steps of all trials are, as a bar of at most 60 characters.
// `before`: those of `done` that an earlier command made, in other seconds.
std::string tune_progress(int64_t before, int64_t done, int64_t all,
                          double seconds);

// The best setting, the keys to use it, and the effect of each knob on
// throughput in percent; or why there is none. With these keys, a job whose
// data-parallel ranks follow from the slots still adapts to them.
std::string tune_text(const TuneReport& report);
std::string tune_json(const TuneReport& report);
// The page of charts: effects, measured against predicted, progress.
Study tune_charts(const TuneReport& report);

}  // namespace remesh::ctl
