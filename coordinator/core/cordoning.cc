#include "coordinator/core/cordoning.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

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

}  // namespace

// ---------------------------------------------------------------- questions

// Whether hosts remain on which the job has not failed in this way. For those
// that are cordoned for something else the job waits.
bool Cordoning::others_remain(const std::vector<std::string>& failed,
                              const Failure& fault) const {
  if (in_.view.roster.others_may_return(in_.elastic.rejoin_wait_ms(),
                                        in_.view.now_ms))
    return true;
  const auto& members = in_.view.roster.members();
  return std::any_of(members.begin(), members.end(), [&](const auto& named) {
    const Roster::Member& m = named.second;
    const std::string& host = m.report.host();
    return m.alive && m.reported && !m.leaving() && m.report.slots() > 0 &&
           !failed_alike(*in_.faults, host, fault) &&
           std::find(failed.begin(), failed.end(), host) == failed.end();
  });
}

// Whether a mesh is possible now, and hosts that are well remain.
bool Cordoning::possible_without(const std::vector<std::string>& hosts) const {
  pb::Durable without = in_.view.durable;
  pb::HostFaults* faults = without.mutable_host_faults();
  faults->mutable_link_search()->clear_apart();
  for (const std::string& host : hosts)
    cordon(host, "", {}, in_.unix_s, faults);
  return in_.policy
      .place(ClusterView{.roster = in_.view.roster,
                         .durable = without,
                         .now_ms = in_.view.now_ms})
      .ok();
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
  return !std::includes(elsewhere.begin(), elsewhere.end(), here.begin(),
                        here.end());
}

void Cordoning::begin(const std::string& host, const std::string& peer,
                      const Failure& fault) {
  changes_.any = true;
  changes_.begun.push_back(cordon(host, peer, fault, in_.unix_s, in_.faults));
}

int64_t Cordoning::count(const std::string& host, const std::string& peer,
                         const Failure& fault, double remembered_s) {
  changes_.any = true;
  return suspect(host, peer, fault, remembered_s, in_.unix_s, in_.faults);
}

// ----------------------------------------------------------------- failures

Consequence Cordoning::after(const Failure& fault) {
  if (!fault.between.empty()) return after_lost_message(fault);
  if (!fault.links.empty()) return after_broken(fault);
  const Blame blame =
      blame_for(fault, in_.view, in_.elastic, possible_without(fault.hosts));
  std::vector<std::string> failing;
  for (const std::string& host : blame.hosts)
    if (count(host, "", fault, blame.remembered_s) >= blame.enough)
      failing.push_back(host);
  if (failing.empty())
    return blame.hosts.empty() ? Consequence::kNone
           : blame.hosts_alone ? Consequence::kHostsAlone
                               : Consequence::kSuspected;
  if (!others_remain(failing, fault)) return Consequence::kNone;
  for (const std::string& host : failing) begin(host, "", fault);
  return Consequence::kCordoned;
}

FailureVerdict Cordoning::judge(const Failure& fault, pb::Durable* d) {
  if (fault.exit_code == kExitSaveFailed) return {.unsaved = true};
  const pb::Source& source = d->assignment().source();
  count_failure(fault, in_.view.last_finished, source.step(),
                d->mutable_budget());
  const Consequence consequence = after(fault);
  FailureVerdict v = judge_failure(fault, in_.elastic, consequence, source,
                                   *in_.faults, d->mutable_budget());
  v.no_room =
      fault.exit_code == kExitNoRoom && consequence != Consequence::kCordoned;
  if (v.bad_source)
    refuse_source(source, in_.view.roster, d->mutable_refusals());
  return v;
}

// Counts the failure on the links between hosts. When one failed before, one
// of its two hosts is cordoned: rather one that is on more such links, and
// without which the state is complete. A search for a link has ended then: its
// failures were on this one.
Consequence Cordoning::after_broken(const Failure& fault) {
  if (in_.faults->link_search().failures() >= kEnough) {
    in_.faults->clear_link_search();
    for (const auto& [a, b] : fault.links)
      if (failures_of(*in_.faults, a, b) < 1) count(a, b, fault);
  }
  int64_t most = 0;
  for (const auto& [a, b] : fault.links)
    most = std::max(most, count(a, b, fault));
  if (most < kEnough) return Consequence::kSuspected;
  std::map<std::string, std::set<std::string>> peers;
  for (const auto& [a, b] : fault.links) {
    if (failures_of(*in_.faults, a, b) < most) continue;
    peers[a].insert(b);
    peers[b].insert(a);
  }
  std::optional<std::string> chosen;
  std::tuple<bool, size_t> best;
  for (const auto& [host, of] : peers) {
    const std::tuple key(!needs_state_of({host}), of.size());
    if (!possible_without({host}) || (chosen && key < best)) continue;
    chosen = host;
    best = key;
  }
  if (!chosen) return Consequence::kSuspected;
  // Cordons for other links did not mend it.
  for (const pb::Cordon& c : std::vector<pb::Cordon>(
           in_.faults->cordons().begin(), in_.faults->cordons().end()))
    if (!c.peer().empty() &&
        failures_of(*in_.faults, c.host(), c.peer()) < most)
      end_cordon(c.host(), in_.faults);
  begin(*chosen, *peers[*chosen].begin(), fault);
  return Consequence::kCordoned;
}

// The first hang may be a single message that was lost. After another one
// meshes are tried that separate the hosts.
Consequence Cordoning::after_lost_message(const Failure& fault) {
  for (const pb::Cordon& c : in_.faults->suspects())
    if (!c.peer().empty() && c.failures() >= kEnough &&
        fault.between.contains(c.host()) && fault.between.contains(c.peer())) {
      Failure known = fault;  // from an earlier search
      known.links = {std::minmax(c.host(), c.peer())};
      return after_broken(known);
    }
  changes_.any = true;
  pb::LinkSearch* s = in_.faults->mutable_link_search();
  const int64_t failures = s->failures() + 1;
  if (failures > 1) narrow(fault.between, /*passed=*/false, s);
  // If it is none of the links in question, another one is bad, too.
  if (failures == 1 || num_links(*s) == 0)
    *s = begin_link_search(fault.between);
  s->set_failures(failures);
  s->set_reason(fault.text());
  if (failures == 1) return Consequence::kSuspected;
  return next_link_test() ? Consequence::kCordoned : Consequence::kSuspected;
}

// Sets hosts apart for the next test, or ends the search with a cordon. False
// if nothing can be done: the job cannot run without any of the hosts.
bool Cordoning::next_link_test() {
  pb::LinkSearch* s = in_.faults->mutable_link_search();
  if (const auto link = found_link(*s))
    return after_broken({.what = s->reason(), .links = {*link}}) ==
           Consequence::kCordoned;
  const auto possible = [this](const std::set<std::string>& apart) {
    return possible_without({apart.begin(), apart.end()});
  };
  const auto harmless = [&](const std::set<std::string>& apart) {
    return !needs_state_of(apart) && possible(apart);
  };
  if (!set_apart(harmless, s) && !set_apart(possible, s)) return false;
  s->set_until(in_.unix_s + kLinkTestS);
  changes_.tests.push_back(*s);
  return true;
}

bool Cordoning::for_room(const Plan& plan) {
  std::vector<std::string> hosts;
  for (const auto& [host, shortage] : plan.short_of) {
    const auto& states = plan.assignment.source().states();
    if (std::any_of(states.begin(), states.end(),
                    [&, &host = host](auto& h) { return h.host() == host; }))
      return false;
    hosts.push_back(host);
  }
  if (!possible_without(hosts)) return false;
  for (const auto& [host, shortage] : plan.short_of) {
    const Failure failure{.what = to_text({{host, shortage}})};
    count(host, "", failure);
    begin(host, "", failure);
  }
  return true;
}

bool Cordoning::for_loading(pb::Durable* durable) {
  const pb::Refusals& refusals = durable->refusals();
  if (refusals.checkpoints().empty() && refusals.states().empty()) return false;
  const Failure fault{.what = "the state does not load",
                      .exit_code = kExitBadSource};
  const std::set<std::string> failed = hosts_failed_alike(*in_.faults, fault);
  if (!others_remain({failed.begin(), failed.end()}, fault)) return false;
  for (const std::string& host : failed)
    if (!is_cordoned(*in_.faults, host)) begin(host, "", fault);
  if (changes_.any) durable->clear_refusals();
  return changes_.any;
}

// --------------------------------------------------------------------- ends

bool Cordoning::after_step() {
  if (in_.faults->suspects().empty() && !in_.faults->has_link_search())
    return false;
  const std::set<std::string> hosts = hosts_with_ranks(in_.view.durable);
  note_link_test(hosts);
  if (clear_suspects(hosts, in_.unix_s, in_.faults)) changes_.any = true;
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
  changes_.any |= !changes_.ended.empty();
  return changes_.any;
}

Result<std::string> Cordoning::lift(const std::string& name) {
  const Roster::Member* m = in_.view.roster.find_alive(name);
  const std::string host =
      m != nullptr && !is_cordoned(*in_.faults, name) ? m->report.host() : name;
  if (uncordon(host, in_.faults)) return host;
  std::vector<std::string> hosts;
  for (const pb::Cordon& c : in_.faults->cordons()) hosts.push_back(c.host());
  return not_found(fmt::format("'{}' is not cordoned; cordoned hosts: {}", name,
                               hosts.empty() ? "none" : join(hosts)));
}

}  // namespace remesh::core
