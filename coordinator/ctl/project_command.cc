// remesh plan project: time, energy and cost of a training run.
#include <fmt/format.h>

#include <memory>

#include "coordinator/ctl/plan_parts.h"
#include "coordinator/ctl/project_view.h"

namespace remesh::ctl {
namespace {

Result<int> project(const ProjectOptions& o) {
  ASSIGN_OR_RETURN(const ClusterChoice cluster, find_cluster(o.plan.cluster));
  ASSIGN_OR_RETURN(const ModelChoice model, find_model(o.plan.model, {}));
  ASSIGN_OR_RETURN(const std::string text, project_text(o, model, cluster));
  fmt::print("{}", text);
  return kExitOk;
}

}  // namespace

void add_project_command(CLI::App* plan, int* code) {
  auto o = std::make_shared<ProjectOptions>();
  CLI::App* c = plan->add_subcommand(
      "project", "Project the time, energy and cost of a training run");
  constexpr int kMost = 1 << 20;
  c->add_option("--model", o->plan.model,
                "A known model, a description of one, or a Hugging Face "
                "config.json")
      ->required();
  c->add_option("--cluster", o->plan.cluster,
                "A known cluster, or a description of one")
      ->required();
  c->add_option("--gpus", o->plan.devices, "Number of devices")
      ->required()
      ->check(integer_in(1, kMost));
  c->add_option("--tokens", o->tokens, "Tokens to train on: 20e12")
      ->required()
      ->check(number_in(1, 1e18));
  c->add_option("--seq", o->plan.seq_len,
                "Tokens of a sequence. Default: the model's")
      ->check(integer_in(1, 1 << 30));
  c->add_option("--global-batch", o->plan.global_batch,
                "Sequences of a step. Default: 4 Mi tokens or 1 Ki for each "
                "device")
      ->check(integer_in(1, kMost));
  c->add_flag("--fp8", o->plan.fp8, "Matrix products in fp8");
  const auto time = [&](const char* name, double& value, const char* help,
                        double least, double most) {
    c->add_option(name, value, help)
        ->check(number_in(least, most))
        ->capture_default_str();
  };
  time("--mtbf-hours", o->mtbf_hours, "Mean time between failures of a device",
       1e-3, 1e12);
  time("--storage-gb-per-s", o->storage_gb_per_s,
       "Rate at which all devices together save a checkpoint", 1e-3, 1e9);
  time("--restart-s", o->restart_s,
       "From a failure to training again from a checkpoint, without reading it",
       0, 1e9);
  time("--recover-s", o->recover_s,
       "From a failure to training again from memory (bench_elastic)", 0, 1e9);
  time("--replace-s", o->replace_s,
       "From a failure to a node that takes the place of the lost one", 0, 1e9);
  c->add_option("--price", o->price_per_hour,
                "Of a device for an hour. Default: the cluster's")
      ->check(number_in(0, 1e6));
  add_json_option(c, &o->plan.json);
  c->footer(R"(
Goodput is the share of the time that goes into steps that are kept. Recovery
from memory (remesh) is shown beside restarts from checkpoints at the interval
that costs least (Daly 2006).

Example:
  remesh plan project --model llama3-405b --cluster h100 --gpus 16384 \
    --tokens 15.6e12)");
  c->callback([o, code] { *code = exit_code(project(*o)); });
}

}  // namespace remesh::ctl
