// `remesh trace`: the timeline of a generation.
#include <fmt/format.h>

#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "coordinator/ctl/client.h"
#include "coordinator/ctl/commands.h"
#include "coordinator/ctl/timeline.h"

namespace remesh::ctl {
namespace {

namespace fs = std::filesystem;

// Generation and rank of "gen-3-rank-0.json".
std::optional<std::pair<int64_t, int>> parse_name(const std::string& name) {
  int64_t generation = 0;
  int rank = 0, used = 0;
  if (std::sscanf(name.c_str(), "gen-%ld-rank-%d.json%n", &generation, &rank,
                  &used) != 2 ||
      used != static_cast<int>(name.size()))
    return std::nullopt;
  return std::pair(generation, rank);
}

Result<std::string> read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  if (!in) return io_error(path.string() + ": cannot be read");
  return text.str();
}

// The files of a run's traces by generation and rank.
std::map<int64_t, std::map<int, fs::path>> find_traces(const fs::path& folder) {
  std::map<int64_t, std::map<int, fs::path>> found;
  std::error_code ec;
  for (fs::directory_iterator it(folder, ec), end; !ec && it != end;
       it.increment(ec))
    if (const auto id = parse_name(it->path().filename().string()))
      found[id->first][id->second] = it->path();
  return found;
}

Status write_trace(const TraceOptions& o) {
  ASSIGN_OR_RETURN(const Target target, find_target(o.run));
  if (target.run_dir.empty())
    return invalid_argument(o.run +
                            ": traces are files of the run directory; give "
                            "its path");
  const fs::path folder = fs::path(target.run_dir) / "traces";
  const auto all = find_traces(folder);
  if (all.empty())
    return not_found(folder.string() +
                     ": no traces; a job with profile.enable = true writes "
                     "them once profile.num_steps steps were traced");
  const auto of =
      o.generation < 0 ? std::prev(all.end()) : all.find(o.generation);
  if (of == all.end())
    return not_found(fmt::format(
        "{}: no traces of generation {}; there are those of {} to {}",
        folder.string(), o.generation, all.begin()->first,
        all.rbegin()->first));
  std::vector<RankTrace> ranks;
  for (const auto& [rank, path] : of->second) {
    ASSIGN_OR_RETURN(const std::string text, read_file(path));
    ASSIGN_OR_RETURN(RankTrace trace, parse_trace(text, path.string()));
    ranks.push_back(std::move(trace));
  }
  const std::string out =
      o.output.empty()
          ? (folder / fmt::format("gen-{}.json", of->first)).string()
          : o.output;
  {
    std::ofstream file(out, std::ios::binary | std::ios::trunc);
    file << merge_traces(ranks);
    file.flush();
    if (!file) return io_error(out + ": cannot be written");
  }
  fmt::print("generation {}, mesh {}: {} ranks\n{}\n{}\n", of->first,
             ranks[0].mesh, ranks.size(), trace_report(ranks), out);
  fmt::print("open it at https://ui.perfetto.dev or chrome://tracing\n");
  return ok_status();
}

}  // namespace

int trace_command(const TraceOptions& options) {
  const Status s = write_trace(options);
  return s.ok() ? kExitOk : fail(s);
}

}  // namespace remesh::ctl
