#include "coordinator/core/cordoning.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "checkpoint/manifest/conversions.h"
#include "coordinator/core/durable.h"
#include "coordinator/core/link_search.h"
#include "coordinator/core/recovery.h"
#include "coordinator/core/survival.h"
#include "proto/base/exit_code.h"
#include "proto/base/text.h"

namespace remesh::core {
namespace {

constexpr int64_t kEnough = 2;  // failures of a link in a row that cordon
constexpr double kLinkTestS = 600;
// Workers that were restarted, or that a new coordinator waits for, are back by
// then.
constexpr int64_t kOthersReturnMs = 5'000;

// Links of the host that failed often enough.
int64_t bad_links(const pb::HostFaults& faults, const std::string& host) {
  return std::ranges::count_if(faults.suspects(), [&](const pb::Cordon& c) {
    return !c.peer().empty() && c.failures() >= kEnough &&
           (c.host() == host || c.peer() == host);
  });
}

}  // namespace

// ---------------------------------------------------------------- questions

// Whether the job waits for proven hosts or workers that are away, rather than
// ending for what failed on others. Not without end: they may be gone for good.
bool Cordoning::awaits_proven(const std::vector<Site>& failed) const {
  std::set<std::string> away(in_.faults->proven().begin(),
                             in_.faults->proven().end());
  for (const auto& named : in_.view.roster.members()) {
    const std::string& host = named.second.report.host();
    if (named.second.alive && std::ranges::none_of(failed, [&](const Site& s) {
          return concerns(s, host, named.first);
        }))
      away.erase(host);
  }
  return !away.empty() && std::ranges::all_of(failed, [this](const Site& s) {
    return (!s.worker.empty() || !is_proven(*in_.faults, s.host)) &&
           failures_of(*in_.faults, s) <
               in_.elastic.max_failures_without_progress();
  });
}

// Whether the job would wait without end if nobody could read its inputs.
bool Cordoning::awaits_inputs(const pb::Cause& fault) const {
  return fault.exit_code() == kExitUnreadable && in_.view.last_finished > 0;
}

// Whether workers remain with which the job has not failed in this way. For
// those that are cordoned for something else the job waits. For workers that
// may return it does, too, unless it waits for its inputs anyway: then it sees
// what happens when they are back. What could not be read may be readable again
// where ranks have not failed this time.
bool Cordoning::others_remain(const std::vector<Site>& failed,
                              const pb::Cause& fault) const {
  const bool waits = awaits_inputs(fault);
  if (!waits && in_.view.roster.others_may_return(in_.elastic.rejoin_wait_ms(),
                                                  in_.view.now_ms))
    return true;
  const auto& members = in_.view.roster.members();
  return std::ranges::any_of(members, [&](const auto& named) {
    const std::string& name = named.first;
    const Roster::Member& m = named.second;
    const std::string& host = m.report.host();
    return m.alive && m.reported && !m.leaving() && m.report.slots() > 0 &&
           ((waits && has_ranks(in_.view.durable, name)) ||
            !failed_alike(*in_.faults, host, name, fault)) &&
           std::ranges::none_of(
               failed, [&](const Site& s) { return concerns(s, host, name); });
  });
}

// Whether a mesh is possible now if these hosts are cordoned and set apart.
bool Cordoning::possible_with(const pb::HostFaults& faults) const {
  pb::Durable with = in_.view.durable;
  *with.mutable_host_faults() = faults;
  return in_.policy
      .place(ClusterView{.roster = in_.view.roster,
                         .durable = with,
                         .now_ms = in_.view.now_ms})
      .ok();
}

// Whether one is if these are cordoned, too, and none is set apart.
bool Cordoning::possible_without(const std::vector<Site>& sites,
                                 pb::HostFaults faults) const {
  faults.mutable_link_search()->clear_apart();
  for (const Site& site : sites) cordon(site, {}, in_.unix_s, &faults);
  return possible_with(faults);
}

// Whether the newest state is incomplete without the hosts.
bool Cordoning::needs_state_of(const std::set<std::string>& hosts) const {
  const pb::Assignment& a = in_.view.durable.assignment();
  if (in_.stepped) {
    std::set<std::string> others(a.hosts().begin(), a.hosts().end());
    for (const std::string& host : hosts) others.erase(host);
    return !survives_on(a, others);
  }
  std::set<int> here, elsewhere;
  for (const pb::StateHolding& h : a.source().states())
    (hosts.contains(h.host()) ? here : elsewhere).insert(h.rank());
  return !std::ranges::includes(elsewhere, here);
}

// Whether workers on other hosts say that they hold what of the source is on
// these. While ranks run they say nothing, so that holders count as needed.
bool Cordoning::others_hold(const pb::Source& source,
                            const std::set<std::string>& hosts) const {
  if (source.states().empty()) return true;
  const pb::StateHolding& first = source.states(0);
  const std::string sharding = first.sharding().SerializeAsString();
  const auto cut = manifest::parse_sharding(first.sharding());
  const auto part_of = [&](int rank) {
    return cut.ok() && rank < cut->layout.world()
               ? geometry::replica_group(*cut, rank)
               : rank;
  };
  std::set<int> here, elsewhere;
  for (const pb::StateHolding& h : source.states())
    if (hosts.contains(h.host())) here.insert(part_of(h.rank()));
  for (const auto& named : in_.view.roster.members()) {
    const Roster::Member& m = named.second;
    if (!m.alive || hosts.contains(m.report.host())) continue;
    for (const pb::StateHolding& h : m.report.holdings())
      if (h.generation() == first.generation() && h.step() == first.step() &&
          h.sharding().SerializeAsString() == sharding)
        elsewhere.insert(part_of(h.rank()));
  }
  return std::ranges::includes(elsewhere, here);
}

void Cordoning::begin(const Site& site, const pb::Cause& fault) {
  changes_.any = true;
  changes_.begun.push_back(cordon(site, fault, in_.unix_s, in_.faults));
}

int64_t Cordoning::count(const Site& site, const pb::Cause& fault,
                         double remembered_s) {
  changes_.any = true;
  return suspect(site, fault, remembered_s, in_.unix_s, in_.faults);
}

// ----------------------------------------------------------------- failures

Consequence Cordoning::after(const pb::Cause& noticed) {
  pb::Cause fault = of_unproven(noticed, *in_.faults);
  if (fault.at_start()) fault.set_cost_s(in_.generation_s);
  // If others hung with them, it may be what they share.
  if (fault.hosts_size() != noticed.hosts_size()) fault.clear_hung();
  if (!fault.between().empty()) return after_lost_message(fault);
  if (!fault.links().empty()) return after_broken(fault);
  std::vector<Site> sites = sites_of(fault, in_.view);
  const bool others_can_run = possible_without(sites);
  // A job that needs all workers of the host fails as if there were one.
  std::set<Site> counted;
  if (!others_can_run)
    std::erase_if(sites, [&](Site& site) {
      if (failures_of(*in_.faults, site) < kEnough) site.worker.clear();
      return !counted.insert(site).second;
    });
  const Blame blame =
      blame_for(fault, sites, in_.view, in_.elastic, others_can_run);
  std::vector<Site> failing;
  for (const Site& site : blame.sites)
    if (count(site, fault, blame.remembered_s) >= blame.enough)
      failing.push_back(site);
  if (failing.empty())
    return blame.sites.empty()    ? Consequence::kNone
           : blame.others_can_run ? Consequence::kOthersCanRun
                                  : Consequence::kSuspected;
  if (!others_remain(failing, fault) &&
      (awaits_inputs(fault) || !awaits_proven(failing)))
    return Consequence::kNone;
  for (const Site& site : failing) begin(site, fault);
  return Consequence::kCordoned;
}

FailureVerdict Cordoning::judge(const pb::Cause& fault,
                                pb::FailureBudget* budget,
                                pb::Refusals* refusals) {
  if (fault.exit_code() == kExitSaveFailed) return {.unsaved = true};
  if (awaits_inputs(fault)) return judge_unreadable(fault, refusals);
  const pb::Source& source = in_.view.durable.assignment().source();
  count_failure(fault, in_.view.last_finished, source.step(), budget);
  const Consequence consequence = after(fault);
  FailureVerdict v = judge_failure(fault, in_.elastic, consequence, source,
                                   *in_.faults, budget);
  v.no_room =
      fault.exit_code() == kExitNoRoom && consequence != Consequence::kCordoned;
  if (v.bad_source) refuse_source(source, in_.view.roster, refusals);
  return v;
}

// A checkpoint that cannot be read for a long time may be on a bad disk, and
// older ones elsewhere, so that one of those is tried. If that cannot be read
// either, it is the storage. Attempts in which nobody reads it do not lengthen
// the cordons of hosts that cannot read it later, when others can.
FailureVerdict Cordoning::judge_unreadable(const pb::Cause& fault,
                                           pb::Refusals* refusals) {
  constexpr int64_t kBeforeOlder = 20;  // about 8 minutes
  if (after(fault) == Consequence::kCordoned) return {};
  changes_.any = true;
  for (pb::Cordon& c : *in_.faults->mutable_suspects())
    if (is_alike(c, fault)) c.set_failures(std::min(c.failures(), kAtFault));
  const int64_t failures = in_.faults->unreadable() + 1;
  in_.faults->set_unreadable(failures);
  const pb::Source& source = in_.view.durable.assignment().source();
  if (!forgive_unreadable(refusals) && failures % kBeforeOlder == 0 &&
      source.kind() == pb::Source::CHECKPOINT) {
    refuse_source(source, in_.view.roster, refusals);
    refusals->set_unreadable(source.path());
  }
  return {.unreadable = true, .backoff_ms = wait_for_storage_ms(failures)};
}

// Counts the failure on the links between hosts. When one failed before, one
// of its two hosts is cordoned: rather one without which the state is complete,
// that is not proven, and that is on more such links. Cordons for its other
// links end, and those for links that failed less often, which did not help. If
// that happens again and again, all links may be bad, and the failure counts. A
// search for a link has ended then: its failures were on this one.
Consequence Cordoning::after_broken(const pb::Cause& fault) {
  const std::vector<Link> links = links_of(fault);
  if (in_.faults->link_search().failures() >= kEnough) {
    in_.faults->clear_link_search();
    for (const auto& [a, b] : links)
      if (failures_of(*in_.faults, {.host = a, .peer = b}) < 1)
        count({.host = a, .peer = b}, fault);
  }
  int64_t most = 0;
  for (const auto& [a, b] : links)
    most = std::max(most, count({.host = a, .peer = b}, fault));
  if (most < kEnough) return Consequence::kSuspected;
  std::map<std::string, std::string> peers;
  for (const auto& [a, b] : links) {
    if (failures_of(*in_.faults, {.host = a, .peer = b}) < most) continue;
    peers.emplace(a, b);
    peers.emplace(b, a);
  }
  std::optional<Site> chosen;
  pb::HostFaults others_of_chosen;
  std::tuple<bool, bool, int64_t> best;
  for (const auto& [host, peer] : peers) {
    pb::HostFaults others = *in_.faults;
    for (const pb::Cordon& c : in_.faults->cordons())
      if (!c.peer().empty() &&
          (c.peer() == host ||
           failures_of(*in_.faults, {.host = c.host(), .peer = c.peer()}) <
               most))
        end_cordon({.host = c.host()}, &others);
    // A single host may have been proven by running alone.
    const bool proven = others.proven_size() > 1 && is_proven(others, host);
    const std::tuple key(!needs_state_of({host}), !proven,
                         bad_links(others, host));
    if (!possible_without({{.host = host}}, others) || (chosen && key < best))
      continue;
    chosen = {.host = host, .peer = peer};
    others_of_chosen = std::move(others);
    best = key;
  }
  if (!chosen) return Consequence::kSuspected;
  const bool in_turn = most >= kAtFault && others_of_chosen.cordons_size() <
                                               in_.faults->cordons_size();
  *in_.faults = std::move(others_of_chosen);
  begin(*chosen, fault);
  return in_turn ? Consequence::kSuspected : Consequence::kCordoned;
}

// The first hang may be a single message that was lost. After another one
// meshes are tried that separate the hosts.
Consequence Cordoning::after_lost_message(const pb::Cause& fault) {
  const std::set<std::string> between(fault.between().begin(),
                                      fault.between().end());
  for (const pb::Cordon& c : in_.faults->suspects())
    if (!c.peer().empty() && c.failures() >= kEnough &&
        between.contains(c.host()) && between.contains(c.peer())) {
      pb::Cause known = fault;  // from an earlier search
      set_links({std::minmax(c.host(), c.peer())}, &known);
      return after_broken(known);
    }
  changes_.any = true;
  pb::LinkSearch* s = in_.faults->mutable_link_search();
  const int64_t failures = s->failures() + 1;
  if (failures > 1) narrow(between, /*passed=*/false, s);
  // If it is none of the links in question, another one is bad, too.
  if (failures == 1 || num_links(*s) == 0) *s = begin_link_search(between);
  s->set_failures(failures);
  s->set_reason(text_of(fault));
  s->set_cost_s(fault.cost_s());
  if (failures == 1) return Consequence::kSuspected;
  return next_link_test() ? Consequence::kCordoned : Consequence::kSuspected;
}

// Sets hosts apart for the next test, or ends the search with a cordon. False
// if nothing can be done: the job cannot run without any of the hosts.
bool Cordoning::next_link_test() {
  pb::LinkSearch* s = in_.faults->mutable_link_search();
  if (cordon_found_host()) return true;
  if (const auto link = found_link(*s)) {
    pb::Cause fault = cause_of(s->reason());
    fault.set_cost_s(s->cost_s());
    set_links({*link}, &fault);
    return after_broken(fault) == Consequence::kCordoned;
  }
  std::set<std::string> unproven;
  for (const std::string& host : s->ends())
    if (in_.faults->proven_size() > 0 && !is_proven(*in_.faults, host))
      unproven.insert(host);
  const auto possible = [this](const std::set<std::string>& apart) {
    std::vector<Site> sites;
    for (const std::string& host : apart) sites.push_back({.host = host});
    return possible_without(sites);
  };
  const auto harmless = [&](const std::set<std::string>& apart) {
    return !needs_state_of(apart) && possible(apart);
  };
  if (!set_apart(harmless, unproven, s) && !set_apart(possible, unproven, s))
    return false;
  s->set_until(in_.unix_s + kLinkTestS);
  changes_.tests.push_back(*s);
  return true;
}

// If all links in question are of one host, it does not matter which of them it
// is, unless the host is needed.
bool Cordoning::cordon_found_host() {
  const pb::LinkSearch search = in_.faults->link_search();
  if (search.ends_size() != 1) return false;
  const Site site{.host = search.ends(0)};
  if (needs_state_of({site.host}) || !possible_without({site})) return false;
  pb::Cause fault = cause_of(search.reason());
  fault.set_cost_s(search.cost_s());
  while (count(site, fault) < kEnough) continue;
  in_.faults->clear_link_search();
  begin(site, fault);
  return true;
}

bool Cordoning::for_room(const Plan& plan) {
  std::vector<Site> sites;
  std::set<std::string> hosts;
  for (const auto& [host, shortage] : plan.short_of) {
    sites.push_back({.host = host});
    hosts.insert(host);
  }
  if (!others_hold(plan.assignment.source(), hosts) || !possible_without(sites))
    return false;
  for (const auto& [host, shortage] : plan.short_of) {
    const pb::Cause failure = cause_of(to_text({{host, shortage}}));
    count({.host = host}, failure);
    begin({.host = host}, failure);
  }
  return true;
}

bool Cordoning::for_loading(pb::Refusals* refusals) {
  if (refusals->checkpoints().empty() && refusals->states().empty())
    return false;
  pb::Cause fault = cause_of("the state does not load");
  fault.set_exit_code(kExitBadSource);
  std::vector<Site> failed;
  for (const std::string& host : hosts_failed_alike(*in_.faults, fault))
    failed.push_back({.host = host});
  if (!others_remain(failed, fault)) return false;
  for (const Site& site : failed)
    if (!is_cordoned(*in_.faults, site.host)) begin(site, fault);
  if (changes_.any) refusals->Clear();
  return changes_.any;
}

// --------------------------------------------------------------------- ends

bool Cordoning::after_step(bool first) {
  const bool failed =
      !in_.faults->suspects().empty() || in_.faults->has_link_search();
  if (!first && !failed) return false;
  const std::set<std::string> hosts = hosts_with_ranks(in_.view.durable);
  if (!std::ranges::equal(in_.faults->proven(), hosts)) {
    in_.faults->mutable_proven()->Assign(hosts.begin(), hosts.end());
    changes_.any = true;
  }
  if (first) {
    begin_training(hosts, in_.unix_s, in_.faults);
    in_.faults->clear_unreadable();
  }
  if (!failed) return changes_.any;
  std::set<std::string> workers;
  for (const pb::RankPlace& p : in_.view.durable.assignment().ranks())
    workers.insert(p.worker());
  note_link_test(hosts);
  if (clear_suspects(hosts, workers, in_.unix_s, in_.faults))
    changes_.any = true;
  return changes_.any;
}

void Cordoning::note_link_test(const std::set<std::string>& hosts) {
  if (!in_.faults->has_link_search()) return;
  pb::LinkSearch* s = in_.faults->mutable_link_search();
  if (s->failures() >= kEnough) {
    const size_t before = num_links(*s);
    narrow(hosts, /*passed=*/true, s);
    const size_t left = num_links(*s);
    if (left == before || (left > 0 && next_link_test())) {
      changes_.any |= left != before;
      return;
    }
  }
  in_.faults->clear_link_search();
  changes_.any = true;
}

bool Cordoning::end_in_time() {
  // The clock may have been set back, or be another host's.
  if (const double latest = in_.unix_s + kLinkTestS;
      in_.faults->link_search().until() > latest)
    in_.faults->mutable_link_search()->set_until(latest);
  if (const pb::LinkSearch& search = in_.faults->link_search();
      !search.apart().empty() && in_.unix_s >= search.until()) {
    // Its hosts are gone, or get no ranks for another reason.
    in_.faults->clear_link_search();
    changes_.any = changes_.search_ended = true;
  }
  changes_.ended = end_cordons(in_.unix_s, in_.faults);
  if (in_.view.durable.phase() == pb::Durable::WAITING &&
      in_.view.now_ms - in_.view.phase_since_ms >= kOthersReturnMs)
    end_needed();
  changes_.any |= !changes_.ended.empty();
  return changes_.any;
}

// Others that could run the job may have left since. Then the search for a link
// cannot be continued, and hosts are used again whose cordon has lasted long
// enough for a job that has no others: those first that made steps.
void Cordoning::end_needed() {
  pb::HostFaults faults = *in_.faults;
  const bool searched = !faults.link_search().apart().empty();
  if ((!searched && faults.cordons().empty()) ||
      in_.policy.place(in_.view).ok())
    return;
  if (searched) faults.clear_link_search();
  const auto is_gone = [this](const std::string& host) {
    return std::ranges::none_of(
        in_.view.roster.members(), [&](const auto& named) {
          return named.second.alive && named.second.report.host() == host;
        });
  };
  std::vector<pb::Cordon> all(faults.cordons().begin(), faults.cordons().end());
  std::stable_partition(all.begin(), all.end(),
                        [](const pb::Cordon& c) { return c.in_training(); });
  std::vector<pb::Cordon> ended;
  for (const pb::Cordon& c : all) {
    if (possible_with(faults)) break;
    if (c.peer().empty() ? remaining_alone_s(c, in_.unix_s) > 0
                         : !is_gone(c.peer()))
      continue;
    end_cordon({.host = c.host(), .worker = c.worker()}, &faults);
    ended.push_back(c);
  }
  if (!possible_with(faults)) return;
  *in_.faults = std::move(faults);
  changes_.any = true;
  changes_.search_ended |= searched;
  changes_.ended.insert(changes_.ended.end(), ended.begin(), ended.end());
}

Result<Site> Cordoning::lift(const std::string& name) {
  std::vector<Site> meant = {{.host = name}};
  for (const pb::Cordon& c : in_.faults->cordons())
    if (c.worker() == name) meant.push_back({.host = c.host(), .worker = name});
  if (const Roster::Member* m = in_.view.roster.find_alive(name); m != nullptr)
    if (const std::string& host = m->report.host();
        is_cordoned(*in_.faults, host))
      meant.push_back({.host = host});
  for (const Site& site : meant)
    if (uncordon(site, in_.faults)) return site;
  std::vector<std::string> sites;
  for (const pb::Cordon& c : in_.faults->cordons())
    sites.push_back(site_text(c));
  return not_found(fmt::format("'{}' is not cordoned; cordoned: {}", name,
                               sites.empty() ? "none" : join(sites)));
}

}  // namespace remesh::core
