#include "coordinator/ctl/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "parallel/jobfile/jobfile.h"
#include "parallel/jobfile/lr_schedule.h"
#include "proto/base/text.h"
#include "proto/rundir/events.h"
#include "proto/rundir/paths.h"

namespace remesh::ctl {
namespace {

constexpr int kCurveHeight = 10;
constexpr int kMaxCurveWidth = 78;
constexpr size_t kMaxFailures = 5;

std::string row(const std::string& label, const std::string& text) {
  return fmt::format("  {:<12}{}\n", label, text);
}

std::string loss_rows(const RunSummary& s) {
  if (!s.last) return row("loss", "no step finished");
  std::string out =
      row("loss",
          fmt::format("{:.4f} at step {}, {:.4f} at step {}", s.first->loss(),
                      s.first->step(), s.last->loss(), s.last->step()));
  if (s.validated)
    out += row("validation",
               fmt::format("{:.4f} nats per token at step {}",
                           s.validated->val_loss(), s.validated->step()));
  return out;
}

std::string speed_row(const RunSummary& s) {
  if (s.steps == 0 || s.seconds <= 0) return "";
  return row("speed",
             fmt::format("{} tokens/s, {:.3f} s per step (mean of {} steps)",
                         short_number(s.tokens / s.seconds),
                         s.seconds / static_cast<double>(s.steps), s.steps));
}

std::string mesh_rows(const RunSummary& s, const Style& style) {
  std::vector<std::string> meshes;
  int64_t interruptions = 0;
  double lost_s = 0;
  int64_t lost_steps = 0;
  for (const pb::EventRecord& e : s.events) {
    if (e.event() == events::kMesh)
      meshes.push_back(rundir::mesh_text(e.mesh()));
    if (e.event() == events::kTraining) {
      ++interruptions;
      lost_s += e.seconds();
      lost_steps += e.lost_steps();
    }
  }
  std::string out;
  if (!meshes.empty())
    out += row("meshes", join(meshes, style.unicode ? " \u2192 " : " -> "));
  if (interruptions > 0)
    out += row("time lost",
               fmt::format("{} in {}, {} recomputed", format_duration(lost_s),
                           plural(interruptions, "interruption"),
                           plural(lost_steps, "step")));
  return out;
}

std::string event_rows(const RunSummary& s) {
  int joined = 0;
  int left = 0;
  std::vector<std::string> bad;
  for (const pb::EventRecord& e : s.events) {
    joined +=
        e.event() == events::kWorkerJoined || e.event() == events::kWorkerBack;
    left +=
        e.event() == events::kWorkerLeft || e.event() == events::kWorkerLost;
    if (events::tone_of(e.event()) == Tone::kBad &&
        e.event() != events::kJobFailed) {
      bad.push_back(rundir::time_of_day(e.time()) + " " + event_text(e));
    }
  }
  std::string out =
      row("workers", fmt::format("{} joined, {} left", joined, left));
  const size_t shown = std::min(bad.size(), kMaxFailures);
  for (size_t i = 0; i < shown; ++i)
    out += row(i == 0 ? "problems" : "", bad[bad.size() - shown + i]);
  if (bad.size() > shown) {
    out += row(
        "", fmt::format("and {} more, see events.jsonl", bad.size() - shown));
  }
  return out;
}

// The commands stay in one piece.
std::string next_rows(const RunSummary& s, const Style& style) {
  std::vector<std::string> next = {s.resume};
  if (s.outcome == pb::JobStatus::DONE)
    next = longer_advice(s.job, s.resume, s.last);
  if (s.outcome == pb::JobStatus::FAILED) {
    next.push_back("less " +
                   shell_quoted(rundir::coordinator_log_path(s.run_dir)));
  }
  if (!s.checkpoint.empty())
    next.push_back("remesh checkpoint inspect " + shell_quoted(s.run_dir));
  next.push_back("remesh status " + shell_quoted(s.run_dir));
  std::string out = "\nWhat to try next:\n";
  for (const std::string& line : next)
    out +=
        (line.starts_with(' ') ? fold("  " + line, style.width) : "  " + line) +
        "\n";
  return out;
}

}  // namespace

void RunSummary::add(const pb::StepMetrics& m) {
  if (std::isfinite(m.loss())) losses.emplace_back(m.step(), m.loss());
  if (!first) first = m;
  last = m;
  if (m.has_val_loss()) validated = m;
  if (m.time() < began) return;
  ++steps;
  seconds += m.step_s();
  tokens += m.tokens_per_s() * m.step_s();
}

void RunSummary::add(pb::EventRecord e) {
  if (e.time() >= began) events.push_back(std::move(e));
}

std::vector<std::string> longer_advice(
    const pb::Job& job, const std::string& resume,
    const std::optional<pb::StepMetrics>& made) {
  const int64_t steps = job.train().steps();
  const int64_t end = job.schedule().total_steps();
  const std::string longer =
      fmt::format("{} --set train.steps={}", resume, 2 * steps);
  pb::Job follows = jobfile::without_derived(job);
  follows.mutable_train()->set_steps(2 * steps);
  if (!follows.schedule().has_warmup_steps())
    follows.mutable_schedule()->set_warmup_steps(
        std::min(follows.schedule().warmup_steps(), 2 * steps));
  const auto before = jobfile::lr_schedule(job);
  const auto after = jobfile::lr_schedule(follows);
  if (!before.ok() || !after.ok()) return {longer};
  // The rate of the last step that was made, and of the next one with either
  // command.
  const auto rate = [](double r) { return fmt::format("{:.2e}", r); };
  // The job may have changed since that step.
  const std::string last =
      rate(made && made->step() == steps && made->has_lr()
               ? made->lr()
               : jobfile::learning_rate(*before, steps - 1));
  const std::string next = rate(jobfile::learning_rate(*before, steps));
  const std::string raised = rate(jobfile::learning_rate(*after, steps));
  if (raised == next) return {longer};
  if (jobfile::learning_rate(*before, steps) == 0)
    return {longer,
            fmt::format("    (step {} has a learning rate of {} after {} "
                        "at step {})",
                        steps + 1, raised, last, steps)};
  return {fmt::format("{} --set schedule.total_steps={}", longer, end),
          fmt::format("    (step {} has a learning rate of {} after {} at step "
                      "{}; without the last --set, {})",
                      steps + 1, next, last, steps, raised)};
}

std::string summary_text(const RunSummary& s, const Style& style) {
  std::string out = "\n";
  for (const std::string& line :
       loss_curve(s.losses,
                  style.width > 0 ? std::min(style.width, kMaxCurveWidth)
                                  : kMaxCurveWidth,
                  kCurveHeight, style.unicode)) {
    out += line + "\n";
  }
  out += "\n";
  const int64_t step = s.last ? s.last->step() : 0;
  const int64_t tokens = s.last ? s.last->tokens() : 0;
  std::string rows = row("run", s.run_dir);
  rows +=
      row("outcome", fmt::format("{} at step {} of {}, {} tokens",
                                 s.outcome == pb::JobStatus::UNKNOWN
                                     ? "interrupted"
                                     : rundir::state_text(s.outcome),
                                 step, s.job.train().steps(),
                                 short_number(static_cast<double>(tokens))));
  rows += loss_rows(s);
  rows += speed_row(s);
  rows += mesh_rows(s, style);
  rows += event_rows(s);
  rows += row("checkpoint", s.checkpoint.empty() ? "none" : s.checkpoint);
  if (!s.in_memory.empty())
    rows += row("in memory", s.in_memory + "; resume the run before that");
  return out + fold(rows, style.width) + next_rows(s, style);
}

}  // namespace remesh::ctl
