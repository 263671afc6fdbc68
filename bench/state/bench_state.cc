// bench_state: what it costs a step that its state survives a killed process
// and a lost worker.
//
//   bench_state [--size 42m]      starts mpirun with two ranks, once a row
//
// Every rank has two engines of the same model and mesh: one updates its state
// in place in memory of its own, the other out of place in a segment of shared
// memory, and commits it (worker/train/state_home.h). Rounds of three steps
// alternate: in place; kept; kept, with replicas to the other worker
// (worker/train/replication.h) from the update before to the agreement. A round
// gives two ratios, each of neighbouring steps; the medians over all rounds are
// printed, and their quartiles, because machines are shared.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "bench/kept_state.h"
#include "bench/models.h"
#include "parallel/comm/mpi_comm.h"
#include "parallel/geometry/batch.h"
#include "proto/base/clock.h"
#include "proto/base/rng.h"

namespace remesh::bench {
namespace {

using engine::Engine;
using geometry::Layout;

struct Options {
  std::string size = "42m";
  std::string layout;
  int zero = 0;
  int64_t global_batch = 16;  // the defaults of a job file
  int64_t batch = 4;
  int64_t seq = 256;
  int rounds = 12;
  std::string dtype = "bf16";
};

struct Batch {
  std::vector<int32_t> tokens;
  std::vector<model::MicroBatch> list;
};

Batch make_batch(const Options& o, int64_t count, int64_t vocab) {
  Batch b;
  const int64_t each = o.batch * o.seq;
  for (int64_t i = 0; i <= count * each; ++i)
    b.tokens.push_back(
        static_cast<int32_t>(random_u64(1, 2, static_cast<uint64_t>(i)) %
                             static_cast<uint64_t>(vocab)));
  for (int64_t m = 0; m < count; ++m)
    b.list.push_back({b.tokens.data() + m * each,
                      b.tokens.data() + m * each + 1, o.batch, o.seq});
  return b;
}

double median(std::vector<double> v, double at = 0.5) {
  std::sort(v.begin(), v.end());
  return v[static_cast<size_t>(at * static_cast<double>(v.size() - 1) + 0.5)];
}

// One rank's two engines.
class Pair {
 public:
  Pair(const Options& o, const Layout& layout, comm::Comm& world)
      : o_(o),
        world_(world),
        table_(geometry::ParamTable::llama(models().at(o.size))),
        backend_(kernels::make_cpu_backend(1)),
        kept_(table_, layout, world.rank(), o.global_batch, o.seq) {}

  Status make(const Layout& layout) {
    ASSIGN_OR_RETURN(mesh_, comm::Mesh::make(world_, layout));
    ASSIGN_OR_RETURN(other_mesh_, comm::Mesh::make(world_, layout));
    batch_ = make_batch(
        o_, geometry::deal(microbatches(), layout.dp, mesh_->coord().dp).size(),
        table_.config().vocab_size);
    ASSIGN_OR_RETURN(own_, engine(*mesh_, nullptr));
    ASSIGN_OR_RETURN(in_segment_, engine(*other_mesh_, &kept_.home()));
    for (Engine* e : {own_.get(), in_segment_.get()}) {
      e->initialise(1);
      e->state_loaded();
    }
    return kept_.replicate(*in_segment_, world_);
  }

  enum class How { kInPlace, kKept, kReplicated };
  // Seconds of a step, with all that belongs to it. A replica belongs to the
  // step beside which it is made.
  Result<double> step(How how) {
    Engine& e = how == How::kInPlace ? *own_ : *in_segment_;
    world_.barrier();
    const int64_t began = monotonic_ns();
    if (how == How::kReplicated) kept_.after_step();
    Status replicated;
    const auto r = e.run({.lr = 1e-4,
                          .microbatches = batch_.list,
                          .global_tokens = o_.global_batch * o_.seq,
                          .facts = [&] {
                            if (how == How::kReplicated)
                              replicated = kept_.before_agreement();
                            return engine::Facts{};
                          }});
    RETURN_IF_ERROR(r.status());
    RETURN_IF_ERROR(replicated);
    double s = static_cast<double>(monotonic_ns() - began) * 1e-9;
    update_s_ = r->times.update;
    world_.all_reduce(std::span<double>(&s, 1), comm::Op::kMax);
    return s;
  }
  double update_s() const { return update_s_; }
  uint64_t replica_bytes() const { return kept_.replica_bytes(); }
  uint64_t state_bytes() const { return 3 * own_->weights().size_bytes(); }

 private:
  int64_t microbatches() const { return o_.global_batch / o_.batch; }
  Result<std::unique_ptr<Engine>> engine(comm::Mesh& mesh,
                                         engine::StateStore* state) {
    return Engine::create(table_, mesh,
                          {.zero = {.stage = o_.zero},
                           .dtype = o_.dtype == "bf16" ? model::Dtype::kBf16
                                                       : model::Dtype::kFp32,
                           .num_microbatches = microbatches(),
                           .max_batch = o_.batch,
                           .max_seq = o_.seq,
                           .optimizer = {.max_norm = 1}},
                          *backend_, {}, state);
  }

  const Options& o_;
  comm::Comm& world_;
  const geometry::ParamTable table_;
  const std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<comm::Mesh> mesh_, other_mesh_;
  Kept kept_;
  Batch batch_;
  std::unique_ptr<Engine> own_, in_segment_;
  double update_s_ = 0;
};

Status measure(const Options& o, comm::MpiWorld& mpi) {
  ASSIGN_OR_RETURN(const Layout layout, Layout::parse(o.layout));
  Pair pair(o, layout, mpi.world());
  RETURN_IF_ERROR(pair.make(layout));
  std::vector<double> plain, kept, replicated, plain_update, kept_update;
  using How = Pair::How;
  for (int i = -1; i < o.rounds; ++i) {  // the first warms up
    ASSIGN_OR_RETURN(const double a, pair.step(How::kInPlace));
    const double a_update = pair.update_s();
    ASSIGN_OR_RETURN(const double b, pair.step(How::kKept));
    const double b_update = pair.update_s();
    ASSIGN_OR_RETURN(const double c, pair.step(How::kReplicated));
    if (i < 0) continue;
    plain.push_back(a);
    kept.push_back(b / a);
    replicated.push_back(c / b);
    plain_update.push_back(a_update);
    kept_update.push_back(b_update);
  }
  if (mpi.rank() != 0) return ok_status();
  const auto percent = [](const std::vector<double>& v, double at) {
    return 100 * (median(v, at) - 1);
  };
  const std::string replicas =
      pair.replica_bytes() == 0
          ? "none: copies of each other"
          : fmt::format("{:+.1f} % ({:+.1f} to {:+.1f})",
                        percent(replicated, 0.5), percent(replicated, 0.25),
                        percent(replicated, 0.75));
  fmt::print("{:<14} {:>8.0f} {:>9.0f} {:>9.0f}/{:<6.0f} {:>7} {:<20} {}\n",
             o.layout + (o.zero > 0 ? fmt::format(" ZeRO {}", o.zero) : ""),
             1e3 * median(plain),
             static_cast<double>(pair.state_bytes()) / (1 << 20),
             1e3 * median(plain_update), 1e3 * median(kept_update),
             fmt::format("{:+.1f} %", percent(kept, 0.5)),
             fmt::format("({:+.1f} to {:+.1f})", percent(kept, 0.25),
                         percent(kept, 0.75)),
             replicas);
  std::fflush(stdout);
  return ok_status();
}

int run_all(const std::string& self, const Options& o) {
  fmt::print(
      "{} in {}, global batches of {} x {} in microbatches of {}; medians of "
      "{} rounds (quartiles)\n{:<14} {:>8} {:>9} {:>16} {:>28} {}\n",
      o.size, o.dtype, o.global_batch, o.seq, o.batch, o.rounds,
      "configuration", "step ms", "state MiB", "update ms", "kept costs",
      "replicas cost");
  std::fflush(stdout);
  int bad = 0;
  for (const char* row : {"--layout dp2", "--layout dp2 --zero 1",
                          "--layout dp2 --zero 3", "--layout tp2"}) {
    const std::string command = fmt::format(
        "OMP_NUM_THREADS=1 mpirun --allow-run-as-root --oversubscribe "
        "--bind-to none -n 2 {} --size {} --dtype {} --global-batch {} "
        "--batch {} --seq {} --rounds {} {}",
        self, o.size, o.dtype, o.global_batch, o.batch, o.seq, o.rounds, row);
    if (std::system(command.c_str()) != 0) ++bad;
  }
  return bad == 0 ? 0 : 1;
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) {
  using namespace remesh;  // NOLINT: a program
  bench::Options o;
  CLI::App app{
      "What states in shared memory, and replicas of them, cost a step.\n"
      "Example: bench_state --size 15m --rounds 20"};
  app.add_option("--size", o.size, "Model: tiny, 15m, 42m or 110m")
      ->capture_default_str()
      ->check(CLI::IsMember({"tiny", "15m", "42m", "110m"}));
  app.add_option("--layout", o.layout,
                 "This mesh alone, in the ranks that mpirun started");
  app.add_option("--zero", o.zero, "ZeRO stage")->check(CLI::Range(0, 3));
  app.add_option("--global-batch", o.global_batch, "Sequences a step")
      ->check(CLI::Range(1, 4096));
  app.add_option("--batch", o.batch, "Sequences a microbatch")
      ->check(CLI::Range(1, 4096));
  app.add_option("--seq", o.seq, "Tokens a sequence")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--rounds", o.rounds, "Rounds measured")
      ->check(CLI::Range(1, 1000));
  app.add_option("--dtype", o.dtype, "bf16 or fp32")
      ->check(CLI::IsMember({"bf16", "fp32"}));
  CLI11_PARSE(app, argc, argv);
  if (o.layout.empty()) return bench::run_all(argv[0], o);
  auto mpi = comm::MpiWorld::init({});
  if (!mpi.ok()) {
    fmt::print(stderr, "bench_state: {}\n", mpi.status().to_string());
    return 3;
  }
  const Status s = bench::measure(o, **mpi);
  if (!s.ok()) {
    fmt::print(stderr, "bench_state: {}: {}\n", o.layout, s.to_string());
    (*mpi)->abort(1, s.to_string());
  }
  (*mpi)->finalize();
  return 0;
}
