#include "tests/testing/records.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "tests/testing/cluster.h"

namespace remesh::testing {
namespace {

bool inside(const std::vector<Window>& windows, double time) {
  return std::any_of(windows.begin(), windows.end(), [&](const Window& w) {
    return time > w.from && time <= w.to;
  });
}

// The source of the state in a mesh event.
bool is_memory(const std::string& source) {
  return source.find("memory") != std::string::npos;
}

}  // namespace

Findings check_records(const std::vector<Json>& metrics,
                       const std::vector<Json>& events,
                       const std::vector<Window>& windows) {
  Findings out;
  out.steps = static_cast<int64_t>(metrics.size());
  const std::string broken = sequence_error(metrics);
  if (!broken.empty()) out.errors.push_back("metrics.jsonl: " + broken);
  std::map<int64_t, std::string> digest_of;
  for (const Json& m : metrics) {
    if (m.contains("digest"))
      digest_of[m.value("step", int64_t{0})] = m["digest"].dump();
    else
      out.errors.push_back(
          fmt::format("step {} has no digest", m.value("step", 0)));
  }
  std::map<int64_t, int64_t> restored;  // generation -> step
  // Steps recomputed on another mesh differ in their bits, and metrics.jsonl
  // has the original ones.
  std::set<int64_t> computed_again;
  for (const Json& e : events) {
    const std::string name = e.value("event", "");
    const double time = e.value("time", 0.0);
    if (name == "metrics_gap") out.errors.push_back(e.dump());
    if (name == "mesh") {
      ++out.generations;
      const std::string source = e.value("source", "");
      if (is_memory(source))
        ++out.from_memory;
      else if (source.find("step-") != std::string::npos)
        ++out.from_checkpoint;
      const int64_t lost = e.value("lost_steps", int64_t{0});
      out.lost_steps += lost;
      // The step of an event is the last one finished before it.
      const int64_t step = e.value("step", int64_t{0}) - lost;
      restored[e.value("generation", int64_t{0})] = step;
      for (int64_t k = 1; k <= lost; ++k) computed_again.insert(step + k);
      if (lost == 0 || inside(windows, time)) continue;
      out.lost_outside += lost;
      out.errors.push_back(
          fmt::format("{} finished steps lost: {}", lost, e.dump()));
    }
    if (name == "training" && e.contains("digest")) {
      const int64_t step = restored[e.value("generation", int64_t{0})];
      if (step == 0 || computed_again.contains(step)) continue;
      const auto it = digest_of.find(step);
      ++out.digests;
      if (it == digest_of.end() || it->second != e["digest"].dump())
        out.errors.push_back(fmt::format(
            "the state restored is not that of step {} ({}): {}", step,
            it == digest_of.end() ? "none" : it->second, e.dump()));
    }
  }
  return out;
}

int64_t first_difference(const std::vector<std::string>& lines_a,
                         const std::vector<std::string>& lines_b) {
  for (size_t i = 0; i < std::max(lines_a.size(), lines_b.size()); ++i)
    if (i >= lines_a.size() || i >= lines_b.size() ||
        raw_value(lines_a[i], "loss").empty() ||
        raw_value(lines_a[i], "loss") != raw_value(lines_b[i], "loss"))
      return static_cast<int64_t>(i) + 1;
  return 0;
}

}  // namespace remesh::testing
