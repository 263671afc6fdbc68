// bench_comm: all-reduce of mpi_comm compared with MPI_Allreduce in one run.
//
//   bench_comm [--ranks 4] [--max-mib 64] [--json]
//
// One row per message size: bus bandwidth (bytes * 2 (p-1) / p / time, as the
// NCCL tests define it) of Comm::all_reduce, of eight overlapping
// start_all_reduce buckets, and of MPI_Allreduce in place; then the ratio of
// the first to the last. The three alternate within each repetition, so that
// noise affects all of them alike; medians are shown. Target: large messages in
// buckets, as the engine sends them, reach half of MPI's bandwidth. On one host
// both go through shared memory.
// The C interface only; Open MPI's C++ one needs another library.
#define OMPI_SKIP_MPICXX 1

#include <fmt/format.h>
#include <mpi.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <vector>

#include "bench/options.h"
#include "bench/ranks.h"
#include "parallel/comm/mpi_comm.h"
#include "proto/base/clock.h"
#include "proto/base/machine.h"
#include "proto/base/median.h"

namespace remesh::bench {
namespace {

struct Options {
  int ranks = 4;
  size_t max_mib = 64;
  bool json = false;
  bool smoke = false;
};
constexpr size_t kSmallest = 64;  // bytes
constexpr size_t kLarge = size_t{1} << 20;
constexpr double kOverMpi = 0.5;

// Seconds of one call on the slowest rank.
double timed(comm::Comm& world, const std::function<void()>& f) {
  world.barrier();
  const int64_t start = monotonic_ns();
  f();
  double seconds = seconds_since(start);
  world.all_reduce(std::span(&seconds, 1), comm::Op::kMax);
  return seconds;
}

void plain_all_reduce(std::span<float> data) {
  MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(data.size()),
                MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

void buckets(comm::Comm& world, std::span<float> data) {
  const size_t bucket = std::max<size_t>(1, data.size() / 8);
  std::vector<comm::RequestPtr> requests;
  for (size_t at = 0; at < data.size(); at += bucket)
    requests.push_back(world.start_all_reduce(
        data.subspan(at, std::min(bucket, data.size() - at)), comm::Op::kSum));
  for (auto& r : requests) r->wait();
}

// Whether each way adds the ranks' numbers exactly.
bool correct(comm::Comm& world, std::span<float> data,
             std::span<const std::function<void()>> ways) {
  const int p = world.size();
  const int total = p * (p + 1) / 2;
  const auto sum = static_cast<float>(total);
  return std::all_of(ways.begin(), ways.end(), [&](const auto& way) {
    std::fill(data.begin(), data.end(), static_cast<float>(world.rank() + 1));
    way();
    return std::all_of(data.begin(), data.end(),
                       [&](float x) { return x == sum; });
  });
}

void row(comm::Comm& world, size_t bytes) {
  std::vector<float> data(bytes / sizeof(float));
  const std::span<float> span(data);
  const std::function<void()> ways[] = {
      [&] { world.all_reduce(span, comm::Op::kSum); },
      [&] { buckets(world, span); }, [&] { plain_all_reduce(span); }};
  constexpr size_t kWays = std::size(ways);
  const bool right = correct(world, span, ways);
  std::fill(data.begin(), data.end(), 1e-30F);
  // Small messages are repeated within one timing.
  const int inner = bytes < (size_t{1} << 16) ? 50 : 1;
  const int outer = bytes < (size_t{1} << 22) ? 31 : 9;
  std::vector<double> seconds[kWays];
  for (int i = -2; i < outer; ++i)
    for (size_t w = 0; w < kWays; ++w) {
      const double s = timed(world, [&] {
        for (int k = 0; k < inner; ++k) ways[w]();
      });
      if (i >= 0) seconds[w].push_back(s / inner);
    }
  if (world.rank() != 0) return;
  const double p = world.size();
  double gb[kWays];
  for (size_t w = 0; w < kWays; ++w)
    gb[w] = static_cast<double>(bytes) * 2 * (p - 1) / p / median(seconds[w]) *
            1e-9;
  const Json out = {
      {"bytes", bytes},           {"us", median(seconds[0]) * 1e6},
      {"all_reduce_gb_s", gb[0]}, {"buckets_gb_s", gb[1]},
      {"mpi_gb_s", gb[2]},        {"ratio", gb[0] / gb[2]},
      {"correct", right}};
  fmt::print("{}\n", out.dump());
}

std::vector<size_t> sizes_up_to(size_t max_mib) {
  std::vector<size_t> out;
  for (size_t bytes = kSmallest; bytes <= max_mib << 20; bytes *= 4)
    out.push_back(bytes);
  return out;
}

Status measure(const Options& o, comm::MpiWorld& mpi) {
  for (const size_t bytes : sizes_up_to(o.max_mib)) row(mpi.world(), bytes);
  return ok_status();
}

void print_table(const Options& o, const std::vector<Json>& rows) {
  fmt::print(
      "{} ranks on {} cores; bus bandwidth in GB/s\n"
      "{:>10} {:>10} {:>12} {:>12} {:>12} {:>7}\n",
      o.ranks, usable_cores(), "bytes", "us", "all_reduce", "8 buckets", "MPI",
      "ratio");
  for (const Json& r : rows)
    fmt::print("{:>10} {:>10.1f} {:>12.4f} {:>12.4f} {:>12.4f} {:>7.2f}\n",
               r["bytes"].get<size_t>(), r["us"].get<double>(),
               r["all_reduce_gb_s"].get<double>(),
               r["buckets_gb_s"].get<double>(), r["mpi_gb_s"].get<double>(),
               r["ratio"].get<double>());
}

int run(const Options& o) {
  const size_t max_mib = o.smoke ? 1 : o.max_mib;
  const auto rows =
      run_in_ranks(o.ranks, {"--max-mib", std::to_string(max_mib)});
  if (!rows.ok()) return failed("bench_comm", rows.status().message());
  if (o.json)
    for (const Json& r : *rows) fmt::print("{}\n", r.dump());
  else
    print_table(o, *rows);
  Targets targets(o.smoke);
  targets.require("one row per message size",
                  rows->size() == sizes_up_to(max_mib).size());
  for (const Json& r : *rows)
    targets.require(
        fmt::format("sums of {} bytes are exact", r["bytes"].get<size_t>()),
        r["correct"]);
  for (const Json& r : *rows)
    if (r["bytes"].get<size_t>() >= kLarge)
      targets.at_least(
          fmt::format("{} bytes: 8 buckets over MPI_Allreduce",
                      r["bytes"].get<size_t>()),
          kOverMpi,
          r["buckets_gb_s"].get<double>() / r["mpi_gb_s"].get<double>());
  return targets.report(stderr);
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) {
  using namespace remesh::bench;  // NOLINT: a program
  Options o;
  CLI::App app{
      "All-reduce bandwidth compared with MPI_Allreduce.\n"
      "Example: bench_comm --ranks 2 --max-mib 16"};
  add_number(app, "--ranks", o.ranks, "Ranks", 2, 256);
  add_number(app, "--max-mib", o.max_mib, "Largest message, MiB", 1, 4096);
  app.add_flag("--json", o.json, "One JSON object per line");
  app.add_flag("--smoke", o.smoke, "Small messages; no target is judged");
  CLI11_PARSE(app, argc, argv);
  return run_with_ranks("bench_comm", o, run, measure);
}
