#include "coordinator/core/recovery.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "checkpoint/manifest/conversions.h"
#include "checkpoint/memory/replica_placement.h"
#include "coordinator/core/cordons.h"
#include "coordinator/core/durable.h"
#include "coordinator/core/state_retention.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"

namespace remesh::core {
namespace {

// NFS caches the contents of a folder that does not change for 30 s (acdirmin).
constexpr int64_t kListingPatienceMs = 30'000;
constexpr int64_t kRescanMs = 1000;

std::string in_memory(const pb::Source& s) {
  std::set<std::string> workers;
  for (const pb::StateHolding& h : s.states()) workers.insert(h.worker());
  return fmt::format("memory of {}: step {} of generation {}",
                     join({workers.begin(), workers.end()}), s.step(),
                     s.states(0).generation());
}

// The checkpoints and segments that are damaged, for the reason of a choice.
std::string damage_text(const Recovery::Inputs& in) {
  constexpr size_t kShown = 4;
  std::vector<std::string> bad;
  for (const InvalidCheckpoint& c : in.scan.invalid) bad.push_back(c.why);
  for (const std::string& path : in.view.durable.refusals().checkpoints())
    bad.push_back(path + ": does not load");
  std::string out;
  if (!bad.empty())
    out = fmt::format(
        "; skipped {}{}", bad[0],
        bad.size() == 1 ? "" : fmt::format(" and {} more", bad.size() - 1));
  size_t damages = 0;
  for (const auto& [name, m] : in.view.roster.members())
    for (const std::string& d : m.report.damaged())
      if (m.alive && ++damages <= kShown)
        out += fmt::format("; worker {}: {}", name, d);
  return out;
}

Inventory saved_states(const Recovery::Inputs& in) {
  Inventory out;
  for (const CheckpointInfo& c : in.scan.valid)
    if (!refuses(in.view.durable.refusals(), c.path))
      out.checkpoints.push_back({c.step, c.generation, c.path});
  out.first_steps = in.ledger.first_steps();
  out.last_finished = in.ledger.last_finished();
  return out;
}

bool holds(const Roster::Member& m, const pb::StateHolding& wanted) {
  const auto& held = m.report.holdings();
  return std::ranges::any_of(held, [&](const auto& h) {
    return h.generation() == wanted.generation() && h.step() == wanted.step() &&
           h.rank() == wanted.rank();
  });
}

// The hosts with workers of that build; cordoned ones are first or last.
std::vector<std::string> hosts_of_build(const ClusterView& view,
                                        const std::string& build,
                                        bool cordoned_first) {
  std::set<std::string> all;
  for (const auto& [name, m] : view.roster.members())
    if (m.alive && !m.sent_away && m.report.build() == build)
      all.insert(m.report.host());
  std::vector<std::string> out(all.begin(), all.end());
  std::stable_partition(out.begin(), out.end(), [&](const std::string& host) {
    return is_cordoned(view.durable.host_faults(), host) == cordoned_first;
  });
  return out;
}

}  // namespace

int64_t newest_generation(const CheckpointsScanned& scan, int64_t journaled) {
  int64_t newest = journaled;
  const auto take = [&](int64_t other) {
    if (other <= limits::kMaxNumber) newest = std::max(newest, other);
  };
  take(scan.claimed);
  for (const CheckpointInfo& c : scan.valid) take(c.generation);
  return newest;
}

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

// --------------------------------------------------------- a source's fate

bool source_is_there(const Roster& roster, const pb::Source& source) {
  const auto& states = source.states();
  return std::ranges::all_of(states, [&](const auto& wanted) {
    const Roster::Member* m = roster.find_alive(wanted.worker());
    return m != nullptr && holds(*m, wanted);
  });
}

bool holders_answered(const ClusterView& view) {
  constexpr int kReports = 2;  // the first one may have been under way
  const pb::Durable& d = view.durable;
  const auto& states = d.assignment().source().states();
  return std::ranges::all_of(states, [&](const auto& h) {
    const Roster::Member* m = view.roster.find_alive(h.worker());
    return m == nullptr || m->reports_in_phase >= kReports ||
           (has_ranks(d, h.worker()) && m->quiesced(d.generation()));
  });
}

bool refuses(const pb::Refusals& refusals, const std::string& checkpoint) {
  const auto& bad = refusals.checkpoints();
  return std::ranges::find(bad, checkpoint) != bad.end();
}

void refuse_source(const pb::Source& s, const Roster& roster,
                   pb::Refusals* refusals) {
  if (s.kind() == pb::Source::CHECKPOINT) {
    refusals->add_checkpoints(s.path());
    refusals->add_checkpoint_steps(s.step());
  }
  if (s.kind() != pb::Source::MEMORY || !source_is_there(roster, s)) return;
  pb::Refusals::State* bad = refusals->add_states();
  bad->set_generation(s.states(0).generation());
  bad->set_step(s.step());
}

bool try_elsewhere(const planner::Placement& placement, const ClusterView& view,
                   pb::Refusals* refusals) {
  if (refusals->checkpoints().empty()) return false;
  std::set<std::string> tried;
  for (const auto& [worker, host] :
       memory::hosts_by_worker(view.durable.assignment()))
    if (has_ranks(view.durable, worker)) tried.insert(host);
  const std::set<std::string> next = hosts_of(placement, view.roster);
  if (std::ranges::includes(tried, next)) return false;
  refusals->clear_checkpoints();
  refusals->clear_checkpoint_steps();
  return true;
}

bool forgive_source(const pb::Source& s, const std::string& worker,
                    pb::Refusals* refusals) {
  if (!is_in_memory_of(s, worker)) return false;
  auto* bad = refusals->mutable_states();
  const auto kept = std::remove_if(bad->begin(), bad->end(), [&](auto& b) {
    return b.generation() == s.states(0).generation() && b.step() == s.step();
  });
  if (kept == bad->end()) return false;
  bad->erase(kept, bad->end());
  return true;
}

void forgive_checkpoint(int64_t step, pb::Refusals* refusals) {
  auto* steps = refusals->mutable_checkpoint_steps();
  for (int i = steps->size() - 1; i >= 0; --i) {
    if (steps->Get(i) != step) continue;
    refusals->mutable_checkpoints()->DeleteSubrange(i, 1);
    steps->erase(steps->begin() + i);
  }
}

bool forgive_unreadable(pb::Refusals* refusals) {
  const auto& all = refusals->checkpoints();
  const auto it = std::ranges::find(all, refusals->unreadable());
  const bool found = refusals->has_unreadable() && it != all.end();
  if (found)
    forgive_checkpoint(refusals->checkpoint_steps(
                           static_cast<int>(std::distance(all.begin(), it))),
                       refusals);
  refusals->clear_unreadable();
  return found;
}

std::string lost_source(const ClusterView& view, bool forgiving) {
  for (const auto& h : view.durable.assignment().source().states()) {
    const Roster::Member* m = view.roster.find(h.worker());
    const bool lost = m == nullptr ? !forgiving
                                   : !m->alive || (m->report.has_inventory() &&
                                                   !holds(*m, h));
    if (lost) return h.worker();
  }
  return "";
}

// ------------------------------------------------------------------ choice

struct Recovery::Option {
  planner::Placement placement;
  StateChoice choice;
};

Recovery::Recovery(const pb::Job& job,
                   std::optional<geometry::ParamTable> table)
    : job_(job), table_(std::move(table)) {}

Inventory Recovery::gather(const Inputs& in) const {
  Inventory out = saved_states(in);
  for (const pb::Refusals::State& s : in.view.durable.refusals().states())
    out.refused.emplace(s.generation(), s.step());
  // Without states in memory the newest checkpoint is all there is.
  if (!table_) return out;
  for (const auto& [name, m] : in.view.roster.members()) {
    if (!m.alive || m.sent_away) continue;
    for (const pb::StateHolding& h : m.report.holdings()) {
      auto sharding = manifest::parse_sharding(h.sharding());
      if (!sharding.ok()) continue;
      out.holdings.push_back({h, std::move(*sharding)});
      out.holdings.back().info.set_worker(name);
      out.holdings.back().info.set_host(m.report.host());
    }
  }
  const auto limit = [&](int64_t generation) {
    if (!out.known_steps.contains(generation))
      out.known_steps[generation] = in.ledger.last_known(generation);
  };
  for (const Holding& h : out.holdings) limit(h.info.generation());
  for (const CheckpointInfo& c : out.checkpoints) limit(c.generation);
  return out;
}

// A state beyond the steps whose metrics are known leaves a gap in the metrics
// log. A few steps that nobody has seen are better computed again, as many as
// the states of a rank differ by: such a state is chosen only if finished steps
// or a saved one would be lost without it, or more than these.
StateChoice Recovery::choose(Inventory& candidates, const Inputs& in,
                             const std::set<std::string>& hosts) const {
  constexpr int64_t kMostAgain = 2;
  candidates.hosts = hosts;
  StateChoice c = choose_state(table(), candidates);
  const bool loses =
      c.step < std::max(in.ledger.last_finished(),
                        choose_state(nullptr, saved_states(in)).step);
  if (!loses && c.kind == pb::Source::MEMORY) return c;
  const auto known = std::exchange(candidates.known_steps, {});
  StateChoice all = choose_state(table(), candidates);
  candidates.known_steps = known;
  return all.step > c.step + (loses ? 0 : kMostAgain) ? all : c;
}

StateChoice Recovery::newest(const Inputs& in) const {
  Inventory candidates = gather(in);
  return choose(candidates, in, {});
}

StateChoice Recovery::saved_end(const Inputs& in) const {
  Inventory inventory = saved_states(in);
  std::erase_if(inventory.checkpoints, [&](const CheckpointInfo& c) {
    return c.step != job_.train().steps();
  });
  return choose_state(nullptr, inventory);
}

// Why initial weights would discard what was trained: checkpoints exist and
// none is usable, or existed. Nothing if none ever did.
std::optional<std::string> Recovery::no_checkpoint(const Inputs& in) const {
  size_t bad = in.scan.invalid.size();
  std::string first = bad > 0 ? in.scan.invalid.front().why : "";
  for (const CheckpointInfo& c : in.scan.valid) {
    ++bad;
    if (!first.empty()) continue;
    first = c.path + (refuses(in.view.durable.refusals(), c.path)
                          ? ": does not load"
                          : ": belongs to an abandoned branch");
  }
  if (bad == 0 && in.view.durable.saved_step() == 0) return std::nullopt;
  if (bad == 0)
    return fmt::format(
        "a checkpoint of step {} was saved, but the checkpoint folder has "
        "none; "
        "make the folder available again, or start over in a new run directory",
        in.view.durable.saved_step());
  return fmt::format(
      "{} found, but none can be loaded ({}); `remesh checkpoint verify` says "
      "what is wrong with each. To start over, give another --run-dir",
      plural(static_cast<int64_t>(bad), "checkpoint"), first);
}

// Names the checkpoint that was committed, is newer than the step chosen, and
// that the scan did not find; nothing if there is none.
std::optional<std::string> Recovery::missing_checkpoint(const Inputs& in,
                                                        int64_t chosen) const {
  const int64_t saved = in.view.durable.saved_step();
  if (saved <= chosen ||
      std::ranges::count(in.scan.invalid, saved, &InvalidCheckpoint::step) >
          0 ||
      std::ranges::any_of(in.scan.valid, [&](const CheckpointInfo& c) {
        return c.step == saved;
      }))
    return std::nullopt;
  return fmt::format(
      "the checkpoint of step {} was committed, but the "
      "checkpoint folder does not show it",
      saved);
}

// Whether to scan again before anything older is used.
bool Recovery::await_listing(const Inputs& in, int64_t chosen,
                             const std::optional<std::string>& missing,
                             Decision* out) {
  const bool first_time = listing_late_since_ms_ < 0;
  if (!missing || first_time)
    listing_late_since_ms_ = missing ? in.view.now_ms : -1;
  if (!missing || in.view.now_ms - listing_late_since_ms_ >= kListingPatienceMs)
    return false;
  out->kind = Decision::Kind::kWait;
  out->rescan_ms = kRescanMs;
  if (first_time)
    out->why = fmt::format(
        "{}; looking again for up to {} s before going back to step {}",
        *missing, kListingPatienceMs / 1000, chosen);
  return true;
}

// Whether to wait for workers that are missing: they may return with the
// finished steps. Others that are lost meanwhile do not prolong that, and one
// that is lost again and again does so once.
bool Recovery::await_holders(const Inputs& in, const StateChoice& best,
                             Decision* out) {
  const std::set<std::string>& missing = in.missing_holders;
  if (missing.empty()) {
    awaited_.clear();
    had_time_.clear();
  }
  const Roster& roster = in.view.roster;
  const size_t before = had_time_.size();
  had_time_.insert(missing.begin(), missing.end());
  if (had_time_.size() > before)
    awaited_until_ms_ = roster.last_lost_ms() - roster.absent_ms() +
                        job_.elastic().rejoin_wait_ms();
  const int64_t left_ms = time_left_ms(in.view);
  if (best.step >= in.ledger.last_finished() || missing.empty() || left_ms <= 0)
    return false;
  out->kind = Decision::Kind::kWait;
  if (awaited_ != missing)
    out->why = fmt::format(
        "step {} is complete only with the memory of {}; waiting up to "
        "{:.1f} s before going back to {} (elastic.rejoin_wait_ms)",
        in.ledger.last_finished(), join({missing.begin(), missing.end()}),
        static_cast<double>(left_ms) / 1000,
        best.kind == pb::Source::INIT ? "the initial weights"
                                      : fmt::format("step {}", best.step));
  awaited_ = missing;
  return true;
}

Recovery::Decision Recovery::decide(const Inputs& in,
                                    const planner::Placement& wanted) {
  Inventory candidates = gather(in);
  Option best{
      .placement = wanted,
      .choice = choose(candidates, in, hosts_of(wanted, in.view.roster))};
  Decision out;
  const int64_t last_finished = in.ledger.last_finished();
  if (table_ && best.choice.step < last_finished) {
    if (auto rescued = rescue(candidates, in, best)) {
      best = std::move(*rescued);
      out.rescue = !in.policy.stays_on(in.view, best.placement);
      if (!out.rescue)
        best.placement.reason =
            fmt::format("{} on the workers that hold the state",
                        best.placement.layout.to_string());
    }
    if (await_newer(candidates, in, best.choice, &out)) return out;
  }
  const StateChoice& c = best.choice;
  const auto missing = missing_checkpoint(in, c.step);
  if (await_listing(in, c.step, missing, &out) || await_readable(in, c, &out))
    return out;
  if (c.kind == pb::Source::INIT)
    if (auto why = no_checkpoint(in))
      return {.kind = Decision::Kind::kGiveUp, .why = std::move(why)};
  out.source.set_step(c.step);
  out.source.set_reason(c.why + damage_text(in) +
                        (missing ? "; " + *missing : ""));
  out.source.set_kind(c.kind);
  if (!c.path.empty()) out.source.set_path(c.path);
  for (const size_t i : c.sources)
    *out.source.add_states() = candidates.holdings[i].info;
  out.generation = c.generation;
  out.placement = std::move(best.placement);
  return out;
}

bool Recovery::waiting(const ClusterView& view,
                       const std::set<std::string>& missing) const {
  return !awaited_.empty() && missing == awaited_ && time_left_ms(view) > 0;
}

// ------------------------------------------------------------------ rescue

// The fewest hosts with workers of that build that together hold the state of
// that step; cordoned ones only if the others do not hold it.
std::set<std::string> Recovery::hosts_needed(Inventory& candidates,
                                             const Inputs& in, int64_t step,
                                             const std::string& build) const {
  const auto all = hosts_of_build(in.view, build, /*cordoned_first=*/true);
  const auto usable = std::ranges::find_if(all, [&](const auto& h) {
    return !is_cordoned(in.view.durable.host_faults(), h);
  });
  for (const auto first : {usable, all.begin()})
    if (const StateChoice c = choose(candidates, in, {first, all.end()});
        first != all.end() && c.step >= step)
      return fewest_hosts(candidates, c, all);
  return {all.begin(), all.end()};
}

// A placement that can start from a newer state than `option`, if there is one:
// the last one again, or one on the hosts that hold the state, and on further
// hosts where those have too few slots. On cordoned ones last of all.
std::optional<Recovery::Option> Recovery::rescue(Inventory& candidates,
                                                 const Inputs& in,
                                                 const Option& option) const {
  const int64_t newest = choose(candidates, in, {}).step;
  if (newest <= option.choice.step) return std::nullopt;
  const auto try_placement = [&](std::optional<planner::Placement> placement)
      -> std::optional<Option> {
    if (!placement) return std::nullopt;
    StateChoice c =
        choose(candidates, in, hosts_of(*placement, in.view.roster));
    if (c.step < newest) return std::nullopt;
    placement->reason = fmt::format(
        "{} once more, on the workers that hold the state, to save it for {}",
        placement->layout.to_string(), option.placement.layout.to_string());
    return Option{.placement = std::move(*placement), .choice = std::move(c)};
  };
  const auto try_hosts =
      [&](const std::string& build,
          const std::set<std::string>& hosts) -> std::optional<Option> {
    constexpr int kMostFewer = 8;
    for (int fewer = 0; fewer <= kMostFewer; ++fewer)
      if (auto found =
              try_placement(in.policy.place_on(in.view, build, hosts, fewer)))
        return found;
    return std::nullopt;
  };
  const auto before = in.policy.place_as_before(in.view);
  const bool cordoned =
      before && std::ranges::any_of(before->ranks, [&](const pb::RankPlace& p) {
        const auto* m = in.view.roster.find_alive(p.worker());
        return is_cordoned(in.view.durable.host_faults(), m->report.host(),
                           p.worker());
      });
  if (!cordoned)
    if (auto found = try_placement(before)) return found;
  for (const std::string& build :
       in.policy.builds(in.view, /*everyone=*/true)) {
    std::set<std::string> hosts = hosts_needed(candidates, in, newest, build);
    if (auto found = try_hosts(build, hosts)) return found;
    for (const std::string& host :
         hosts_of_build(in.view, build, /*cordoned_first=*/false))
      if (hosts.insert(host).second)
        if (auto found = try_hosts(build, hosts)) return found;
  }
  return cordoned ? try_placement(before) : std::nullopt;
}

}  // namespace remesh::core
