// The commands that a scenario gives.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "proto/base/exit_code.h"
#include "proto/base/text.h"
#include "tests/scenario/scripted_cluster.h"
#include "tests/testing/messages.h"

namespace remesh::scenario {

const std::map<std::string, ScriptedCluster::Verb>& ScriptedCluster::verbs() {
  using S = ScriptedCluster;
  static const std::map<std::string, Verb> kVerbs = {
      {"job",
       {&S::job,
        "job steps= interval= min_slots= max_slots= join_window_ms= "
        "dead_after_ms= closed_after_ms= hang_after_s= max_same_failures= "
        "max_failures= "
        "microbatches= dp= tp= pp= cp= layouts=\"A B\" keep_state=0 "
        "replicas= replicate_every= rejoin_wait_ms= zero=: a new cluster; its "
        "model has 8 layers and 8 heads"}},
      {"coordinator",
       {&S::coordinator,
        "coordinator [resume] [lost-journal|old-journal]: (re)starts it, on "
        "its journal, or on the copy that `backup` made; lost-journal: the "
        "claim of the checkpoints is lost as well"}},
      {"backup", {&S::backup, "backup: copies the journal"}},
      {"kill-coordinator", {&S::kill_coordinator, "SIGKILL"}},
      {"freeze-coordinator",
       {&S::freeze_coordinator,
        "SIGSTOP, and its lock is lost: `coordinator` starts a second one"}},
      {"thaw-coordinator",
       {&S::thaw_coordinator,
        "thaw-coordinator NAME...: the older one continues with what it was "
        "sent "
        "before there was a second one, and hears these workers"}},
      {"worker",
       {&S::worker,
        "worker NAME... slots=1 host=: (re)starts daemons; a live one of the "
        "name is left alone when `twin` is given"}},
      {"kill",
       {&S::kill,
        "kill NAME... [silent] [memory]: SIGKILL of daemons, ranks die with "
        "them; silent: the connection does not break; memory: the states in "
        "it are lost as well"}},
      {"network",
       {&S::network,
        "network NAME cut|lost|hold|ok: loses everything / breaks and loses "
        "/ delays / heals and delivers"}},
      {"link",
       {&S::link,
        "link HOST HOST cut|ok: messages between their ranks are lost, in "
        "generations that start from now on as well"}},
      {"freeze", {&S::freeze, "freeze NAME [off]: SIGSTOP of the daemon"}},
      {"term", {&S::term, "term NAME: SIGTERM of the daemon"}},
      {"drain", {&S::user, "drain NAME: as `remesh drain`"}},
      {"stop", {&S::user, "stop [discard]: as `remesh stop [--discard]`"}},
      {"checkpoint", {&S::user, "checkpoint: as `remesh checkpoint`"}},
      {"mesh", {&S::user, "mesh LAYOUT: as `remesh mesh`"}},
      {"scale", {&S::user, "scale N: as `remesh scale`; 0: all"}},
      {"uncordon", {&S::user, "uncordon HOST: as `remesh uncordon`"}},
      {"time", {&S::time, "time MS: lets it pass"}},
      {"step", {&S::step, "step [N=1]: all ranks make N steps, 10 ms each"}},
      {"commit",
       {&S::commit,
        "commit RANK step=N [unreported]: one rank commits a step; unreported: "
        "its board does not say so yet"}},
      {"rank",
       {&S::rank,
        "rank N exit=|signal=|stopped|continued|stuck error= time=: what "
        "happens to a rank"}},
      {"spawn-failed",
       {&S::rank,
        "spawn-failed NAME error= times=: its next ranks cannot be started"}},
      {"disk",
       {&S::disk,
        "disk full|ok|unreadable [HOST]: data sets and checkpoints return "
        "errors, on that host or on all"}},
      {"room",
       {&S::room, "room NAME bytes=: so much shared memory is free there"}},
      {"kills", {&S::disk, "kills slow [NAME]|done: SIGKILLed ranks linger"}},
      {"damage",
       {&S::scan_result,
        "damage STEP...: checkpoints fail verification; `lost`: are gone"}},
      {"listing",
       {&S::scan_result,
        "listing late|ok: checkpoints saved from now on are not listed"}},
      {"spoil",
       {&S::scan_result,
        "spoil NAME STEP...: states in that worker's memory do not load"}},
      {"report",
       {&S::report,
        "report NAME incarnation= seq= generation= state= slots= epoch= host= "
        "host_id= proven=1: a hand-made message to the coordinator"}},
      {"directive",
       {&S::directive,
        "directive NAME goal= epoch= seq= generation= incarnation=: a "
        "hand-made message to the worker"}},
      {"fence",
       {&S::fence,
        "fence NAME generation= index= [in|out] incarnation=: a hand-made "
        "contribution or result"}},
      {"status", {&S::status, "status: one line, and dropped messages"}},
  };
  return kVerbs;
}

std::string ScriptedCluster::help() {
  std::string s;
  for (const auto& [name, verb] : verbs())
    s += fmt::format("  {:<17} {}\n", name, verb.help);
  return s;
}

Result<std::string> ScriptedCluster::execute(const Command& c) {
  const auto it = verbs().find(c.name);
  if (it == verbs().end()) {
    std::vector<std::string> names;
    for (const auto& [name, verb] : verbs()) names.push_back(name);
    return invalid_argument(
        fmt::format("line {}: no command '{}'; there are: {}", c.line, c.name,
                    join(names)));
  }
  output_.clear();
  const Status s = (this->*it->second.handler)(c);
  if (!s.ok()) return s.with_context(fmt::format("line {}", c.line));
  pump();
  return output_;
}

// ------------------------------------------------------------- the cluster

// In a new cluster.
Status ScriptedCluster::job(const Command&) {
  start_coordinator();
  return ok_status();
}

Status ScriptedCluster::coordinator(const Command& c) {
  if (coordinator_) return already_exists("the coordinator runs");
  forgot_ = forgot_ || c.has("lost-journal") || c.has("old-journal");
  if (c.has("lost-journal")) {
    journal_.reset();
    claimed_ = 0;
  }
  if (c.has("old-journal")) journal_ = backup_;
  told_.clear();
  start_coordinator(c.has("resume"));
  return ok_status();
}

Status ScriptedCluster::backup(const Command&) {
  backup_ = journal_;
  return ok_status();
}

Status ScriptedCluster::kill_coordinator(const Command&) {
  coordinator_.reset();
  return ok_status();
}

Status ScriptedCluster::freeze_coordinator(const Command&) {
  rival_ = std::move(coordinator_);
  rival_lines_ = lines_;
  return ok_status();
}

Status ScriptedCluster::thaw_coordinator(const Command& c) {
  rival_hears_ = {c.words.begin(), c.words.end()};
  for (const core::Input& event : std::exchange(rival_mail_, {}))
    drive_rival(event);
  drive_rival(core::Tick{});
  return ok_status();
}

Status ScriptedCluster::worker(const Command& c) {
  for (const std::string& name : c.words) {
    auto& w = workers_[name];
    if (w && w->agent) return already_exists("worker " + name + " runs");
    const auto last = std::exchange(w, std::make_unique<Worker>());
    if (last) w->incarnation = last->incarnation;
    if (last) w->memory = std::move(last->memory);
    w->name = name;
    w->build = "";  // as in `report`
    w->host = c.text("host", "host-" + name);
    w->slots = static_cast<int>(c.number("slots", 1));
    partitioned_until_.erase(name);
    said_.erase(name);
    told_.erase(name);
    start_worker(*w);
    tick(*w);
    pump();
  }
  return ok_status();
}

Status ScriptedCluster::kill(const Command& c) {
  for (const std::string& name : c.words) {
    if (name == "silent" || name == "memory") continue;
    ASSIGN_OR_RETURN(Worker* const w, find_worker(name, true));
    stop_daemon(*w);
    if (c.has("memory")) lose_memory(*w);
    if (!c.has("silent")) lose_connection(name);
  }
  return ok_status();
}

Status ScriptedCluster::network(const Command& c) {
  if (c.words.size() != 2) return invalid_argument("network NAME HOW");
  ASSIGN_OR_RETURN(Worker* const w, find_worker(c.words[0], false));
  const std::string& how = c.words[1];
  w->held = how == "hold";
  partitioned_until_[w->name] = how == "cut" || how == "lost" ? kNever : 0;
  if (how == "lost") lose_connection(w->name);
  if (how == "ok")
    for (const auto& deliver : std::exchange(w->undelivered, {})) deliver();
  return ok_status();
}

Status ScriptedCluster::link(const Command& c) {
  if (c.words.size() != 3) return invalid_argument("link HOST HOST HOW");
  const std::pair<std::string, std::string> link =
      std::minmax(c.words[0], c.words[1]);
  cut_links_.erase(link);
  if (c.words[2] == "cut") cut_links_.insert(link);
  return ok_status();
}

Status ScriptedCluster::freeze(const Command& c) {
  ASSIGN_OR_RETURN(Worker* const w, find_worker(c.word(0), true));
  w->frozen_until = c.words.size() < 2 ? kNever : 0;
  if (w->frozen_until > now_) return ok_status();
  for (const agent::Event& e : std::exchange(w->inbox_while_frozen, {}))
    drive_worker(*w, e);
  return ok_status();
}

Status ScriptedCluster::term(const Command& c) {
  ASSIGN_OR_RETURN(Worker* const w, find_worker(c.word(0), true));
  w->terminated = true;
  drive_worker(*w, agent::Terminate{});
  return ok_status();
}

Status ScriptedCluster::user(const Command& c) {
  pb::Command command;
  command.set_kind(c.name == "drain"        ? pb::Command::DRAIN
                   : c.name == "checkpoint" ? pb::Command::CHECKPOINT
                   : c.name == "mesh"       ? pb::Command::MESH
                   : c.name == "scale"      ? pb::Command::SCALE
                   : c.name == "uncordon"   ? pb::Command::UNCORDON
                                            : pb::Command::STOP);
  command.set_discard(c.word(0) == "discard");
  if (!c.words.empty()) command.set_worker(c.words[0]);
  if (!c.words.empty()) command.set_layout(c.words[0]);
  if (!c.words.empty()) command.set_slots(std::atoi(c.words[0].c_str()));
  ask(command);
  return ok_status();
}

Status ScriptedCluster::time(const Command& c) {
  const int64_t until =
      now_ +
      (c.words.empty() ? 50 : std::strtoll(c.words[0].c_str(), nullptr, 10));
  constexpr int64_t kTickMs = 50;
  while (now_ < until) {
    now_ = std::min(until, (now_ / kTickMs + 1) * kTickMs);
    next_sync_ms_ = now_;
    if (coordinator_) drive_coordinator(tick_of_disk());
    tick_all();
  }
  return ok_status();
}

// ------------------------------------------------------------------- ranks

Status ScriptedCluster::step(const Command& c) {
  const int64_t n =
      c.words.empty() ? 1 : std::strtoll(c.words[0].c_str(), nullptr, 10);
  for (int64_t i = 0; i < n; ++i) {
    if (ranks().empty()) return not_found("no ranks");
    const World& world = *worlds_.at(live_);
    if (!world.connected || !intact(world))
      return unavailable(
          fmt::format("generation {} cannot make a step", live_));
    now_ += 10;
    finish_step(live_, world.step + 1);
    tick_all();
  }
  return ok_status();
}

Status ScriptedCluster::commit(const Command& c) {
  ASSIGN_OR_RETURN(Rank* const r, find_rank(c.word(0)));
  World& world = *worlds_.at(live_);
  now_ += 10;
  const int64_t step = c.number("step", r->committed + 1);
  if (world.step < step) record_step(world, step);
  for (const Rank* other : ranks())
    workers_[other->worker]->memory.forget_before(live_);
  if (keeps_state()) commit_state(world, r->rank, step);
  if (c.words.size() == 1) {
    publish(world, *r, step);
    report_committed(world, r->rank, step);
  }
  tick(*workers_[r->worker]);
  return ok_status();
}

Status ScriptedCluster::rank(const Command& c) {
  if (c.words.empty()) return invalid_argument("which?");
  if (c.name == "spawn-failed") {
    ASSIGN_OR_RETURN(Worker* const w, find_worker(c.word(0), true));
    w->spawn_error = c.text("error", "no such file");
    w->failing_spawns = c.number("times", 1);
    return ok_status();
  }
  ASSIGN_OR_RETURN(Rank* const r, find_rank(c.word(0)));
  const std::string what = c.word(1);
  if (what == "stopped" || what == "continued") r->stopped = what == "stopped";
  if (what == "stuck") r->stuck = true;
  if (!what.empty()) return ok_status();
  if (c.number("exit", 0) == kExitWorld) r->committed = -1;  // not connected
  r->error = c.text("error", "");
  r->exit_time = c.real("time", static_cast<double>(now_) / 1000);
  rank_ends(*r, static_cast<int>(c.number("exit", 0)),
            static_cast<int>(c.number("signal", 0)), 0);
  return ok_status();
}

Status ScriptedCluster::disk(const Command& c) {
  const std::string what = c.word(0);
  if (c.name == "disk") {
    disk_full_ = what == "full";
    outage_until_ = what == "unreadable" ? kNever : 0;
    outage_ = c.words.size() > 1 ? c.word(1) : "";
    if (!disk_full_)
      for (Rank* r : ranks()) r->checkpoint_error.clear();
    return ok_status();
  }
  for (auto& [name, w] : workers_) {
    if (c.words.size() > 1 && name != c.word(1)) continue;
    const bool slow =
        std::exchange(w->kills_wait_until, what == "slow" ? kNever : 0) > 0;
    if (w->kills_wait_until > 0 || !slow) continue;
    for (auto& [rank, r] : w->ranks)
      if (r.alive) rank_ends(r, 0, 9, 0);
    later(*w, 0, [this](Worker& x) { tear_down(x, x.ranks_generation); });
  }
  return ok_status();
}

Status ScriptedCluster::room(const Command& c) {
  ASSIGN_OR_RETURN(Worker* const w, find_worker(c.word(0), true));
  w->room = static_cast<uint64_t>(c.number("bytes", 0));
  return ok_status();
}

Status ScriptedCluster::scan_result(const Command& c) {
  if (c.name == "spoil") {
    for (size_t i = 1; i < c.words.size(); ++i)
      spoiled_.emplace(c.words[0], std::atoll(c.words[i].c_str()));
    return ok_status();
  }
  if (c.name == "listing") {
    listing_ms_ = c.word(0) == "late" ? now_ : kNever;
    return ok_status();
  }
  for (const std::string& word : c.words)
    if (const int64_t step = std::strtoll(word.c_str(), nullptr, 10);
        c.words.back() == "lost")
      checkpoints_.erase(step);
    else
      damaged_.insert(step);
  return ok_status();
}

// ------------------------------------------------------- hand-made messages

Status ScriptedCluster::report(const Command& c) {
  pb::Report r;
  r.set_worker(c.word(0));
  r.set_incarnation(static_cast<uint64_t>(c.number("incarnation", 1)));
  r.set_seq(static_cast<uint64_t>(c.number("seq", 1)));
  r.set_host(c.text("host", "host-" + r.worker()));
  r.set_host_id(static_cast<uint64_t>(c.number("host_id", 0)));
  r.set_slots(static_cast<int>(c.number("slots", 1)));
  r.set_generation(c.number("generation", 0));
  pb::Report::State state = pb::Report::IDLE;
  if (!pb::Report::State_Parse(c.text("state", "IDLE"), &state))
    return invalid_argument("state: IDLE, PREPARED, RUNNING or QUIESCED");
  r.set_state(state);
  if (c.number("epoch", 0) > 0)
    r.set_coordinator_epoch(static_cast<uint64_t>(c.number("epoch", 0)));
  if (c.number("proven", 0) != 0)
    r.set_proof(core::proof_of("", r.coordinator_epoch(), r.generation()));
  drive_coordinator(core::received(r));
  return ok_status();
}

Status ScriptedCluster::directive(const Command& c) {
  ASSIGN_OR_RETURN(Worker* const w, find_worker(c.word(0), true));
  pb::Directive d;
  d.set_worker(w->name);
  d.set_incarnation(static_cast<uint64_t>(
      c.number("incarnation", static_cast<int64_t>(w->incarnation))));
  d.set_epoch(static_cast<uint64_t>(c.number("epoch", 0)));
  d.set_seq(static_cast<uint64_t>(c.number("seq", 0)));
  d.set_generation(c.number("generation", 0));
  pb::Directive::Goal goal = pb::Directive::IDLE;
  if (!pb::Directive::Goal_Parse(c.text("goal", "IDLE"), &goal))
    return invalid_argument("goal: IDLE, PREPARE, RUN, FINISH, ABORT ...");
  d.set_goal(goal);
  drive_worker(*w, agent::DirectiveReceived{d});
  return ok_status();
}

Status ScriptedCluster::fence(const Command& c) {
  ASSIGN_OR_RETURN(Worker* const w, find_worker(c.word(0), true));
  if (c.word(1) == "out") {
    pb::FenceOut f;
    f.set_generation(c.number("generation", live_));
    f.set_index(c.number("index", 0));
    drive_worker(*w, agent::FenceOutReceived{f});
    return ok_status();
  }
  pb::FenceIn f;
  f.set_worker(w->name);
  f.set_incarnation(static_cast<uint64_t>(
      c.number("incarnation", static_cast<int64_t>(w->incarnation))));
  f.set_generation(c.number("generation", live_));
  f.set_index(c.number("index", 0));
  drive_coordinator(core::received(f));
  return ok_status();
}

Status ScriptedCluster::status(const Command&) {
  if (!coordinator_) {
    say("status: no coordinator");
    return ok_status();
  }
  const pb::JobStatus s = coordinator_->status();
  std::string text =
      fmt::format("status: {} g{} step {}/{}",
                  enum_text(pb::JobStatus::State_Name(s.state())),
                  s.generation(), s.step(), s.steps());
  if (s.wait_reason() != pb::JobStatus::NOTHING)
    text += " for=" + pb::JobStatus::WaitReason_Name(s.wait_reason());
  if (s.has_mesh()) text += mesh_text(s.mesh());
  if (!s.pinned().empty()) text += " pinned";
  if (s.scale() > 0) text += fmt::format(" scale={}", s.scale());
  if (s.mesh_changes() && s.state() == pb::JobStatus::RUNNING)
    text += " changes";
  if (!s.detail().empty()) text += " (" + s.detail() + ")";
  for (const pb::WorkerStatus& w : s.workers())
    text += fmt::format(" {}:{}{}{}", w.name(),
                        enum_text(pb::WorkerStatus::State_Name(w.state())),
                        w.draining() ? "+leaving" : "",
                        w.cordoned().empty() ? "" : "+cordoned");
  for (const pb::Cordon& k : s.cordons())
    text +=
        fmt::format(" {}={:.0f}s", k.worker().empty() ? k.host() : k.worker(),
                    k.remaining_s());
  text += fmt::format(" dropped={}", s.dropped());
  say(text);
  return ok_status();
}

}  // namespace remesh::scenario
