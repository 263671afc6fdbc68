#include "worker/trace/tracer.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

namespace remesh::trace {
namespace {

constexpr const char* kNames[kNumCategories] = {
    "step", "forward", "backward",  "weight",     "collective",
    "wait", "bubble",  "optimizer", "checkpoint", "data"};

std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto b = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\')
      out += {'\\', c};
    else if (b < 0x20)
      out += fmt::format("\\u{:04x}", b);
    else
      out += c;
  }
  return out + "\"";
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

}  // namespace

// A record with its times and lane.
struct Tracer::Shown {
  Record record;
  int64_t begin_us = 0, end_us = 0;
  int tid = 0;
};

// Gives the spans of `lane` tids from first_tid on; the number used.
int Tracer::place(std::vector<Shown>& shown, Lane lane, int first_tid) {
  std::vector<std::pair<int64_t, int64_t>> spans;
  std::vector<Shown*> of_lane;
  for (Shown& s : shown) {
    if (s.record.lane != lane) continue;
    spans.emplace_back(s.begin_us, s.end_us);
    of_lane.push_back(&s);
  }
  int used = 0;
  const std::vector<int> lanes = to_lanes(spans);
  for (size_t i = 0; i < lanes.size(); ++i) {
    of_lane[i]->tid = first_tid + lanes[i];
    used = std::max(used, lanes[i] + 1);
  }
  return used;
}

std::string Tracer::span_line(int pid, const Shown& s) {
  std::string args;
  const auto add = [&](const char* key, const std::string& value) {
    args +=
        fmt::format("{}{}:{}", args.empty() ? "" : ",", json_text(key), value);
  };
  if (s.record.group != nullptr) add("group", json_text(s.record.group));
  for (const Arg& a : s.record.args)
    if (a.key != nullptr) add(a.key, fmt::format("{}", a.value));
  return fmt::format(
      R"({{"ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"name":{},)"
      R"("cat":"{}","args":{{{}}}}})",
      pid, s.tid, s.begin_us, s.end_us - s.begin_us, json_text(s.record.name),
      category_name(s.record.category), args);
}

const char* category_name(Category category) {
  return kNames[static_cast<size_t>(category)];
}

Tracer::Tracer(TracerOptions options)
    : options_(std::move(options)), able_(true) {
  const int64_t before = monotonic_ns();
  const double unix_s = unix_seconds();
  unix_minus_monotonic_ns_ = static_cast<int64_t>(unix_s * 1e6) * 1000 - before;
}

void Tracer::add(Lane lane, Category category, const char* name,
                 int64_t begin_ns, int64_t end_ns,
                 std::initializer_list<Arg> args, const char* group) {
  if (!on_ || begin_ns == 0) return;
  Record r{.name = name,
           .group = group,
           .begin_ns = begin_ns,
           .end_ns = std::max(begin_ns, end_ns),
           .args = {},
           .category = category,
           .lane = lane};
  size_t i = 0;
  for (const Arg& a : args)
    if (i < kMaxArgs) r.args[i++] = a;
  const std::lock_guard lock(mutex_);
  if (records_.size() >= options_.max_spans) {
    ++dropped_;
    return;
  }
  records_.push_back(r);
}

const char* Tracer::keep(const std::string& text) {
  const std::lock_guard lock(mutex_);
  return kept_.insert(text).first->c_str();
}

size_t Tracer::num_spans() const {
  const std::lock_guard lock(mutex_);
  return records_.size();
}

size_t Tracer::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

std::string Tracer::to_json() const {
  const std::lock_guard lock(mutex_);
  std::vector<Shown> shown;
  for (const Record& r : records_)
    shown.push_back({.record = r,
                     .begin_us = (r.begin_ns + unix_minus_monotonic_ns_) / 1000,
                     .end_us = (r.end_ns + unix_minus_monotonic_ns_) / 1000});
  // Outer spans before those in them.
  std::stable_sort(shown.begin(), shown.end(),
                   [](const Shown& a, const Shown& b) {
                     return std::make_pair(a.begin_us, -a.end_us) <
                            std::make_pair(b.begin_us, -b.end_us);
                   });
  const int pid = options_.rank;
  std::vector<std::string> lines = {
      metadata(pid, 0, "process_name", "name",
               json_text(fmt::format("rank {}", pid))),
      metadata(pid, 0, "process_sort_index", "sort_index",
               fmt::format("{}", pid)),
      metadata(pid, 0, "thread_name", "name", "\"compute\"")};
  int tid = 1;
  for (const auto& [lane, title] :
       {std::pair(Lane::kCommunication, "communication"),
        std::pair(Lane::kBackground, "background")}) {
    const int used = place(shown, lane, tid);
    for (int i = 0; i < used; ++i, ++tid)
      lines.push_back(metadata(
          pid, tid, "thread_name", "name",
          json_text(i == 0 ? title : fmt::format("{} {}", title, i + 1))));
  }
  for (const Shown& s : shown) lines.push_back(span_line(pid, s));
  std::string out = fmt::format(
      R"({{"displayTimeUnit":"ms","otherData":{{"generation":{},"rank":{},)"
      R"("mesh":{},"schedule":{},"chunks":{},"microbatches":{},)"
      R"("dropped":{}}},)",
      options_.generation, pid, json_text(options_.mesh),
      json_text(options_.schedule), options_.chunks, options_.microbatches,
      dropped_);
  out += "\n\"traceEvents\":[\n" + fmt::format("{}", fmt::join(lines, ",\n"));
  return out + "\n]}\n";
}

Status Tracer::write(const std::string& folder) const {
  std::error_code ec;
  std::filesystem::create_directories(folder, ec);
  if (ec) return io_error(folder + ": " + ec.message());
  const std::string path = fmt::format("{}/gen-{}-rank-{}.json", folder,
                                       options_.generation, options_.rank);
  const std::string part = path + ".part";
  {
    std::ofstream file(part, std::ios::binary | std::ios::trunc);
    file << to_json();
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
