// remesh plan project: what a training run takes in time, energy and money, and
// what failures cost it, as text or JSON.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "coordinator/ctl/cluster_plan.h"
#include "coordinator/ctl/render.h"
#include "coordinator/ctl/status_view.h"
#include "coordinator/ctl/verbs.h"
#include "parallel/planner/collective.h"
#include "parallel/planner/projection.h"
#include "proto/base/json_output.h"
#include "proto/base/text.h"

namespace remesh::ctl {
namespace {

using planner::Plan;
using Json = nlohmann::ordered_json;

constexpr double kHour = 3600, kDay = 24 * kHour;
// fp32 weights and two moments.
constexpr double kStateBytes = 12;

// Restarts and lost steps take all of the time.
constexpr double kNoProgress = 1e-6;

struct ProjectOptions {
  ClusterPlanOptions plan;
  double tokens = 0;
  // Mean time between failures of a device. The default is from Llama 3's
  // training: 419 interruptions of 16,384 H100 in 54 days (arXiv 2407.21783,
  // section 3.3.4).
  double mtbf_hours = 50000;
  // Checkpoints: storage that all devices share, and the time from a failure to
  // the first step with the job's scheduler, libraries and data.
  double storage_gb_per_s = 100;
  double restart_s = 600;
  // remesh: from a failure to the next step without the state's way over the
  // network, and until a lost node is replaced. The default is the largest of
  // the medians that bench_elastic measured on two cores, 0.63 to 0.84 s by the
  // kind of failure.
  double recover_s = 0.84;
  double replace_s = 600;
  double price_per_hour = -1;  // of a device, in US dollars; -1: the cluster's
};

struct Way {
  double goodput = 1;
  double train_s = 0;  // with what it loses
  bool ends() const { return goodput > kNoProgress; }
};

struct Projection {
  int64_t steps = 0;
  double steps_s = 0;      // of the steps alone
  double mtbf_s = 0;       // of all devices
  double state_bytes = 0;  // of the model
  planner::CheckpointRestart restart;
  double interval_s = 0;
  planner::InMemoryRecovery memory;
  bool one_node = false;  // no state in memory survives its loss
  Way from_checkpoints, from_memory;
  double power_w = 0;  // of a device; 0: unknown
  double price = 0;    // of a device-hour, in US dollars; 0: unknown
};

Projection projection_of(const ProjectOptions& o,
                         const planner::SearchRequest& q, const Plan& plan,
                         const pb::Cluster& cluster) {
  const auto devices = static_cast<double>(q.devices);
  const double step_s = plan.cost.total_s;
  Projection p;
  p.steps = std::llround(
      std::ceil(o.tokens / static_cast<double>(q.global_batch * q.T)));
  p.steps_s = static_cast<double>(p.steps) * step_s;
  p.mtbf_s = o.mtbf_hours * kHour / devices;
  p.state_bytes = kStateBytes * static_cast<double>(parameters_of(q));
  p.restart = {
      .mtbf_s = p.mtbf_s,
      .save_s = p.state_bytes / (o.storage_gb_per_s * 1e9),
      .restart_s = o.restart_s + p.state_bytes / (o.storage_gb_per_s * 1e9)};
  p.interval_s = planner::daly_interval_s(p.restart);
  // A device's share of the state, to a replica on another node and back.
  const geometry::Layout& l = plan.layout;
  const double shards =
      static_cast<double>(l.pp) * l.tp * planner::shard_group_on(plan.shape, l);
  const double copy_s = planner::send_s(q.machine, q.machine.node_devices,
                                        p.state_bytes / shards);
  // Data-parallel devices that hold the same state are replicas already.
  const bool copied = shards * 2 > devices;
  // A lost node takes its replicas along.
  p.one_node = q.devices <= q.machine.node_devices;
  p.memory = {
      .mtbf_s = p.mtbf_s,
      .recover_s = p.one_node ? p.restart.restart_s : o.recover_s + copy_s,
      .step_s = step_s,
      .lost_share = planner::lost_share(q.machine.node_devices, l),
      .replace_s = o.replace_s,
      .replica_share =
          copied ? planner::exposed_s(q.machine, copy_s, step_s) / step_s : 0};
  const auto way = [&](double goodput) {
    return Way{goodput, p.steps_s / goodput};
  };
  p.from_checkpoints = way(planner::goodput(p.restart, p.interval_s));
  p.from_memory =
      p.one_node ? p.from_checkpoints : way(planner::goodput(p.memory));
  p.power_w = planner::device_power_w(
      cluster.device().busy_w(), cluster.device().idle_w(), plan.cost.terms);
  p.price = o.price_per_hour >= 0 ? o.price_per_hour
                                  : cluster.device().price_per_hour();
  return p;
}

std::string duration(double s) {
  return s < 100        ? fmt::format("{:.2g} s", s)
         : s < kHour    ? fmt::format("{:.1f} min", s / 60)
         : s < 2 * kDay ? fmt::format("{:.1f} h", s / kHour)
                        : fmt::format("{:.1f} days", s / kDay);
}

Json way_json(const Projection& p, const Way& w, double devices) {
  if (!w.ends())
    return {
        {"goodput", w.goodput}, {"days", nullptr}, {"device_hours", nullptr}};
  Json out{{"goodput", w.goodput},
           {"days", w.train_s / kDay},
           {"device_hours", w.train_s / kHour * devices}};
  if (p.power_w > 0)
    out["energy_mwh"] = p.power_w * devices * w.train_s / kHour / 1e6;
  if (p.price > 0) out["cost"] = p.price * devices * w.train_s / kHour;
  return out;
}

std::string ways_text(const Projection& p, double devices) {
  std::vector<std::vector<std::string>> rows = {
      {"", "no failures", "recovery from memory", "checkpoint-restart"}};
  const Way ideal{1, p.steps_s};
  const auto add = [&](const char* what, const auto& text) {
    std::vector<std::string> row{what};
    for (const Way* w : {&ideal, &p.from_memory, &p.from_checkpoints})
      row.push_back(w->ends() ? text(*w) : "never");
    rows.push_back(std::move(row));
  };
  add("goodput",
      [](const Way& w) { return fmt::format("{:.2f} %", 100 * w.goodput); });
  add("days",
      [](const Way& w) { return fmt::format("{:.2f}", w.train_s / kDay); });
  const auto device_hours = [&](const Way& w) {
    return w.train_s / kHour * devices;
  };
  add("device-hours",
      [&](const Way& w) { return short_number(device_hours(w)); });
  if (p.power_w > 0)
    add("energy", [&](const Way& w) {
      return fmt::format("{:.4g} MWh", p.power_w * device_hours(w) / 1e6);
    });
  if (p.price > 0)
    add("cost", [&](const Way& w) {
      return short_number(p.price * device_hours(w)) + " USD";
    });
  return table(std::move(rows));
}

std::string text_of(const ProjectOptions& o, const planner::SearchRequest& q,
                    const Plan& plan, const Projection& p,
                    const ModelChoice& model, const ClusterChoice& cluster) {
  const auto devices = static_cast<double>(q.devices);
  std::string out = plan_heading(q, model, cluster);
  out += fmt::format(
      "  {}: {:.2f} s a step, {:.0f} tokens/s/device, MFU {:.1f} %\n"
      "{}  {} token{} in {}\n\n",
      plan.settings(), plan.cost.total_s, plan.cost.tokens_per_s,
      100 * plan.cost.mfu, step_range_text(cluster, plan),
      short_number(o.tokens), o.tokens == 1 ? "" : "s",
      plural(p.steps, "step"));
  out += ways_text(p, devices);
  out += fmt::format("\nfailures: one every {} ({:g} h for a device)",
                     duration(p.mtbf_s), o.mtbf_hours);
  if (p.from_memory.ends())
    out += fmt::format(", {:.0f} in the run", p.from_memory.train_s / p.mtbf_s);
  if (p.one_node)
    out +=
        "\nrecovery from memory: none, because all devices are in one node; "
        "from checkpoints as well\n";
  else
    out += fmt::format(
        "\nrecovery from memory: {} to the next step, then {:.2f} % fewer "
        "devices for {}; replicas cost {:.1f} % of a step\n",
        duration(p.memory.recover_s), 100 * p.memory.lost_share,
        duration(p.memory.replace_s), 100 * p.memory.replica_share);
  out += fmt::format(
      "checkpoint-restart: {:.3g} TB in {}, every {} (Daly; Young: {}), {} to "
      "restart\n",
      p.state_bytes / 1e12, duration(p.restart.save_s), duration(p.interval_s),
      duration(planner::young_interval_s(p.restart)),
      duration(p.restart.restart_s));
  if (p.power_w > 0)
    out += fmt::format("power: {:.0f} W a device, {:.2f} MW\n", p.power_w,
                       p.power_w * devices / 1e6);
  else
    out += "power: unknown; set device.busy_w in the description\n";
  if (p.price <= 0)
    out += "cost: unknown; give --price, of a device for an hour\n";
  else
    out += fmt::format("price: {:.2f} USD for a device-hour{}\n", p.price,
                       o.price_per_hour >= 0
                           ? ""
                           : " (the source is in the cluster's description)");
  return out;
}

// Fails like cluster_plan().
Result<std::string> project_text(const ProjectOptions& o,
                                 const ModelChoice& model,
                                 const ClusterChoice& cluster) {
  ASSIGN_OR_RETURN(planner::SearchRequest q,
                   search_request(o.plan, model, cluster));
  q.most = 1;
  ASSIGN_OR_RETURN(const planner::SearchResult found, search_layouts(q));
  const Plan& plan = found.plans[0];
  const Projection p = projection_of(o, q, plan, cluster.cluster);
  if (!o.plan.json) return text_of(o, q, plan, p, model, cluster);
  const auto [least, most] = step_range_s(cluster, plan);
  const auto devices = static_cast<double>(q.devices);
  return json_output(
      {{"model", model.name},
       {"cluster", cluster.name},
       {"devices", q.devices},
       {"tokens", std::llround(o.tokens)},
       {"plan", plan.settings()},
       {"step_s", plan.cost.total_s},
       {"step_range_s", most > 0 ? Json{least, most} : Json(nullptr)},
       {"steps", p.steps},
       {"mtbf_s", p.mtbf_s},
       {"device_power_w", p.power_w},
       {"checkpoint_interval_s", p.interval_s},
       {"checkpoint_save_s", p.restart.save_s},
       {"recover_s", p.memory.recover_s},
       {"no_failures", way_json(p, {1, p.steps_s}, devices)},
       {"recovery_from_memory", way_json(p, p.from_memory, devices)},
       {"checkpoint_restart", way_json(p, p.from_checkpoints, devices)}});
}

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
                "US dollars of a device for an hour. Default: the cluster's")
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
