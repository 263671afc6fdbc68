#include "worker/trace/trace_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "proto/base/file_system.h"

namespace remesh::trace {
namespace {

using board::Lane;

// Assigns spans, sorted by begin, to the fewest lanes in which none overlap.
std::vector<int> to_lanes(
    const std::vector<std::pair<int64_t, int64_t>>& spans) {
  std::vector<int64_t> ends;  // by lane
  std::vector<int> lanes;
  for (const auto& [begin, end] : spans) {
    size_t lane = 0;
    while (lane < ends.size() && ends[lane] > begin) ++lane;
    if (lane == ends.size()) ends.push_back(0);
    ends[lane] = end;
    lanes.push_back(static_cast<int>(lane));
  }
  return lanes;
}

std::string metadata(int pid, int tid, const char* what, const char* key,
                     const std::string& value) {
  return fmt::format(
      R"({{"ph":"M","pid":{},"tid":{},"name":"{}","args":{{"{}":{}}}}})", pid,
      tid, what, key, value);
}

// Assigns tids from `first_tid` on to the spans of `lane`; returns the number
// of tids used.
int place(const std::vector<FileSpan>& spans, Lane lane, int first_tid,
          std::vector<int>* tids) {
  std::vector<std::pair<int64_t, int64_t>> times;
  std::vector<size_t> of_lane;
  for (size_t i = 0; i < spans.size(); ++i) {
    if (spans[i].lane != lane) continue;
    times.emplace_back(spans[i].begin_us, spans[i].end_us);
    of_lane.push_back(i);
  }
  int used = 0;
  const std::vector<int> lanes = to_lanes(times);
  for (size_t i = 0; i < lanes.size(); ++i) {
    (*tids)[of_lane[i]] = first_tid + lanes[i];
    used = std::max(used, lanes[i] + 1);
  }
  return used;
}

std::string span_line(int pid, int tid, const FileSpan& s) {
  std::string args;
  const auto add = [&](const char* key, const std::string& value) {
    args +=
        fmt::format("{}{}:{}", args.empty() ? "" : ",", json_text(key), value);
  };
  if (!s.group.empty()) add("group", json_text(s.group));
  for (const auto& [key, value] : s.args) add(key, fmt::format("{}", value));
  return fmt::format(
      R"({{"ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"name":{},)"
      R"("cat":"{}","args":{{{}}}}})",
      pid, tid, s.begin_us, s.end_us - s.begin_us, json_text(s.name),
      s.category, args);
}

}  // namespace

std::string json_text(std::string_view text) {
  using Json = nlohmann::json;
  return Json(std::string(text))
      .dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

std::string trace_json(int rank, std::vector<FileSpan> spans,
                       const std::string& about) {
  // Outer spans before inner ones.
  std::stable_sort(spans.begin(), spans.end(),
                   [](const FileSpan& a, const FileSpan& b) {
                     return std::make_pair(a.begin_us, -a.end_us) <
                            std::make_pair(b.begin_us, -b.end_us);
                   });
  std::vector<std::string> lines = {
      metadata(rank, 0, "process_name", "name",
               json_text(fmt::format("rank {}", rank))),
      metadata(rank, 0, "process_sort_index", "sort_index",
               fmt::format("{}", rank)),
      metadata(rank, 0, "thread_name", "name", "\"compute\"")};
  std::vector<int> tids(spans.size(), 0);
  int tid = 1;
  for (const auto& [lane, title] :
       {std::pair(Lane::kCommunication, "communication"),
        std::pair(Lane::kBackground, "background")}) {
    const int used = place(spans, lane, tid, &tids);
    for (int i = 0; i < used; ++i, ++tid)
      lines.push_back(metadata(
          rank, tid, "thread_name", "name",
          json_text(i == 0 ? title : fmt::format("{} {}", title, i + 1))));
  }
  for (size_t i = 0; i < spans.size(); ++i)
    lines.push_back(span_line(rank, tids[i], spans[i]));
  std::string out =
      fmt::format(R"({{"displayTimeUnit":"ms","otherData":{{{}}},)", about);
  out += "\n\"traceEvents\":[\n" + fmt::format("{}", fmt::join(lines, ",\n"));
  return out + "\n]}\n";
}

Status write_atomically(const std::string& folder, const std::string& name,
                        std::string_view text) {
  const auto fs = posix_file_system();
  // A run directory that is gone is not made again.
  if (!fs->exists(parent_path(folder)))
    return not_found(parent_path(folder) + ": no such folder");
  RETURN_IF_ERROR(fs->create_dirs(folder));
  return write_file_atomically(*fs, path_join(folder, name), text);
}

}  // namespace remesh::trace
