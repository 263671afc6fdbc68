#include "proto/rundir/paths.h"

#include <fmt/format.h>

namespace remesh::rundir {
namespace {

std::optional<RankFile> parse(const std::string& name, const char* form,
                              std::string (*make)(const RankFile&)) {
  long long generation = 0;
  RankFile file;
  if (std::sscanf(name.c_str(), form, &generation, &file.rank) != 2)
    return std::nullopt;
  file.generation = generation;
  return make(file) == name ? std::optional(file) : std::nullopt;
}

}  // namespace

std::string rank_logs_path(const std::string& run, int64_t generation) {
  return fmt::format("{}/gen-{}", logs_path(run), generation);
}

std::optional<int64_t> parse_rank_logs_name(const std::string& name) {
  long long generation = 0;
  const bool ok = std::sscanf(name.c_str(), "gen-%lld", &generation) == 1 &&
                  name == fmt::format("gen-{}", generation);
  return ok ? std::optional<int64_t>(generation) : std::nullopt;
}

std::string trace_name(const RankFile& file) {
  return fmt::format("gen-{}-rank-{}.json", file.generation, file.rank);
}

std::optional<RankFile> parse_trace_name(const std::string& name) {
  return parse(name, "gen-%lld-rank-%d", trace_name);
}

std::string flight_name(const RankFile& file) {
  return fmt::format("flight-g{:03}-rank-{}.json", file.generation, file.rank);
}

std::optional<RankFile> parse_flight_name(const std::string& name) {
  return parse(name, "flight-g%lld-rank-%d", flight_name);
}

std::string merged_trace_name(int64_t generation) {
  return fmt::format("gen-{}.json", generation);
}

}  // namespace remesh::rundir
