#include "coordinator/rundir/first_steps.h"

#include <cstdlib>
#include <fstream>
#include <set>
#include <string_view>

#include "coordinator/rundir/lines.h"

namespace remesh::rundir {

std::vector<core::FirstStep> first_steps(const std::string& metrics_path,
                                         int64_t* damaged) {
  constexpr std::string_view kKey = "\"generation\":";
  std::vector<core::FirstStep> out;
  std::set<int64_t> seen;
  std::ifstream in(metrics_path);
  for (std::string line; std::getline(in, line);) {
    if (damaged != nullptr &&
        !(line.starts_with("{\"step\":") && line.ends_with("}")))
      ++*damaged;
    const size_t at = line.find(kKey);
    if (at == std::string::npos ||
        seen.contains(std::atoll(line.c_str() + at + kKey.size())))
      continue;
    const auto m = parse_metrics_line(line);
    if (!m.ok() || !seen.insert(m->generation()).second) continue;
    out.push_back({m->generation(), m->step()});
  }
  return out;
}

}  // namespace remesh::rundir
