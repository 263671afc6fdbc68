// remesh-measure: measures this host under mpirun and prints its description as
// a cluster (TOML). Started by `remesh plan measure`.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <optional>
#include <utility>

#include "parallel/comm/mpi_comm.h"
#include "parallel/jobfile/jobfile.h"
#include "parallel/jobfile/local_cluster.h"
#include "proto/base/exit_code.h"
#include "proto/base/file_system.h"
#include "proto/base/machine.h"
#include "proto/base/usage.h"
#include "worker/measure/host.h"
#include "worker/measure/measured.h"

namespace remesh::measure {
namespace {

constexpr double kGigabitEthernet = 125e6;

struct Options {
  double network_gb_per_s = 0;
  std::string out;
  bool core = false;
};

// Fails if nobody could read it, as when a rate is absurd.
Result<std::string> text_of(Measured m, const Options& o) {
  m.network_bytes_per_s =
      o.network_gb_per_s > 0 ? o.network_gb_per_s * 1e9 : network_speed();
  if (m.network_bytes_per_s == 0) m.network_bytes_per_s = kGigabitEthernet;
  std::string text = jobfile::description_text(describe(m));
  pb::Cluster cluster;
  RETURN_IF_ERROR(
      jobfile::parse_description(text, {.name = "measured"}, &cluster));
  return text;
}

Status measure(comm::MpiWorld& mpi, const Options& o) {
  if (mpi.size() < 2)
    return invalid_argument("needs two ranks: mpirun -n 2 remesh-measure");
  const auto backend = kernels::make_cpu_backend(1);
  ASSIGN_OR_RETURN(Measured m, measure_host(mpi.world(), *backend));
  if (mpi.rank() != 0) return ok_status();
  ASSIGN_OR_RETURN(const std::string text, text_of(std::move(m), o));
  if (!o.out.empty())
    return write_file_atomically(*posix_file_system(), o.out, text);
  fmt::print("{}", text);
  return ok_status();
}

// What was found out before, if it can be used. Hosts are replaced under their
// names, so what was measured must be of this processor, in the way of today.
std::optional<std::string> known_text(const std::string& path) {
  const auto text = jobfile::read_text(path);
  pb::Cluster cluster;
  if (!text.ok() ||
      !jobfile::parse_description(*text, {.name = path}, &cluster).ok() ||
      (cluster.device().source().starts_with(kMeasured) &&
       (cluster.device().source() != kSource ||
        cluster.device().name() != processor_name())))
    return std::nullopt;
  return *text;
}

// Of several workers of a host one measures, and the others wait for it. Where
// the result cannot be kept, each measures for itself.
Status measure_once(const Options& o) {
  const std::string path = jobfile::local_cluster_path();
  std::error_code ec;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(),
                                      ec);
  const int lock = path.empty() ? -1
                                : open((path + ".lock").c_str(),
                                       O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  const bool kept = lock >= 0 && flock(lock, LOCK_EX) == 0;
  std::optional<std::string> text = known_text(path);
  if (!text) {
    ASSIGN_OR_RETURN(Measured m, measure_cores(usable_cores()));
    ASSIGN_OR_RETURN(text, text_of(std::move(m), o));
    if (kept) (void)write_file_atomically(*posix_file_system(), path, *text);
  }
  fmt::print("{}", *text);
  return ok_status();
}

int run(const Options& o) {
  if (o.core) {
    const Status s = measure_once(o);
    return s.ok() ? kExitOk : exit_with("remesh-measure", s);
  }
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
  app.add_flag("--core", o.core,
               "Without mpirun: print what is known of this host, or measure "
               "its cores and keep that");
  if (const auto ended = remesh::parse_arguments(app, argc, argv))
    return *ended;
  return remesh::measure::run(o);
}
