#include "worker/trace/trace_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "proto/base/file_system.h"

namespace remesh::trace {
namespace {

using board::Lane;

std::string metadata(int pid, int tid, const char* what, const char* key,
                     const std::string& value) {
  return fmt::format(
      R"({{"ph":"M","pid":{},"tid":{},"name":"{}","args":{{"{}":{}}}}})", pid,
      tid, what, key, value);
}

// Assigns tids from `first_tid` on to the spans of `lane`, sorted by begin: the
// fewest for which none overlap. Returns the number of tids used.
int place(const std::vector<FileSpan>& spans, Lane lane, int first_tid,
          std::vector<int>* tids) {
  std::vector<int64_t> ends;  // of the last span so far, by tid
  for (size_t i = 0; i < spans.size(); ++i) {
    if (spans[i].lane != lane) continue;
    size_t at = 0;
    while (at < ends.size() && ends[at] > spans[i].begin_us) ++at;
    if (at == ends.size()) ends.push_back(0);
    ends[at] = spans[i].end_us;
    (*tids)[i] = first_tid + static_cast<int>(at);
  }
  return static_cast<int>(ends.size());
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
