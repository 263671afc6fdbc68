#include "coordinator/ctl/run_options.h"

#include <fmt/format.h>

#include <algorithm>

#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/run_dir.h"
#include "parallel/geometry/layout.h"
#include "parallel/jobfile/jobfile.h"
#include "proto/base/text.h"

namespace remesh::ctl {
namespace {

// The least number of slots that the job can run on.
int64_t slots_needed(const pb::Job& job) {
  int64_t least = job.elastic().layouts().empty()
                      ? jobfile::ranks_of_degrees(job.parallel())
                      : INT64_MAX;
  for (const std::string& text : job.elastic().layouts())
    if (const auto layout = geometry::Layout::parse(text); layout.ok())
      least = std::min<int64_t>(least, layout->world());
  return std::max(least, job.elastic().min_slots());
}

// The least number of local workers that offer them.
int64_t workers_needed(const pb::Job& job, const RunOptions& o) {
  return (slots_needed(job) + o.slots_per_worker - 1) / o.slots_per_worker;
}

// remesh resume with so many local workers and the same options.
std::string resume_with(int64_t workers, const RunOptions& o,
                        const std::string& run_dir) {
  std::string out = "remesh resume " + rundir::typed_path(run_dir);
  if (workers > 0) out += fmt::format(" --local {}", workers);
  if (o.slots_per_worker > 1)
    out += fmt::format(" --slots-per-worker {}", o.slots_per_worker);
  if (o.bind != RunOptions().bind) out += " --bind " + shell_quoted(o.bind);
  if (!o.advertise.empty()) out += " --advertise " + shell_quoted(o.advertise);
  if (o.no_auth) out += " --no-auth";
  if (o.respawn) out += " --respawn";
  return out;
}

}  // namespace

std::string slots_hint(const pb::Job& job, const RunOptions& o,
                       const std::string& run_dir) {
  const int64_t needed = slots_needed(job);
  return fmt::format(
      "the job needs {} and waits for workers. To train on this machine, press "
      "Ctrl-C and type: {}; or start workers with: "
      "remesh-worker --connect {} --slots {}{}",
      plural(needed, "slot"), resume_with(workers_needed(job, o), o, run_dir),
      shell_quoted(run_dir), needed, o.no_auth ? " --no-auth" : "");
}

std::string resume_command(const pb::Job& job, const RunOptions& o,
                           const std::string& run_dir) {
  return resume_with(
      o.local_workers == 0
          ? 0
          : std::max<int64_t>(o.local_workers, workers_needed(job, o)),
      o, run_dir);
}

void add_run_options(CLI::App* c, RunOptions* o) {
  c->add_option("--local", o->local_workers,
                "Number of workers to start on this machine")
      ->check(integer_in(0, 4096));
  c->add_option("--slots-per-worker", o->slots_per_worker,
                "Slots (ranks) that each local worker offers")
      ->check(integer_in(1, 4096))
      ->capture_default_str();
  c->add_flag("--accept-edits", o->accept_edits,
              "Take what somebody has edited in RUN/job.toml");
  c->add_option("--bind", o->bind,
                "Address the coordinator listens on; use tcp://0.0.0.0:5710 "
                "for workers on other machines, ipc:///PATH for no port")
      ->capture_default_str();
  c->add_option("--advertise", o->advertise,
                "HOST or HOST:PORT that workers connect to, if it differs from "
                "--bind");
  c->add_option("--stop-timeout", o->stop_timeout_s,
                "Seconds to wait for an answer after Ctrl-C before all "
                "processes are killed")
      ->check(integer_in(1, 86'400))
      ->capture_default_str();
  c->add_flag("--respawn", o->respawn, "Restart local workers that die");
  c->add_flag("--no-auth", o->no_auth,
              "Without keys: whoever reaches the coordinator's port controls "
              "the job");
  CLI::Option* detach = c->add_flag(
      "--detach", o->detach,
      "Continue in the background once the run has started; what it "
      "prints goes to logs/run.out of the run");
  add_json_option(c, &o->json)->needs(detach);
}

}  // namespace remesh::ctl
