// The invariants, which Cluster checks at each action of the cores. run() adds
// those of the end: the job is done some time after the faults end, with every
// step recorded once, and nothing outlives it.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "coordinator/core/cause.h"
#include "coordinator/core/cordons.h"
#include "coordinator/core/durable.h"
#include "coordinator/core/job_shape.h"
#include "coordinator/core/survival.h"
#include "proto/base/exit_code.h"
#include "proto/base/rank_request.h"
#include "tests/sim/cluster.h"
#include "tests/sim/parts.h"
#include "tests/testing/event_fields.h"
#include "tests/testing/sentences.h"

namespace remesh::sim {
namespace {

// The largest number of slots of live, staying workers of one build.
int64_t staying_slots(const pb::JobStatus& status) {
  std::map<std::string, int64_t> slots;
  int64_t most = 0;
  for (const pb::WorkerStatus& w : status.workers())
    if (w.state() != pb::WorkerStatus::DEAD &&
        w.state() != pb::WorkerStatus::GIVEN_UP &&
        w.state() != pb::WorkerStatus::AWAITED && !w.draining() &&
        w.cordoned().empty())
      most = std::max(most, slots[w.build()] += w.slots());
  return most;
}

}  // namespace

std::vector<Cluster::Rank*> Cluster::live_ranks(Worker& w) {
  std::vector<Rank*> out;
  if (w.agent)
    for (auto& [rank, r] : w.ranks)
      if (r.alive) out.push_back(&r);
  return out;
}

bool Cluster::considers_live(const Worker& w) const {
  return coordinator_ &&
         coordinator_->roster().considers_live(w.name, w.incarnation);
}

// Whether nothing has happened to this incarnation of the worker for which the
// coordinator may declare it dead. Always false if the network loses messages.
bool Cluster::healthy(const std::string& name) const {
  const auto it = workers_.find(name);
  if (loss_ > 0 || it == workers_.end() || !it->second->agent) return false;
  // A restarted coordinator waits for the journaled incarnation, which may have
  // a larger number or be on another host.
  if (adopted_)
    for (const auto& p : adopted_->participants())
      if (p.name() == name && (p.incarnation() > it->second->incarnation ||
                               p.host() != it->second->host))
        return false;
  return now_ > it->second->trouble_until + job_.elastic().dead_after_ms() +
                    kTroubleSlackMs;
}

// A generation may run only when no live member has an older rank and every
// live member is fenced.
void Cluster::check_quiet(int64_t generation) {
  for (auto& [g, world] : worlds_)
    for (const pb::RankPlace& p : world->assignment.ranks())
      if (!considers_live(*workers_[p.worker()])) world->presumed_dead = true;
  for (const auto& [name, w] : workers_) {
    if (!considers_live(*w)) continue;
    if (w->agent && w->agent->generation() < generation)
      violated("generation {} runs while {} is fenced at {}", generation, name,
               w->agent->generation());
    for (const Rank* r : live_ranks(*w))
      if (r->generation < generation)
        violated(
            "generation {} runs while rank {} of generation {} is alive on {}",
            generation, r->rank, r->generation, name);
  }
}

// The first journal entry of a coordinator has a new largest epoch, and a job
// that has ended does not continue.
void Cluster::check_life(const pb::Durable& d) {
  if (epoch_life_ != coordinator_life_) {
    if (d.epoch() <= epoch_ && !forgot_)
      violated("two coordinators with epoch {}", d.epoch());
    epoch_life_ = coordinator_life_;
  } else if (decided_ && decided_->phase() >= pb::Durable::DONE &&
             d.phase() < pb::Durable::DONE) {
    violated("continued after the end of the job");
  }
}

// The mesh of a new generation is admitted by the model, has all its ranks
// placed, and is the requested one; without a request it is the first preferred
// one or has the given degrees. A request is released only if the slots do not
// suffice.
void Cluster::check_mesh(const pb::Durable& d) {
  const auto suffice = [](int64_t slots, const std::string& layout) {
    return geometry::Layout::parse(layout)->world() <= slots;
  };
  const geometry::Layout mesh = core::layout_of(d.assignment().mesh());
  const std::string text = mesh.to_string();
  const pb::MeshRequest& asked = d.mesh_request();
  const std::string before = decided_ ? decided_->mesh_request().pinned() : "";
  if (d.phase() == pb::Durable::RUNNING) {
    if (!asked.pinned().empty() && !asked.changed() && asked.pinned() != text &&
        !d.rescue())
      violated("{} runs, but {} is pinned", text, asked.pinned());
    if (coordinator_ && !before.empty() && asked.pinned().empty() &&
        !asked.changed() && !asks_auto_) {
      if (suffice(staying_slots(coordinator_->status()), before))
        violated(before + " was released although the slots suffice");
    }
    return;
  }
  if (d.phase() != pb::Durable::PREPARING || !d.has_assignment() ||
      (decided_ && decided_->generation() == d.generation()))
    return;
  int64_t slots = 0;
  std::map<std::string, int64_t> slots_of_build;
  std::map<std::string, std::string> build_of;
  std::map<std::string, int> room;
  for (const pb::Durable::Member& p : d.participants()) {
    build_of[p.name()] = builds_[{p.name(), p.incarnation()}];
    if (core::is_cordoned(d.host_faults(), p.host(), p.name())) {
      if (core::has_ranks(d, p.name()) && !d.rescue())
        violated("ranks are placed on " + p.name() + ", which is cordoned");
    } else {
      slots = std::max(slots, slots_of_build[build_of[p.name()]] += p.slots());
    }
    room[p.name()] = p.slots();
  }
  for (const pb::RankPlace& p : d.assignment().ranks())
    if (build_of[p.worker()] != d.assignment().build())
      violated("{} is of another build than its mesh", p.worker());
  if (asked.scale() > 0 && mesh.world() > asked.scale() && !d.rescue())
    violated("{} is planned, but the scale is {}", text, asked.scale());
  if (asked.scale() > 0) slots = std::min<int64_t>(slots, asked.scale());
  for (const pb::RankPlace& p : d.assignment().ranks())
    if (--room[p.worker()] < 0)
      violated("{} has more ranks than slots", p.worker());
  if (mesh.world() != d.assignment().ranks_size())
    violated("{} with {} ranks", text, d.assignment().ranks_size());
  const auto shape = core::shape_of(job_);
  if (const Status s = planner::admit(*shape, mesh); !s.ok())
    violated("a mesh that the model does not admit: " + s.message());
  if (d.rescue()) return;  // temporary, not the wanted mesh
  if (asked.changed()) violated("a new generation still has a mesh request");
  if (!before.empty() && asked.pinned().empty() && suffice(slots, before))
    violated(before + " was released although the slots suffice");
  if (!asked.pinned().empty()) {
    if (asked.pinned() != text)
      violated("{} is planned, but {} is pinned", text, asked.pinned());
    return;
  }
  for (const std::string& l : job_.elastic().layouts()) {
    if (!suffice(slots, l)) continue;
    if (geometry::Layout::parse(l)->to_string() != text)
      violated("{} is planned, but {} is preferred", text, l);
    return;
  }
  const pb::Parallel& p = job_.parallel();
  const auto kept = [](int64_t given, int degree) {
    return given == -1 || given == degree;
  };
  if (!kept(p.tensor_parallel_degree(), mesh.tp) ||
      !kept(p.pipeline_parallel_degree(), mesh.pp) ||
      !kept(p.context_parallel_degree(), mesh.cp))
    violated("given degrees were not kept: " + text);
}

void Cluster::check_persist(const pb::Durable& d) {
  check_life(d);
  check_mesh(d);
  if (d.phase() == pb::Durable::FINISHING && decided_ &&
      decided_->phase() != pb::Durable::FINISHING)
    finishing_ms_ = now_;
  const pb::Durable::Phase before =
      decided_ ? decided_->phase() : pb::Durable::WAITING;
  if (d.phase() == pb::Durable::RUNNING && before == pb::Durable::PREPARING) {
    check_quiet(d.generation());
    for (const auto& p : d.participants())
      if (core::has_ranks(d, p.name()) && coordinator_ &&
          !coordinator_->roster().considers_live(p.name(), p.incarnation()))
        violated("generation {} runs with {}, which is known to be dead",
                 d.generation(), p.name());
    check_source_is_there(d);
  }
  if (d.phase() == pb::Durable::WAITING && before == pb::Durable::ABORTING &&
      d.assignment().generation() == d.generation())
    for (const auto& [name, w] : workers_)
      if (considers_live(*w))
        for (const Rank* r : live_ranks(*w))
          if (r->generation == d.generation())
            violated(
                "the abort of generation {} ended while rank {} is alive on {}",
                d.generation(), r->rank, name);
  if (d.phase() == pb::Durable::PREPARING && d.has_assignment()) {
    for (const pb::Durable::Member& p : d.participants())
      planned_[d.generation()][p.name()] = p.incarnation();
    const int64_t g = d.assignment().generation();
    if (forgot_ && assignments_.contains(g) &&
        (!decided_ || decided_->assignment().generation() != g) &&
        (metrics_.empty() || metrics_.back().generation() < g)) {
      // The journal was lost, and no worker that knows the number has reported.
      // Nothing better is possible, and this run cannot be judged further.
      inconclusive_ = true;
      return;
    }
    const bool fresh = !scripted_ && !assignments_.contains(g) &&
                       (!decided_ || decided_->assignment().generation() != g);
    if (fresh) check_saved_is_used(d);
    if (fresh && keeps_state()) check_source(d);
    if (fresh && !keeps_state() &&
        d.assignment().source().step() != newest_scanned_) {
      // A source that failed on all hosts is not tried again.
      if (bad_hosts_.size() == 1 &&
          bad_hosts_.begin()->second == Bad::kNoSource && !others_could_run() &&
          now_ - restarted_ms_ >= core::kReconnectSlackMs) {
        inconclusive_ = true;
        return;
      }
      violated(
          "generation {} starts from step {}, not from the "
          "newest checkpoint, {}",
          d.generation(), d.assignment().source().step(), newest_scanned_);
    }
  }
}

// Called when the state is on the disk.
void Cluster::note_written(const pb::Durable& d) {
  if (inconclusive_) return;
  epoch_ = std::max(epoch_, d.epoch());
  if (d.phase() == pb::Durable::RUNNING) ran_.insert(d.generation());
  if (d.phase() == pb::Durable::FAILED && !scripted_)
    check_failed(core::text_of(d.cause()));
  if (d.phase() != pb::Durable::PREPARING || !d.has_assignment()) return;
  const auto [it, fresh] = assignments_.emplace(
      d.assignment().generation(), without_sentences(d.assignment()));
  if (!fresh && it->second != without_sentences(d.assignment()))
    violated("generation {} was planned twice, differently",
             d.assignment().generation());
}

// Whether the job has continued without that version of the step.
bool Cluster::abandoned(int64_t step, int64_t generation) const {
  return std::any_of(metrics_.begin(), metrics_.end(), [&](const auto& m) {
    return m.generation() > generation && m.step() <= step;
  });
}

// No generation starts from a state older than an existing checkpoint that was
// reported to the coordinator, even if a listing lacked it.
void Cluster::check_saved_is_used(const pb::Durable& d) {
  const int64_t step = d.assignment().source().step();
  const auto saved = checkpoints_.find(told_saved_);
  const auto& bad = d.refusals().checkpoints();
  if (step < told_saved_ && saved != checkpoints_.end() &&
      !abandoned(told_saved_, saved->second.generation) &&
      std::find(bad.begin(), bad.end(), fmt::format("step-{}", told_saved_)) ==
          bad.end())
    violated(
        "generation {} starts from step {}, and step {} is known to be saved",
        d.generation(), step, told_saved_);
  told_saved_ = std::min(told_saved_, step);
}

// For the job's smallest mesh, on workers that stay.
bool Cluster::slots_suffice(const pb::JobStatus& status) const {
  const pb::Parallel& p = job_.parallel();
  int64_t needed = std::max<int64_t>(1, p.tensor_parallel_degree()) *
                   std::max<int64_t>(1, p.pipeline_parallel_degree()) *
                   std::max<int64_t>(1, p.context_parallel_degree());
  if (!job_.elastic().layouts().empty())
    needed = std::numeric_limits<int64_t>::max();
  for (const std::string& l : job_.elastic().layouts())
    needed = std::min<int64_t>(needed, geometry::Layout::parse(l)->world());
  return staying_slots(status) >= std::max(needed, job_.elastic().min_slots());
}

void Cluster::check_directive(const pb::Directive& d) {
  if (d.goal() == pb::Directive::RUN &&
      (!decided_ || decided_->generation() != d.generation() ||
       decided_->phase() != pb::Durable::RUNNING))
    violated("RUN was sent before it was journaled");
  if (d.goal() != pb::Directive::LEAVE) return;
  for (const Rank* r : live_ranks(*workers_[d.worker()]))
    if (r->generation == d.generation() && decided_ &&
        (decided_->phase() == pb::Durable::RUNNING ||
         decided_->phase() == pb::Durable::FINISHING))
      violated("{} is sent away while its rank {} runs", d.worker(), r->rank);
}

// Called when a directive is sent, for the first time or again: the decision
// must be on the disk.
void Cluster::check_sent(const pb::Directive& d) {
  if (d.goal() == pb::Directive::RUN && !ran_.contains(d.generation()))
    violated("RUN was sent before it was on the disk");
  if (d.goal() != pb::Directive::LEAVE) return;
  // With too few slots to continue, no mesh can take over its states: it may
  // leave.
  if (Worker& w = *workers_[d.worker()]; !w.told_to_leave)
    w.told_to_leave = !coordinator_ || slots_suffice(coordinator_->status());
  // Its states were taken over by a mesh that cannot have replicas.
  const int64_t finished = metrics_.empty() ? 0 : metrics_.back().step();
  if (const auto world = worlds_.find(d.generation());
      world != worlds_.end() && was_complete(*world->second, finished) &&
      !core::makes_replicas(world->second->assignment) &&
      safe_generation_ != 0 && safe_generation_ < d.generation()) {
    safe_generation_ = d.generation();
    safe_ms_ = world->second->planned_ms;
  }
}

void Cluster::check_metrics(const pb::StepMetrics& m) {
  const int64_t expected = metrics_.empty() ? 1 : metrics_.back().step() + 1;
  if (m.step() != expected && (stats_.gaps == 0 || m.step() < expected))
    violated("metrics: step {} after step {}", m.step(), expected - 1);
  if (!metrics_.empty() && m.step() == expected && !lost_since_record_)
    check_branch(metrics_.back(), m.generation());
  after_loss_.push_back(lost_since_record_);
  lost_since_record_ = false;
  if (m.loss() != as_loss(chain(m.step())))
    violated("metrics: step {} was computed from a wrong state", m.step());
  // A state that was restored from memory may have no replicas yet, or no
  // longer: ranks remove the segments of older generations when they finish a
  // step.
  if (m.generation() < forgotten_before_) {
    safe_generation_ = 0;
  } else if (const auto w = worlds_.find(m.generation()); w != worlds_.end()) {
    if (w->second->complete_ms.contains(m.step()))
      note_safe(m.generation(), w->second->complete_ms[m.step()]);
    else
      safe_generation_ = 0;
  }
  if (saved_steps_.contains({m.generation(), m.step()})) return;
  const auto world = worlds_.find(m.generation());
  const bool known = world != worlds_.end();
  for (int r = 0; known && r < world->second->assignment.ranks_size(); ++r)
    if (world->second->committed[r] < m.step() &&
        !was_complete(*world->second, m.step()))
      violated("metrics: step {} of generation {} before rank {} committed it",
               m.step(), m.generation(), r);
  if (!known) violated("metrics: of an unknown generation");
}

// As the journal has it: the coordinator may crash before it emits the event.
void Cluster::check_failed(const std::string& cause) {
  const auto says = [&](const std::string& what) {
    return cause.find(what) != std::string::npos;
  };
  if (says(fmt::format("exit code {}", static_cast<int>(kExitUnreadable)))) {
    if (!metrics_.empty())
      violated("storage that returned errors ended the job: " + cause);
    rightly_failed_ = true;  // its inputs may never have been there
  }
  if (!bad_hosts_.empty() || !bad_workers_.empty()) {
    // A failure on all hosts ends the job, and one of the only mesh.
    if (others_could_run() && bad_place_.empty())
      violated("bad hosts ended the job: " + cause);
    rightly_failed_ = true;
  }
  // Random faults may hit the same rank repeatedly.
  if (!calm_ && !bad_link_.first.empty() && says("the same failure"))
    rightly_failed_ = true;
}

// A failure must name something that failed.
void Cluster::check_event(const pb::EventRecord& e) {
  if (const std::string fields = undeclared_fields(e); !fields.empty())
    violated("event {}: not in proto/rundir/events.inc: {}", e.event(), fields);
  if (e.event() == "change_put_off" || e.event() == "stop_declined")
    put_off_.insert(e.generation());
  // What follows knows the faults of run().
  if (scripted_) return;
  if (e.event() == "metrics_gap") {
    // Allowed only if all daemons that knew the metrics are dead or cut off.
    const int64_t first = (metrics_.empty() ? 0 : metrics_.back().step()) + 1;
    if (!keeps_state() ||
        std::none_of(worlds_.begin(), worlds_.end(), [&](const auto& w) {
          return !reporter_is_here(*w.second, first);
        }))
      violated("the metrics log has a gap: " + e.detail());
    ++stats_.gaps;
  }
  check_bad_place(e);
  // The job was stopped with too few slots for a mesh that could save.
  if (e.event() == "job_stopped") safe_generation_ = 0;
  if (e.event() == "checkpoint") told_saved_ = std::max(told_saved_, e.step());
  if (e.event() == "worker_lost") check_lost_worker(e);
  // Of one host alone it cannot know which side is cut off.
  if (e.event() == "worker_lost" && !knows_hosts())
    lost_alone_.insert(e.worker());
  check_link_search(e);
  check_room(e);
  if (calm_ && bad_place_.empty() && e.event() == "worker_lost" &&
      knows_hosts())
    violated("declared dead although it is alive: " + e.ShortDebugString());
  // Ranks that end wait for a fence, for which they need the coordinator.
  if (cut_off_ && knows_hosts() && !lost_alone_.contains(e.worker()) &&
      e.cause().find("no progress") == std::string::npos &&
      (e.event() == "failure" || e.event() == "host_cordoned"))
    violated("nothing failed: " + e.ShortDebugString());
  // An older journal does not know which ranks were told to end.
  if (e.event() != "failure" || forgot_) return;
  const auto world = worlds_.find(e.generation());
  if (e.cause().find("no progress") != std::string::npos) {
    if (world == worlds_.end() ||
        (!world->second->stalled && !waits_for_fence(*world->second)))
      violated("a hang was reported and no rank was stuck: " + e.cause());
  } else if (e.has_rank()) {
    if (world == worlds_.end() || !world->second->faulted.contains(e.rank()))
      violated("a failure names a healthy rank: " + e.cause());
  } else if (const auto w = workers_.find(e.worker());
             loss_ == 0 && w != workers_.end() && w->second->agent &&
             world != worlds_.end() &&
             w->second->incarnation == planned_[e.generation()][e.worker()] &&
             w->second->trouble_until < world->second->began_ms) {
    violated("a failure names a healthy worker: " + e.cause());
  }
}

// No generation number is used twice, even after the loss of the journal.
void Cluster::check_heard(const pb::Report& r) {
  if (!coordinator_ || coordinator_->ended()) return;
  if (coordinator_->roster().considers_live(r.worker(), r.incarnation()) &&
      coordinator_->durable().generation() < r.generation())
    violated("continues at generation {}, {} was at {}",
             coordinator_->durable().generation(), r.worker(), r.generation());
  auto& [newest, since] = newest_heard_[r.worker()];
  if (r.incarnation() < newest && now_ - since < kEarlierLifeMs)
    violated("considered an earlier incarnation alive: " + r.worker());
  newest = r.incarnation();
  since = now_;
}

void Cluster::check_report(Worker& w, const pb::Report& r) {
  const auto say = [&](const char* what, int64_t g) {
    violated("{} reports {} while its generation {} still runs", w.name, what,
             g);
  };
  for (const int64_t g : w.spawned) {
    if (w.torn_down.contains(g)) continue;
    if (r.state() == pb::Report::PREPARED) say("prepared", g);
    if (r.state() == pb::Report::QUIESCED && g == r.generation())
      say("quiesced", g);
    if (!r.busy()) say("free", g);
  }
  if (r.coordinator_epoch() < w.epoch_seen)
    violated("{} went back to coordinator {} from {}", w.name,
             r.coordinator_epoch(), w.epoch_seen);
  w.epoch_seen = r.coordinator_epoch();
}

// A stop request is withdrawn only if the coordinator put it off.
void Cluster::check_request(const Worker& w, const agent::SetRequest& q) {
  for (const auto& [rank, r] : w.ranks)
    if (r.alive && (r.request & kRequestStop) != 0 &&
        (q.bits & kRequestStop) == 0 &&
        !put_off_.contains(w.ranks_generation) && !w.terminated && !forgot_)
      violated("{} withdrew the stop of generation {}", w.name,
               w.ranks_generation);
}

// The result has every contribution to this fence of this generation, in the
// order of the workers, and reaches each worker once.
void Cluster::check_fence(const Worker& w, World& world,
                          const agent::CompleteFence& f) {
  if (f.generation != w.ranks_generation)
    violated("{} completes a fence of generation {} in {}", w.name,
             f.generation, w.ranks_generation);
  std::set<std::string> with_ranks;
  for (const auto& r : world.assignment.ranks()) with_ranks.insert(r.worker());
  std::string expected;
  for (const std::string& name : world.assignment.workers())
    if (with_ranks.contains(name))
      expected += fence_blob(name, f.generation, f.index);
  if (f.blob != expected)
    violated("fence {} of generation {} lacks contributions: {}", f.index,
             f.generation, f.blob);
  if (!world.fences_done[w.name].insert(f.index).second)
    violated("a fence was completed twice");
}

}  // namespace remesh::sim
