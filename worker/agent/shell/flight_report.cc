#include "worker/agent/shell/flight_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "proto/base/entries.h"
#include "proto/base/text.h"
#include "proto/rundir/paths.h"
#include "worker/trace/trace_file.h"

namespace remesh::agent {
namespace {

using board::FlightGroup;
using board::FlightOp;
using board::Lane;
using board::OpKind;

bool is_pass(OpKind kind) {
  return kind == OpKind::kForward || kind == OpKind::kBackward ||
         kind == OpKind::kWeight;
}

// "all_reduce of 8.0 MiB on data (ranks 0 2)", "recv from rank 3 of ...".
std::string op_text(const FlightOp& op, const FlightGroup& group) {
  std::string out = op.name;
  if (op.peer >= 0)
    out += fmt::format(" {} rank {}", op.sends ? "to" : "from", op.peer);
  if (op.bytes > 0)
    out += " of " + format_bytes(static_cast<uint64_t>(op.bytes));
  if (group.name.empty()) return out;
  out += " on " + group.name;
  constexpr size_t kShown = 8;
  if (op.peer >= 0 || group.ranks.empty()) return out;
  const size_t shown = std::min(group.ranks.size(), kShown);
  out += " (ranks";
  for (size_t i = 0; i < shown; ++i) out += fmt::format(" {}", group.ranks[i]);
  if (static_cast<size_t>(group.size) > shown)
    out += fmt::format(" and {} more", static_cast<size_t>(group.size) - shown);
  return out + ")";
}

// Phases in which a rank without a recorded operation waits for others.
bool waits_in(pb::RankStatus::Phase phase) {
  return phase == pb::RankStatus::CONNECTING ||
         phase == pb::RankStatus::STOPPING;
}

void fill_at(const FlightOp& op, const FlightGroup& group, int64_t now_ns,
             pb::RankOperation* at) {
  at->set_name(op.name);
  at->set_seconds(
      static_cast<double>(std::max<int64_t>(0, now_ns - op.begin_ns)) * 1e-9);
  if (op.bytes >= 0) at->set_bytes(op.bytes);
  if (op.peer >= 0) at->set_peer(op.peer);
  if (op.number >= 0) at->set_number(op.number);
  if (group.name.empty()) return;
  at->set_group(group.name);
  if (static_cast<size_t>(group.size) == group.ranks.size())
    for (const int r : group.ranks) at->add_ranks(r);
}

trace::FileSpan to_span(const FlightOp& op, const board::Flight& flight,
                        int64_t died_ns, int64_t offset_ns) {
  const int64_t end_ns =
      op.end_ns != 0 ? op.end_ns : std::max(op.begin_ns, died_ns);
  trace::FileSpan s{.lane = op.lane,
                    .name = op.name,
                    .category = board::op_kind_name(op.kind),
                    .begin_us = (op.begin_ns + offset_ns) / 1000,
                    .end_us = (end_ns + offset_ns) / 1000};
  if (op.group >= 0 && static_cast<size_t>(op.group) < flight.groups.size())
    s.group = flight.groups[static_cast<size_t>(op.group)].name;
  s.args.emplace_back("step", op.step);
  if (is_pass(op.kind)) s.args.emplace_back("microbatch", op.microbatch);
  if (op.bytes >= 0) s.args.emplace_back("bytes", op.bytes);
  if (op.peer >= 0) s.args.emplace_back("peer", op.peer);
  if (op.number >= 0) s.args.emplace_back("number", op.number);
  if (op.end_ns == 0) s.args.emplace_back("unfinished", 1);
  return s;
}

std::string phase_text(const pb::RankStatus& s) {
  return enum_text(pb::RankStatus::Phase_Name(s.phase()));
}

// "step 12, microbatch 3, backward, all_reduce of 8.0 MiB on data (ranks 0
// 2)". `under_way` has the innermost operation first; if it is empty, the text
// has the phase of the snapshot.
std::string position_text(const std::vector<FlightOp>& under_way,
                          const FlightGroup& group,
                          const pb::RankStatus& snapshot) {
  std::vector<std::string> parts;
  const int64_t step =
      under_way.empty() ? snapshot.step() : under_way.front().step;
  if (step > 0) parts.push_back(fmt::format("step {}", step));
  // From the outermost operation to the innermost. The step is already named.
  for (size_t i = under_way.size(); i-- > 0;) {
    const FlightOp& op = under_way[i];
    if (is_pass(op.kind))
      parts.push_back(fmt::format("microbatch {}", op.microbatch));
    if (i == 0)
      parts.push_back(op_text(op, group));
    else if (op.kind != OpKind::kStep)
      parts.push_back(op.name);
  }
  if (under_way.size() == 1 && under_way[0].kind == OpKind::kStep && step > 0)
    parts.back() = phase_text(snapshot);
  if (under_way.empty()) parts.push_back(phase_text(snapshot));
  return join(parts);
}

}  // namespace

void fill_doing(const board::Board& board, int64_t now_ns,
                pb::RankStatus* status) {
  const std::vector<FlightOp> at = board.flight().under_way();
  FlightGroup group;
  if (!at.empty()) group = board.flight().group(at.front().group);
  status->set_operations(board.flight().begun());
  status->set_doing(position_text(at, group, *status));
  status->set_waits(at.empty() ? waits_in(status->phase())
                               : board::waits_for_others(at.front().kind));
  if (!at.empty()) fill_at(at.front(), group, now_ns, status->mutable_at());
}

std::string flight_json(const FlightAbout& a, const board::Flight& flight,
                        int64_t died_ns, int64_t unix_minus_monotonic_ns) {
  using trace::json_text;
  std::vector<trace::FileSpan> spans;
  for (const FlightOp& op : flight.ops)
    spans.push_back(to_span(op, flight, died_ns, unix_minus_monotonic_ns));
  std::string groups, log;
  for (const FlightGroup& g : flight.groups)
    groups += fmt::format(R"({}{{"name":{},"size":{},"ranks":[{}]}})",
                          groups.empty() ? "" : ",", json_text(g.name), g.size,
                          fmt::join(g.ranks, ","));
  for (const std::string& line : a.log_tail)
    log += (log.empty() ? "" : ",") + json_text(line);
  return trace::trace_json(
      a.rank, std::move(spans),
      fmt::format(
          R"("generation":{},"rank":{},"worker":{},"host":{},)"
          R"("pid":{},"ended":{},"doing":{},"error":{},"log_tail":[{}],)"
          R"("operations":{},"torn":{},"groups":[{}])",
          a.generation, a.rank, json_text(a.worker), json_text(a.host), a.pid,
          json_text(a.ended), json_text(a.doing), json_text(a.error), log,
          flight.begun, flight.torn, groups));
}

void remove_old_traces(const std::string& folder, int keep) {
  namespace fs = std::filesystem;
  std::vector<std::pair<int64_t, fs::path>> files;
  std::set<int64_t> generations;
  for (const fs::path& path : entries_of(folder)) {
    const std::string name = path.filename().string();
    auto file = rundir::parse_flight_name(name);
    if (!file) file = rundir::parse_trace_name(name);
    if (!file) continue;
    files.emplace_back(file->generation, path);
    generations.insert(file->generation);
  }
  std::error_code ignored;
  while (generations.size() > static_cast<size_t>(keep)) {
    for (const auto& [generation, path] : files)
      if (generation == *generations.begin()) fs::remove(path, ignored);
    generations.erase(generations.begin());
  }
}

Status write_flight(const std::string& folder, const FlightAbout& about,
                    const std::string& json, int keep) {
  RETURN_IF_ERROR(trace::write_atomically(
      folder, rundir::flight_name({about.generation, about.rank}), json));
  remove_old_traces(folder, keep);
  return ok_status();
}

}  // namespace remesh::agent
