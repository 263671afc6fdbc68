#include "tests/scenario/scripted_cluster.h"

#include <fmt/format.h>

#include <algorithm>

#include "proto/base/exit_code.h"
#include "proto/base/rank_request.h"
#include "tests/testing/event_fields.h"

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
  for (const pb::Durable::Abandoned& a : d.abandoned())
    s += fmt::format(" g{}..g{} abandoned from step {}", a.after() + 1,
                     a.generation() - 1, a.step());
  if (d.stop_requested()) s += " stop_requested";
  if (d.finish().must_stop()) s += " must_stop";
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
  if (d.must_stop()) s += " must_stop";
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

}  // namespace

void ScriptedCluster::say(const std::string& line) {
  output_ += fmt::format("{:<6} {}\n", now_, line);
}

// -------------------------------------------------------------------- time

void ScriptedCluster::tick() {
  if (coordinator_)
    drive(core::Tick{.synced_step =
                         metrics_.empty() ? 0 : metrics_.back().step()});
  for (auto& [name, w] : workers_) tick_worker(w);
  pump();
}

void ScriptedCluster::tick_worker(Worker& w) {
  if (!w.agent || w.frozen) return;
  const auto ranks = world();
  const bool apart = cut_apart();
  const bool moving = std::all_of(ranks.begin(), ranks.end(), [&](auto& r) {
    return !apart && r.second->alive && !r.second->stopped && !r.second->stuck;
  });
  agent::Tick t;
  if (w.room >= 0) t.state_room = static_cast<uint64_t>(w.room);
  for (auto& [rank, r] : w.ranks) {
    if (r.alive && moving && w.generation == live_) ++r.progress;
    t.samples.push_back(sample(r));
    if (apart) t.samples.back().status.set_waits(true);
  }
  drive(w, t);
}

agent::RankSample ScriptedCluster::sample(Rank& r) {
  agent::RankSample s;
  s.status.set_rank(r.rank);
  s.status.set_phase(pb::RankStatus::STARTING);
  s.status.set_step(r.committed + 1);
  s.status.set_committed_step(r.committed);
  s.status.set_progress(r.progress);
  s.status.set_checkpoint_step(r.checkpoint);
  s.status.set_declined_stops(r.declined_stops);
  if (!r.checkpoint_error.empty()) {
    s.status.set_checkpoint_error(r.checkpoint_error);
    s.status.set_checkpoint_code(code_name(Code::kExhausted));
  }
  s.status.set_os_state(r.stopped ? "T" : "S");
  s.steps = std::move(r.ring);
  r.ring.clear();
  return s;
}

void ScriptedCluster::pump() {
  while (!messages_.empty()) {
    const auto deliver = std::move(messages_.front());
    messages_.pop_front();
    deliver();
  }
}

// ------------------------------------------------------------- coordinator

void ScriptedCluster::start_coordinator(bool resume) {
  core::Options o;
  o.job = job_;
  o.run_dir = "/run";
  o.host = "host-c";
  if (!metrics_.empty()) {
    o.last_finished_step = metrics_.back().step();
    o.recent_metrics = metrics_;
  }
  o.restored = journal_;
  o.resume = resume;
  o.epoch_floor = 1000 + static_cast<uint64_t>(now_ / 1000);
  coordinator_ = std::make_unique<core::Coordinator>(std::move(o));
  for (auto& [name, w] : workers_) w.told.clear();
  for (const core::Action& a : coordinator_->start(now_)) act(a);
}

void ScriptedCluster::drive(const core::Input& event) {
  if (older_ && !coordinator_) older_mail_.push_back(event);
  if (!coordinator_) return;
  for (const core::Action& a : coordinator_->on(event, now_)) act(a);
}

void ScriptedCluster::act(const core::Action& action) {
  if (const auto* p = std::get_if<core::Persist>(&action)) {
    journal_ = p->durable;
    say(durable_text(p->durable));
  } else if (const auto* s = std::get_if<core::SendDirective>(&action)) {
    Worker& w = workers_[s->directive.worker()];
    const std::string text = directive_text(s->directive);
    if (w.told != text) say(text);
    w.told = text;
    to_worker(*s);
  } else if (const auto* f = std::get_if<core::SendFence>(&action)) {
    to_worker(f->worker, agent::FenceOutReceived{f->fence});
  } else if (const auto* r = std::get_if<core::Respond>(&action)) {
    say(r->reply.ok() ? "answer ok" : "answer error: " + r->reply.error());
  } else if (const auto* x = std::get_if<core::Refuse>(&action)) {
    say("refuses: " + x->refusal.reason());
  } else if (const auto* e = std::get_if<core::EmitEvent>(&action)) {
    if (const std::string fields = undeclared_fields(e->record);
        !fields.empty())
      say("UNDECLARED in proto/rundir/events.inc: " + fields);
    say(event_text(e->record));
  } else if (const auto* m = std::get_if<core::AppendMetrics>(&action)) {
    metrics_.push_back(m->metrics);
    say(fmt::format("metrics step {} g{}", m->metrics.step(),
                    m->metrics.generation()));
  } else if (std::get_if<core::ScanCheckpoints>(&action) != nullptr) {
    messages_.push_back([this] { drive(scan()); });
  } else if (const auto* x = std::get_if<core::Exit>(&action)) {
    say(fmt::format("coordinator exits with {}{}", x->code,
                    x->message.empty() ? "" : ": " + x->message));
    coordinator_.reset();
  }
}

core::CheckpointsScanned ScriptedCluster::scan() const {
  core::CheckpointsScanned s;
  for (const auto& [step, recent] : listed_ ? *listed_ : checkpoints_) {
    const std::string path = fmt::format("step-{}", step);
    if (damaged_.contains(step)) {
      s.invalid.push_back(path + ": checksum differs");
      s.invalid_steps.push_back(step);
      continue;
    }
    s.valid.push_back(
        {.step = step,
         .generation = recent.empty() ? 0 : recent.back().generation(),
         .path = path,
         .recent = recent});
  }
  return s;
}

// ----------------------------------------------------------------- network

void ScriptedCluster::to_coordinator(Worker& w, core::Input event) {
  if (w.held) {
    w.out.push_back(std::move(event));
  } else if (!w.cut) {
    if (older_ && older_hears_.contains(w.name))
      messages_.push_back([this, event] { drive_older(event); });
    messages_.push_back([this, event] { drive(event); });
  }
}

void ScriptedCluster::to_worker(const std::string& name, agent::Event event) {
  const auto it = workers_.find(name);
  if (it == workers_.end() || it->second.cut) return;
  Worker& w = it->second;
  if (w.held || w.frozen) {
    w.in.push_back(std::move(event));
    return;
  }
  messages_.push_back([this, &w, event] { drive(w, event); });
}

void ScriptedCluster::to_worker(const core::SendDirective& s) {
  pb::Directive d = s.with_assignment();
  d.set_seq(++directive_seq_);
  to_worker(s.directive.worker(), agent::DirectiveReceived{std::move(d)});
}

// ----------------------------------------------------------------- workers

void ScriptedCluster::drive(Worker& w, const agent::Event& event) {
  if (!w.agent) return;
  for (const agent::Action& a : w.agent->on(event, now_)) act(w, a);
}

void ScriptedCluster::act(Worker& w, const agent::Action& action) {
  if (const auto* s = std::get_if<agent::Send>(&action)) {
    if (s->message.has_report()) {
      const std::string text = report_text(s->message.report());
      if (w.said != text) say(text);
      w.said = text;
    }
    to_coordinator(w, core::MessageReceived{s->message});
  } else if (const auto* p = std::get_if<agent::Spawn>(&action)) {
    spawn(w, p->assignment);
  } else if (const auto* k = std::get_if<agent::KillRanks>(&action)) {
    say(fmt::format("{} kills its ranks of g{}", w.name, k->generation));
    if (!kills_slowly(w)) messages_.push_back([this, &w] { reap_killed(w); });
  } else if (const auto* t = std::get_if<agent::TearDown>(&action)) {
    const int64_t g = t->generation;
    if (!kills_slowly(w))
      messages_.push_back([this, &w, g] { drive(w, agent::TornDown{g}); });
  } else if (const auto* i = std::get_if<agent::TakeInventory>(&action)) {
    const agent::TakeInventory asked = *i;
    messages_.push_back([this, &w, asked] {
      drive(w, agent::InventoryTaken{
                   asked.job, asked.generation, w.memory.inventory(), {}});
    });
  } else if (const auto* c = std::get_if<agent::CompleteFence>(&action)) {
    complete_fence(w, *c);
  } else if (const auto* q = std::get_if<agent::SetRequest>(&action)) {
    std::string text;
    if ((q->bits & kRequestStop) != 0) text += " stop";
    if ((q->bits & kRequestForce) != 0) text += " must";
    if ((q->bits & kRequestHandoff) != 0) text += " handoff";
    if (q->checkpoint_request > 0)
      text += fmt::format(" checkpoint={}", q->checkpoint_request);
    if (!text.empty()) say(fmt::format("{} asks its ranks:{}", w.name, text));
    for (auto& [rank, r] : w.ranks) {
      if (q->bits != r.request.bits) r.declined = false;
      r.request = *q;
    }
  } else if (const auto* l = std::get_if<agent::LogEvent>(&action)) {
    say(fmt::format("{} logs {}: {}", w.name, l->event, l->detail));
  } else if (const auto* x = std::get_if<agent::Exit>(&action)) {
    say(fmt::format("{} exits with {}: {}", w.name, x->code, x->message));
    const std::string name = w.name;
    if (x->states != agent::States::kKept) w.memory.clear();
    // The event being handled is its agent's own: free it afterwards.
    messages_.push_back([this, &w, name] {
      w.agent.reset();
      for (auto& [rank, r] : w.ranks) r.alive = false;
      drive(core::PeerLost{name});
    });
  }
}

void ScriptedCluster::spawn(Worker& w, const pb::Assignment& a) {
  const int64_t g = a.generation();
  if (g != live_) {
    live_ = g;
    assignment_ = a;
    computed_.clear();
  }
  w.generation = g;
  w.ranks.clear();
  w.fences.clear();
  if (w.spawn_failures > 0) {
    say(fmt::format("{} cannot start its ranks of g{}", w.name, g));
    --w.spawn_failures;
    messages_.push_back([this, &w, g, error = w.spawn_error] {
      drive(w, agent::SpawnFailed{g, -1, error});
    });
    return;
  }
  std::string text;
  for (const pb::RankPlace& p : a.ranks()) {
    if (p.worker() != w.name) continue;
    Rank r;
    r.rank = p.rank();
    r.committed = keeps_state() ? -1 : a.source().step();
    w.ranks[p.rank()] = r;
    text += fmt::format(" {}", p.rank());
    const int rank = p.rank();
    messages_.push_back([this, &w, g, rank] {
      drive(w, agent::RankStarted{g, rank, 100 + rank});
    });
  }
  say(fmt::format("{} starts ranks{} of g{}", w.name, text, g));
  messages_.push_back([this, &w, g] {
    drive(w, agent::LocalFence{g, 0, w.name});
  });
}

void ScriptedCluster::complete_fence(Worker& w, const agent::CompleteFence& f) {
  w.fences.insert(f.index);
  const int64_t g = f.generation;
  if (f.index == 0) {
    messages_.push_back([this, &w, g] {
      drive(w, agent::LocalFence{g, 1, w.name});
    });
    return;
  }
  for (auto& [other, r] : world())
    if (!other->fences.contains(1)) return;
  if (cut_apart()) return say(fmt::format("ranks of g{} cannot connect", g));
  say(fmt::format("ranks of g{} are connected", g));
  if (keeps_state()) restore_states();
}

void ScriptedCluster::end_rank(Worker& w, Rank& r, int code, int signal,
                               const std::string& error, double time) {
  if (!r.alive) return;
  r.alive = false;
  agent::RankExited e{.generation = w.generation,
                      .rank = r.rank,
                      .exit_code = code,
                      .signal = signal,
                      .exit_time = time,
                      .last_log = "",
                      .sample = sample(r)};
  if (!error.empty()) e.sample.status.set_error(error);
  drive(w, e);
}

void ScriptedCluster::reap_killed(Worker& w) {
  for (auto& [rank, r] : w.ranks)
    end_rank(w, r, 0, 9, "", static_cast<double>(now_) / 1000);
}

// ---------------------------------------------------------------- training

std::vector<std::pair<ScriptedCluster::Worker*, ScriptedCluster::Rank*>>
ScriptedCluster::world() {
  std::map<int, std::pair<Worker*, Rank*>> by_rank;
  for (auto& [name, w] : workers_)
    if (w.generation == live_)
      for (auto& [rank, r] : w.ranks) by_rank[rank] = {&w, &r};
  std::vector<std::pair<Worker*, Rank*>> out;
  out.reserve(by_rank.size());
  for (const auto& [rank, r] : by_rank) out.push_back(r);
  return out;
}

void ScriptedCluster::commit_step(Worker& w, Rank& r, int64_t step) {
  commit_state(w, r.rank, step);
  pb::StepMetrics m;
  m.set_step(step);
  m.set_step_s(0.01);
  m.set_generation(live_);
  computed_[step] = m;
  r.committed = step;
  ++r.progress;
  if (r.rank == 0) r.ring.push_back(m);
}

// What ranks do between two steps: stop when asked or done, save when due.
void ScriptedCluster::boundary(int64_t step) {
  uint32_t bits = 0;
  bool asked = false;
  bool saves = false;
  const auto ranks = world();
  for (auto& [w, r] : ranks) {
    if (!r->declined) bits |= r->request.bits;
    if (!r->declined && (r->request.bits & kRequestStop) != 0 &&
        (r->request.bits & kRequestHandoff) == 0)
      saves = true;
    if (r->request.checkpoint_request > 0) asked = true;
  }
  const bool last = step >= job_.train().steps();
  const bool stop = last || (bits & kRequestStop) != 0;
  if (stop && !last && !saves) {
    say(fmt::format("ranks of g{} end for a handoff after step {}", live_,
                    step));
    replicate(step, /*always=*/true);
    for (auto& [w, r] : ranks)
      end_rank(*w, *r, 0, 0, "", static_cast<double>(now_) / 1000);
    return;
  }
  const int64_t interval = job_.checkpoint().interval();
  const bool due = asked || (interval > 0 && step % interval == 0);
  if ((stop || due) && !disk_full_) save(step);
  if ((stop || due) && disk_full_)
    ranks[0].second->checkpoint_error = "no space left on device";
  if (!stop) return;
  if (disk_full_ && !last && (bits & kRequestForce) == 0) {
    for (auto& [w, r] : ranks) {
      r->declined = true;
      ++r->declined_stops;
    }
    return;
  }
  say(fmt::format("ranks of g{} end after step {}", live_, step));
  for (auto& [w, r] : ranks)
    end_rank(*w, *r, disk_full_ ? kExitSaveFailed : 0, 0,
             disk_full_ ? "no space left on device" : "",
             static_cast<double>(now_) / 1000);
}

void ScriptedCluster::save(int64_t step) {
  auto& recent = checkpoints_[step];
  recent.clear();
  for (const auto& [s, m] : computed_)
    if (s <= step) recent.push_back(m);
  for (auto& [w, r] : world()) {
    if (r->rank == 0) r->checkpoint = step;
    r->request.checkpoint_request = 0;
  }
  say(fmt::format("ranks of g{} saved step {}", live_, step));
}

}  // namespace remesh::scenario
