#include "coordinator/ctl/tune_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "coordinator/ctl/status_view.h"
#include "proto/base/json_output.h"
#include "proto/base/progress_bar.h"
#include "proto/base/text.h"

namespace remesh::ctl {
namespace {

using Json = nlohmann::ordered_json;

struct Effect {
  std::string knob;
  double percent = 0;  // of throughput, on average up or down
};

// The effects of the knobs that vary, the largest first.
std::vector<Effect> effects_of(const TuneReport& r) {
  std::vector<double> throughput;
  for (const double s : r.tuner.estimates()) throughput.push_back(-std::log(s));
  const std::vector<double> values =
      tune::shapley_effects(r.space.candidates, throughput);
  std::vector<Effect> out;
  for (size_t k = 0; k < values.size(); ++k) {
    const auto same = [&](const tune::Candidate& c) {
      return c.knobs[k] == r.space.candidates[0].knobs[k];
    };
    if (!std::ranges::all_of(r.space.candidates, same))
      out.push_back({tune::knob_names()[k], 100 * (std::exp(values[k]) - 1)});
  }
  std::ranges::stable_sort(out, std::ranges::greater{}, &Effect::percent);
  return out;
}

// How many times as fast as the job's own settings, if these were measured.
double gain_of(const TuneReport& r, const tune::Trial& best) {
  for (const tune::Trial& t : r.tuner.trials())
    if (t.candidate == r.space.own && t.step_s) return *t.step_s / *best.step_s;
  return 0;
}

// How to use a setting.
struct Use {
  std::vector<std::string> overrides;
  int64_t least_slots = 1;
};

Use use_of(const TuneReport& r, const tune::Trial& best) {
  tune::Setting s = r.space.settings[best.candidate];
  const int64_t ranks = s.layout.world();
  int64_t unit = ranks;
  const bool adapts = r.job.parallel().data_parallel_degree() == -1 ||
                      !r.job.elastic().layouts().empty();
  if (adapts) {
    unit /= s.layout.dp;
    s.layout.dp = -1;
  }
  Use out{.overrides = s.overrides()};
  if (adapts && ranks < r.space.slots)
    out.overrides.push_back(fmt::format("elastic.max_slots={}", ranks));
  out.least_slots = (r.job.elastic().min_slots() + unit - 1) / unit * unit;
  return out;
}

std::string use_text(const TuneReport& r, const Use& use) {
  std::string out = "to use it:\n  remesh run " + shell_quoted(r.file);
  for (const std::string& s : use.overrides)
    out += " \\\n    --set " + shell_quoted(s);
  if (use.least_slots > 1)
    out += fmt::format("\nwith fewer than {} slots the job waits",
                       use.least_slots);
  return out + "\n";
}

}  // namespace

std::string trial_text(const TuneReport& r, size_t trial) {
  const tune::Trial& t = r.tuner.trials()[trial];
  const std::string setting =
      r.space.settings[t.candidate].text() +
      (t.candidate == r.space.own ? " (the job's)" : "");
  if (!t.step_s) return fmt::format("{}: failed: {}", setting, r.errors[trial]);
  return fmt::format("{}: {:.3f} s a step ({:.3f} s predicted)", setting,
                     *t.step_s, r.space.candidates[t.candidate].predicted_s);
}

std::string tune_progress(int64_t before, int64_t done, int64_t all,
                          double seconds) {
  constexpr size_t kColumns = 60;
  const double made = static_cast<double>(done - before);
  return progress_text(
      "tuning", "step", static_cast<uint64_t>(done), static_cast<uint64_t>(all),
      made > 0 ? seconds * static_cast<double>(done) / made : 0, kColumns);
}

std::string tune_text(const TuneReport& r) {
  const auto best = r.tuner.best();
  if (!best) return "no trial has succeeded\n";
  std::string out = fmt::format(
      "best of {}: {}, {:.3f} s a step",
      plural(static_cast<int64_t>(r.tuner.trials().size()), "trial"),
      r.space.settings[best->candidate].text(), *best->step_s);
  if (const double gain = gain_of(r, *best); gain > 0)
    out +=
        fmt::format(", {:.2f} times as fast as the job's own settings", gain);
  out += fmt::format("\nthe predictions were off by {:.1f} % on average\n\n",
                     100 * r.tuner.prediction_error());
  std::vector<std::vector<std::string>> rows = {
      {"knob", "effect on throughput"}};
  for (const Effect& e : effects_of(r))
    rows.push_back({e.knob, fmt::format("{:.1f} %", e.percent)});
  return out + table(std::move(rows)) + "\n" + use_text(r, use_of(r, *best));
}

std::string tune_json(const TuneReport& r) {
  Json trials = Json::array();
  for (size_t i = 0; i < r.tuner.trials().size(); ++i) {
    const tune::Trial& t = r.tuner.trials()[i];
    Json j{{"setting", r.space.settings[t.candidate].text()},
           {"set", r.space.settings[t.candidate].overrides()},
           {"predicted_s", r.space.candidates[t.candidate].predicted_s}};
    if (t.step_s)
      j["step_s"] = *t.step_s;
    else
      j["error"] = r.errors[i];
    trials.push_back(std::move(j));
  }
  Json out{{"candidates", r.space.candidates.size()},
           {"too_large", r.space.too_large},
           {"prediction_error", r.tuner.prediction_error()}};
  if (const auto best = r.tuner.best()) {
    out["best"] = {{"setting", r.space.settings[best->candidate].text()},
                   {"set", use_of(r, *best).overrides},
                   {"step_s", *best->step_s}};
    Json effects = Json::object();
    for (const Effect& e : effects_of(r)) effects[e.knob] = e.percent;
    out["effects"] = std::move(effects);
  }
  out["trials"] = std::move(trials);
  return json_output(out);
}

Study tune_charts(const TuneReport& r) {
  Study out;
  out.title = "Tuning of " + r.file;
  out.source = fmt::format("{} of {} settings tried", r.tuner.trials().size(),
                           r.space.settings.size());
  StudyChart effects{.title = "Effect of each knob on throughput",
                     .y = "%, mean absolute Shapley value",
                     .parts = {"effect"}};
  for (const Effect& e : effects_of(r))
    effects.bars.push_back({.name = e.knob, .parts = {e.percent}});
  StudyChart progress{
      .title = "Progress", .x = "trial", .y = "s a step", .linear = true};
  StudyChart::Series best{.name = "best so far"};
  StudyChart::Series all{.name = "trials", .published = true};
  StudyChart accuracy{.title = "Measured against predicted",
                      .x = "predicted, s a step",
                      .y = "measured, s a step",
                      .linear = true};
  StudyChart::Series points{.name = "trials", .published = true};
  double least = INFINITY;
  for (size_t i = 0; i < r.tuner.trials().size(); ++i) {
    const tune::Trial& t = r.tuner.trials()[i];
    if (!t.step_s) continue;
    least = std::min(least, *t.step_s);
    const auto number = static_cast<double>(i + 1);
    best.points.emplace_back(number, least);
    all.points.emplace_back(number, *t.step_s);
    points.points.emplace_back(r.space.candidates[t.candidate].predicted_s,
                               *t.step_s);
  }
  progress.series = {std::move(best), std::move(all)};
  accuracy.series = {std::move(points)};
  out.charts = {std::move(effects), std::move(progress), std::move(accuracy)};
  return out;
}

}  // namespace remesh::ctl
