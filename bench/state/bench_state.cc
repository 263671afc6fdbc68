// bench_state: the cost per step of a state that survives a killed process and
// a lost worker.
//
//   bench_state [--size 42m]      two ranks per row
//
// Each rank has one engine, whose state moves back and forth between steps:
// private memory, updated in place; or a segment of shared memory, updated out
// of place and committed (worker/train/state_home.h). A round has three steps:
// in place; kept; kept with replicas on the other worker
// (worker/train/replication.h), which are made between the update before and
// the agreement. A round gives two ratios of neighbouring steps. Medians over
// all rounds are printed with quartiles, because machines are shared, and for
// replicas also the CPU time relative to the step before, which depends less on
// other load.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/kept_state.h"
#include "bench/options.h"
#include "bench/process_use.h"
#include "bench/random_batch.h"
#include "bench/ranks.h"
#include "parallel/comm/mpi_comm.h"
#include "parallel/geometry/batch.h"
#include "proto/base/clock.h"
#include "proto/base/median.h"

namespace remesh::bench {
namespace {

using engine::Engine;
using geometry::Layout;

struct Options : ModelOptions {
  Options() { batch = 4; }
  std::string layout;
  int zero = 0;
  int64_t global_batch = 16;  // the default of a job file
  int rounds = 12;
};

// A state that lives in one of two stores at a time.
class Movable final : public engine::StateStore {
 public:
  Movable(kernels::Backend& backend, engine::StateStore& kept)
      : own_(engine::own_memory(backend)), kept_(kept) {}
  Status reserve(const geometry::Sharding& sharding,
                 int64_t elements) override {
    RETURN_IF_ERROR(own_->reserve(sharding, elements));
    return kept_.reserve(sharding, elements);
  }
  engine::ConstStateView current() const override { return now_->current(); }
  engine::StateView begin() override { return now_->begin(); }
  void commit(int64_t step) override { now_->commit(step); }
  int copies() const override { return now_->copies(); }
  // True if it was in the other store.
  bool move(bool kept, int64_t step) {
    engine::StateStore* const to = kept ? &kept_ : own_.get();
    if (to == now_) return false;
    const engine::ConstStateView from = now_->current();
    const engine::StateView out = to->begin();
    for (size_t v = 0; v < geometry::kNumStateVectors; ++v)
      std::ranges::copy(from[v], out[v].begin());
    to->commit(step);
    now_ = to;
    return true;
  }

 private:
  const std::unique_ptr<engine::StateStore> own_;
  engine::StateStore& kept_;
  engine::StateStore* now_ = &kept_;
};

class Trial {
 public:
  Trial(const Options& o, const Layout& layout, comm::Comm& world)
      : o_(o),
        world_(world),
        table_(geometry::ParamTable::make(models().at(o.size))),
        backend_(kernels::make_cpu_backend(1)),
        kept_(table_, layout, world.rank(), o.global_batch, o.seq),
        state_(*backend_, kept_.home()) {}

  Status make(const Layout& layout) {
    ASSIGN_OR_RETURN(mesh_, comm::Mesh::make(world_, layout));
    const auto mine =
        geometry::even_share(microbatches(), layout.dp, mesh_->coord().dp);
    batch_ = {mine.begin, mine.end, o_.batch, o_.seq,
              table_.config().vocab_size};
    ASSIGN_OR_RETURN(engine_,
                     kept_.make_engine(*mesh_,
                                       {.zero = {.stage = o_.zero},
                                        .dtype = dtype_of(o_.dtype),
                                        .num_microbatches = microbatches(),
                                        .max_batch = o_.batch,
                                        .max_seq = o_.seq,
                                        .optimizer = {.max_norm = 1}},
                                       *backend_, /*seed=*/1, &state_));
    return ok_status();
  }

  enum class How { kInPlace, kKept, kReplicated };
  // Seconds of a complete step. A replica counts in the step that it overlaps
  // with.
  Result<double> step(How how) {
    if (state_.move(how != How::kInPlace, engine_->step()))
      engine_->state_loaded();
    world_.barrier();
    const int64_t began = monotonic_ns();
    const double cpu_began = thread_cpu_s();
    if (how == How::kReplicated) kept_.after_step();
    Status replicated;
    const auto r = engine_->run({.lr = 1e-4,
                                 .microbatches = batch_.list(),
                                 .global_tokens = o_.global_batch * o_.seq,
                                 .votes = [&] {
                                   if (how == How::kReplicated)
                                     replicated = kept_.before_agreement();
                                   return engine::StepVotes{};
                                 }});
    RETURN_IF_ERROR(r.status());
    RETURN_IF_ERROR(replicated);
    double s = seconds_since(began);
    update_s_ = r->times.update;
    cpu_s_ = thread_cpu_s() - cpu_began;
    world_.all_reduce(std::span<double>(&s, 1), comm::Op::kMax);
    return s;
  }
  double update_s() const { return update_s_; }
  // CPU time of this rank in the last step, and on replicas so far.
  double cpu_s() const { return cpu_s_; }
  double replica_cpu_s() const { return kept_.replica_cpu_s(); }
  uint64_t replica_bytes() const { return kept_.replica_bytes(); }
  uint64_t state_bytes() const { return 3 * engine_->weights().size_bytes(); }

 private:
  int64_t microbatches() const { return o_.global_batch / o_.batch; }

  const Options& o_;
  comm::Comm& world_;
  const geometry::ParamTable table_;
  const std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<comm::Mesh> mesh_;
  Kept kept_;
  Movable state_;
  RandomBatch batch_;
  std::unique_ptr<Engine> engine_;
  double update_s_ = 0, cpu_s_ = 0;
};

Status measure(const Options& o, comm::MpiWorld& mpi) {
  ASSIGN_OR_RETURN(const Layout layout, Layout::parse(o.layout));
  Trial trial(o, layout, mpi.world());
  RETURN_IF_ERROR(trial.make(layout));
  std::vector<double> plain, kept, replicated, work, plain_update, kept_update;
  using How = Trial::How;
  for (int i = -1; i < o.rounds; ++i) {  // the first is warm-up
    ASSIGN_OR_RETURN(const double a, trial.step(How::kInPlace));
    const double a_update = trial.update_s();
    ASSIGN_OR_RETURN(const double b, trial.step(How::kKept));
    const double b_update = trial.update_s();
    const double b_cpu = trial.cpu_s();
    const double before = trial.replica_cpu_s();
    ASSIGN_OR_RETURN(const double c, trial.step(How::kReplicated));
    if (i < 0) continue;
    work.push_back((trial.replica_cpu_s() - before) / b_cpu);
    plain.push_back(a);
    kept.push_back(b / a);
    replicated.push_back(c / b);
    plain_update.push_back(a_update);
    kept_update.push_back(b_update);
  }
  if (mpi.rank() != 0) return ok_status();
  const auto costs = [](const std::vector<double>& v) {
    return std::vector{median(v, 0.25) - 1, median(v) - 1, median(v, 0.75) - 1};
  };
  Json row = {{"step_s", median(plain)},
              {"state_bytes", trial.state_bytes()},
              {"update_s", median(plain_update)},
              {"kept_update_s", median(kept_update)},
              {"keeping_costs", costs(kept)},
              {"replica_bytes", trial.replica_bytes()}};
  if (trial.replica_bytes() > 0) {
    row["replicas_cost"] = costs(replicated);
    row["replicas_cpu"] = median(work);
  }
  fmt::print("{}\n", row.dump());
  return ok_status();
}

constexpr double kKeepingCosts = 0.02;  // of a step
constexpr double kReplicasCost = 0.1;

struct Row {
  const char* layout;
  int zero;
  bool replicas;  // data-parallel ranks without ZeRO are copies of each other
};
constexpr Row kRows[] = {
    {"dp2", 0, false}, {"dp2", 1, true}, {"dp2", 3, true}, {"tp2", 0, true}};

std::string name_of(const Row& row) {
  return row.zero == 0 ? row.layout
                       : fmt::format("{} ZeRO {}", row.layout, row.zero);
}

// "+1.0 % (+0.5 to +2.0)".
std::string percent(const Json& quartiles) {
  return fmt::format(
      "{:+.1f} % ({:+.1f} to {:+.1f})", 100 * quartiles[1].get<double>(),
      100 * quartiles[0].get<double>(), 100 * quartiles[2].get<double>());
}

void print_row(const std::string& name, const Json& r) {
  fmt::print("{:<14} {:>8.0f} {:>9.0f} {:>9.0f}/{:<6.0f} {:>26}  {}\n", name,
             1e3 * r["step_s"].get<double>(),
             r["state_bytes"].get<double>() / (1 << 20),
             1e3 * r["update_s"].get<double>(),
             1e3 * r["kept_update_s"].get<double>(),
             percent(r["keeping_costs"]),
             r.contains("replicas_cost")
                 ? fmt::format("{}, {:.1f} %", percent(r["replicas_cost"]),
                               100 * r["replicas_cpu"].get<double>())
                 : "none: copies of each other");
  std::fflush(stdout);
}

int run_all(const Options& o) {
  fmt::print(
      "{} in {}, global batches of {} x {} in microbatches of {}; medians of "
      "{} rounds (quartiles)\n{:<14} {:>8} {:>9} {:>16} {:>26}  {}\n",
      o.size, o.dtype, o.global_batch, o.seq, o.batch, o.rounds,
      "configuration", "step ms", "state MiB", "update ms", "keeping costs",
      "replicas cost, their CPU time");
  std::fflush(stdout);
  Targets targets(o.smoke);
  for (const Row& row : kRows) {
    const auto r = run_row(
        2,
        model_arguments(o, {"--global-batch", std::to_string(o.global_batch),
                            "--rounds", std::to_string(o.rounds), "--layout",
                            row.layout, "--zero", std::to_string(row.zero)}));
    if (!r.ok())
      return failed("bench_state: " + name_of(row), r.status().message());
    print_row(name_of(row), *r);
    targets.require(
        name_of(row) + (row.replicas ? " has replicas" : " has no replicas"),
        row.replicas == ((*r)["replica_bytes"] > 0));
    targets.at_most(name_of(row) + ": keeping the state costs, median",
                    kKeepingCosts, (*r)["keeping_costs"][1]);
    if (r->contains("replicas_cost"))
      targets.at_most(name_of(row) + ": replicas cost, median", kReplicasCost,
                      (*r)["replicas_cost"][1]);
  }
  return targets.report();
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) {
  using namespace remesh::bench;  // NOLINT: a program
  Options o;
  CLI::App app{
      "Cost per step of keeping the state in shared memory and of replicas.\n"
      "Example: bench_state --size 15m --rounds 20"};
  add_model_options(app, o);
  app.add_option("--layout", o.layout,
                 "Layout of the ranks that mpirun started");
  app.add_option("--zero", o.zero, "ZeRO stage")->check(CLI::Range(0, 3));
  add_number(app, "--global-batch", o.global_batch, "Sequences per step", 1,
             4096);
  add_number(app, "--rounds", o.rounds, "Rounds measured", 1, 1000);
  CLI11_PARSE(app, argc, argv);
  if (o.smoke) {
    o.make_tiny(2);
    o.global_batch = 4;
    o.rounds = 2;
  }
  return run_with_ranks("bench_state", o, run_all, measure);
}
