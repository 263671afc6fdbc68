// remesh plan measure: describes this machine as the cluster `local`.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <sstream>
#include <thread>

#include "coordinator/ctl/children.h"
#include "coordinator/ctl/status_view.h"
#include "coordinator/ctl/verbs.h"
#include "parallel/jobfile/jobfile.h"
#include "parallel/jobfile/local_cluster.h"
#include "proto/base/machine.h"
#include "proto/base/process.h"
#include "proto/base/text.h"
#include "proto/cluster.pb.h"

namespace remesh::ctl {
namespace {

namespace fs = std::filesystem;

struct MeasureOptions {
  std::string out;  // "": local_cluster_path()
  int ranks = 0;    // 0: one for each core
  double network_gb_per_s = 0;
  bool json = false;
};

Result<std::string> in_path(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const fs::path file = fs::path(folder) / program;
    std::error_code ec;
    if (!folder.empty() && fs::is_regular_file(file, ec)) return file.string();
  }
  return not_found(program + ": not in PATH; install Open MPI");
}

// Returns when it has ended; fails with its last lines.
Status run_to_end(const std::vector<std::string>& argv) {
  const Output output;
  Children children;
  RETURN_IF_ERROR(children.start(0, argv, output.path()).status());
  constexpr auto kPoll = std::chrono::milliseconds(20);
  for (;; std::this_thread::sleep_for(kPoll))
    for (const Ended& e : children.reap()) {
      if (e.child != 0) continue;
      if (e.signal == 0 && e.exit_code == 0) return ok_status();
      constexpr size_t kLast = 10;
      std::vector<std::string> lines = output.lines();
      if (lines.size() > kLast)
        lines.erase(lines.begin(),
                    lines.end() - static_cast<std::ptrdiff_t>(kLast));
      return internal(fmt::format("measuring ended with {}:\n{}", e.to_text(),
                                  fmt::join(lines, "\n")));
    }
}

std::string measured_table(const pb::Cluster& c) {
  const pb::Device& d = c.device();
  const pb::Node& n = c.node();
  constexpr double kGiga = 1e3;  // of units of 10^12
  std::vector<std::vector<std::string>> rows = {
      {"processor", d.name()},
      {"cores", fmt::format("{}", n.devices())},
      {"memory", fmt::format("{:.1f} GB",
                             d.memory_gb() * static_cast<double>(n.devices()))},
      {"GEMM, fp32",
       fmt::format("{:.1f} GFLOP/s a core", d.peak_fp32_tflops() * kGiga)},
      {"GEMM, bf16",
       fmt::format("{:.1f} GFLOP/s a core", d.peak_tflops() * kGiga)},
      {"attention",
       fmt::format("{:.1f} GFLOP/s a core",
                   d.peak_fp32_tflops() * kGiga * c.efficiency().attention())},
      {"memory bandwidth",
       fmt::format("{:.1f} GB/s a core", d.memory_gb_per_s())},
      {"between ranks", fmt::format("{:.2f} GB/s, {:.1f} us", n.gb_per_s(),
                                    n.base_us() + n.hop_us())},
      {"between hosts",
       fmt::format("{:.2f} GB/s by the interface's speed",
                   c.network().gb_per_s() * static_cast<double>(n.devices()))}};
  return table(std::move(rows));
}

Result<int> measure(const MeasureOptions& o) {
  const std::string path =
      o.out.empty() ? jobfile::local_cluster_path() : o.out;
  if (path.empty())
    return invalid_argument("no home directory: give --out FILE");
  std::error_code ec;
  // Checked before the work, not after it.
  if (fs::exists(path, ec) && !fs::is_regular_file(path, ec))
    return invalid_argument(path + ": a folder or a device; give a file");
  if (const fs::path folder = fs::path(path).parent_path(); !folder.empty())
    fs::create_directories(folder, ec);
  if (ec) return io_error(path + ": " + ec.message());
  ASSIGN_OR_RETURN(const std::string mpirun, in_path("mpirun"));
  ASSIGN_OR_RETURN(const std::string program, program_beside("remesh-measure"));
  constexpr int kMost = 1024;  // devices of a node in a description
  const int ranks =
      o.ranks > 0 ? o.ranks : std::clamp(usable_cores(), 2, kMost);
  std::vector<std::string> argv = {mpirun,
                                   "--allow-run-as-root",
                                   "--oversubscribe",
                                   "--bind-to",
                                   "none",
                                   "-n",
                                   fmt::format("{}", ranks),
                                   program,
                                   "--out",
                                   fs::absolute(path).string()};
  if (o.network_gb_per_s > 0)
    argv.insert(argv.end(),
                {"--network", fmt::format("{}", o.network_gb_per_s)});
  RETURN_IF_ERROR(run_to_end(argv));
  pb::Cluster cluster;
  RETURN_IF_ERROR(jobfile::load_description(path, &cluster));
  return print_done(
      o.json,
      {{"file", path}, {"description", jobfile::description_text(cluster)}},
      measured_table(cluster) + "written to " + path + "\n");
}

}  // namespace

void add_measure_command(CLI::App* plan, int* code) {
  auto o = std::make_shared<MeasureOptions>();
  CLI::App* c = plan->add_subcommand(
      "measure", "Measure this machine, for the meshes that jobs get on it");
  c->add_option("--out", o->out,
                "Write the description here. Default: as the cluster `local` "
                "of this user");
  c->add_option("--ranks", o->ranks,
                "Ranks that measure at once. Default: one for each core")
      ->check(integer_in(2, 1024));
  c->add_option("--network", o->network_gb_per_s,
                "GB/s between hosts. Default: by the speed that the network "
                "interfaces report, else 0.125")
      ->check(number_in(1e-6, 1e6));
  add_json_option(c, &o->json);
  c->footer(R"(
Takes some seconds, in which the machine should do nothing else. Degrees of -1
are then chosen by what was measured on the hosts of the workers or, for those
that were not measured, on the coordinator's.

Examples:
  remesh plan measure
  remesh plan measure --network 1.25
  remesh plan job.toml --cluster local --gpus 4)");
  c->callback([o, code] { *code = exit_code(measure(*o)); });
}

}  // namespace remesh::ctl
