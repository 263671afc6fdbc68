// `remesh trace`: the merged timeline of a generation.
#include <fmt/format.h>

#include <filesystem>
#include <limits>
#include <map>
#include <memory>

#include "coordinator/ctl/client.h"
#include "coordinator/ctl/timeline.h"
#include "coordinator/ctl/verbs.h"
#include "proto/base/entries.h"
#include "proto/base/file_system.h"
#include "proto/rundir/paths.h"

namespace remesh::ctl {
namespace {

namespace fs = std::filesystem;

struct TraceOptions {
  std::string run;
  std::string output;         // "": traces/gen-G.json of the run
  long long generation = -1;  // -1: the newest that has traces
  bool json = false;
};

// A run's trace files by generation and rank.
std::map<int64_t, std::map<int, fs::path>> find_traces(const fs::path& folder) {
  std::map<int64_t, std::map<int, fs::path>> found;
  for (const fs::path& path : entries_of(folder))
    if (const auto file = rundir::parse_trace_name(path.filename().string()))
      found[file->generation][file->rank] = path;
  return found;
}

Result<int> write_trace(const TraceOptions& o) {
  ASSIGN_OR_RETURN(const Target target, find_target(o.run));
  if (target.run_dir.empty())
    return invalid_argument(o.run +
                            ": traces are read from the run directory; give "
                            "its path, not an address");
  const fs::path folder = rundir::traces_path(target.run_dir);
  const auto all = find_traces(folder);
  if (all.empty())
    return not_found(folder.string() +
                     ": no traces; they are written if profile.enable = true, "
                     "after profile.num_steps traced steps");
  const auto of =
      o.generation < 0 ? std::prev(all.end()) : all.find(o.generation);
  if (of == all.end())
    return not_found(fmt::format(
        "{}: no traces of generation {}; available: {} to {}", folder.string(),
        o.generation, all.begin()->first, all.rbegin()->first));
  constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();
  const auto system = posix_file_system();
  std::vector<RankTrace> ranks;
  for (const auto& [rank, path] : of->second) {
    ASSIGN_OR_RETURN(const std::string text,
                     read_file(*system, path.string(), kNoLimit));
    ASSIGN_OR_RETURN(RankTrace trace, parse_trace(text, path.string()));
    ranks.push_back(std::move(trace));
  }
  const std::string out =
      o.output.empty()
          ? (folder / rundir::merged_trace_name(of->first)).string()
          : o.output;
  if (o.output.empty()) {
    // Another member of the run's group may have put a link there.
    RETURN_IF_ERROR(write_file_atomically(*system, out, merge_traces(ranks)));
  } else {
    RETURN_IF_ERROR(write_output(out, merge_traces(ranks)));
  }
  if (o.json) {
    print_json({{"path", out},
                {"generation", of->first},
                {"mesh", ranks[0].mesh},
                {"ranks", ranks.size()}});
    return kExitOk;
  }
  fmt::print("generation {}, mesh {}: {} ranks\n{}\n{}\n", of->first,
             ranks[0].mesh, ranks.size(), trace_report(ranks), out);
  fmt::print("open it at https://ui.perfetto.dev or chrome://tracing\n");
  return kExitOk;
}

}  // namespace

void add_trace_verb(CLI::App* app, int* code) {
  auto o = std::make_shared<TraceOptions>();
  CLI::App* c = app->add_subcommand(
      "trace", "Merge the ranks' traces into one timeline and summarize it");
  add_run_option(c, &o->run);
  c->add_option("-o,--output", o->output,
                "Output file. Default: traces/gen-G.json of the run");
  c->add_option("--generation", o->generation,
                "Generation to show. Default: the newest that has traces");
  add_json_option(c, &o->json);
  c->footer(R"(
Examples:
  remesh run job.toml --local 4 --set profile.enable=true
  remesh trace
  remesh trace runs/latest -o timeline.json

Open the file at https://ui.perfetto.dev or chrome://tracing.)");
  c->callback([o, code] { *code = exit_code(write_trace(*o)); });
}

}  // namespace remesh::ctl
