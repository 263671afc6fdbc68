// bench_parallel: the cost of parallelism: steps of N single-threaded ranks
// compared with the best that the same cores do without communication, same
// model and global batch.
//
//   bench_parallel [--size 42m] [--ranks 2,4] [--json]
//
// On C cores (N, or all that there are) the baseline of a row is the faster of
//   threads   one rank with C threads
//   ideal     one rank with one thread, alone on the machine, C times as fast
// The two and the row's own step alternate, because the speed of a shared
// machine drifts; the row shows medians over the rounds, and the quartiles of
// the ratio to that round's baseline. A ratio above 1 would say that the
// baseline is poor. `limit` is the ratio that the schedule's bubble and the
// imbalance of the stages alone allow; exposed is the mean over the ranks of
// the time that waits for communication. bubble is the ranks' idle share from
// the first pass of a step to its last, beside that of the schedule if all
// forward and all backward passes take equally long.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "bench/options.h"
#include "bench/random_batch.h"
#include "bench/ranks.h"
#include "parallel/comm/mpi_comm.h"
#include "parallel/geometry/batch.h"
#include "parallel/geometry/model_work.h"
#include "proto/base/clock.h"
#include "proto/base/machine.h"
#include "proto/base/median.h"
#include "tests/testing/engine.h"
#include "tests/testing/local_comm.h"
#include "worker/engine/engine.h"

namespace remesh::bench {
namespace {

using engine::Engine;
using engine::EngineOptions;
using engine::StepSeconds;
using geometry::Layout;
using geometry::ScheduleKind;

// With a layout, only this configuration is measured.
struct Options : ModelOptions, ScheduleOptions {
  Options() : ScheduleOptions{.microbatches = 16} { batch = 2; }
  std::string only;
  int rounds = 3;
  int cores = 0;  // that all ranks may use; 0: started under mpirun by hand
  std::vector<int> ranks = {2, 4};
  bool json = false;
};
constexpr uint64_t kSeed = 1;
// Losses differ by rounding.
constexpr double kLossDifferenceBf16 = 1e-2;
constexpr double kLossDifferenceFp32 = 1e-4;
// Of `limit`, where each rank has a core of its own.
constexpr double kOfLimit = 0.85;
constexpr double kBubbleRatio = 1.2;  // measured over the schedule's

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

// An engine with a data-parallel rank's microbatches of random tokens.
class Runner {
 public:
  static Result<std::unique_ptr<Runner>> make(
      const Options& o, const Configuration& c, int threads, comm::Comm& world,
      const geometry::ParamTable& table) {
    auto r = std::unique_ptr<Runner>(new Runner());
    r->backend_ = kernels::make_cpu_backend(threads);
    ASSIGN_OR_RETURN(r->mesh_, comm::Mesh::make(world, c.layout));
    const EngineOptions e{.zero = {.stage = c.zero},
                          .schedule = c.schedule,
                          .chunks = c.chunks,
                          .dtype = dtype_of(o.dtype),
                          .num_microbatches = o.microbatches,
                          .max_batch = o.batch,
                          .max_seq = o.seq,
                          .optimizer = {.weight_decay = 0.1, .max_norm = 1}};
    ASSIGN_OR_RETURN(r->engine_, engine::make_ready_engine(
                                     table, *r->mesh_, e, *r->backend_, kSeed));
    r->make_data(o, table.config().vocab_size);
    return r;
  }

  void reset() {
    engine::initialise(*engine_, *backend_, kSeed);
    engine_->state_loaded();
  }

  engine::StepResult step() {
    auto r = engine_->run({.lr = 1e-4,
                           .microbatches = batch_.list(),
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
    batch_ = {mine.begin, mine.end, o.batch, o.seq, vocab};
  }

  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<comm::Mesh> mesh_;
  std::unique_ptr<Engine> engine_;
  RandomBatch batch_;
  int64_t global_tokens_ = 0;
};

// The idle share of the schedule with equal passes; 0 without a pipeline.
Result<double> scheduled_bubble(const Configuration& c, const Options& o) {
  if (c.layout.pp == 1) return 0;
  ASSIGN_OR_RETURN(
      const auto schedule,
      geometry::step_schedule(
          c.schedule, c.layout.pp, c.chunks,
          geometry::largest_share(o.microbatches, {}, c.layout.dp)));
  ASSIGN_OR_RETURN(const auto timing, geometry::simulate(schedule, {}));
  return timing.bubble_share;
}

// The speed of the pipeline relative to an even split without a bubble.
Result<double> limit_of(const Configuration& c, const Options& o,
                        const geometry::ModelConfig& m) {
  if (c.layout.pp == 1) return 1;
  const int stages = c.layout.pp * c.chunks;
  ASSIGN_OR_RETURN(const double bubble, scheduled_bubble(c, o));
  ASSIGN_OR_RETURN(const auto bounds, geometry::stage_bounds(m, stages, o.seq));
  const geometry::ModelWork work = geometry::work_per_token(m, o.seq);
  std::vector<double> load(static_cast<size_t>(c.layout.pp), 0);
  for (int s = 0; s < stages; ++s)
    load[static_cast<size_t>(s % c.layout.pp)] +=
        static_cast<double>(bounds[static_cast<size_t>(s) + 1] -
                            bounds[static_cast<size_t>(s)]) *
            (work.block + work.attention) +
        (s + 1 == stages ? work.head : 0);
  const double sum = std::accumulate(load.begin(), load.end(), 0.0);
  const double most = *std::max_element(load.begin(), load.end());
  return sum / c.layout.pp / most * (1 - bubble);
}

// The idle share of the ranks, which started together, until the last of them
// has made its passes.
double measured_bubble(const StepSeconds& t, comm::Comm& world) {
  double busy = t.compute + t.tensor + t.context;
  double passes = busy + t.pipeline;
  world.all_reduce(std::span(&busy, 1), comm::Op::kSum);
  world.all_reduce(std::span(&passes, 1), comm::Op::kMax);
  return 1 - busy / (world.size() * passes);
}

// Runs a step on rank 0; the others sleep and leave it their cores.
double alone(comm::Comm& world, Runner* runner, double& loss) {
  double seconds = 0;
  std::byte done{0};
  if (world.rank() == 0) {
    const int64_t start = monotonic_ns();
    loss = runner->step().loss;
    seconds = seconds_since(start);
    for (int r = 1; r < world.size(); ++r) world.send({&done, 1}, r, 1);
  } else {
    const auto request = world.start_recv({&done, 1}, 0, 1);
    while (!request->test()) usleep(1000);
  }
  world.all_reduce(std::span(&seconds, 1), comm::Op::kMax);
  return seconds;
}

constexpr const char* kParts[] = {"compute", "pipeline", "tp_cp", "reduce",
                                  "gather",  "agree",    "update"};

struct Series {
  std::vector<double> mesh, threads, ideal, ratio, exposed, bubble;
  double loss_difference = 0;
  // Of kParts, sums over rounds, of this rank.
  std::array<double, std::size(kParts)> parts = {};
};

// The part of a step that each kind of work takes, mean over the ranks.
Json parts_of(const Series& s, comm::Comm& world) {
  auto sums = s.parts;
  world.all_reduce(std::span<double>(sums), comm::Op::kSum);
  Json parts = Json::object();
  for (size_t i = 0; i < sums.size(); ++i)
    parts[kParts[i]] =
        sums[i] / world.size() / static_cast<double>(s.mesh.size());
  return parts;
}

// The runners exist on rank 0 only.
struct Baselines {
  std::unique_ptr<Runner> threads, single;
  int cores = 1;
};

Result<Baselines> make_baselines(const Options& o, comm::Comm& self,
                                 int num_cores,
                                 const geometry::ParamTable& table) {
  Baselines b{.cores = num_cores};
  ASSIGN_OR_RETURN(b.threads,
                   Runner::make(o, {"", {}}, num_cores, self, table));
  ASSIGN_OR_RETURN(b.single, Runner::make(o, {"", {}}, 1, self, table));
  return b;
}

void run_round(comm::Comm& world, Runner& mesh, const Baselines& b,
               Series* out) {
  double loss = 0;
  const double threads = alone(world, b.threads.get(), loss);
  const double ideal = alone(world, b.single.get(), loss) / b.cores;
  world.barrier();
  const int64_t start = monotonic_ns();
  const engine::StepResult r = mesh.step();
  const double seconds = seconds_since(start);
  if (world.rank() == 0) {
    const double difference = std::abs(r.loss / loss - 1);
    // NaN stays.
    if (!(difference <= out->loss_difference))
      out->loss_difference = std::isnan(difference)
                                 ? std::numeric_limits<double>::infinity()
                                 : difference;
  }
  out->mesh.push_back(seconds);
  out->threads.push_back(threads);
  out->ideal.push_back(ideal);
  out->ratio.push_back(std::min(threads, ideal) / seconds);
  out->exposed.push_back(r.mean_exposed_s);
  out->bubble.push_back(measured_bubble(r.times, world));
  const StepSeconds& t = r.times;
  const double parts[] = {t.compute, t.pipeline, t.tensor + t.context,
                          t.reduce,  t.gather,   t.agree,
                          t.update};
  for (size_t i = 0; i < out->parts.size(); ++i) out->parts[i] += parts[i];
}

Status measure_one(const Options& o, const Configuration& c, comm::Comm& world,
                   const geometry::ParamTable& table, const Baselines& b) {
  ASSIGN_OR_RETURN(const auto runner, Runner::make(o, c, 1, world, table));
  for (Runner* r : {b.threads.get(), b.single.get()})
    if (r != nullptr) r->reset();
  Series warm_up, s;
  run_round(world, *runner, b, &warm_up);
  for (int i = 0; i < o.rounds; ++i) run_round(world, *runner, b, &s);
  const Json parts = parts_of(s, world);
  if (world.rank() != 0) return ok_status();
  ASSIGN_OR_RETURN(const double limit, limit_of(c, o, table.config()));
  ASSIGN_OR_RETURN(const double scheduled, scheduled_bubble(c, o));
  Json row = {{"configuration", c.name},
              {"layout", c.layout.to_string()},
              {"ranks", world.size()},
              {"cores", b.cores},
              {"step_s", median(s.mesh)},
              {"threads_step_s", median(s.threads)},
              {"ideal_step_s", median(s.ideal)},
              {"ratio",
               {median(s.ratio, 0.25), median(s.ratio), median(s.ratio, 0.75)}},
              {"limit", limit},
              {"exposed_s", median(s.exposed)},
              {"loss_difference", s.loss_difference},
              {"parts_s", parts}};
  if (c.layout.pp > 1) {
    row["bubble"] = median(s.bubble);
    row["scheduled_bubble"] = scheduled;
  }
  fmt::print("{}\n", row.dump());
  std::fflush(stdout);
  return ok_status();
}

// A rank on one core would share it among all threads of the baseline.
Status check_cores(comm::Comm& world, int wanted) {
  if (world.rank() != 0 || usable_cores() >= wanted) return ok_status();
  return invalid_argument(fmt::format(
      "rank 0 may run on {} of the {} cores that the baseline's threads need, "
      "so the ratios would flatter: start bench_parallel without mpirun, or "
      "add --bind-to none to mpirun",
      usable_cores(), wanted));
}

Status measure(const Options& o, comm::MpiWorld& mpi) {
  comm::Comm& world = mpi.world();
  const auto table = geometry::ParamTable::make(models().at(o.size));
  const int num_cores = std::min(
      world.size(),
      o.cores > 0 ? o.cores : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  RETURN_IF_ERROR(check_cores(world, num_cores));
  Baselines baselines{.cores = num_cores};
  const auto self = comm::make_local_comms(1);
  if (world.rank() == 0) {
    ASSIGN_OR_RETURN(baselines, make_baselines(o, *self[0], num_cores, table));
  }
  ASSIGN_OR_RETURN(const auto all, configurations(o, world.size()));
  for (const Configuration& c : all) {
    if (!o.only.empty() && c.name.find(o.only) == std::string::npos) continue;
    RETURN_IF_ERROR(
        measure_one(o, c, world, table, baselines).with_context(c.name));
  }
  return ok_status();
}

void print_head(const Options& o) {
  fmt::print(
      "{} in {}, {} microbatches of {} x {}; ranks of 1 thread, on {} cores\n"
      "{:<18} {:>5} {:>8} {:>8} {:>8} {:>22} {:>6} {:>8} {:>9}\n",
      o.size, o.dtype, o.microbatches, o.batch, o.seq, usable_cores(),
      "configuration", "ranks", "step_s", "threads", "ideal",
      "ratio (quartiles)", "limit", "exposed", "loss diff");
}

double bubble_ratio(const Json& r) {
  return r["bubble"].get<double>() / r["scheduled_bubble"].get<double>();
}

void print_row(const Json& r) {
  const Json& q = r["ratio"];
  fmt::print(
      "{:<18} {:>5} {:>8.3f} {:>8.3f} {:>8.3f} {:>22} {:>6.3f} {:>8.3f} "
      "{:>9.1e}\n",
      r["configuration"].get<std::string>(), r["ranks"].get<int>(),
      r["step_s"].get<double>(), r["threads_step_s"].get<double>(),
      r["ideal_step_s"].get<double>(),
      fmt::format("{:.3f} ({:.3f}-{:.3f})", q[1].get<double>(),
                  q[0].get<double>(), q[2].get<double>()),
      r["limit"].get<double>(), r["exposed_s"].get<double>(),
      r["loss_difference"].get<double>());
  for (const auto& [name, seconds] : r["parts_s"].items())
    fmt::print("  {} {:.3f}", name, seconds.get<double>());
  fmt::print("\n");
  if (r.contains("bubble"))
    fmt::print("  bubble {:.1f} %, by the schedule {:.1f} %, ratio {:.2f}\n",
               100 * r["bubble"].get<double>(),
               100 * r["scheduled_bubble"].get<double>(), bubble_ratio(r));
}

void judge(const Options& o, const Json& r, Targets& targets) {
  const std::string name =
      fmt::format("{} on {} ranks", r["configuration"].get<std::string>(),
                  r["ranks"].get<int>());
  targets.require(
      name + ": the loss is that of one rank",
      r["loss_difference"] <
          (o.dtype == "bf16" ? kLossDifferenceBf16 : kLossDifferenceFp32));
  if (r["ranks"] != r["cores"]) return;
  if (r.contains("bubble"))
    targets.at_most(name + ": bubble over the schedule's", kBubbleRatio,
                    bubble_ratio(r));
  targets.at_least(name + ": ratio over limit", kOfLimit,
                   r["ratio"][1].get<double>() / r["limit"].get<double>());
}

std::vector<std::string> arguments_of(const Options& o) {
  std::vector<std::string> a = {
      "--microbatches", std::to_string(o.microbatches),
      "--rounds",       std::to_string(o.rounds),
      "--cores",        std::to_string(usable_cores())};
  if (!o.only.empty()) a.insert(a.end(), {"--only", o.only});
  if (!o.layout.empty())
    a.insert(a.end(),
             {"--layout", o.layout, "--zero", std::to_string(o.zero),
              "--schedule", o.schedule, "--chunks", std::to_string(o.chunks)});
  return model_arguments(o, std::move(a));
}

int run_all(const Options& o) {
  if (!o.json) print_head(o);
  Targets targets(o.smoke);
  for (const int n : o.ranks) {
    const auto rows = run_in_ranks(n, arguments_of(o), [&](const Json& r) {
      if (o.json)
        fmt::print("{}\n", r.dump());
      else
        print_row(r);
      std::fflush(stdout);
      judge(o, r, targets);
    });
    if (!rows.ok()) return failed("bench_parallel", rows.status().message());
    targets.require(fmt::format("rows of {} ranks", n), !rows->empty());
  }
  return targets.report(stderr);
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) {
  using namespace remesh::bench;  // NOLINT: a program
  Options o;
  CLI::App app{
      "Steps of N single-threaded ranks compared with the best without "
      "communication.\nExample: bench_parallel --size 15m --ranks 2"};
  add_model_options(app, o);
  add_schedule_options(app, o);
  app.add_option("--only", o.only,
                 "Only configurations whose name contains this");
  app.add_option("--layout", o.layout,
                 "Only this layout of all ranks, like dp2,pp2");
  add_number(app, "--rounds", o.rounds, "Steps measured per configuration", 1,
             1000);
  app.add_option("--cores", o.cores)->group("");  // for its own ranks
  app.add_flag("--json", o.json, "One JSON object per line");
  app.add_option("--ranks", o.ranks, "Numbers of ranks, a run for each")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(2, 256));
  CLI11_PARSE(app, argc, argv);
  if (o.smoke) {
    o.make_tiny(1);
    o.ranks = {2};
    o.microbatches = 4;
    o.rounds = 1;
  }
  return run_with_ranks("bench_parallel", o, run_all, measure);
}
