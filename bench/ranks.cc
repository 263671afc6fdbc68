#include "bench/ranks.h"

#include <sched.h>

#include <cstdlib>
#include <filesystem>

#include "tests/testing/process.h"

namespace remesh::bench {

namespace {
constexpr int64_t kPatienceMs = 3'600'000;
constexpr size_t kLastLines = 15;
}  // namespace

bool started_by_mpirun() {
  return std::getenv("OMPI_COMM_WORLD_RANK") != nullptr;
}

int cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

Result<std::vector<Json>> run_in_ranks(
    int ranks, const std::vector<std::string>& arguments) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return io_error("/proc/self/exe: " + error.message());
  std::vector<std::string> command = {
      "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
      "-n",     std::to_string(ranks), self.string()};
  command.insert(command.end(), arguments.begin(), arguments.end());
  const testing::Finished f = testing::run_program(command, kPatienceMs);
  if (f.exit.code != 0)
    return internal(fmt::format("mpirun -n {} failed:\n{}", ranks,
                                testing::tail(f.output, kLastLines)));
  std::vector<Json> rows;
  for (const std::string& line : testing::split_lines(f.output)) {
    Json row = Json::parse(line, nullptr, false);
    if (row.is_object()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace remesh::bench
