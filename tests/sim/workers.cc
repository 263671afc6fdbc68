// Worker processes, with real agents, and the network.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "proto/base/rng.h"
#include "tests/sim/cluster.h"
#include "tests/sim/parts.h"
#include "tests/testing/sentences.h"

namespace remesh::sim {
namespace {

constexpr int64_t kWorkerTickMs = 50;

}  // namespace

// ----------------------------------------------------------------- network

int64_t Cluster::latency() {
  if (!faults_on_) return uniform(0, 2);
  return chance(0.9) ? uniform(0, std::min<int64_t>(5, max_latency_ms_))
                     : uniform(0, max_latency_ms_);
}

bool Cluster::network_eats() { return faults_on_ && chance(loss_); }

// From or to the worker.
void Cluster::send(const std::string& worker, bool lost,
                   const std::function<void()>& arrives) {
  if (const auto w = workers_.find(worker);
      w != workers_.end() && w->second->held)
    return w->second->undelivered.push_back(
        [=, this] { send(worker, lost, arrives); });
  const int copies = faults_on_ && chance(duplicate_) ? 2 : 1;
  for (int i = 0; i < copies; ++i) {
    if (network_eats() || partitioned_until_[worker] > now_ || lost) continue;
    ++stats_.messages;
    at(latency(), arrives);
  }
}

void Cluster::deliver_to_coordinator(const std::string& from,
                                     const core::Input& event) {
  if (partitioned_until_[from] <= now_) tell_rival(from, event);
  send(from, mute_until_[from] > now_ || reconnected_at_[from] > now_,
       [this, from, event] { arrive(from, event); });
}

void Cluster::deliver_to_worker(const std::string& to,
                                const agent::Event& event) {
  send(to, deaf_until_[to] > now_, [this, to, event] {
    const auto it = workers_.find(to);
    if (it == workers_.end()) return;
    Worker& w = *it->second;
    if (now_ < w.frozen_until)
      w.inbox_while_frozen.push_back(event);
    else
      drive_worker(w, event);
  });
}

// ----------------------------------------------------------------- workers

Cluster::Worker& Cluster::add_worker() {
  auto w = std::make_unique<Worker>();
  w->name = fmt::format("w{}", workers_.size());
  w->host = fmt::format("h{}", workers_.size() / workers_a_host_);
  w->slots = static_cast<int>(uniform(1, 2));
  // Every host has a clock of its own.
  const uint64_t clock = hash64(fmt::format("{} {}", options_.seed, w->host));
  w->uptime_ms = static_cast<int64_t>(clock % 10'000'000'000);
  w->clock_ms = static_cast<int64_t>(clock % 7'200'000) - 3'600'000;
  Worker& ref = *w;
  workers_[w->name] = std::move(w);
  return ref;
}

void Cluster::start_worker(Worker& w) {
  if (w.agent || w.left || done_) return;
  pb::Report about;
  about.set_worker(w.name);
  w.told_to_leave.reset();
  w.incarnation = scripted_ ? w.incarnation + 1 : new_incarnation(w);
  w.started_ms = now_;
  about.set_incarnation(w.incarnation);
  about.set_host(w.host);
  if (!scripted_) about.set_host_id(hash64(w.host));
  upgrade(w);
  about.set_build(builds_[{w.name, w.incarnation}] = w.build);
  about.set_slots(w.slots);
  about.set_cores(2);
  w.agent = std::make_unique<agent::Agent>(about);
  w.ranks.clear();
  w.spawned.clear();
  w.torn_down.clear();
  w.epoch_seen = 0;
  w.terminated = false;
  w.frozen_until = 0;
  note_trouble(w, now_);
  w.inbox_while_frozen.clear();
  trace("worker " + w.name + " starts");
  if (!scripted_) later(w, 0, [this](Worker& x) { worker_tick(x); });
}

// Its ranks die with it (PR_SET_PDEATHSIG), and the metrics of earlier ones, as
// far as they are not in the log: the coordinator may have them, but records
// them only once a generation has restored their state.
void Cluster::stop_daemon(Worker& w) {
  w.agent.reset();
  for (auto& [g, world] : worlds_)
    for (auto& [step, names] : world->reporters) names.erase(w.name);
  for (auto& [rank, r] : w.ranks) r.alive = false;
}

void Cluster::end_daemon(Worker& w) {
  trace("worker " + w.name + " dies");
  stop_daemon(w);
  if (chance(0.7))  // usually the transport notices
    at(uniform(0, 30), [this, name = w.name] {
      if (partitioned_until_[name] <= now_) lose_connection(name);
    });
}

void Cluster::crash_worker(Worker& w) {
  if (!w.agent) return;
  end_daemon(w);
  if (faults_on_ && chance(0.15)) {
    w.left = true;  // with its host, permanently
    lose_memory(w);
  } else
    at(uniform(5, 3000), [this, &w] { start_worker(w); });
}

void Cluster::worker_tick(Worker& w) {
  const uint64_t life = w.incarnation;
  if (now_ >= w.frozen_until) {
    for (const agent::Event& e : std::exchange(w.inbox_while_frozen, {})) {
      drive_worker(w, e);
      if (!w.agent || w.incarnation != life) return;
    }
    tick(w);
    if (!w.agent || w.incarnation != life) return;
    attack_worker(w);
    if (!w.agent || w.incarnation != life) return;
  }
  later(w, kWorkerTickMs, [this](Worker& x) { worker_tick(x); });
}

void Cluster::tick(Worker& w) {
  agent::Tick tick;
  for (auto& [rank, r] : w.ranks)
    if (r.generation == w.ranks_generation) {
      if (r.alive && !r.stopped && !r.stuck && !r.finalizing &&
          worlds_[r.generation]->connected && intact(*worlds_[r.generation]))
        ++r.progress;
      tick.samples.push_back(sample(r));
    }
  if (calm_) w.room = uint64_t{1} << (bad_of(w.host) == Bad::kSmall ? 20 : 40);
  tick.state_room = w.room;
  drive_worker(w, tick);
}

agent::RankSample Cluster::sample(Rank& r) {
  agent::RankSample s;
  s.status.set_rank(r.rank);
  s.status.set_phase(pb::RankStatus::STARTING);
  s.status.set_step(scripted_ ? r.committed + 1 : r.step);
  s.status.set_committed_step(r.committed);
  s.status.set_progress(r.progress);
  s.status.set_checkpoint_step(r.checkpoint);
  s.status.set_declined_stops(r.declined_stops);
  s.status.set_os_state(r.stopped ? "T" : "S");
  const World& world = *worlds_.at(r.generation);
  if (world.connected && r.committed >= 0)
    s.status.set_phase(pb::RankStatus::COMPUTE);
  if (r.finalizing) s.status.set_phase(pb::RankStatus::STOPPING);
  if (cut_apart(world)) s.status.set_waits(true);
  if (world.hangs) s.status.set_waits(all_wait_ || !r.stuck);
  // Random faults have no words.
  if (scripted_ && !r.error.empty()) s.status.set_error(r.error);
  if (scripted_ && !r.checkpoint_error.empty()) {
    s.status.set_checkpoint_error(r.checkpoint_error);
    s.status.set_checkpoint_code(code_name(Code::kExhausted));
  }
  s.steps = std::exchange(r.ring, {});
  return s;
}

void Cluster::drive_worker(Worker& w, const agent::Event& event) {
  if (!w.agent) return;
  const uint64_t life = w.incarnation;
  const int64_t generation = w.agent->generation();
  const std::vector<agent::Action> actions =
      w.agent->on(event, now_ + w.uptime_ms);
  if (const auto* d = std::get_if<agent::DirectiveReceived>(&event);
      d != nullptr && d->directive.incarnation() != life &&
      w.agent->generation() != generation)
    violated(w.name + " obeys a directive to its earlier incarnation");
  for (const agent::Action& a : actions) {
    if (faults_on_ && chance(crash_between_actions_)) {
      ++stats_.faults;
      return crash_worker(w);
    }
    do_action(w, a);
    if (!w.agent || w.incarnation != life) return;
  }
}

void Cluster::do_action(Worker& w, const agent::Action& action) {
  note(w, action);
  if (const auto* s = std::get_if<agent::Send>(&action)) {
    core::MessageReceived out{s->message};
    if (out.message.has_report()) {
      check_report(w, s->message.report());
      pb::Report* report = out.message.mutable_report();
      if (options_.reword) for_each_sentence(report, reworded);
      overheard_.report = *report;
    }
    deliver_to_coordinator(w.name, out);
  } else if (const auto* p = std::get_if<agent::Spawn>(&action)) {
    spawn(w, p->assignment);
  } else if (const auto* k = std::get_if<agent::KillRanks>(&action)) {
    for (auto& [rank, r] : w.ranks)
      if (r.alive && r.generation == k->generation)
        rank_ends(r, 0, 9, std::max(uniform(0, 30), w.kills_wait_until - now_));
    delay_kills(w);
  } else if (const auto* t = std::get_if<agent::TearDown>(&action)) {
    const int64_t delay = std::max(uniform(0, 20), w.kills_wait_until - now_);
    later(w, delay, [this, g = t->generation](Worker& x) { tear_down(x, g); });
  } else if (const auto* c = std::get_if<agent::CompleteFence>(&action)) {
    World& world = *worlds_[c->generation];
    check_fence(w, world, *c);
    if (c->index == 0) {
      later(w, uniform(1, 10), [this, g = c->generation](Worker& x) {
        drive_worker(x, agent::LocalFence{g, 1, fence_blob(x.name, g, 1)});
      });
    }
    if (c->index == 2) end_finalize(w, c->generation);
    maybe_connect(world);
  } else if (const auto* q = std::get_if<agent::SetRequest>(&action)) {
    check_request(w, *q);
    for (auto& [rank, r] : w.ranks) {
      r.request = q->bits;
      r.save_request = q->checkpoint_request;
    }
  } else if (const auto* i = std::get_if<agent::TakeInventory>(&action)) {
    later(w, uniform(0, 8), [this, asked = *i](Worker& x) {
      drive_worker(x,
                   agent::InventoryTaken{
                       asked.job, asked.generation, x.memory.inventory(), {}});
    });
  } else if (std::holds_alternative<agent::MeasureHardware>(action)) {
    if (!scripted_) measure_hardware(w);
  } else if (const auto* e = std::get_if<agent::Exit>(&action)) {
    trace("worker " + w.name + " exits: " + e->message);
    if (e->states != agent::States::kKept) {
      w.memory.clear();
      if (!w.told_to_leave.value_or(false)) w.memory_lost_ms = now_;
    }
    note_trouble(w, now_);
    stop_daemon(w);
    w.left = true;
    if (scripted_) at(0, [this, name = w.name] { lose_connection(name); });
    if (chance(0.7)) lose_connection(w.name);
  }
}

void Cluster::tear_down(Worker& w, int64_t g) {
  for (const Rank* r : live_ranks(w))
    if (r->generation == g)
      violated("{} tears generation {} down, rank {} is alive", w.name, g,
               r->rank);
  w.torn_down.insert(g);
  drive_worker(w, agent::TornDown{g});
}

// Hosts differ; some cannot be measured.
void Cluster::measure_hardware(const Worker& w) {
  const std::string text =
      chance(0.2) ? "# no program"
                  : fmt::format(
                        "[device]\nname = \"cpu\"\nmemory_gb = 4.0\n"
                        "memory_gb_per_s = 6.0\npeak_tflops = {:.2f}\n"
                        "[node]\ndevices = 2\ngb_per_s = 4.0\n"
                        "[network]\ngb_per_s = 0.06\n",
                        0.01 * static_cast<double>(uniform(2, 20)));
  later(w, uniform(100, 6000), [this, text](Worker& x) {
    drive_worker(x, agent::HardwareMeasured{text});
  });
}

}  // namespace remesh::sim
