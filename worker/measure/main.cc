// remesh-measure: measures this host under mpirun and prints its description as
// a cluster (TOML). Started by `remesh plan measure`.
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "parallel/comm/mpi_comm.h"
#include "parallel/jobfile/jobfile.h"
#include "proto/base/exit_code.h"
#include "proto/base/file_system.h"
#include "proto/base/usage.h"
#include "worker/measure/host.h"

namespace remesh::measure {
namespace {

constexpr double kGigabitEthernet = 125e6;

struct Options {
  double network_gb_per_s = 0;
  std::string out;
};

Status measure(comm::MpiWorld& mpi, const Options& o) {
  if (mpi.size() < 2)
    return invalid_argument("needs two ranks: mpirun -n 2 remesh-measure");
  const auto backend = kernels::make_cpu_backend(1);
  ASSIGN_OR_RETURN(Measured m, measure_host(mpi.world(), *backend));
  m.network_bytes_per_s =
      o.network_gb_per_s > 0 ? o.network_gb_per_s * 1e9 : network_speed();
  if (m.network_bytes_per_s == 0) m.network_bytes_per_s = kGigabitEthernet;
  if (mpi.rank() != 0) return ok_status();
  const std::string text = jobfile::description_text(describe(m));
  if (!o.out.empty())
    return write_file_atomically(*posix_file_system(), o.out, text);
  fmt::print("{}", text);
  return ok_status();
}

int run(const Options& o) {
  auto mpi = comm::MpiWorld::init({});
  if (!mpi.ok()) return exit_with("remesh-measure", mpi.status());
  const Status s = measure(**mpi, o);
  if (!s.ok()) (*mpi)->abort(exit_code_of(s), s.message());
  (*mpi)->finalize();
  return kExitOk;
}

}  // namespace
}  // namespace remesh::measure

int main(int argc, char** argv) {
  CLI::App app(
      "Measures this host and prints its description as a cluster, in which a "
      "device is a core.\nExample: mpirun -n 4 remesh-measure");
  app.name("remesh-measure");
  remesh::measure::Options o;
  app.add_option("--out", o.out, "Write it to this file instead");
  app.add_option("--network", o.network_gb_per_s,
                 "GB/s of the host to others. Default: by the speed that its "
                 "interfaces report")
      ->check(CLI::PositiveNumber);
  remesh::report_usage_in_one_line(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? remesh::kExitOk : remesh::kExitUsage;
  }
  return remesh::measure::run(o);
}
