#include "tests/scenario/scripted_cluster.h"

#include <fmt/format.h>

#include <sstream>
#include <utility>

#include "proto/base/rank_request.h"

namespace remesh::scenario {
namespace {

std::string lower(std::string s) {
  for (char& c : s) c = static_cast<char>(std::tolower(c));
  return s;
}

}  // namespace

std::string mesh_text(const pb::Mesh& m) {
  std::string s = fmt::format(" dp={}", m.dp());
  if (m.pp() > 1) s += fmt::format(" pp={}", m.pp());
  if (m.tp() > 1) s += fmt::format(" tp={}", m.tp());
  if (m.cp() > 1) s += fmt::format(" cp={}", m.cp());
  return s;
}

namespace {

std::string assignment_text(const pb::Assignment& a) {
  std::string places;
  for (const pb::RankPlace& p : a.ranks())
    places +=
        fmt::format("{}{}:{}", places.empty() ? "" : " ", p.rank(), p.worker());
  return places;
}

std::string durable_text(const pb::Durable& d) {
  std::string s =
      fmt::format("journal {} g{}", lower(pb::Durable::Phase_Name(d.phase())),
                  d.generation());
  if (d.phase() == pb::Durable::PREPARING)
    s += fmt::format(
        "{} ranks {} from step {}", mesh_text(d.assignment().mesh()),
        assignment_text(d.assignment()), d.assignment().source().step());
  if (d.phase() == pb::Durable::PREPARING &&
      d.assignment().source().kind() == pb::Source::MEMORY)
    s += " in memory";
  if (d.rescue()) s += " rescue";
  if (d.phase() == pb::Durable::FINISHING && !d.finish().save())
    s += " handoff";
  const pb::MeshRequest& asked = d.mesh_request();
  if (asked.scale() > 0) s += fmt::format(" scale={}", asked.scale());
  for (const pb::Refusals::State& b : d.refusals().states())
    s += fmt::format(" bad=g{}:{}", b.generation(), b.step());
  for (const pb::Branches::Abandoned& a : d.branches().abandoned())
    s += fmt::format(" g{}..g{} abandoned from step {}", a.after() + 1,
                     a.generation() - 1, a.step());
  if (d.stop().asked()) s += " stop_requested";
  if (!asked.pinned().empty()) s += " pinned " + asked.pinned();
  if (asked.changed()) s += " mesh_asked";
  const auto place = [](const pb::Cordon& c) {
    return c.worker().empty() ? c.host() : c.worker() + "@" + c.host();
  };
  for (const pb::Cordon& c : d.host_faults().cordons())
    s += " cordoned=" + place(c);
  for (const pb::Cordon& c : d.host_faults().suspects())
    if (d.phase() == pb::Durable::WAITING)
      s += fmt::format(" {}={}{}:{}", c.in_training() ? "deaths" : "failures",
                       place(c), c.peer().empty() ? "" : "+" + c.peer(),
                       c.failures());
  return s;
}

std::string event_text(const pb::EventRecord& e) {
  std::string s = fmt::format("event {} g{}", e.event(), e.generation());
  if (e.has_worker() && !e.worker().empty()) s += " worker=" + e.worker();
  if (e.has_rank()) s += fmt::format(" rank={}", e.rank());
  if (e.has_host() && !e.has_worker()) s += " host=" + e.host();
  if (e.lost_steps() != 0) s += fmt::format(" lost_steps={}", e.lost_steps());
  if (e.has_source()) s += " source=\"" + e.source() + "\"";
  if (e.has_cause()) s += " cause=\"" + e.cause() + "\"";
  if (e.has_from() && e.has_mesh())
    s += fmt::format(" from{} to{}", mesh_text(e.from()), mesh_text(e.mesh()));
  if (e.has_detail()) s += " (" + e.detail() + ")";
  return s;
}

std::string directive_text(const pb::Directive& d) {
  std::string s =
      fmt::format("tell {} {} g{}", d.worker(),
                  pb::Directive::Goal_Name(d.goal()), d.generation());
  if (!d.save()) s += " handoff";
  if (d.want_fences()) s += " want_fences";
  if (d.checkpoint_request() > 0)
    s += fmt::format(" checkpoint_request={}", d.checkpoint_request());
  return s;
}

std::string report_text(const pb::Report& r) {
  std::string s =
      fmt::format("{} is {} g{}", r.worker(), pb::Report::State_Name(r.state()),
                  r.generation());
  if (r.leaving()) s += " leaving";
  if (r.busy() && r.state() != pb::Report::RUNNING) s += " busy";
  std::set<std::pair<int64_t, int64_t>> held;
  for (const pb::StateHolding& h : r.holdings())
    held.emplace(h.generation(), h.step());
  for (const auto& [generation, step] : held)
    s += fmt::format(" holds g{}:{}", generation, step);
  return s;
}

pb::Job job_of(const Command& c) {
  pb::Job job;
  job.mutable_job()->set_name("scenario");
  job.mutable_train()->set_steps(c.number("steps", 10));
  job.mutable_train()->set_global_batch_size(c.number("microbatches", 16));
  job.mutable_train()->set_local_batch_size(1);
  job.mutable_checkpoint()->set_interval(c.number("interval", 0));
  auto* m = job.mutable_model();
  m->set_n_layers(8);
  m->set_n_heads(8);
  m->set_n_kv_heads(8);
  m->set_hidden_dim(704);
  m->set_vocab_size(257);
  auto* p = job.mutable_parallel();
  p->set_data_parallel_degree(c.number("dp", -1));
  p->set_tensor_parallel_degree(c.number("tp", 1));
  p->set_pipeline_parallel_degree(c.number("pp", 1));
  p->set_context_parallel_degree(c.number("cp", 1));
  auto* e = job.mutable_elastic();
  std::istringstream layouts(c.text("layouts", ""));
  for (std::string l; layouts >> l;) e->add_layouts(l);
  e->set_min_slots(c.number("min_slots", 1));
  e->set_max_slots(c.number("max_slots", -1));
  e->set_join_window_ms(c.number("join_window_ms", 500));
  e->set_dead_after_ms(c.number("dead_after_ms", 2000));
  e->set_closed_after_ms(c.number("closed_after_ms", -1));
  e->set_hang_after_s(c.real("hang_after_s", -1));
  e->set_max_same_failures(c.number("max_same_failures", 3));
  e->set_max_failures_without_progress(c.number("max_failures", 10));
  p->set_zero_stage(c.number("zero", 0));
  e->set_keep_state(c.number("keep_state", 0) != 0);
  e->set_replicas(c.number("replicas", 1));
  e->set_replicate_every(c.number("replicate_every", 1));
  e->set_rejoin_wait_ms(c.number("rejoin_wait_ms", 3000));
  return job;
}

}  // namespace

ScriptedCluster::ScriptedCluster(const Command& job) : Cluster(job_of(job)) {}

void ScriptedCluster::say(const std::string& line) {
  output_ += fmt::format("{:<6} {}\n", now_, line);
}

void ScriptedCluster::note(const core::Action& action) {
  if (const auto* p = std::get_if<core::Persist>(&action)) {
    say(durable_text(p->durable));
  } else if (const auto* s = std::get_if<core::SendDirective>(&action)) {
    const std::string text = directive_text(s->directive);
    if (std::exchange(told_[s->directive.worker()], text) != text) say(text);
  } else if (const auto* r = std::get_if<core::Respond>(&action)) {
    say(r->reply.ok() ? "answer ok" : "answer error: " + r->reply.error());
  } else if (const auto* x = std::get_if<core::Refuse>(&action)) {
    say("refuses: " + x->refusal.reason());
  } else if (const auto* e = std::get_if<core::EmitEvent>(&action)) {
    say(event_text(e->record));
  } else if (const auto* m = std::get_if<core::AppendMetrics>(&action)) {
    say(fmt::format("metrics step {} g{}", m->metrics.step(),
                    m->metrics.generation()));
  } else if (const auto* x = std::get_if<core::Exit>(&action)) {
    say(fmt::format("coordinator exits with {}{}", x->code,
                    x->message.empty() ? "" : ": " + x->message));
  }
}

void ScriptedCluster::note(const Worker& w, const agent::Action& action) {
  if (const auto* s = std::get_if<agent::Send>(&action)) {
    if (!s->message.has_report()) return;
    const std::string text = report_text(s->message.report());
    if (std::exchange(said_[w.name], text) != text) say(text);
  } else if (const auto* p = std::get_if<agent::Spawn>(&action)) {
    live_ = p->assignment.generation();
    std::string ranks;
    for (const pb::RankPlace& place : p->assignment.ranks())
      if (place.worker() == w.name) ranks += fmt::format(" {}", place.rank());
    say(w.failing_spawns > 0
            ? fmt::format("{} cannot start its ranks of g{}", w.name, live_)
            : fmt::format("{} starts ranks{} of g{}", w.name, ranks, live_));
  } else if (const auto* k = std::get_if<agent::KillRanks>(&action)) {
    say(fmt::format("{} kills its ranks of g{}", w.name, k->generation));
  } else if (const auto* q = std::get_if<agent::SetRequest>(&action)) {
    std::string text;
    if ((q->bits & kRequestStop) != 0) text += " stop";
    if ((q->bits & kRequestForce) != 0) text += " must";
    if ((q->bits & kRequestHandoff) != 0) text += " handoff";
    if (q->checkpoint_request > 0)
      text += fmt::format(" checkpoint={}", q->checkpoint_request);
    if (!text.empty()) say(fmt::format("{} asks its ranks:{}", w.name, text));
  } else if (const auto* l = std::get_if<agent::LogEvent>(&action)) {
    say(fmt::format("{} logs {}: {}", w.name, l->event, l->detail));
  } else if (const auto* x = std::get_if<agent::Exit>(&action)) {
    say(fmt::format("{} exits with {}: {}", w.name, x->code, x->message));
  }
}

// ------------------------------------------------------------- the cluster

void ScriptedCluster::tick_all() {
  for (auto& [name, w] : workers_)
    if (w->agent && w->frozen_until <= now_) tick(*w);
  pump();
}

void ScriptedCluster::pump() {
  constexpr int kEndless = 100'000;
  for (int events = 0;; ++events) {
    if (coordinator_ && coordinator_->ended()) coordinator_.reset();
    if (queue_.empty() || queue_.front().when > now_) break;
    if (events == kEndless) {
      violated("this instant does not end");
      break;
    }
    step_once();
  }
  done_ = false;
  const std::string violation = std::exchange(violation_, "");
  if (!violation.empty() && !inconclusive_) say("VIOLATED " + violation);
}

std::vector<ScriptedCluster::Rank*> ScriptedCluster::ranks() {
  const auto world = worlds_.find(live_);
  return world == worlds_.end() ? std::vector<Rank*>()
                                : ranks_of(*world->second);
}

Result<ScriptedCluster::Worker*> ScriptedCluster::find_worker(
    const std::string& name, bool alive) {
  const auto it = workers_.find(name);
  if (it == workers_.end() || (alive && !it->second->agent))
    return not_found(
        fmt::format("no {}worker '{}'", alive ? "live " : "", name));
  return it->second.get();
}

Result<ScriptedCluster::Rank*> ScriptedCluster::find_rank(
    const std::string& number) {
  for (Rank* r : ranks())
    if (std::to_string(r->rank) == number) return r;
  return not_found(
      fmt::format("no live rank '{}' of generation {}", number, live_));
}

}  // namespace remesh::scenario
