// bench_memory: how much memory a rank needs, compared with the prediction of
// the planner.
//
//   bench_memory [--size 15m]        starts mpirun once per configuration
//
// One row per configuration, for the rank that needs most: the bytes predicted
// (planner::predict_memory), the bytes the engine accounts for, and the growth
// of the peak resident memory of the process (VmHWM) from before the engine was
// created to after three steps. The baseline of every process (code, MPI,
// stacks) is measured before and subtracted. With --keep-state the state lives
// in shared memory, as in training, and each rank is a worker of its own;
// resident memory includes those pages.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/kept_state.h"
#include "bench/models.h"
#include "bench/under_mpi.h"
#include "parallel/comm/mpi_comm.h"
#include "parallel/geometry/batch.h"
#include "parallel/planner/memory.h"
#include "proto/base/rng.h"
#include "tests/testing/engine.h"
#include "worker/engine/engine.h"

namespace remesh::bench {
namespace {

using engine::Engine;
using geometry::Layout;

struct Options {
  std::string size = "15m";
  std::string layout;
  int zero = 0;
  std::string schedule = "1f1b";
  int chunks = 1;
  std::string recompute = "none";
  int64_t microbatches = 8;
  int64_t batch = 8;
  int64_t seq = 256;
  std::string dtype = "bf16";
  bool keep_state = false;  // in shared memory, with replicas
};

// The value of a line of /proc/self/status, in KiB.
double status_kib(const std::string& key) {
  std::ifstream in("/proc/self/status");
  std::string word;
  double kib = 0;
  while (in >> word)
    if (word == key + ":") in >> kib;
  return kib;
}

double mib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

uint64_t total(const board::Memory& m) {
  return m.weights + m.gradients + m.optimizer + m.activations + m.buffers;
}

Status steps(const Options& o, const Layout& layout, Engine& e, int dp_index,
             int64_t vocab, Kept* kept) {
  const auto mine = geometry::even_share(o.microbatches, layout.dp, dp_index);
  const int64_t each = o.batch * o.seq;
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i <= mine.size() * each; ++i)
    tokens.push_back(
        static_cast<int32_t>(random_u64(1, 2, static_cast<uint64_t>(i)) %
                             static_cast<uint64_t>(vocab)));
  std::vector<model::MicroBatch> list;
  for (int64_t m = 0; m < mine.size(); ++m)
    list.push_back({tokens.data() + m * each, tokens.data() + m * each + 1,
                    o.batch, o.seq});
  for (int i = 0; i < 3; ++i) {
    Status replicated;
    RETURN_IF_ERROR(e.run({.lr = 1e-4,
                           .microbatches = list,
                           .global_tokens = o.microbatches * each,
                           .facts =
                               [&] {
                                 if (kept != nullptr)
                                   replicated = kept->before_agreement();
                                 return engine::Facts{};
                               }})
                        .status());
    RETURN_IF_ERROR(replicated);
    if (kept != nullptr) kept->after_step();
  }
  return kept != nullptr ? kept->before_agreement() : ok_status();
}

// Gathers the figures of all ranks and prints those of the rank with the
// highest peak, on rank 0.
void print_row(const Options& o, comm::Comm& world, const planner::Memory& want,
               const board::Memory& held, double peak) {
  const double mine[] = {
      mib(want.total()),     mib(total(held)),    peak,
      mib(want.weights),     mib(want.gradients), mib(want.optimizer),
      mib(want.activations), mib(want.buffers),   mib(held.weights),
      mib(held.gradients),   mib(held.optimizer), mib(held.activations),
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
  std::string name = o.layout;
  if (o.zero > 0) name += fmt::format(" ZeRO {}", o.zero);
  if (o.layout.find("pp") != std::string::npos) name += " " + o.schedule;
  if (o.recompute != "none") name += " " + o.recompute;
  if (o.keep_state) name += " kept";
  fmt::print(
      "{:<28} {:>9.1f} {:>8.1f} {:>8.1f} {:>8.3f}   {:.0f}/{:.0f} "
      "{:.0f}/{:.0f} {:.0f}/{:.0f} {:.0f}/{:.0f} {:.0f}/{:.0f}\n",
      name, w[0], w[1], w[2], w[2] / w[0], w[3], w[8], w[4], w[9], w[5], w[10],
      w[6], w[11], w[7], w[12]);
  std::fflush(stdout);
}

// Measures one configuration; called on every rank of an MPI world.
Status measure(const Options& o, comm::MpiWorld& mpi) {
  comm::Comm& world = mpi.world();
  ASSIGN_OR_RETURN(const Layout layout, Layout::parse(o.layout));
  ASSIGN_OR_RETURN(const auto schedule, geometry::parse_schedule(o.schedule));
  const auto table = geometry::ParamTable::make(models().at(o.size));
  const auto backend = kernels::make_cpu_backend(1);
  const bool bf16 = o.dtype == "bf16";
  ASSIGN_OR_RETURN(const auto mesh, comm::Mesh::make(world, layout));
  world.barrier();
  const double before_kib = status_kib("VmRSS");
  std::optional<Kept> kept;
  if (o.keep_state)
    kept.emplace(table, layout, world.rank(), o.microbatches * o.batch, o.seq);
  ASSIGN_OR_RETURN(
      const auto e,
      engine::make_engine(
          table, *mesh,
          {.zero = {.stage = o.zero},
           .schedule = schedule,
           .chunks = o.chunks,
           .recompute = *geometry::parse_recompute(o.recompute),
           .dtype = bf16 ? model::Dtype::kBf16 : model::Dtype::kFp32,
           .num_microbatches = o.microbatches,
           .max_batch = o.batch,
           .max_seq = o.seq,
           .optimizer = {.max_norm = 1}},
          *backend, {}, kept ? &kept->home() : nullptr));
  engine::initialise(*e, *backend, 1);
  e->state_loaded();
  if (kept) RETURN_IF_ERROR(kept->replicate(*e, world));
  RETURN_IF_ERROR(steps(o, layout, *e, mesh->coord().dp,
                        table.config().vocab_size, kept ? &*kept : nullptr));
  const double peak = (status_kib("VmHWM") - before_kib) / 1024;
  const planner::JobShape shape{
      .model = table.config(),
      .T = o.seq,
      .B = o.batch,
      .microbatches = o.microbatches,
      .bf16 = bf16,
      .zero_stage = o.zero,
      .schedule = schedule,
      .chunks = o.chunks,
      .recompute = *geometry::parse_recompute(o.recompute),
      .keep_state = o.keep_state,
      .replicas = o.keep_state ? 1 : 0};
  const planner::Memory want =
      planner::predict_memory(shape, layout, world.rank());
  board::Memory held = e->memory();
  if (kept) held.buffers += kept->replica_bytes();
  print_row(o, world, want, held, peak);
  return ok_status();
}

struct Row {
  int ranks;
  const char* arguments;
};

constexpr Row kRows[] = {{1, "--layout dp1"},
                         {1, "--layout dp1 --recompute selective"},
                         {1, "--layout dp1 --recompute full"},
                         {2, "--layout dp2"},
                         {2, "--layout dp2 --zero 1"},
                         {2, "--layout dp2 --zero 3"},
                         {2, "--layout dp2 --zero 3 --microbatches 2"},
                         {1, "--layout dp1 --keep-state"},
                         {2, "--layout dp2 --keep-state"},
                         {2, "--layout dp2 --zero 1 --keep-state"},
                         {2, "--layout tp2"},
                         {2, "--layout cp2"},
                         {2, "--layout pp2"},
                         {2, "--layout pp2 --schedule zb-h1"},
                         {4, "--layout dp2,tp2 --zero 2 --recompute full"},
                         {4, "--layout dp2,pp2 --zero 3 --schedule gpipe"}};

int run_all(const std::string& self, const Options& o) {
  fmt::print(
      "{} in {}, microbatches of {} x {}; MiB of the rank with the highest "
      "peak\n{:<28} {:>9} {:>8} {:>8} {:>8}   predicted/held: weights "
      "gradients optimizer activations buffers\n",
      o.size, o.dtype, o.batch, o.seq, "configuration", "predicted", "held",
      "peak", "ratio");
  std::fflush(stdout);
  int bad = 0;
  for (const Row& row : kRows) {
    const std::string command = fmt::format(
        "OMP_NUM_THREADS=1 mpirun --allow-run-as-root --oversubscribe "
        "--bind-to none -n {} {} --size {} --dtype {} --batch {} --seq {} {}",
        row.ranks, self, o.size, o.dtype, o.batch, o.seq, row.arguments);
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
      "Memory that ranks need, compared with the planner's prediction.\n"
      "Example: bench_memory --size 42m"};
  app.add_option("--size", o.size, "Model: 15m or 42m")
      ->capture_default_str()
      ->check(CLI::IsMember({"15m", "42m"}));
  app.add_option("--layout", o.layout,
                 "Only this layout, in the ranks that mpirun started");
  app.add_option("--zero", o.zero, "ZeRO stage")->check(CLI::Range(0, 3));
  app.add_option("--schedule", o.schedule, "gpipe, 1f1b, interleaved, zb-h1");
  app.add_option("--chunks", o.chunks, "Model chunks per pipeline rank")
      ->check(CLI::Range(1, 64));
  app.add_option("--recompute", o.recompute, "none, selective or full")
      ->check(CLI::IsMember({"none", "selective", "full"}));
  app.add_option("--microbatches", o.microbatches, "Microbatches per step")
      ->check(CLI::Range(1, 4096));
  app.add_option("--batch", o.batch, "Sequences per microbatch")
      ->check(CLI::Range(1, 4096));
  app.add_option("--seq", o.seq, "Tokens per sequence")
      ->check(CLI::Range(1, 1 << 20));
  app.add_flag("--keep-state", o.keep_state,
               "State and replicas in shared memory");
  app.add_option("--dtype", o.dtype, "bf16 or fp32")
      ->check(CLI::IsMember({"bf16", "fp32"}));
  CLI11_PARSE(app, argc, argv);
  if (o.layout.empty()) return bench::run_all(argv[0], o);
  return bench::under_mpi("bench_memory", o.layout, [&](comm::MpiWorld& mpi) {
    return bench::measure(o, mpi);
  });
}
