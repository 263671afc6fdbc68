#include "bench/ranks.h"

#include <fmt/format.h>

#include <csignal>
#include <filesystem>

#include "proto/base/clock.h"
#include "tests/testing/process.h"

namespace remesh::bench {

namespace {
constexpr int64_t kPatienceMs = 3'600'000;
constexpr int64_t kPollMs = 500;
constexpr size_t kLastLines = 15;
}  // namespace

Result<std::vector<Json>> run_in_ranks(
    int ranks, const std::vector<std::string>& arguments,
    const std::function<void(const Json&)>& show) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return io_error("/proc/self/exe: " + error.message());
  std::vector<std::string> command = {
      "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
      "-n",     std::to_string(ranks), self.string()};
  command.insert(command.end(), arguments.begin(), arguments.end());
  const testing::TempDir dir;
  testing::Process mpirun({.argv = command, .output = dir.path() + "/out"});
  std::vector<Json> rows;
  std::string output;
  const auto read_rows = [&] {
    const size_t seen = output.rfind('\n') + 1;  // 0 if there is no line yet
    output = mpirun.output();
    const size_t end = output.rfind('\n') + 1;
    if (end <= seen) return;
    for (const std::string& line :
         testing::split_lines(output.substr(seen, end - seen))) {
      Json row = Json::parse(line, nullptr, false);
      if (!row.is_object()) continue;
      if (show) show(row);
      rows.push_back(std::move(row));
    }
  };
  const int64_t give_up_ms = monotonic_ms() + kPatienceMs;
  while (!mpirun.wait_ms(kPollMs) && monotonic_ms() < give_up_ms) read_rows();
  if (mpirun.running()) {
    mpirun.kill(SIGKILL);
    mpirun.wait_ms(kPatienceMs);
  }
  read_rows();
  if (mpirun.exit().code != 0)
    return internal(fmt::format("mpirun -n {} failed:\n{}", ranks,
                                testing::tail(output, kLastLines)));
  return rows;
}

Result<Json> run_row(int ranks, const std::vector<std::string>& arguments) {
  ASSIGN_OR_RETURN(const auto rows, run_in_ranks(ranks, arguments));
  if (rows.size() != 1) return internal("the ranks printed no figures");
  return rows.front();
}

}  // namespace remesh::bench
