// bench_memory: how much memory a rank needs, compared with the prediction of
// the planner.
//
//   bench_memory [--size 15m]
//
// One row per configuration, for the rank that needs most: the bytes predicted
// (planner::predict_memory and predict_workspace), the bytes the engine
// accounts for, and the growth of the peak resident memory of the process
// (VmHWM) from before the engine was created to after three steps. The baseline
// of every process (code, MPI, stacks) is measured before and subtracted, as
// are pages of other ranks' states that it maps to copy them, because they are
// resident in those ranks already. With --keep-state the state lives in shared
// memory, as in training, and each rank is a worker of its own; resident memory
// includes those pages.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bench/kept_state.h"
#include "bench/memory/changes.h"
#include "bench/options.h"
#include "bench/process_use.h"
#include "bench/random_batch.h"
#include "bench/ranks.h"
#include "parallel/comm/mpi_comm.h"
#include "parallel/geometry/batch.h"
#include "parallel/planner/memory.h"
#include "tests/testing/engine.h"
#include "worker/engine/engine.h"
#include "worker/kernels/cpu/onednn_gemm.h"

namespace remesh::bench {
namespace {

using engine::Engine;
using geometry::Layout;

struct Options : ModelOptions, ScheduleOptions {
  Options() : ScheduleOptions{.layout = "dp1"} { size = "15m"; }
  std::string recompute = "none";
  bool keep_state = false;  // in shared memory, with replicas
  bool adapters = false;
  std::string row;
};
constexpr double kWithin = 0.05;         // of the prediction
constexpr double kAdaptersShare = 0.01;  // of the optimizer's state
constexpr const char* kWhole = "dp1";
constexpr const char* kAdapters = "dp1 adapters";
constexpr const char* kJobKept = "job kept";
constexpr const char* kJobPrivate = "job private";

// Resident pages of files that this process maps for reading only: states of
// other ranks, which it copies into its replicas. They are in VmHWM of both.
double others_mib() {
  std::ifstream in("/proc/self/smaps");
  std::string line;
  bool others = false;
  double sum = 0;
  while (std::getline(in, line)) {
    if (line.find(" r--s ") != std::string::npos) {
      others = true;
    } else if (line.starts_with("Rss:") && others) {
      sum += std::stod(line.substr(4));
      others = false;
    }
  }
  return sum / 1024;
}

double mib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

double status_mib(const char* key) { return mib(status_bytes(key)); }

Status steps(const Options& o, const Layout& layout, Engine& e, int dp_index,
             int64_t vocab, Kept* kept) {
  const auto mine = geometry::even_share(o.microbatches, layout.dp, dp_index);
  const RandomBatch batch(mine.begin, mine.end, o.batch, o.seq, vocab);
  for (int i = 0; i < 3; ++i) {
    Status replicated;
    RETURN_IF_ERROR(e.run({.lr = 1e-4,
                           .microbatches = batch.list(),
                           .global_tokens = o.microbatches * o.batch * o.seq,
                           .votes =
                               [&] {
                                 if (kept != nullptr)
                                   replicated = kept->before_agreement();
                                 return engine::StepVotes{};
                               }})
                        .status());
    RETURN_IF_ERROR(replicated);
    if (kept != nullptr) kept->after_step();
  }
  return kept != nullptr ? kept->before_agreement() : ok_status();
}

// Prints, on rank 0, the figures of the rank with the highest peak, in MiB.
void print_json(comm::Comm& world, const MemoryUse& want, uint64_t workspace,
                const MemoryUse& held, double peak) {
  const double mine[] = {mib(want.total() + workspace),
                         mib(held.total()),
                         peak,
                         mib(want.weights),
                         mib(want.gradients),
                         mib(want.optimizer),
                         mib(want.activations),
                         mib(want.buffers),
                         mib(held.weights),
                         mib(held.gradients),
                         mib(held.optimizer),
                         mib(held.activations),
                         mib(held.buffers)};
  constexpr size_t kN = sizeof(mine) / sizeof(mine[0]);
  std::vector<double> all(kN * static_cast<size_t>(world.size()));
  world.all_gather(std::as_bytes(std::span(mine)),
                   std::as_writable_bytes(std::span(all)));
  if (world.rank() != 0) return;
  size_t worst = 0;
  for (size_t r = 0; r * kN < all.size(); ++r)
    if (all[r * kN + 2] > all[worst * kN + 2]) worst = r;
  const double* w = all.data() + worst * kN;
  const Json row = {{"predicted", w[0]},
                    {"held", w[1]},
                    {"peak", w[2]},
                    {"predicted_parts", std::vector<double>(w + 3, w + 8)},
                    {"held_parts", std::vector<double>(w + 8, w + kN)}};
  fmt::print("{}\n", row.dump());
}

// The adapters are those of PEFT's defaults.
geometry::ModelConfig model_of(const Options& o) {
  geometry::ModelConfig model = models().at(o.size);
  if (o.adapters)
    model.lora = {.rank = 8, .alpha = 16, .targets = {"q_proj", "v_proj"}};
  return model;
}

// Measures one configuration; called on every rank of an MPI world.
Status measure(const Options& o, comm::MpiWorld& mpi) {
  comm::Comm& world = mpi.world();
  ASSIGN_OR_RETURN(const Layout layout, Layout::parse(o.layout));
  ASSIGN_OR_RETURN(const auto schedule, geometry::parse_schedule(o.schedule));
  const auto table = geometry::ParamTable::make(model_of(o));
  const auto backend = kernels::make_cpu_backend(1);
  ASSIGN_OR_RETURN(const auto mesh, comm::Mesh::make(world, layout));
  world.barrier();
  // Code that is read later, such as oneDNN's, does not count either.
  const auto code_mib = [] { return status_mib("RssFile"); };
  const double before_mib = status_mib("VmRSS") - code_mib();
  std::optional<Kept> kept;
  if (o.keep_state)
    kept.emplace(table, layout, world.rank(), o.microbatches * o.batch, o.seq);
  const engine::EngineOptions options{
      .zero = {.stage = o.zero},
      .schedule = schedule,
      .chunks = o.chunks,
      .recompute = *geometry::parse_recompute(o.recompute),
      .dtype = dtype_of(o.dtype),
      .num_microbatches = o.microbatches,
      .max_batch = o.batch,
      .max_seq = o.seq,
      .optimizer = {.max_norm = 1}};
  ASSIGN_OR_RETURN(
      const auto e,
      kept ? kept->make_engine(*mesh, options, *backend, /*seed=*/1)
           : engine::make_ready_engine(table, *mesh, options, *backend, 1));
  RETURN_IF_ERROR(steps(o, layout, *e, mesh->coord().dp,
                        table.config().vocab_size, kept ? &*kept : nullptr));
  const double peak =
      status_mib("VmHWM") - code_mib() - others_mib() - before_mib;
  const planner::JobShape shape{
      .model = table.config(),
      .T = o.seq,
      .B = o.batch,
      .microbatches = o.microbatches,
      .bf16 = o.dtype == "bf16",
      .packed = kernels::bf16_hardware() == kernels::Bf16Hardware::kAmx,
      .zero_stage = o.zero,
      .schedule = schedule,
      .chunks = o.chunks,
      .recompute = *geometry::parse_recompute(o.recompute),
      .keep_state = o.keep_state,
      .replicas = o.keep_state ? 1 : 0};
  const MemoryUse want = planner::predict_memory(shape, layout, world.rank());
  MemoryUse held = e->memory();
  if (kept) held.buffers += kept->replica_bytes();
  print_json(world, want, planner::predict_workspace(shape, layout, 1), held,
             peak);
  return ok_status();
}

struct Row {
  const char* name;
  int ranks;
  std::vector<std::string> arguments;
  bool in_smoke = false;
};

const std::vector<Row>& rows() {
  static const std::vector<Row> kRows = {
      {kWhole, 1, {}},
      {kAdapters, 1, {"--adapters"}, true},
      {"dp1 selective", 1, {"--recompute", "selective"}},
      {"dp1 full", 1, {"--recompute", "full"}},
      {"dp2", 2, {"--layout", "dp2"}},
      {"dp2 ZeRO 1", 2, {"--layout", "dp2", "--zero", "1"}},
      {"dp2 ZeRO 3", 2, {"--layout", "dp2", "--zero", "3"}},
      {"dp2 ZeRO 3, one microbatch",
       2,
       {"--layout", "dp2", "--zero", "3", "--microbatches", "2"}},
      {"dp1 kept", 1, {"--keep-state"}},
      {"dp2 kept", 2, {"--layout", "dp2", "--keep-state"}},
      {"dp2 ZeRO 1 kept",
       2,
       {"--layout", "dp2", "--zero", "1", "--keep-state"},
       true},
      {"tp2", 2, {"--layout", "tp2"}},
      {"cp2", 2, {"--layout", "cp2"}},
      {"pp2 1f1b", 2, {"--layout", "pp2"}, true},
      {"pp2 zb-h1", 2, {"--layout", "pp2", "--schedule", "zb-h1"}},
      {"dp2,tp2 ZeRO 2 full",
       4,
       {"--layout", "dp2,tp2", "--zero", "2", "--recompute", "full"}},
      {"dp2,pp2 ZeRO 3 gpipe",
       4,
       {"--layout", "dp2,pp2", "--zero", "3", "--schedule", "gpipe"}}};
  return kRows;
}

void print_row(const Row& row, const Json& r) {
  std::string parts;
  for (size_t i = 0; i < r["held_parts"].size(); ++i)
    parts +=
        fmt::format(" {:.0f}/{:.0f}", r["predicted_parts"][i].get<double>(),
                    r["held_parts"][i].get<double>());
  const double predicted = r["predicted"];
  const double peak = r["peak"];
  fmt::print("{:<28} {:>9.1f} {:>8.1f} {:>8.1f} {:>8.3f}  {}\n", row.name,
             predicted, r["held"].get<double>(), peak, peak / predicted, parts);
  std::fflush(stdout);
}

bool wanted(const Options& o, const std::string& row) {
  return row.find(o.row) != std::string::npos;
}

Status run_rows(const Options& o, Targets& targets) {
  fmt::print(
      "{} in {}, microbatches of {} x {}; MiB of the rank with the highest "
      "peak\n{:<28} {:>9} {:>8} {:>8} {:>8}   predicted/held: weights "
      "gradients optimizer activations buffers\n",
      o.size, o.dtype, o.batch, o.seq, "configuration", "predicted", "held",
      "peak", "ratio");
  std::fflush(stdout);
  std::map<std::string, double> optimizer;  // MiB, by row
  for (const Row& row : rows()) {
    if ((o.smoke && !row.in_smoke) || !wanted(o, row.name)) continue;
    const auto r = run_row(row.ranks, model_arguments(o, row.arguments));
    if (!r.ok()) return r.status().with_context(row.name);
    print_row(row, *r);
    optimizer[row.name] = (*r)["held_parts"][2];
    targets.at_most(
        fmt::format("{}: peak from prediction, share", row.name), kWithin,
        std::abs((*r)["peak"].get<double>() / (*r)["predicted"].get<double>() -
                 1));
  }
  if (optimizer.contains(kWhole) && optimizer.contains(kAdapters))
    targets.at_most("the optimizer's state: adapters' over the whole model's",
                    kAdaptersShare, optimizer[kAdapters] / optimizer[kWhole]);
  return ok_status();
}

double ratio_of(const ChangeRow& r) {
  return mib(r.peak.total) / mib(r.training + r.besides);
}

void print_change(const ChangeRow& r) {
  const double extra = mib(r.peak.total) - mib(r.training);
  fmt::print(
      "{:<14} {:>9.1f} {:>8.1f} {:>8.1f} {:>6.3f} {:>8.1f} {:>8.1f} {:>6.3f}\n",
      r.name, mib(r.training), mib(r.besides), mib(r.peak.total), ratio_of(r),
      mib(r.peak.shared), extra, extra / mib(r.training));
  std::fflush(stdout);
}

// `trained` is the peak of the training before it.
void judge_change(const std::string& job, const ChangeRow& r, uint64_t trained,
                  Targets& targets) {
  const std::string name = job + ", " + r.name;
  targets.require(name + ": has a peak, in shared memory if kept",
                  r.peak.total > 0 && (r.peak.shared > 0) == (job == kJobKept));
  if (r.phase == Phase::kSave)
    targets.at_most(name + ": more than training, over what it may need",
                    1 + kWithin,
                    (mib(r.peak.total) - mib(trained)) / mib(r.besides));
  else if (r.phase == Phase::kTraining && r.besides == 0)
    targets.at_most(name + ": peak from prediction, share", kWithin,
                    std::abs(ratio_of(r) - 1));
  else
    targets.at_most(name + ": peak over what it may need", 1 + kWithin,
                    ratio_of(r));
}

// With real jobs.
Status run_changes(const Options& o, Targets& targets) {
  ChangeOptions c{.model = o};
  if (o.smoke) c.model.size = "";
  for (const bool kept : {true, false}) {
    const std::string job = kept ? kJobKept : kJobPrivate;
    if (!wanted(o, job)) continue;
    c.keep_state = kept;
    if (!o.smoke && c.base == 0) {
      ASSIGN_OR_RETURN(c.base, measure_base(c));
    }
    fmt::print(
        "\n{}: MiB of all ranks on the host, without {:.1f} of each rank\n"
        "{:<14} {:>9} {:>8} {:>8} {:>6} {:>8} {:>8} {:>6}\n",
        job, mib(c.base), "", "predicted", "besides", "peak", "ratio", "shared",
        "extra", "share");
    uint64_t trained = 0;
    RETURN_IF_ERROR(measure_changes(c, [&](const ChangeRow& r) {
                      print_change(r);
                      judge_change(job, r, trained, targets);
                      if (r.phase == Phase::kTraining) trained = r.peak.total;
                    }).with_context(job));
  }
  return ok_status();
}

int run_all(const Options& o) {
  Targets targets(o.smoke);
  Status done = run_rows(o, targets);
  if (done.ok()) done = run_changes(o, targets);
  if (done.ok()) return targets.report();
  return failed("bench_memory", done.message());
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) {
  using namespace remesh::bench;  // NOLINT: a program
  Options o;
  CLI::App app{
      "Memory that ranks need, compared with the planner's prediction.\n"
      "Example: bench_memory --size 42m"};
  add_model_options(app, o);
  add_schedule_options(app, o);
  app.add_option("--row", o.row, "Only rows whose name contains this");
  app.add_option("--layout", o.layout,
                 "Layout of the ranks that mpirun started");
  app.add_option("--recompute", o.recompute, "none, selective or full")
      ->check(CLI::IsMember({"none", "selective", "full"}));
  app.add_flag("--keep-state", o.keep_state,
               "State and replicas in shared memory");
  app.add_flag("--adapters", o.adapters, "Train adapters on the frozen model");
  CLI11_PARSE(app, argc, argv);
  if (o.smoke) o.make_tiny(1);
  return run_with_ranks("bench_memory", o, run_all, measure);
}
