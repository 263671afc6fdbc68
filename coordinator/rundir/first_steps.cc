#include "coordinator/rundir/first_steps.h"

#include <cstdlib>
#include <fstream>
#include <set>
#include <string_view>

#include "coordinator/rundir/lines.h"

namespace remesh::rundir {
namespace {

constexpr std::string_view kKey = "\"generation\":";

// Whether a line looks like one of metrics_line(), which need not be parsed to
// count as whole.
bool is_as_written(std::string_view line) {
  return line.starts_with("{\"step\":") && line.ends_with("}") &&
         line.find(kKey) != std::string_view::npos;
}

}  // namespace

std::vector<core::FirstStep> first_steps(const std::string& metrics_path,
                                         int64_t* damaged) {
  std::vector<core::FirstStep> out;
  std::set<int64_t> seen;
  std::ifstream in(metrics_path);
  for (std::string line; std::getline(in, line);) {
    if (is_as_written(line) &&
        seen.contains(std::atoll(line.c_str() + line.find(kKey) + kKey.size())))
      continue;
    const auto m = parse_metrics_line(line);
    if (!m.ok() && damaged != nullptr) ++*damaged;
    if (m.ok() && m->has_generation() && seen.insert(m->generation()).second)
      out.push_back({m->generation(), m->step()});
  }
  return out;
}

}  // namespace remesh::rundir
