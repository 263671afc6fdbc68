#include "coordinator/ctl/status_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "coordinator/ctl/follower.h"
#include "coordinator/ctl/render.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/base/process.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"

namespace remesh::ctl {
namespace {

constexpr int kShownEvents = 8;
constexpr size_t kShownRanks = 16;

std::string rank_text(const pb::RankStatus& r) {
  if (r.exited())
    return fmt::format("{}: {}", r.rank(),
                       exit_text(r.signal(), r.exit_code()));
  std::string out =
      fmt::format("{}: pid {} step {}", r.rank(), r.pid(), r.step());
  if (r.os_state() == "T") out += " stopped";
  return out;
}

// The build of the ranks that run, if there are any.
std::string running_build(const pb::JobStatus& s) {
  for (const pb::WorkerStatus& w : s.workers())
    if (w.ranks_size() > 0) return w.build();
  return "";
}

std::string worker_state(const pb::WorkerStatus& w, const std::string& build) {
  std::string out = rundir::state_text(w.state()) +
                    (w.draining() ? ", draining" : "") +
                    (w.cordoned().empty() ? "" : ", cordoned");
  if (!build.empty() && w.build() != build)
    out += ", waiting: of another build, " + w.build();
  return out;
}

std::string worker_table(const pb::JobStatus& s) {
  std::vector<std::vector<std::string>> rows = {
      {"worker", "host", "pid", "slots", "state", "last seen", "ranks"}};
  for (const pb::WorkerStatus& w : s.workers()) {
    std::vector<std::string> ranks;
    for (const pb::RankStatus& r : w.ranks()) ranks.push_back(rank_text(r));
    rows.push_back({w.name(), w.host(), fmt::format("{}", w.pid()),
                    fmt::format("{}", w.slots()),
                    worker_state(w, running_build(s)),
                    format_duration(w.age_s()) + " ago",
                    ranks.empty() ? "-" : join(ranks, "; ")});
  }
  return s.workers_size() == 0 ? "  no workers\n" : table(rows);
}

// One line for each cordon.
std::string cordon_lines(const pb::JobStatus& s) {
  std::string out;
  for (const pb::Cordon& c : s.cordons())
    out +=
        fmt::format("  {}host {} is cordoned for {}: {}\n",
                    c.worker().empty() ? "" : "worker " + c.worker() + " of ",
                    c.host(), format_duration(c.remaining_s()), c.reason());
  return out;
}

std::string share_text(bool known, double share) {
  return known ? fmt::format("{:.1f}%", 100 * share) : "-";
}

// One row per rank: its memory by purpose, and the predicted total.
std::string memory_table(const pb::JobStatus& s) {
  std::vector<const pb::RankStatus*> ranks;
  for (const pb::WorkerStatus& w : s.workers())
    for (const pb::RankStatus& r : w.ranks())
      if (!r.exited() && (r.has_memory() || r.has_predicted()))
        ranks.push_back(&r);
  if (ranks.empty()) return "";
  std::ranges::sort(ranks, {}, &pb::RankStatus::rank);
  std::vector<std::vector<std::string>> rows = {
      {"rank", "weights", "grads", "optim", "activ", "buf", "total", "pred",
       "rss", "comm", "bubble"}};
  for (const pb::RankStatus* r : ranks) {
    if (rows.size() > kShownRanks) {
      rows.push_back({fmt::format("and {} more", ranks.size() - kShownRanks)});
      break;
    }
    const pb::MemoryUse& m = r->memory();
    const auto cell = [&](uint64_t bytes) {
      return r->has_memory() ? bytes_text(bytes) : "-";
    };
    rows.push_back(
        {fmt::format("{}", r->rank()), cell(m.weights()), cell(m.gradients()),
         cell(m.optimizer()), cell(m.activations()), cell(m.buffers()),
         cell(memory_of(m).total()),
         r->has_predicted() ? bytes_text(memory_of(r->predicted()).total())
                            : "-",
         bytes_text(r->rss_bytes()),
         share_text(r->has_exposed_comm(), r->exposed_comm()),
         share_text(r->has_bubble(), r->bubble())});
  }
  return table(rows);
}

// "312G FLOP/s, GEMM efficiency 74.1%, MFU 40.2%", as far as known.
std::string speed_text(const pb::StepMetrics& m) {
  if (!m.has_flops_per_s()) return "";
  std::string out = short_number(m.flops_per_s()) + " FLOP/s";
  if (m.gemm_flops_per_s() > 0)
    out += fmt::format(", GEMM efficiency {:.1f}%",
                       100 * m.flops_per_s() / m.gemm_flops_per_s());
  if (m.has_mfu()) out += fmt::format(", MFU {:.1f}%", 100 * m.mfu());
  return out;
}

// "exposed comm 5.2%, bubble 12.1% (11.0% scheduled)", as far as known.
std::string waiting_text(const pb::JobStatus& s) {
  const pb::StepMetrics& m = s.last();
  std::vector<std::string> parts;
  if (m.has_exposed_comm())
    parts.push_back(
        fmt::format("exposed comm {:.1f}%", 100 * m.exposed_comm()));
  if (s.mesh().pp() == 1) return join(parts);
  std::string bubble;
  if (m.has_bubble()) bubble = fmt::format(" {:.1f}%", 100 * m.bubble());
  if (s.has_predicted_bubble())
    bubble += fmt::format(" ({:.1f}% scheduled)", 100 * s.predicted_bubble());
  if (!bubble.empty()) parts.push_back("bubble" + bubble);
  return join(parts);
}

std::string mesh_row(const pb::JobStatus& s, bool lives) {
  if (!lives)
    return fmt::format("{}, generation {}", rundir::mesh_text(s.mesh()),
                       s.generation());
  if (!s.has_mesh()) return fmt::format("none, generation {}", s.generation());
  std::string out =
      fmt::format("{}{}, generation {}, {}", rundir::mesh_text(s.mesh()),
                  s.pinned().empty() ? "" : " (requested)", s.generation(),
                  plural(s.spares(), "spare slot"));
  if (s.scale() > 0)
    out += fmt::format(", limited to {}", plural(s.scale(), "slot"));
  return out;
}

// " (books 4.1234, code 3.8)"; "" unless the data are a mixture.
std::string member_losses(const pb::StepMetrics& m,
                          const std::vector<std::string>& names) {
  std::vector<std::string> out;
  for (int i = 0; i < m.val_losses_size(); ++i) {
    const auto at = static_cast<size_t>(i);
    out.push_back(fmt::format("{} {:.4f}", at < names.size() ? names[at] : "?",
                              m.val_losses(i)));
  }
  return out.empty() ? "" : " (" + join(out) + ")";
}

std::string checkpoint_row(const pb::JobStatus& s, const RunFacts& f,
                           bool lives) {
  const int64_t saved = f.checkpoint ? f.checkpoint->step() : 0;
  if (saved > 0 &&
      (lives ? saved >= s.checkpoint_step() : saved == s.checkpoint_step()))
    return fmt::format("step {} (generation {}), {} ago", saved,
                       f.checkpoint->generation(),
                       format_duration(f.now - f.checkpoint->time()));
  return (s.checkpoint_step() > 0 ? fmt::format("step {}", s.checkpoint_step())
                                  : "none yet") +
         (saved > s.checkpoint_step()
              ? fmt::format("; step {} was saved and is not there", saved)
              : "");
}

// What a failure of a host would cost.
std::string memory_row(const pb::JobStatus& s) {
  if (!s.has_kept_state()) return "";
  const pb::JobStatus::KeptState& k = s.kept_state();
  const std::string step = fmt::format("step {}, ", k.step());
  if (k.has_kept_until())
    return step + "until " + rundir::time_of_day(k.kept_until());
  if (k.has_safe_step())
    return step + (k.safe_step() == k.step()
                       ? "kept if any one host is lost"
                       : fmt::format("step {} if any one host is lost",
                                     k.safe_step()));
  return step +
         fmt::format("kept by {} {} only",
                     k.needed_hosts_size() == 1 ? "host" : "all of hosts",
                     join({k.needed_hosts().begin(), k.needed_hosts().end()}));
}

std::string time_row(const pb::JobStatus& s, const RunFacts& f) {
  if (f.began <= 0) return "";
  std::string out = fmt::format("since {} ({} ago)", rundir::date_text(f.began),
                                format_duration(f.now - f.began));
  if (f.left_s >= 0 && s.state() == pb::JobStatus::RUNNING)
    out += fmt::format(", about {} left", format_duration(f.left_s));
  return out;
}

std::string last_step_row(const pb::StepMetrics& m) {
  return fmt::format("loss {:.4f}, {} tokens/s, {:.3f} s", m.loss(),
                     short_number(m.tokens_per_s()), m.step_s());
}

std::string events_text(const pb::JobStatus& s, const Style& style) {
  std::string out;
  for (int i = std::max(0, s.events_size() - kShownEvents); i < s.events_size();
       ++i) {
    const pb::EventRecord& e = s.events(i);
    out += "  " + rundir::date_text(e.time()) + "  " +
           toned(event_text(e), events::tone_of(e.event()), style) + "\n";
  }
  return out;
}

}  // namespace

std::string settings_text(const pb::Parallel& parallel,
                          const std::string& recompute, int64_t recompute_every,
                          const pb::Mesh& mesh) {
  std::vector<std::string> parts = {
      fmt::format("ZeRO {}", parallel.zero_stage())};
  if (parallel.zero_stage() > 0 && parallel.zero_shard_group() > 0)
    parts[0] += fmt::format(" in groups of {}", parallel.zero_shard_group());
  if (mesh.pp() > 1) {
    parts.push_back(parallel.pipeline_schedule());
    if (parallel.pipeline_chunks() > 1)
      parts.back() += fmt::format(" of {} chunks", parallel.pipeline_chunks());
  }
  parts.push_back(recompute == "none" ? "no recomputation"
                                      : "recompute " + recompute);
  if (recompute != "none" && recompute_every > 1)
    parts.back() += fmt::format(" every {} layers", recompute_every);
  return join(parts);
}

std::string problem_text(const pb::JobStatus::Problem& p) {
  return p.has_seconds()
             ? fmt::format("{}, for {}", p.text(), format_duration(p.seconds()))
             : p.text();
}

std::string table(std::vector<std::vector<std::string>> rows) {
  std::vector<size_t> widths;
  for (auto& row : rows) {
    for (std::string& cell : row)
      cell = limits::printable(cell, std::string::npos);
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i)
      widths[i] = std::max(widths[i], display_width(row[i]));
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line = " ";
    for (size_t i = 0; i < row.size(); ++i) {
      line += " " + row[i] +
              std::string(widths[i] - display_width(row[i]) + 1, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::string bytes_text(uint64_t bytes) {
  const double mib = static_cast<double>(bytes) / (1 << 20);
  if (mib < 9.95) return fmt::format("{:.1f}M", mib);
  if (mib < 1023.5) return fmt::format("{:.0f}M", mib);
  return fmt::format("{:.1f}G", mib / 1024);
}

RunFacts facts_of(const std::vector<pb::StepMetrics>& metrics,
                  const std::vector<pb::EventRecord>& events, int64_t steps,
                  double now) {
  RunFacts out{.now = now};
  // A pause between two coordinators is no step.
  double since = 0;
  for (const pb::EventRecord& e : events)
    if (e.event() == events::kCoordinatorStarted ||
        e.event() == events::kCoordinatorRestarted)
      since = e.time();
  Pace pace;
  for (const pb::StepMetrics& m : metrics) {
    if (m.time() >= since) pace.step(m.step(), m.time());
    if (m.has_val_loss()) out.validated = m;
  }
  out.left_s = pace.left_s(steps, now);
  for (const pb::EventRecord& e : events) {
    if (e.event() == events::kCheckpoint) out.checkpoint = e;
    if (e.event() == events::kCoordinatorStarted && out.began == 0)
      out.began = e.time();
  }
  return out;
}

std::string state_text(const pb::JobStatus& s) {
  if (s.wait_reason() == pb::JobStatus::NOTHING)
    return rundir::state_text(s.state());
  return "waiting for " +
         enum_text(pb::JobStatus::WaitReason_Name(s.wait_reason()));
}

std::string status_text(const pb::JobStatus& s, const RunFacts& f,
                        const Style& style) {
  const double share = s.steps() > 0 ? 100.0 * static_cast<double>(s.step()) /
                                           static_cast<double>(s.steps())
                                     : 0.0;
  std::string out = fmt::format("job {}: {}, step {} of {} ({:.0f}%)", s.job(),
                                state_text(s), s.step(), s.steps(), share);
  if (!s.detail().empty()) out += "\n  " + s.detail();
  for (const pb::JobStatus::Problem& p : s.problems())
    out += "\n  " + problem_text(p);
  out += "\n\n";
  const bool lives = s.coordinator_pid() > 0;
  std::vector<std::vector<std::string>> rows = {{"run", s.run_dir()}};
  const auto add = [&](const char* name, const std::string& text) {
    if (!text.empty()) rows.push_back({name, text});
  };
  add("time", time_row(s, f));
  if (lives || s.has_mesh()) add("mesh", mesh_row(s, lives));
  if (s.has_mesh() && s.has_parallel())
    rows.push_back({"", settings_text(s.parallel(), s.recompute(),
                                      s.recompute_every(), s.mesh())});
  add("", s.prediction());
  add("speed", speed_text(s.last()));
  add("idle time", waiting_text(s));
  if (s.has_last()) add("last step", last_step_row(s.last()));
  if (f.validated)
    add("validation", fmt::format("{:.4f} nats per token at step {}{}",
                                  f.validated->val_loss(), f.validated->step(),
                                  member_losses(*f.validated, f.members)));
  add("in memory", memory_row(s));
  add("checkpoint", checkpoint_row(s, f, lives));
  if (lives)
    add("coordinator", fmt::format("{} on {}, pid {}", s.address(),
                                   s.coordinator_host(), s.coordinator_pid()));
  if (s.no_auth())
    add("no keys",
        "--no-auth: whoever reaches the coordinator controls the job");
  out += table(rows);
  if (lives) out += "\n" + worker_table(s) + cordon_lines(s);
  if (const std::string memory = memory_table(s); !memory.empty())
    out += "\n" + memory;
  if (s.events_size() > 0) out += "\n" + events_text(s, style);
  return out;
}

}  // namespace remesh::ctl
