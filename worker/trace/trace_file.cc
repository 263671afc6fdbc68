#include "worker/trace/trace_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace remesh::trace {
namespace {

using board::Lane;

// Bytes of the UTF-8 character that a text begins with; 0: it is none.
// Unicode 15, table 3-7.
size_t utf8_length(std::string_view s) {
  const auto at = [&](size_t i) {
    return i < s.size() ? static_cast<unsigned char>(s[i]) : 0U;
  };
  const unsigned b = at(0);
  if (b < 0x80) return 1;
  const size_t n = b >= 0xC2 && b <= 0xDF   ? 2
                   : b >= 0xE0 && b <= 0xEF ? 3
                   : b >= 0xF0 && b <= 0xF4 ? 4
                                            : 0;
  for (size_t i = 1; i < n; ++i)
    if ((at(i) & 0xC0) != 0x80) return 0;
  const bool bad = (b == 0xE0 && at(1) < 0xA0) || (b == 0xED && at(1) > 0x9F) ||
                   (b == 0xF0 && at(1) < 0x90) || (b == 0xF4 && at(1) > 0x8F);
  return bad ? 0 : n;
}

// Gives spans that are sorted by their begin to as few lanes as need be so that
// none overlaps another of its lane.
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

// Gives the spans of `lane` tids from first_tid on; the number used.
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
  std::string out = "\"";
  while (!text.empty()) {
    const auto b = static_cast<unsigned char>(text[0]);
    const size_t n = utf8_length(text);
    if (n == 0)
      out += "\xEF\xBF\xBD";
    else if (b == '"' || b == '\\')
      out += {'\\', text[0]};
    else if (b < 0x20)
      out += fmt::format("\\u{:04x}", b);
    else
      out += text.substr(0, n);
    text.remove_prefix(std::max<size_t>(n, 1));
  }
  return out + "\"";
}

std::string trace_json(int rank, std::vector<FileSpan> spans,
                       const std::string& about) {
  // Outer spans before those in them.
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

Status write_at_once(const std::string& folder, const std::string& name,
                     std::string_view text) {
  std::error_code ec;
  std::filesystem::create_directories(folder, ec);
  if (ec) return io_error(folder + ": " + ec.message());
  const std::string path = folder + "/" + name;
  const std::string part = path + ".part";
  {
    std::ofstream file(part, std::ios::binary | std::ios::trunc);
    file << text;
    file.flush();
    if (!file) {
      std::filesystem::remove(part, ec);
      return io_error(part + ": cannot write");
    }
  }
  std::filesystem::rename(part, path, ec);
  if (ec) return io_error(path + ": " + ec.message());
  return ok_status();
}

}  // namespace remesh::trace
