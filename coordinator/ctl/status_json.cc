// `remesh status --json`.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "coordinator/ctl/status_view.h"
#include "coordinator/rundir/lines.h"
#include "proto/base/json_output.h"
#include "proto/base/text.h"
#include "proto/rundir/events.h"

namespace remesh::ctl {
namespace {

using Json = nlohmann::ordered_json;

Json settings_json(const pb::JobStatus& s) {
  const pb::Parallel& p = s.parallel();
  return {{"zero_stage", p.zero_stage()},
          {"zero_shard_group", p.zero_shard_group()},
          {"pipeline_schedule", p.pipeline_schedule()},
          {"pipeline_chunks", p.pipeline_chunks()},
          {"recompute", s.recompute()},
          {"recompute_every", s.recompute_every()},
          {"pinned_mesh", or_null(!s.pinned().empty(), s.pinned())},
          {"predicted_bubble",
           or_null(s.has_predicted_bubble(), s.predicted_bubble())}};
}

Json rank_json(const pb::RankStatus& r, const std::string& host) {
  Json j{{"rank", r.rank()},
         {"host", host},
         {"pid", r.pid()},
         {"phase", enum_text(pb::RankStatus::Phase_Name(r.phase()))},
         {"step", r.step()},
         {"microbatch", r.microbatch()},
         {"committed_step", r.committed_step()},
         {"progress", r.progress()},
         {"rss_bytes", r.rss_bytes()},
         {"exited", r.exited()}};
  if (r.has_os_state()) j["os_state"] = r.os_state();
  if (r.has_doing()) {
    j["doing"] = events::doing_text(r);
    j["waits"] = r.waits();
    j["operations"] = r.operations();
  }
  if (r.exited()) {
    j["exit_code"] = r.exit_code();
    j["signal"] = r.signal();
  }
  if (r.has_exposed_comm()) j["exposed_comm"] = r.exposed_comm();
  if (r.has_bubble()) j["bubble"] = r.bubble();
  if (r.has_memory()) j["memory"] = memory_json(memory_of(r.memory()));
  if (r.has_predicted())
    j["predicted_memory"] = memory_json(memory_of(r.predicted()));
  if (!r.error().empty()) j["error"] = r.error();
  if (!r.checkpoint_error().empty())
    j["checkpoint_error"] = r.checkpoint_error();
  return j;
}

Json worker_json(const pb::WorkerStatus& w) {
  Json ranks = Json::array();
  for (const pb::RankStatus& r : w.ranks())
    ranks.push_back(rank_json(r, w.host()));
  return Json{{"name", w.name()},
              {"host", w.host()},
              {"pid", w.pid()},
              {"slots", w.slots()},
              {"cores", w.cores()},
              {"build", w.build()},
              {"age_s", w.age_s()},
              {"state", rundir::state_text(w.state())},
              {"draining", w.draining()},
              {"cordoned", w.cordoned()},
              // Beyond 2^53, which is all that JSON readers must keep.
              {"incarnation", fmt::format("{}", w.incarnation())},
              {"ranks", ranks}};
}

// The keys that come from the files of the run.
void add_facts(const pb::JobStatus& s, const RunFacts& f, Json* j) {
  (*j)["began"] = or_null(f.began > 0, f.began);
  (*j)["left_s"] =
      or_null(f.left_s >= 0 && s.state() == pb::JobStatus::RUNNING, f.left_s);
  (*j)["validation"] = nullptr;
  if (f.validated)
    (*j)["validation"] = Json::parse(rundir::metrics_line(*f.validated));
  (*j)["checkpoint_time"] = nullptr;
  if (f.checkpoint && f.checkpoint->step() == s.checkpoint_step())
    (*j)["checkpoint_time"] = f.checkpoint->time();
}

Json kept_state_json(const pb::JobStatus::KeptState& k) {
  Json hosts = Json::array();
  for (const std::string& host : k.needed_hosts()) hosts.push_back(host);
  Json j{{"step", k.step()},
         {"needed_hosts", hosts},
         {"replicate_every", k.replicate_every()},
         {"safe_step", or_null(k.has_safe_step(), k.safe_step())}};
  if (k.has_kept_until()) j["kept_until"] = k.kept_until();
  return j;
}

}  // namespace

Json mesh_json(const pb::Mesh& m) {
  return {{"dp", m.dp()},
          {"pp", m.pp()},
          {"tp", m.tp()},
          {"cp", std::max(1, m.cp())}};
}

Json memory_json(const MemoryUse& memory) {
  Json j;
  for (const MemoryPurpose& m : kMemoryPurposes) j[m.key] = memory.*m.bytes;
  j["total"] = memory.total();
  return j;
}

std::string status_json(const pb::JobStatus& s, const RunFacts& facts) {
  Json j{{"job", s.job()},       {"state", rundir::state_text(s.state())},
         {"detail", s.detail()}, {"generation", s.generation()},
         {"step", s.step()},     {"steps", s.steps()}};
  j["mesh"] = or_null(s.has_mesh(), mesh_json(s.mesh()));
  j["prediction"] = or_null(s.has_prediction(), s.prediction());
  j["loss"] = nullptr;
  j["tokens_per_s"] = nullptr;
  j["last"] = nullptr;
  if (s.has_last()) {
    j["last"] = Json::parse(rundir::metrics_line(s.last()));
    j["loss"] = j["last"]["loss"];
    j["tokens_per_s"] = j["last"]["tokens_per_s"];
  }
  j["settings"] = settings_json(s);
  j["checkpoint_step"] = s.checkpoint_step();
  add_facts(s, facts, &j);
  j["kept_state"] =
      or_null(s.has_kept_state(), kept_state_json(s.kept_state()));
  j["run_dir"] = s.run_dir();
  j["address"] = s.address();
  j["coordinator"] = Json{{"host", s.coordinator_host()},
                          {"pid", s.coordinator_pid()},
                          {"epoch", s.epoch()}};
  j["no_auth"] = s.no_auth();
  j["spares"] = s.spares();
  j["missing_slots"] = s.missing_slots();
  j["wait_reason"] =
      or_null(s.wait_reason() != pb::JobStatus::NOTHING,
              enum_text(pb::JobStatus::WaitReason_Name(s.wait_reason())));
  j["scale"] = or_null(s.scale() > 0, s.scale());
  j["cordons"] = Json::array();
  for (const pb::Cordon& c : s.cordons()) {
    j["cordons"].push_back(Json{{"host", c.host()},
                                {"reason", c.reason()},
                                {"failures", c.failures()},
                                {"remaining_s", c.remaining_s()}});
    if (!c.worker().empty()) j["cordons"].back()["worker"] = c.worker();
    if (!c.peer().empty()) j["cordons"].back()["peer"] = c.peer();
  }
  j["dropped"] = s.dropped();
  j["problems"] = Json::array();
  for (const pb::JobStatus::Problem& p : s.problems())
    j["problems"].push_back(problem_text(p));
  j["workers"] = Json::array();
  for (const pb::WorkerStatus& w : s.workers())
    j["workers"].push_back(worker_json(w));
  j["events"] = Json::array();
  for (const pb::EventRecord& e : s.events())
    j["events"].push_back(Json::parse(rundir::event_line(e)));
  return json_output(j);
}

}  // namespace remesh::ctl
