// bench_comm: all-reduce of mpi_comm compared with MPI_Allreduce in one run.
//
//   mpirun -n 4 bench_comm [--max-mib 64] [--json]
//
// One row per message size: bus bandwidth (bytes * 2 (p-1) / p / time, as the
// NCCL tests define it) of Comm::all_reduce, of eight overlapping
// start_all_reduce buckets, and of MPI_Allreduce in place; then the ratio of
// the first to the last. The three alternate within each repetition, so that
// noise affects all of them alike; medians are shown.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <vector>

#include "bench/comm/plain_mpi.h"
#include "bench/median.h"
#include "parallel/comm/mpi_comm.h"
#include "proto/base/clock.h"

namespace {

using namespace remesh;  // NOLINT: a program

// Seconds of one call on the slowest rank.
double timed(comm::Comm& world, const std::function<void()>& f) {
  world.barrier();
  const int64_t start = monotonic_ns();
  f();
  double seconds = static_cast<double>(monotonic_ns() - start) * 1e-9;
  world.all_reduce(std::span(&seconds, 1), comm::Op::kMax);
  return seconds;
}

void buckets(comm::Comm& world, std::span<float> data) {
  const size_t bucket = std::max<size_t>(1, data.size() / 8);
  std::vector<comm::RequestPtr> requests;
  for (size_t at = 0; at < data.size(); at += bucket)
    requests.push_back(world.start_all_reduce(
        data.subspan(at, std::min(bucket, data.size() - at)), comm::Op::kSum));
  for (auto& r : requests) r->wait();
}

void row(comm::Comm& world, size_t bytes, bool json) {
  std::vector<float> data(bytes / sizeof(float), 1e-30F);
  const std::span<float> span(data);
  const std::function<void()> ways[] = {
      [&] { world.all_reduce(span, comm::Op::kSum); },
      [&] { buckets(world, span); }, [&] { bench::plain_all_reduce(span); }};
  constexpr size_t kWays = std::size(ways);
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
    gb[w] = static_cast<double>(bytes) * 2 * (p - 1) / p /
            bench::median(seconds[w]) * 1e-9;
  fmt::print(
      fmt::runtime(json ? "{{\"bytes\": {}, \"us\": {:.1f}, "
                          "\"all_reduce_gb_s\": {:.4f}, "
                          "\"buckets_gb_s\": {:.4f}, \"mpi_gb_s\": {:.4f}, "
                          "\"ratio\": {:.3f}}}\n"
                        : "{:>10} {:>10.1f} {:>12.4f} {:>12.4f} {:>12.4f} "
                          "{:>7.2f}\n"),
      bytes, bench::median(seconds[0]) * 1e6, gb[0], gb[1], gb[2],
      gb[0] / gb[2]);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "All-reduce bandwidth compared with MPI_Allreduce.\n"
      "Example: mpirun -n 4 bench_comm --max-mib 16"};
  size_t max_mib = 64;
  bool json = false;
  app.add_option("--max-mib", max_mib, "Largest message, MiB")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  app.add_flag("--json", json, "One JSON object per line");
  CLI11_PARSE(app, argc, argv);

  auto made = comm::MpiWorld::init({});
  if (!made.ok()) {
    fmt::print(stderr, "bench_comm: {}\n", made.status().to_string());
    return 3;
  }
  comm::MpiWorld& mpi = **made;
  if (mpi.size() < 2) {
    fmt::print(stderr, "bench_comm: needs at least 2 ranks: mpirun -n 2\n");
    return 2;
  }
  if (mpi.rank() == 0 && !json)
    fmt::print(
        "{} ranks; bus bandwidth in GB/s\n"
        "{:>10} {:>10} {:>12} {:>12} {:>12} {:>7}\n",
        mpi.size(), "bytes", "us", "all_reduce", "8 buckets", "MPI", "ratio");
  for (size_t bytes = 64; bytes <= max_mib << 20; bytes *= 4)
    row(mpi.world(), bytes, json);
  mpi.finalize();
  return 0;
}
