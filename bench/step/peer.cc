#include "bench/step/peer.h"

#include <fmt/format.h>

#include <regex>
#include <vector>

#include "tests/testing/files.h"
#include "tests/testing/process.h"

namespace remesh::bench {
namespace {

constexpr const char* kPython = "/usr/bin/python3";
constexpr int64_t kPatienceMs = 1'800'000;
constexpr size_t kLastLines = 5;
// A real BLAS is on a par with oneDNN; the reference one is slower by 20 times
// or more.
constexpr double kLeastOfOurs = 0.25;

constexpr const char* kFindBlas = R"(
import re, sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
n = 1024
a = torch.randn(n, n)
best = 1e9
for i in range(6):
    t = time.perf_counter(); a @ a; best = min(best, time.perf_counter() - t)
maps = re.findall(r'/\S*(?:blas|blis|mkl|dnnl)\S*', open('/proc/self/maps').read())
print('sgemm', 2 * n ** 3 / best)
print('libraries', ' '.join(sorted(set(maps))))
)";

Result<std::string> python(const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {kPython};
  command.insert(command.end(), arguments.begin(), arguments.end());
  const testing::Finished f = testing::run_program(command, kPatienceMs);
  if (f.exit.code == 0) return f.output;
  return unavailable(fmt::format("{} {} failed: {}", kPython, arguments.front(),
                                 testing::tail(f.output, kLastLines)));
}

}  // namespace

Result<double> run_peer(const std::string& file, const ModelOptions& o,
                        int threads, int steps) {
  std::vector<std::string> arguments = {file,
                                        "--size",
                                        o.size,
                                        "--batch",
                                        std::to_string(o.batch),
                                        "--seq",
                                        std::to_string(o.seq),
                                        "--threads",
                                        std::to_string(threads),
                                        "--steps",
                                        std::to_string(steps)};
  if (o.dtype == "bf16") arguments.emplace_back("--bf16");
  ASSIGN_OR_RETURN(const std::string text, python(arguments));
  std::smatch match;
  if (!std::regex_search(text, match, std::regex("tokens/s=([0-9.]+)")))
    return unavailable(file + " printed no tokens/s=");
  return std::stod(match[1]);
}

Result<PeerBlas> find_blas(int threads) {
  ASSIGN_OR_RETURN(const std::string text,
                   python({"-c", kFindBlas, std::to_string(threads)}));
  PeerBlas blas;
  for (const std::string& line : testing::split_lines(text)) {
    if (line.starts_with("sgemm ")) blas.sgemm_rate = std::stod(line.substr(6));
    if (line.starts_with("libraries ")) blas.libraries = line.substr(10);
  }
  return blas;
}

std::string blas_problem(const PeerBlas& blas, double our_rate) {
  if (blas.sgemm_rate >= kLeastOfOurs * our_rate) return "";
  return fmt::format(
      "PyTorch multiplies fp32 matrices at {:.1f} GFLOP/s and oneDNN at {:.1f} "
      "here, so PyTorch has no optimized BLAS ({}); install one, such as "
      "libopenblas0-pthread",
      blas.sgemm_rate / 1e9, our_rate / 1e9, blas.libraries);
}

}  // namespace remesh::bench
