// bench_parallel: the cost of parallelism: steps of N single-threaded ranks
// compared with steps of one rank with N threads, same model and global batch.
//
//   mpirun -n 2 --bind-to none bench_parallel [--size 42m] [--json]
//
// One row per configuration: seconds per step (median of the rounds), the speed
// relative to the one rank, whose steps alternate with it (median of the ratios
// of the rounds, because the speed of a shared machine drifts), the limit set
// by the schedule's bubble and the imbalance of the stages alone, and where the
// time went (mean over ranks).
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "bench/median.h"
#include "bench/models.h"
#include "parallel/comm/mpi_comm.h"
#include "parallel/geometry/batch.h"
#include "parallel/geometry/model_work.h"
#include "proto/base/clock.h"
#include "proto/base/rng.h"
#include "tests/testing/engine.h"
#include "tests/testing/local_comm.h"
#include "worker/engine/engine.h"

namespace remesh::bench {
namespace {

using engine::Engine;
using engine::EngineOptions;
using engine::StepTimes;
using geometry::Layout;
using geometry::ScheduleKind;

struct Options {
  std::string size = "42m";
  std::string only;
  std::string layout;  // not empty: only this configuration
  int zero = 0;
  std::string schedule = "1f1b";
  int chunks = 1;
  int64_t microbatches = 16;
  int64_t batch = 4;
  int64_t seq = 256;
  std::string dtype = "bf16";
  int rounds = 5;
  bool json = false;
};

struct Configuration {
  std::string name;
  Layout layout;
  int zero = 0;
  ScheduleKind schedule = ScheduleKind::k1F1B;
  int chunks = 1;
};

Result<std::vector<Configuration>> configurations(const Options& o, int n) {
  if (!o.layout.empty()) {
    ASSIGN_OR_RETURN(const Layout layout, Layout::parse(o.layout));
    ASSIGN_OR_RETURN(const ScheduleKind kind,
                     geometry::parse_schedule(o.schedule));
    return std::vector<Configuration>{
        {o.layout, layout, o.zero, kind, o.chunks}};
  }
  return std::vector<Configuration>{
      {"dp", {.dp = n}},
      {"dp, ZeRO 1", {.dp = n}, 1},
      {"dp, ZeRO 2", {.dp = n}, 2},
      {"dp, ZeRO 3", {.dp = n}, 3},
      {"tp", {.tp = n}},
      {"cp", {.cp = n}},
      {"pp, gpipe", {.pp = n}, 0, ScheduleKind::kGpipe},
      {"pp, 1f1b", {.pp = n}, 0, ScheduleKind::k1F1B},
      {"pp, interleaved 2", {.pp = n}, 0, ScheduleKind::kInterleaved1F1B, 2},
      {"pp, zb-h1", {.pp = n}, 0, ScheduleKind::kZbH1}};
}

double seconds_since(int64_t ns) {
  return static_cast<double>(monotonic_ns() - ns) * 1e-9;
}

// An engine with a data-parallel rank's microbatches of random tokens.
class Runner {
 public:
  static Result<std::unique_ptr<Runner>> make(
      const Options& o, const Configuration& c, int threads, comm::Comm& world,
      const geometry::ParamTable& table) {
    auto r = std::unique_ptr<Runner>(new Runner());
    r->backend_ = kernels::make_cpu_backend(threads);
    ASSIGN_OR_RETURN(r->mesh_, comm::Mesh::make(world, c.layout));
    const EngineOptions e{
        .zero = {.stage = c.zero},
        .schedule = c.schedule,
        .chunks = c.chunks,
        .dtype = o.dtype == "bf16" ? model::Dtype::kBf16 : model::Dtype::kFp32,
        .num_microbatches = o.microbatches,
        .max_batch = o.batch,
        .max_seq = o.seq,
        .optimizer = {.weight_decay = 0.1, .max_norm = 1}};
    ASSIGN_OR_RETURN(
        r->engine_, engine::make_engine(table, *r->mesh_, e, *r->backend_, {}));
    r->reset();
    r->make_data(o, table.config().vocab_size);
    return r;
  }

  void reset() {
    engine::initialise(*engine_, *backend_, 1);
    engine_->state_loaded();
  }

  engine::StepResult step() {
    auto r = engine_->run({.lr = 1e-4,
                           .microbatches = microbatches_,
                           .global_tokens = global_tokens_});
    CHECK_MSG(r.ok(), r.status().to_string().c_str());
    return std::move(r).value();
  }

 private:
  Runner() = default;

  void make_data(const Options& o, int64_t vocab) {
    global_tokens_ = o.microbatches * o.batch * o.seq;
    const auto mine = geometry::even_share(o.microbatches, mesh_->layout().dp,
                                           mesh_->coord().dp);
    const int64_t each = o.batch * o.seq;
    for (int64_t i = mine.begin * each; i <= mine.end * each; ++i)
      tokens_.push_back(
          static_cast<int32_t>(random_u64(1, 2, static_cast<uint64_t>(i)) %
                               static_cast<uint64_t>(vocab)));
    for (int64_t m = 0; m < mine.size(); ++m)
      microbatches_.push_back({tokens_.data() + m * each,
                               tokens_.data() + m * each + 1, o.batch, o.seq});
  }

  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<comm::Mesh> mesh_;
  std::unique_ptr<Engine> engine_;
  std::vector<int32_t> tokens_;
  std::vector<model::MicroBatch> microbatches_;
  int64_t global_tokens_ = 0;
};

// The speed of the pipeline relative to an even split without a bubble.
double predicted(const Configuration& c, const Options& o,
                 const geometry::ModelConfig& m) {
  if (c.layout.pp == 1) return 1;
  const auto schedule = geometry::step_schedule(
      c.schedule, c.layout.pp, c.chunks, o.microbatches, c.layout.dp);
  const int stages = c.layout.pp * c.chunks;
  const auto bounds = geometry::stage_bounds(m, stages, o.seq);
  if (!schedule.ok() || !bounds.ok()) return 0;
  const geometry::ModelWork work = geometry::work_per_token(m, o.seq);
  std::vector<double> load(static_cast<size_t>(c.layout.pp), 0);
  for (int s = 0; s < stages; ++s)
    load[static_cast<size_t>(s % c.layout.pp)] +=
        static_cast<double>((*bounds)[static_cast<size_t>(s) + 1] -
                            (*bounds)[static_cast<size_t>(s)]) *
            (work.block + work.attention) +
        (s + 1 == stages ? work.head : 0);
  const double sum = std::accumulate(load.begin(), load.end(), 0.0);
  const double most = *std::max_element(load.begin(), load.end());
  const auto timing = geometry::simulate(*schedule, {});
  return sum / c.layout.pp / most / (1 + timing->bubble_overhead);
}

// Runs the reference on rank 0; the others sleep and leave it their cores.
double alone(comm::Comm& world, Runner* reference, double& loss) {
  double seconds = 0;
  std::byte done{0};
  if (world.rank() == 0) {
    const int64_t start = monotonic_ns();
    loss = reference->step().loss;
    seconds = seconds_since(start);
    for (int r = 1; r < world.size(); ++r) world.send({&done, 1}, r, 1);
  } else {
    const auto request = world.start_recv({&done, 1}, 0, 1);
    while (!request->test()) usleep(1000);
  }
  world.all_reduce(std::span(&seconds, 1), comm::Op::kMax);
  return seconds;
}

void print_row(const Options& o, const Configuration& c, double seconds,
               double ratio, double prediction, double difference, double most,
               const StepTimes& t) {
  if (o.json)
    fmt::print(
        "{{\"configuration\": \"{}\", \"layout\": \"{}\", \"step_s\": {:.4f}, "
        "\"ratio\": {:.4f}, \"predicted\": {:.4f}, \"loss_difference\": "
        "{:.2e}, \"compute_s\": {:.4f}, "
        "\"most_compute_s\": {:.4f}, \"pipeline_s\": {:.4f}, \"tp_cp_s\": "
        "{:.4f}, \"reduce_s\": {:.4f}, "
        "\"gather_s\": {:.4f}, "
        "\"agree_s\": {:.4f}, \"update_s\": {:.4f}}}\n",
        c.name, c.layout.to_string(), seconds, ratio, prediction, difference,
        t.compute, most, t.pipeline, t.tensor, t.reduce, t.gather, t.agree,
        t.update);
  else
    fmt::print(
        "{:<18} {:>7.3f} {:>6.3f} {:>9.3f} {:>9.1e} {:>8.3f} {:>7.3f} {:>8.3f} "
        "{:>7.3f} "
        "{:>7.3f} "
        "{:>7.3f} {:>7.3f} {:>7.3f}\n",
        c.name, seconds, ratio, prediction, difference, t.compute, most,
        t.pipeline, t.tensor, t.reduce, t.gather, t.agree, t.update);
  std::fflush(stdout);
}

Status measure(const Options& o, const Configuration& c, comm::Comm& world,
               const geometry::ParamTable& table, Runner* reference) {
  ASSIGN_OR_RETURN(const auto runner, Runner::make(o, c, 1, world, table));
  if (reference != nullptr) reference->reset();
  std::vector<double> with, ratios;
  double difference = 0;  // of the losses
  double sums[7] = {};
  double most = 0;  // compute time of the busiest rank
  for (int i = -1; i < o.rounds; ++i) {
    double loss = 0;
    const double one = alone(world, reference, loss);
    world.barrier();
    const int64_t start = monotonic_ns();
    const engine::StepResult r = runner->step();
    const StepTimes& t = r.times;
    double seconds = seconds_since(start);
    if (world.rank() == 0)
      difference = std::max(difference, std::abs(r.loss / loss - 1));
    if (i < 0) continue;
    ratios.push_back(one / seconds);
    with.push_back(seconds);
    const double parts[7] = {t.compute, t.pipeline, t.tensor + t.context,
                             t.reduce,  t.gather,   t.agree,
                             t.update};
    most += t.compute / o.rounds;
    for (int k = 0; k < 7; ++k) sums[k] += parts[k] / o.rounds / world.size();
  }
  world.all_reduce(std::span<double>(sums), comm::Op::kSum);
  world.all_reduce(std::span<double>(&most, 1), comm::Op::kMax);
  if (world.rank() == 0)
    print_row(
        o, c, median(with), median(ratios), predicted(c, o, table.config()),
        difference, most,
        {sums[0], sums[1], sums[2], 0, sums[3], sums[4], sums[5], sums[6]});
  return ok_status();
}

int run(const Options& o, comm::MpiWorld& mpi) {
  comm::Comm& world = mpi.world();
  const auto table = geometry::ParamTable::make(models().at(o.size));
  std::unique_ptr<Runner> reference;
  auto self = comm::make_local_comms(1);
  if (world.rank() == 0) {
    auto made =
        Runner::make(o, {"one rank", {}}, world.size(), *self[0], table);
    if (!made.ok()) {
      fmt::print(stderr, "bench_parallel: {}\n", made.status().to_string());
      mpi.abort(3, "cannot set up the one rank");
    }
    reference = std::move(made).value();
    if (!o.json)
      fmt::print(
          "{} in {}, {} microbatches of {} x {}; {} ranks of 1 thread against "
          "1 rank of {} threads\n{:<18} {:>7} {:>6} {:>9} {:>9} {:>8} {:>8} "
          "{:>7} "
          "{:>7} "
          "{:>7} {:>7} {:>7} {:>7}\n",
          o.size, o.dtype, o.microbatches, o.batch, o.seq, world.size(),
          world.size(), "configuration", "step_s", "ratio", "predicted",
          "loss diff", "compute", "max", "pipeline", "tp, cp", "reduce",
          "gather", "agree", "update");
  }
  const auto all = configurations(o, world.size());
  if (!all.ok()) {
    fmt::print(stderr, "bench_parallel: {}\n", all.status().to_string());
    return 2;
  }
  for (const Configuration& c : *all) {
    if (!o.only.empty() && c.name.find(o.only) == std::string::npos) continue;
    const Status s = measure(o, c, world, table, reference.get());
    if (!s.ok() && world.rank() == 0)
      fmt::print("{:<18} {}\n", c.name, s.to_string());
  }
  return 0;
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) {
  using namespace remesh;  // NOLINT: a program
  bench::Options o;
  CLI::App app{
      "Steps of N single-threaded ranks compared with one rank of N threads.\n"
      "Example: mpirun -n 2 --bind-to none bench_parallel --size 15m"};
  app.add_option("--size", o.size, "Model: tiny, 15m, 42m or 110m")
      ->capture_default_str()
      ->check(CLI::IsMember({"tiny", "15m", "42m", "110m"}));
  app.add_option("--only", o.only,
                 "Only configurations whose name contains this");
  app.add_option("--layout", o.layout,
                 "Only this layout of all ranks, like dp2,pp2");
  app.add_option("--zero", o.zero, "ZeRO stage of --layout")
      ->check(CLI::Range(0, 3));
  app.add_option("--schedule", o.schedule,
                 "Schedule of --layout: gpipe, 1f1b, interleaved or zb-h1");
  app.add_option("--chunks", o.chunks, "Chunks of --layout")
      ->check(CLI::Range(1, 64));
  app.add_option("--microbatches", o.microbatches, "Microbatches per step")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  app.add_option("--batch", o.batch, "Sequences per microbatch")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  app.add_option("--seq", o.seq, "Tokens per sequence")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--dtype", o.dtype, "bf16 or fp32")
      ->capture_default_str()
      ->check(CLI::IsMember({"bf16", "fp32"}));
  app.add_option("--rounds", o.rounds, "Steps measured per configuration")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  app.add_flag("--json", o.json, "One JSON object per line");
  CLI11_PARSE(app, argc, argv);

  auto made = comm::MpiWorld::init({});
  if (!made.ok()) {
    fmt::print(stderr, "bench_parallel: {}\n", made.status().to_string());
    return 3;
  }
  comm::MpiWorld& mpi = **made;
  if (mpi.size() < 2) {
    fmt::print(stderr, "bench_parallel: needs at least 2 ranks: mpirun -n 2\n");
    return 2;
  }
  const int rc = bench::run(o, mpi);
  mpi.finalize();
  return rc;
}
