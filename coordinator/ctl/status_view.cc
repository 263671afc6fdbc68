#include "coordinator/ctl/status_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "coordinator/rundir/lines.h"
#include "proto/base/text.h"

namespace remesh::ctl {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kShownEvents = 8;

// Rows of cells as aligned columns, two spaces apart, indented by two.
std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], display_width(row[i]));
    }
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line = " ";
    for (size_t i = 0; i < row.size(); ++i) {
      line += " " + row[i] +
              std::string(widths[i] - display_width(row[i]) + 1, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::string rank_text(const pb::RankStatus& r) {
  if (r.exited()) {
    return r.signal() != 0
               ? fmt::format("{}: ended by signal {}", r.rank(), r.signal())
               : fmt::format("{}: exited {}", r.rank(), r.exit_code());
  }
  std::string out =
      fmt::format("{}: pid {} step {}", r.rank(), r.pid(), r.step());
  if (r.os_state() == "T") out += " stopped";
  return out;
}

std::string worker_table(const pb::JobStatus& s) {
  std::vector<std::vector<std::string>> rows = {
      {"worker", "host", "pid", "slots", "state", "last sign", "ranks"}};
  for (const pb::WorkerStatus& w : s.workers()) {
    std::vector<std::string> ranks;
    for (const pb::RankStatus& r : w.ranks()) ranks.push_back(rank_text(r));
    rows.push_back({w.name(), w.host(), fmt::format("{}", w.pid()),
                    fmt::format("{}", w.slots()),
                    w.state() + (w.draining() ? ", leaving" : ""),
                    format_duration(w.age_s()) + " ago",
                    ranks.empty() ? "-" : join(ranks, "; ")});
  }
  return s.workers_size() == 0 ? "  no workers\n" : table(rows);
}

Json rank_json(const pb::RankStatus& r, const std::string& host) {
  Json j{{"rank", r.rank()},
         {"host", host},
         {"pid", r.pid()},
         {"phase", r.phase()},
         {"step", r.step()},
         {"microbatch", r.microbatch()},
         {"committed_step", r.committed_step()},
         {"progress", r.progress()},
         {"rss_bytes", r.rss_bytes()},
         {"exited", r.exited()}};
  if (r.has_os_state()) j["os_state"] = r.os_state();
  if (r.exited()) {
    j["exit_code"] = r.exit_code();
    j["signal"] = r.signal();
  }
  if (!r.error().empty()) j["error"] = r.error();
  if (!r.checkpoint_error().empty()) {
    j["checkpoint_error"] = r.checkpoint_error();
  }
  return j;
}

Json worker_json(const pb::WorkerStatus& w) {
  Json ranks = Json::array();
  for (const pb::RankStatus& r : w.ranks()) {
    ranks.push_back(rank_json(r, w.host()));
  }
  return Json{{"name", w.name()},
              {"host", w.host()},
              {"pid", w.pid()},
              {"slots", w.slots()},
              {"cores", w.cores()},
              {"age_s", w.age_s()},
              {"state", w.state()},
              {"draining", w.draining()},
              {"incarnation", w.incarnation()},
              {"ranks", ranks}};
}

}  // namespace

std::string status_text(const pb::JobStatus& s, const Style& style) {
  const double share = s.steps() > 0 ? 100.0 * static_cast<double>(s.step()) /
                                           static_cast<double>(s.steps())
                                     : 0.0;
  std::string out = fmt::format("job {}: {}, step {} of {} ({:.0f}%)", s.job(),
                                s.state(), s.step(), s.steps(), share);
  if (!s.detail().empty() && s.state() != "running") out += "\n  " + s.detail();
  out += "\n\n";
  std::vector<std::vector<std::string>> rows;
  rows.push_back({"run", s.run_dir()});
  rows.push_back(
      {"mesh", s.has_mesh()
                   ? fmt::format("{}, generation {}, {} spare slot{}",
                                 rundir::mesh_text(s.mesh()), s.generation(),
                                 s.spares(), s.spares() == 1 ? "" : "s")
                   : fmt::format("none, generation {}", s.generation())});
  if (s.has_last()) {
    const pb::StepMetrics& m = s.last();
    rows.push_back({"last step",
                    fmt::format("loss {:.4f}, {} tokens/s, {:.3f} s", m.loss(),
                                short_number(m.tokens_per_s()), m.step_s())});
  }
  rows.push_back(
      {"checkpoint", s.checkpoint_step() > 0
                         ? fmt::format("step {}", s.checkpoint_step())
                         : "none of this generation"});
  rows.push_back(
      {"coordinator", fmt::format("{} on {}, pid {}", s.address(),
                                  s.coordinator_host(), s.coordinator_pid())});
  out += table(rows) + "\n" + worker_table(s);
  if (s.events_size() > 0) out += "\n";
  for (int i = std::max(0, s.events_size() - kShownEvents); i < s.events_size();
       ++i) {
    const pb::EventRecord& e = s.events(i);
    out += "  " + clock_text(e.time()) + "  " +
           toned(event_text(e), event_tone(e), style) + "\n";
  }
  return out;
}

std::string status_json(const pb::JobStatus& s) {
  Json j{{"job", s.job()},       {"state", s.state()},
         {"detail", s.detail()}, {"generation", s.generation()},
         {"step", s.step()},     {"steps", s.steps()}};
  j["mesh"] = nullptr;
  if (s.has_mesh()) {
    j["mesh"] = Json{
        {"dp", s.mesh().dp()}, {"pp", s.mesh().pp()}, {"tp", s.mesh().tp()}};
  }
  j["loss"] = nullptr;
  j["tokens_per_s"] = nullptr;
  j["last"] = nullptr;
  if (s.has_last()) {
    j["last"] = Json::parse(rundir::metrics_line(s.last()));
    j["loss"] = j["last"]["loss"];
    j["tokens_per_s"] = j["last"]["tokens_per_s"];
  }
  j["checkpoint_step"] = s.checkpoint_step();
  j["run_dir"] = s.run_dir();
  j["address"] = s.address();
  j["coordinator"] = Json{{"host", s.coordinator_host()},
                          {"pid", s.coordinator_pid()},
                          {"epoch", s.epoch()}};
  j["spares"] = s.spares();
  j["dropped"] = s.dropped();
  j["workers"] = Json::array();
  for (const pb::WorkerStatus& w : s.workers()) {
    j["workers"].push_back(worker_json(w));
  }
  j["events"] = Json::array();
  for (const pb::EventRecord& e : s.events()) {
    j["events"].push_back(Json::parse(rundir::event_line(e)));
  }
  return j.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace remesh::ctl
