// States in memory: what the members hold, which state a generation begins
// with, and whose memory is still needed for it.
#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/manifest/sharding.h"
#include "coordinator/core/coordinator.h"
#include "coordinator/core/survival.h"
#include "proto/base/text.h"

namespace remesh::core {
namespace {

constexpr size_t kShownDamages = 4;

Result<Holding> holding_of(const pb::StateHolding& h, const std::string& worker,
                           const std::string& host) {
  ASSIGN_OR_RETURN(geometry::Sharding sharding,
                   manifest::parse_sharding(h.sharding()));
  return Holding{.worker = worker,
                 .host = host,
                 .segment = h.segment(),
                 .step = h.step(),
                 .generation = h.generation(),
                 .rank = h.rank(),
                 .sharding = std::move(sharding),
                 .model = h.model(),
                 .elements = h.elements(),
                 .tokens = h.tokens(),
                 .sequences = h.sequences(),
                 .replica = h.replica()};
}

std::string in_memory(const pb::Source& s) {
  std::set<std::string> workers;
  for (const pb::StateHolding& h : s.states()) workers.insert(h.worker());
  return fmt::format("memory of {}: step {} of generation {}",
                     join({workers.begin(), workers.end()}), s.step(),
                     s.states(0).generation());
}

}  // namespace

std::string source_text(const pb::Source& s) {
  switch (s.kind()) {
    case pb::Source::CHECKPOINT:
      return s.path();
    case pb::Source::MEMORY:
      return in_memory(s);
    default:
      return "initial weights";
  }
}

// What it says is there, and nothing can change it: no rank of it lives, and
// none can be started by an order that is under way.
bool Coordinator::inventory_known(const Member& m) const {
  const pb::Report& r = m.report;
  return m.reported && r.has_inventory() && !r.busy() &&
         r.generation() == durable_.generation() &&
         (r.state() == pb::Report::IDLE || r.state() == pb::Report::QUIESCED);
}

bool Coordinator::inventories_known() const {
  return std::all_of(members_.begin(), members_.end(), [this](const auto& m) {
    return !m.second.alive || m.second.sent_away || inventory_known(m.second);
  });
}

// ------------------------------------------------------------------ choice

// The last step whose metrics, and those of all before, are known.
int64_t Coordinator::last_known_step(int64_t generation) const {
  int64_t known = last_finished_;
  while (known_metrics(generation, known + 1) != nullptr) ++known;
  return known;
}

// A state beyond the steps whose metrics are known leaves a gap in their
// record. Nobody has seen those steps, so they are better computed again: such
// a state is taken only when finished steps would be lost without it.
Choice Coordinator::choose(const CheckpointsScanned& scan,
                           const std::set<std::string>& hosts,
                           std::vector<pb::StateHolding>* messages) const {
  Inventory inventory;
  Inventory* const in = &inventory;
  messages->clear();
  for (const auto& [name, m] : members_) {
    if (!m.alive || m.sent_away) continue;
    for (const pb::StateHolding& h : m.report.holdings()) {
      auto holding = holding_of(h, name, m.report.host());
      if (!holding.ok()) continue;
      in->holdings.push_back(std::move(*holding));
      messages->push_back(h);
      messages->back().set_worker(name);
      messages->back().set_host(m.report.host());
    }
  }
  for (const CheckpointInfo& c : scan.valid)
    if (!refuses(c.path))
      in->checkpoints.push_back({c.step, generation_of(c), c.path});
  in->first_steps = first_steps_;
  in->hosts = hosts;
  for (const pb::Durable::State& s : durable_.bad_states())
    in->refused.emplace(s.generation(), s.step());
  in->last_finished = last_finished_;
  in->max_step = total_steps();
  const auto limit = [&](int64_t generation) {
    if (!in->known_steps.contains(generation))
      in->known_steps[generation] = last_known_step(generation);
  };
  for (const Holding& h : in->holdings) limit(h.generation);
  for (const SavedState& c : in->checkpoints) limit(c.generation);
  Choice c = choose_state(*table_, *in);
  const bool loses = c.step < last_finished_;
  if (!loses && c.kind != Choice::Kind::kInit) return c;
  in->known_steps.clear();
  Choice all = choose_state(*table_, *in);
  if (all.step > c.step && (loses || all.kind == Choice::Kind::kCheckpoint))
    return all;
  return c;
}

// All steps are made, and their state is in a checkpoint.
bool Coordinator::saved_at_end(const CheckpointsScanned& scan) {
  for (const CheckpointInfo& c : scan.valid) {
    if (c.step != total_steps() || refuses(c.path) ||
        left_by(first_steps_, c.generation, c.step) != 0)
      continue;
    take_recent(scan);
    fill_metrics(generation_of(c), c.step);
    return true;
  }
  return false;
}

std::set<std::string> Coordinator::hosts_of(const planner::Deal& deal) const {
  std::set<std::string> hosts;
  for (const planner::RankPlace& p : deal.ranks)
    hosts.insert(members_.at(p.worker).report.host());
  return hosts;
}

bool Coordinator::source_from_states(const CheckpointsScanned& scan,
                                     planner::Deal* deal, pb::Source* source) {
  take_recent(scan);
  std::vector<pb::StateHolding> messages;
  Choice c = choose(scan, hosts_of(*deal), &messages);
  bool rescued = false;
  if (c.step < last_finished_) {
    rescued = rescue(scan, deal, &c, &messages);
    if (c.step < last_finished_ && begin_rejoin_wait()) return false;
  }
  durable_.set_rescue(rescued);
  const std::string none = no_checkpoint(scan);
  if (c.kind == Choice::Kind::kInit && !none.empty()) {
    terminate(pb::Durable::FAILED, none);
    return false;
  }
  source->set_step(c.step);
  std::string why = c.why;
  // Those that were found out by trying, too.
  const size_t bad = scan.invalid.size() +
                     static_cast<size_t>(durable_.bad_checkpoints_size());
  if (bad > 0) why += fmt::format("; {} checkpoints do not verify", bad);
  size_t damages = 0;
  for (const auto& [name, m] : members_)
    for (const std::string& d : m.report.damaged())
      if (m.alive && ++damages <= kShownDamages)
        why += fmt::format("; worker {}: {}", name, d);
  source->set_reason(why);
  switch (c.kind) {
    case Choice::Kind::kInit:
      source->set_kind(pb::Source::INIT);
      break;
    case Choice::Kind::kCheckpoint:
      source->set_kind(pb::Source::CHECKPOINT);
      source->set_path(c.path);
      break;
    case Choice::Kind::kMemory:
      source->set_kind(pb::Source::MEMORY);
      for (const size_t i : c.sources) *source->add_states() = messages[i];
      break;
  }
  fill_metrics(c.generation, c.step);
  return true;
}

// A state that did not load is not tried again, unless part of it is not there
// any more: then the others may do.
void Coordinator::refuse_source() {
  const pb::Source& s = durable_.assignment().source();
  if (s.kind() == pb::Source::CHECKPOINT)
    durable_.add_bad_checkpoints(s.path());
  if (s.kind() != pb::Source::MEMORY || !source_is_there()) return;
  pb::Durable::State* bad = durable_.add_bad_states();
  bad->set_generation(s.states(0).generation());
  bad->set_step(s.step());
}

bool Coordinator::source_is_there() const {
  const auto& states = durable_.assignment().source().states();
  return std::all_of(states.begin(), states.end(), [this](const auto& wanted) {
    const auto it = members_.find(wanted.worker());
    if (it == members_.end() || !it->second.alive) return false;
    const auto& held = it->second.report.holdings();
    return std::any_of(held.begin(), held.end(), [&](const auto& h) {
      return h.generation() == wanted.generation() &&
             h.step() == wanted.step() && h.rank() == wanted.rank();
    });
  });
}

// A worker that is gone and with it a state which the generation begins with.
// A restarted coordinator gives those that it does not know time to be heard.
std::string Coordinator::lost_source() const {
  const bool finding = durable_.generation() == adopted_generation_ &&
                       now_ms_ - started_ms_ < kReconnectSlackMs;
  for (const pb::StateHolding& h : durable_.assignment().source().states()) {
    const auto it = members_.find(h.worker());
    if (it == members_.end() ? !finding : !it->second.alive) return h.worker();
  }
  return "";
}

// ------------------------------------------------------------- coming back

// Workers with ranks of the newest generation, or with states that it was to
// begin with, that are not here.
std::set<std::string> Coordinator::gone_holders() const {
  std::set<std::string> gone;
  const pb::Assignment& a = durable_.assignment();
  for (const pb::RankPlace& p : a.ranks()) gone.insert(p.worker());
  if (!handed_over_)
    for (const pb::StateHolding& h : a.source().states())
      gone.insert(h.worker());
  for (const auto& [name, m] : members_)
    if (m.alive && m.reported) gone.erase(name);
  return gone;
}

int64_t Coordinator::rejoin_until_ms() const {
  return loss_ms_ + options_.job.elastic().rejoin_wait_ms();
}

bool Coordinator::awaits_rejoin() const {
  return !awaited_.empty() && now_ms_ < rejoin_until_ms() &&
         gone_holders() == awaited_;
}

// Finished steps would be lost; those who are gone may come back with them.
bool Coordinator::begin_rejoin_wait() {
  const std::set<std::string> gone = gone_holders();
  if (gone.empty() || now_ms_ >= rejoin_until_ms()) return false;
  if (awaited_ != gone) {
    waiting_for_ = fmt::format(
        "finished steps would be lost without {}: waits {:.1f} s for it to "
        "come back (elastic.rejoin_wait_ms)",
        join({gone.begin(), gone.end()}),
        static_cast<double>(rejoin_until_ms() - now_ms_) / 1000);
    pb::EventRecord e = event("waiting");
    e.set_detail(waiting_for_);
    emit(std::move(e));
  }
  awaited_ = gone;
  return true;
}

// --------------------------------------------------------------- hand-over

// From when on nobody needs the states that the generation began with: each
// rank has its own, and a further step shows that replicas were made of them.
void Coordinator::watch_hand_over() {
  if (handed_over_) return;
  const pb::Source& s = durable_.assignment().source();
  const int64_t committed = min_committed();
  handed_over_ =
      committed > s.step() ||
      (committed == s.step() && !makes_replicas(durable_.assignment()));
}

bool Coordinator::needs_memory_of(const std::string& name,
                                  const Member& m) const {
  if (!keeps_state() || m.sent_away) return false;
  if (durable_.phase() == pb::Durable::WAITING ||
      durable_.phase() == pb::Durable::ABORTING) {
    if (m.report.has_inventory() && m.report.holdings_size() == 0) return false;
    if (checkpoint_step_ >= last_finished_) return false;
    return expects_plan();
  }
  if (handed_over_) return false;
  const pb::Source& source = durable_.assignment().source();
  if (source.kind() != pb::Source::MEMORY) return false;
  // Also one that nobody reads from: until there are replicas of what the
  // others took up, it is one.
  const auto& held = m.report.holdings();
  return std::any_of(source.states().begin(), source.states().end(),
                     [&](const auto& h) { return h.worker() == name; }) ||
         std::any_of(held.begin(), held.end(),
                     [&](const auto& h) { return h.step() == source.step(); });
}

bool Coordinator::must_save_to_finish() const {
  if (!keeps_state() || durable_.stop_requested()) return true;
  const auto next = deal();
  if (!next.ok()) return true;
  return !survives_on(durable_.assignment(), hosts_of(*next));
}

// Finished steps are in memory alone, which ends with the job: a generation
// takes them up and saves them.
bool Coordinator::stop_needs_save() const {
  if (!keeps_state() || checkpoint_step_ >= last_finished_) return false;
  const bool held =
      std::any_of(members_.begin(), members_.end(), [](const auto& m) {
        return m.second.alive && m.second.report.holdings_size() > 0;
      });
  return held && expects_plan();
}

// While waiting: there are slots enough, or may be soon.
bool Coordinator::expects_plan() const {
  return deal().ok() ||
         now_ms_ - phase_since_ms_ < options_.job.elastic().rejoin_wait_ms();
}

}  // namespace remesh::core
