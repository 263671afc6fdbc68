// remesh plan: of a job on CPU hosts, or of a model on a described cluster.
#include <fmt/format.h>

#include <memory>

#include "coordinator/ctl/cluster_plan.h"
#include "coordinator/ctl/plan_view.h"
#include "coordinator/ctl/screen.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/local_core.h"
#include "proto/base/machine.h"

namespace remesh::ctl {
namespace {

struct Options {
  PlanOptions hosts;
  ClusterPlanOptions cluster;
  std::string schedule, recompute;  // as given; "": any
};

Result<std::string> on_hosts(PlanOptions o) {
  ASSIGN_OR_RETURN(const pb::Job job,
                   rundir::load_resolved({o.job_file, o.set}));
  if (o.cores == 0) o.cores = usable_cores();
  ASSIGN_OR_RETURN(o.core, rundir::local_core());
  return plan_text(job, o);
}

Result<std::string> on_cluster(Options given) {
  ClusterPlanOptions& o = given.cluster;
  if (o.model.empty()) o.model = given.hosts.job_file;
  o.set = given.hosts.set;
  o.json = given.hosts.json;
  if (!given.schedule.empty()) {
    ASSIGN_OR_RETURN(o.limits.schedule,
                     geometry::parse_schedule(given.schedule));
  }
  if (!given.recompute.empty()) {
    ASSIGN_OR_RETURN(o.limits.recompute,
                     geometry::parse_recompute(given.recompute));
  }
  ASSIGN_OR_RETURN(const ClusterChoice cluster, find_cluster(o.cluster));
  ASSIGN_OR_RETURN(const ModelChoice model, find_model(o.model, o.set));
  return cluster_plan(o, model, cluster);
}

Result<int> plan(const Options& o) {
  if (o.hosts.job_file.empty() == o.cluster.model.empty())
    return invalid_argument(
        "expected either a job file or --model (with --cluster and --gpus)");
  ASSIGN_OR_RETURN(const std::string text, o.cluster.cluster.empty()
                                               ? on_hosts(o.hosts)
                                               : on_cluster(o));
  fmt::print("{}", o.hosts.json ? text : fold(text, style_of_stdout().width));
  return kExitOk;
}

// Options for CPU hosts exclude --cluster, options for a cluster need it.
void add_options(CLI::App* c, Options* options) {
  PlanOptions* hosts = &options->hosts;
  ClusterPlanOptions* o = &options->cluster;
  constexpr int kMost = 1 << 20;
  const std::string group = "On a cluster of GPUs";
  CLI::Option* cluster =
      c->add_option("--cluster", o->cluster,
                    "A known cluster, or a description of one")
          ->group(group);
  const auto on_hosts = [&](const char* name, auto& value, const char* help) {
    return c->add_option(name, value, help)->excludes(cluster);
  };
  on_hosts("--slots", hosts->slots, "Slots of each host")
      ->check(integer_in(1, 65536))
      ->capture_default_str();
  on_hosts("--hosts", hosts->hosts, "Number of identical hosts")
      ->check(integer_in(1, 65536))
      ->capture_default_str();
  on_hosts("--layout", hosts->layout, "Use this mesh instead of selecting one");
  on_hosts("--cores", hosts->cores,
           "Cores of each host. Default: those of this machine")
      ->check(integer_in(1, 65536));
  on_hosts("--memory-gib", hosts->memory_gib,
           "Memory of each host. Default: not checked")
      ->check(number_in(0, 1e9));

  const auto on_cluster = [&](CLI::Option* option) {
    return option->group(group)->needs(cluster);
  };
  const auto add = [&](const char* name, auto& value, const char* help) {
    return on_cluster(c->add_option(name, value, help));
  };
  add("--model", o->model,
      "Instead of JOB: a known model, a description of one, or a Hugging Face "
      "config.json or its folder");
  cluster->needs(add("--gpus", o->devices, "Number of devices")
                     ->check(integer_in(1, kMost)));
  add("--seq", o->seq_len, "Tokens of a sequence. Default: the model's")
      ->check(integer_in(1, 1 << 30));
  add("--global-batch", o->global_batch,
      "Sequences of a step. Default: the job's, else 4 Mi tokens or 1 Ki for "
      "each device")
      ->check(integer_in(1, kMost));
  add("--top", o->meshes, "Meshes to show")
      ->check(integer_in(1, 1000))
      ->capture_default_str();
  CLI::Option* explain =
      add("--explain", o->explain, "Show the time of this mesh by cause");
  add("--compare", o->compare, "Show the times of two meshes beside each other")
      ->expected(2)
      ->excludes(explain);
  add("--micro-batch", o->limits.B, "Only plans with so many sequences")
      ->check(integer_in(1, kMost));
  add("--zero", o->limits.zero_stage, "Only plans with this ZeRO stage")
      ->check(integer_in(0, 3));
  add("--schedule", options->schedule, "Only plans with this schedule");
  add("--recompute", options->recompute,
      "Only plans that recompute none, selective or full");
  on_cluster(c->add_flag("--fp8", o->fp8, "Matrix products in fp8"));
  on_cluster(c->add_flag("--tp-across-nodes", o->limits.tensor_across_nodes,
                         "Tensor parallelism over several nodes as well"));
}

}  // namespace

void add_plan_verb(CLI::App* app, int* code) {
  auto o = std::make_shared<Options>();
  CLI::App* c = app->add_subcommand(
      "plan", "Show the mesh that a job would get, or the best on a cluster");
  c->add_option("JOB", o->hosts.job_file,
                "Job file (TOML); -: the standard input");
  add_set_option(c, &o->hosts.set);
  add_options(c, o.get());
  add_json_option(c, &o->hosts.json);
  c->footer(R"(
Examples:
  remesh plan job.toml --slots 4
  remesh plan job.toml --slots 8 --hosts 4 --memory-gib 64
  remesh plan job.toml --slots 4 --layout pp2,tp2 --set train.recompute=full
  remesh plan --model llama3-405b --cluster h100 --gpus 512
  remesh plan --model config.json --cluster h100 --gpus 64 --explain dp8,tp8

Exit code 2 or 3, with the reason, if no mesh can run the job there.)");
  add_measure_command(c, code);
  add_project_command(c, code);
  add_study_command(c, code);
  c->callback([c, o, code] {
    if (c->get_subcommands().empty()) *code = exit_code(plan(*o));
  });
}

}  // namespace remesh::ctl
