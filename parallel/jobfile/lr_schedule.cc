#include "parallel/jobfile/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

namespace remesh::jobfile {
namespace {

// Share of [begin, end) behind i.
double behind(int64_t i, double begin, double end) {
  const double at = static_cast<double>(i);
  if (at >= end) return 1;
  if (at <= begin) return 0;
  return (at - begin) / (end - begin);
}

}  // namespace

double learning_rate(const LrSchedule& s, int64_t i) {
  CHECK(i >= 0);
  if (i < s.warmup_steps)
    return s.lr * static_cast<double>(i + 1) /
           static_cast<double>(s.warmup_steps);
  const double warm = static_cast<double>(s.warmup_steps);
  const double total = static_cast<double>(s.total_steps);
  const double falls = 1 - s.min_lr_factor;
  switch (s.decay) {
    case Decay::kConstant:
      return s.lr;
    case Decay::kCosine: {
      const double u = behind(i, warm, total);
      return s.lr * (s.min_lr_factor +
                     falls * 0.5 * (1 + std::cos(std::numbers::pi * u)));
    }
    case Decay::kLinear:
      return s.lr * (1 - falls * behind(i, warm, total));
    case Decay::kWsd: {
      const double begin = std::max(warm, total * (1 - s.decay_ratio));
      return s.lr * (1 - falls * behind(i, begin, total));
    }
  }
  CHECK_MSG(false, "unknown decay");
  return 0;
}

Result<Decay> parse_decay(std::string_view name) {
  if (name == "constant") return Decay::kConstant;
  if (name == "cosine") return Decay::kCosine;
  if (name == "linear") return Decay::kLinear;
  if (name == "wsd") return Decay::kWsd;
  return invalid_argument("schedule.decay_type: \"" + std::string(name) +
                          "\", allowed: cosine, linear, wsd, constant");
}

Result<LrSchedule> lr_schedule(const pb::Job& job) {
  const pb::Schedule& s = job.schedule();
  ASSIGN_OR_RETURN(const Decay decay, parse_decay(s.decay_type()));
  return LrSchedule{.lr = job.optimizer().lr(),
                    .warmup_steps = s.warmup_steps(),
                    .total_steps = s.total_steps() > 0 ? s.total_steps()
                                                       : job.train().steps(),
                    .decay = decay,
                    .decay_ratio = s.decay_ratio(),
                    .min_lr_factor = s.min_lr_factor()};
}

}  // namespace remesh::jobfile
