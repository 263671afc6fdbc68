// The learning-rate schedule. Pure functions.
#pragma once

#include <cstdint>
#include <string_view>

#include "proto/base/status.h"
#include "proto/job.pb.h"

namespace remesh::jobfile {

enum class Decay { kConstant, kCosine, kLinear, kWsd };

struct LrSchedule {
  double lr = 1e-3;  // peak
  int64_t warmup_steps = 0;
  int64_t total_steps = 1;  // where the decay ends
  Decay decay = Decay::kCosine;
  double decay_ratio = 0.2;    // kWsd: share of total_steps that decays
  double min_lr_factor = 0.1;  // rate at the end, as a share of lr
};

// Learning rate of update `i`, counted from 0. Warm-up: lr * (i + 1) /
// warmup_steps while i < warmup_steps. Then, with u the completed share of the
// decay (0 at its first step, 1 from total_steps on):
//   kCosine  from warm-up to total_steps, min + (1 - min) (1 + cos(pi u)) / 2
//            (Loshchilov and Hutter 2017)
//   kLinear  from warm-up to total_steps, 1 - (1 - min) u
//   kWsd     lr, then linear over the last decay_ratio of the steps (Hu et al.
//            2024, MiniCPM)
//   kConstant  lr
// REQUIRES: i >= 0.
double learning_rate(const LrSchedule& schedule, int64_t i);

// Fails on an unknown name, listing the known ones.
Result<Decay> parse_decay(std::string_view name);

// The schedule of a resolved job.
Result<LrSchedule> lr_schedule(const pb::Job& job);

}  // namespace remesh::jobfile
