// bench_step: the speed of one training step of one rank: engine::Engine with
// its state in shared memory, as in training, on a Llama of a named size;
// without data loading and communication.
//
// Prints tokens/s of the median step; where the time went and what bounds each
// part (step_report.h), by the memory bandwidth and the best way to compute
// each of the step's GEMMs, measured in the same run; and, with --peer, the
// same step of another program for comparison. Everything alternates in rounds,
// because machines are shared.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <vector>

#include "bench/kept_state.h"
#include "bench/options.h"
#include "bench/random_batch.h"
#include "bench/step/peer.h"
#include "bench/step/profiling_backend.h"
#include "bench/step/step_report.h"
#include "bench/step/yardstick.h"
#include "bench/targets.h"
#include "parallel/geometry/model_work.h"
#include "proto/base/clock.h"
#include "proto/base/median.h"
#include "tests/testing/local_comm.h"
#include "worker/kernels/cpu/onednn_gemm.h"

namespace remesh::bench {
namespace {

using engine::Engine;
using geometry::ParamTable;

struct Options : ModelOptions {
  int threads = 2;
  int steps = 4;
  int rounds = 3;
  bool recompute = false;
  bool json = false;
  std::string peer;
  int peer_steps = 3;
};
constexpr double kGemmShare = 0.75;
constexpr double kPeerRatioBf16 = 1.6;
constexpr double kPeerRatioFp32 = 2.0;
constexpr int kGemmRepeats = 5;
constexpr double kLossOfGuessing = 0.5;  // from ln(vocabulary)
constexpr double kLeastGemms = 0.5;      // of the model's FLOPs

const char* cpu_class() {
  switch (kernels::bf16_hardware()) {
    case kernels::Bf16Hardware::kAmx:
      return "AMX";
    case kernels::Bf16Hardware::kAvx512:
      return "AVX512-BF16";
    case kernels::Bf16Hardware::kNone:
      return "AVX2 or AVX-512 without bf16";
  }
  return "";
}

// One rank of dp1 that trains, and the sums of its measured steps.
class Trainer {
 public:
  Trainer(const ParamTable& table, const Options& o, ProfilingBackend& backend)
      : o_(o),
        backend_(backend),
        world_(comm::make_local_comms(1)),
        kept_(table, {}, 0, o.batch, o.seq),
        batch_(0, 1, o.batch, o.seq, table.config().vocab_size) {}

  Status make() {
    ASSIGN_OR_RETURN(mesh_, comm::Mesh::make(*world_[0], {}));
    ASSIGN_OR_RETURN(
        engine_,
        kept_.make_engine(*mesh_,
                          {.recompute = o_.recompute ? model::Recompute::kFull
                                                     : model::Recompute::kNone,
                           .dtype = dtype_of(o_.dtype),
                           .max_batch = o_.batch,
                           .max_seq = o_.seq,
                           .optimizer = {.weight_decay = 0.01, .max_norm = 1}},
                          backend_, /*seed=*/0));
    return ok_status();
  }

  Status step(bool measured) {
    backend_.record(measured);
    const int64_t start = monotonic_ns();
    ASSIGN_OR_RETURN(const engine::StepResult r,
                     engine_->run({.lr = 1e-4,
                                   .microbatches = batch_.list(),
                                   .global_tokens = o_.batch * o_.seq}));
    const double seconds = seconds_since(start);
    if (engine_->step() == 1) first_loss_ = r.loss;
    if (!measured) return ok_status();
    steps_.push_back(seconds);
    const engine::StepSeconds& t = r.times;
    phases_["forward and backward"] += t.compute;
    phases_["clip, AdamW, load"] += t.update;
    phases_["rest"] += seconds - t.compute - t.update;
    return ok_status();
  }

  // REQUIRES: a step was measured.
  void fill(Report& r) const {
    const auto n = static_cast<double>(steps_.size());
    r.step_s = {median(steps_, 0.25), median(steps_), median(steps_, 0.75)};
    r.first_loss = first_loss_;
    const MemoryUse m = engine_->memory();
    r.engine_bytes = m.total();
    for (const auto& [name, s] : phases_) r.phases_s[name] = s / n;
    for (const auto& [name, c] : backend_.costs())
      r.operations[name] = {
          .seconds = c.seconds / n, .flops = c.flops / n, .bytes = c.bytes / n};
    for (const auto& [shape, use] : backend_.gemms()) {
      r.gemms[shape].calls = static_cast<double>(use.calls) / n;
      r.gemms[shape].seconds = use.seconds / n;
    }
  }

 private:
  const Options& o_;
  ProfilingBackend& backend_;
  const std::vector<std::unique_ptr<comm::Comm>> world_;
  std::unique_ptr<comm::Mesh> mesh_;
  Kept kept_;
  const RandomBatch batch_;
  std::unique_ptr<Engine> engine_;
  std::vector<double> steps_;
  std::map<std::string, double> phases_;
  double first_loss_ = 0;
};

// The rates of each GEMM, one entry per round.
using RoundRates = std::map<GemmShape, std::vector<GemmRates>>;

GemmRates median_of(const std::vector<GemmRates>& rounds) {
  const auto over = [&](double GemmRates::*way) {
    std::vector<double> v;
    for (const GemmRates& r : rounds) v.push_back(r.*way);
    return median(std::move(v));
  };
  return {.plain = over(&GemmRates::plain),
          .packed = over(&GemmRates::packed),
          .own = over(&GemmRates::own)};
}

// Sets peer and peer_note.
class Peer {
 public:
  Peer(const Options& o, kernels::Backend& backend) : o_(o) {
    if (o.peer.empty()) {
      note_ = "--peer names none";
      return;
    }
    const auto blas = find_blas(o.threads);
    if (!blas.ok()) {
      note_ = blas.status().message();
      return;
    }
    constexpr int64_t kSize = 1024;
    note_ = blas_problem(
        *blas, gemm_rates(backend, {.rows = kSize, .out = kSize, .in = kSize},
                          kGemmRepeats)
                   .plain);
    wanted_ = note_.empty();
    if (wanted_)
      note_ = fmt::format("its fp32 products {:.1f} GFLOP/s, {}",
                          blas->sgemm_rate / 1e9, blas->libraries);
  }
  Status run() {
    if (!wanted_) return ok_status();
    ASSIGN_OR_RETURN(const double rate,
                     run_peer(o_.peer, o_, o_.threads, o_.peer_steps));
    rates_.push_back(rate);
    return ok_status();
  }
  void fill(Report& r) const {
    r.peer_note = note_;
    if (!rates_.empty()) r.peer = median(rates_);
  }

 private:
  const Options& o_;
  bool wanted_ = false;
  std::string note_;
  std::vector<double> rates_;
};

Result<Report> measure(const Options& o) {
  const auto table = ParamTable::make(models().at(o.size));
  const auto backend = kernels::make_cpu_backend(o.threads);
  const auto profiler = make_profiling_backend(*backend);
  Trainer trainer(table, o, *profiler);
  RETURN_IF_ERROR(trainer.make());
  Peer peer(o, *backend);
  const auto tokens = static_cast<double>(o.batch * o.seq);
  Report report{
      .size = o.size,
      .dtype = o.dtype,
      .backend = backend->description(),
      .cpu = cpu_class(),
      .batch = o.batch,
      .seq = o.seq,
      .threads = o.threads,
      .parameters = table.num_elements(),
      .tokens = tokens,
      .flops = tokens * geometry::flops_per_token(table.config(), o.seq)};
  RoundRates rates;
  for (int round = 0; round < o.rounds; ++round) {
    // The first step of a round finds cold caches.
    for (int i = 0; i < o.steps; ++i) RETURN_IF_ERROR(trainer.step(i > 0));
    for (const auto& [shape, use] : profiler->gemms())
      rates[shape].push_back(gemm_rates(*backend, shape, kGemmRepeats));
    report.bandwidth =
        std::max(report.bandwidth, memory_bandwidth(o.threads, 3));
    RETURN_IF_ERROR(peer.run());
  }
  trainer.fill(report);
  for (const auto& [shape, r] : rates) report.gemms[shape].rates = median_of(r);
  peer.fill(report);
  return report;
}

int run(const Options& o) {
  const auto report = measure(o);
  if (!report.ok()) return failed("bench_step", report.status().message());
  if (o.json)
    print_json(*report);
  else
    print_text(*report);
  Targets targets(o.smoke);
  targets.require(
      "the first loss is that of guessing",
      std::abs(report->first_loss - std::log(models().at(o.size).vocab_size)) <
          kLossOfGuessing);
  double gemm_flops = 0;
  for (const auto& [shape, g] : report->gemms)
    gemm_flops += g.calls * shape.flops();
  targets.require("the GEMMs are most of the model's FLOPs",
                  gemm_flops > kLeastGemms * report->flops);
  targets.at_least("share of the best GEMM rate", kGemmShare,
                   report->gemm_share());
  // Without a comparison that was asked for, the target is missed.
  if (!o.peer.empty())
    targets.at_least(
        "ratio to the peer",
        o.dtype == "bf16" ? kPeerRatioBf16 : kPeerRatioFp32,
        report->peer > 0 ? report->rate() / report->peer : std::nan(""));
  return targets.report(stderr);
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) {
  using namespace remesh::bench;  // NOLINT: a program
  Options o;
  CLI::App app{
      "Speed of one training step of one rank.\n\nExample:\n  bench_step "
      "--size 42m --batch 8 --seq 256 --threads 2 --dtype bf16\n"};
  add_model_options(app, o);
  add_number(app, "--threads", o.threads, "CPU threads", 1, 1024);
  add_number(app, "--steps", o.steps, "Steps per round; the first is warm-up",
             2, 1 << 20);
  add_number(app, "--rounds", o.rounds, "Rounds; the peer runs once per round",
             1, 1000);
  app.add_flag("--recompute", o.recompute, "Recompute activations");
  app.add_flag("--json", o.json, "One JSON object on one line");
  app.add_option(
         "--peer", o.peer,
         "PyTorch program to run for comparison, with the same arguments")
      ->check(CLI::ExistingFile);
  add_number(app, "--peer-steps", o.peer_steps,
             "Steps of the peer per round; the first is warm-up", 2, 1 << 20);
  CLI11_PARSE(app, argc, argv);
  if (o.smoke) {
    o.make_tiny(2);
    o.steps = 2;
    o.rounds = 1;
  }
  return run(o);
}
