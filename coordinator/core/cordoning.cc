// Which hosts the coordinator cordons, and when it uses them again.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "coordinator/core/coordinator.h"
#include "coordinator/core/cordons.h"
#include "coordinator/core/durable.h"
#include "coordinator/core/link_search.h"
#include "coordinator/core/survival.h"
#include "proto/base/exit_code.h"
#include "proto/base/text.h"

namespace remesh::core {

namespace {

constexpr int64_t kEnough = 2;  // failures of a link in a row that cordon
constexpr double kLinkTestS = 600;

}  // namespace

double Coordinator::unix_now() const {
  return options_.unix_offset_s + static_cast<double>(now_ms_) / 1000;
}

// Whether hosts remain on which the job has not failed in this way, or may
// return soon: after a loss, or to a coordinator that was restarted. For those
// that are cordoned for something else the job waits.
bool Coordinator::others_remain(const std::vector<std::string>& failed,
                                const Failure& fault) const {
  if (now_ms_ < unheard_until_ms_ ||
      (roster_.last_loss_ms() > started_ms_ &&
       now_ms_ - roster_.last_loss_ms() <
           options_.job.elastic().rejoin_wait_ms()))
    return true;
  const std::set<std::string> present = hosts_present(roster_);
  return std::any_of(present.begin(), present.end(), [&](const auto& host) {
    return !failed_alike(durable_.host_faults(), host, fault) &&
           std::find(failed.begin(), failed.end(), host) == failed.end();
  });
}

// Whether a mesh is possible now, and hosts that are well remain.
bool Coordinator::could_go_on_without(
    const std::vector<std::string>& hosts) const {
  pb::Durable without = durable_;
  pb::HostFaults* faults = without.mutable_host_faults();
  faults->mutable_link_search()->clear_apart();
  for (const std::string& host : hosts)
    cordon(host, "", {}, unix_now(), faults);
  return policy_
      .place(ClusterView{.roster = roster_,
                         .durable = without,
                         .now_ms = now_ms_,
                         .phase_since_ms = phase_since_ms_})
      .ok();
}

// Counts the failure on the hosts that it is put down to, and cordons those
// where it is one too many, unless nobody else could continue the job.
Consequence Coordinator::cordon_for(const Failure& fault,
                                    std::vector<pb::Cordon>* cordoned) {
  if (!fault.between.empty()) return search_link(fault, cordoned);
  if (!fault.links.empty()) return cordon_for_link(fault, cordoned);
  const double now_s = unix_now();
  pb::HostFaults* faults = durable_.mutable_host_faults();
  const Blame blame = blame_for(fault, view(), options_.job.elastic(),
                                could_go_on_without(fault.hosts));
  std::vector<std::string> failing;
  for (const std::string& host : blame.hosts)
    if (suspect(host, "", fault, blame.remembered_s, now_s, faults) >=
        blame.enough)
      failing.push_back(host);
  if (failing.empty())
    return blame.hosts.empty() ? Consequence::kNone
           : blame.hosts_alone ? Consequence::kHostsAlone
                               : Consequence::kSuspected;
  if (!others_remain(failing, fault)) return Consequence::kNone;
  for (const std::string& host : failing)
    cordoned->push_back(cordon(host, "", fault, now_s, faults));
  return Consequence::kCordoned;
}

// Whether the newest state is incomplete without the hosts.
bool Coordinator::needs_state_of(const std::set<std::string>& hosts) const {
  const pb::Assignment& a = durable_.assignment();
  if (detector_.has_stepped()) {
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

// Counts the failure on the links between hosts. When one failed before, one
// of its two hosts is cordoned: rather one that is on more such links, and
// without which the state is complete. A search for a link has ended then: its
// failures were on this one.
Consequence Coordinator::cordon_for_link(const Failure& fault,
                                         std::vector<pb::Cordon>* cordoned) {
  const double now_s = unix_now();
  pb::HostFaults* faults = durable_.mutable_host_faults();
  if (faults->link_search().failures() >= kEnough) {
    faults->clear_link_search();
    for (const auto& [a, b] : fault.links)
      if (failures_of(*faults, a, b) < 1)
        suspect(a, b, fault, 0, now_s, faults);
  }
  int64_t most = 0;
  for (const auto& [a, b] : fault.links)
    most = std::max(most, suspect(a, b, fault, 0, now_s, faults));
  if (most < kEnough) return Consequence::kSuspected;
  std::map<std::string, std::set<std::string>> peers;
  for (const auto& [a, b] : fault.links) {
    if (failures_of(*faults, a, b) < most) continue;
    peers[a].insert(b);
    peers[b].insert(a);
  }
  std::optional<std::string> chosen;
  std::tuple<bool, size_t> best;
  for (const auto& [host, of] : peers) {
    const std::tuple key(!needs_state_of({host}), of.size());
    if (!could_go_on_without({host}) || (chosen && key < best)) continue;
    chosen = host;
    best = key;
  }
  if (!chosen) return Consequence::kSuspected;
  // Cordons for other links did not mend it.
  for (const pb::Cordon& c : std::vector<pb::Cordon>(faults->cordons().begin(),
                                                     faults->cordons().end()))
    if (!c.peer().empty() && failures_of(*faults, c.host(), c.peer()) < most)
      end_cordon(c.host(), faults);
  cordoned->push_back(
      cordon(*chosen, *peers[*chosen].begin(), fault, now_s, faults));
  return Consequence::kCordoned;
}

// The first hang may be a single message that was lost. After another one
// meshes are tried that separate the hosts.
Consequence Coordinator::search_link(const Failure& fault,
                                     std::vector<pb::Cordon>* cordoned) {
  for (const pb::Cordon& c : durable_.host_faults().suspects())
    if (!c.peer().empty() && c.failures() >= kEnough &&
        fault.between.contains(c.host()) && fault.between.contains(c.peer())) {
      Failure known = fault;  // from an earlier search
      known.links = {std::minmax(c.host(), c.peer())};
      return cordon_for_link(known, cordoned);
    }
  pb::LinkSearch* s = durable_.mutable_host_faults()->mutable_link_search();
  const int64_t failures = s->failures() + 1;
  if (failures > 1) narrow(fault.between, /*passed=*/false, s);
  // If it is none of the links in question, another one is bad, too.
  if (failures == 1 || num_links(*s) == 0)
    *s = begin_link_search(fault.between);
  s->set_failures(failures);
  s->set_reason(fault.text());
  if (failures == 1) return Consequence::kSuspected;
  return next_link_test(cordoned) ? Consequence::kCordoned
                                  : Consequence::kSuspected;
}

// Sets hosts apart for the next test, or ends the search with a cordon. False
// if nothing can be done: the job cannot run without any of the hosts.
bool Coordinator::next_link_test(std::vector<pb::Cordon>* cordoned) {
  pb::LinkSearch* s = durable_.mutable_host_faults()->mutable_link_search();
  if (const auto link = found_link(*s)) {
    const Failure fault{.what = s->reason(), .links = {*link}};
    return cordon_for_link(fault, cordoned) == Consequence::kCordoned;
  }
  const auto possible = [this](const std::set<std::string>& apart) {
    return could_go_on_without({apart.begin(), apart.end()});
  };
  const auto harmless = [&](const std::set<std::string>& apart) {
    return !needs_state_of(apart) && possible(apart);
  };
  if (!set_apart(harmless, s) && !set_apart(possible, s)) return false;
  s->set_until(unix_now() + kLinkTestS);
  pb::EventRecord e = event(events::kLinkSearch);
  e.set_cause(s->reason());
  e.set_detail(fmt::format("messages are lost {}; the next mesh is without {}",
                           link_text(*s),
                           join({s->apart().begin(), s->apart().end()})));
  emit(std::move(e));
  return true;
}

// A mesh made a step: none of its links is bad.
void Coordinator::note_link_test() {
  pb::HostFaults* faults = durable_.mutable_host_faults();
  if (!faults->has_link_search()) return;
  if (faults->link_search().failures() < 2) {
    faults->clear_link_search();
    return persist();
  }
  std::set<std::string> hosts;
  for (const pb::Durable::Member& p : durable_.participants())
    if (has_ranks(durable_, p.name())) hosts.insert(p.host());
  pb::LinkSearch* s = faults->mutable_link_search();
  const size_t before = num_links(*s);
  narrow(hosts, /*passed=*/true, s);
  const size_t left = num_links(*s);
  if (left == before) return;
  std::vector<pb::Cordon> cordoned;
  if (left == 0 || !next_link_test(&cordoned)) faults->clear_link_search();
  persist();
  for (const pb::Cordon& c : cordoned) emit_cordon(c);
}

// Cordons hosts that have too little room for states, unless they are needed:
// without the others, or because of the states that they hold.
bool Coordinator::cordon_short(const Shortages& shortages,
                               const pb::Assignment& a) {
  std::vector<std::string> hosts;
  for (const auto& [host, shortage] : shortages) {
    const auto& states = a.source().states();
    if (std::any_of(states.begin(), states.end(),
                    [&, &host = host](auto& h) { return h.host() == host; }))
      return false;
    hosts.push_back(host);
  }
  if (!could_go_on_without(hosts)) return false;
  std::vector<pb::Cordon> made;
  pb::HostFaults* faults = durable_.mutable_host_faults();
  for (const auto& [host, shortage] : shortages) {
    const Failure failure{.what = to_text({{host, shortage}})};
    suspect(host, "", failure, 0, unix_now(), faults);
    made.push_back(cordon(host, "", failure, unix_now(), faults));
  }
  persist();
  for (const pb::Cordon& c : made) emit_cordon(c);
  return true;
}

// What some hosts cannot load may be sound, and the hosts bad. Before finished
// steps are lost by that, hosts that have not tried it do.
bool Coordinator::others_may_load() {
  const pb::Refusals& refusals = durable_.refusals();
  if (refusals.checkpoints().empty() && refusals.states().empty()) return false;
  const Failure fault{.what = "the state does not load",
                      .exit_code = kExitBadSource};
  pb::HostFaults* faults = durable_.mutable_host_faults();
  const std::set<std::string> failed = hosts_failed_alike(*faults, fault);
  if (!others_remain({failed.begin(), failed.end()}, fault)) return false;
  std::vector<pb::Cordon> made;
  for (const std::string& host : failed)
    if (!is_cordoned(*faults, host))
      made.push_back(cordon(host, "", fault, unix_now(), faults));
  if (made.empty()) return false;
  durable_.clear_refusals();
  persist();
  for (const pb::Cordon& c : made) emit_cordon(c);
  return true;
}

void Coordinator::emit_cordon(const pb::Cordon& c) {
  pb::EventRecord e = event(events::kHostCordoned);
  e.set_host(c.host());
  e.set_cause(c.reason());
  e.set_seconds(remaining_s(c, unix_now()));
  e.set_detail(fmt::format(
      "{}no ranks are placed on it for {}; `remesh uncordon {}` ends this",
      c.peer().empty()
          ? ""
          : fmt::format("its link to {} seems to be bad; ", c.peer()),
      format_duration(e.seconds()), c.host()));
  emit(std::move(e));
}

void Coordinator::emit_uncordoned(const std::string& host,
                                  const std::string& detail) {
  pb::EventRecord e = event(events::kHostUncordoned);
  e.set_host(host);
  e.set_detail(detail);
  emit(std::move(e));
}

void Coordinator::end_cordons_in_time() {
  pb::HostFaults* faults = durable_.mutable_host_faults();
  if (const pb::LinkSearch& search = faults->link_search();
      !search.apart().empty() && unix_now() >= search.until()) {
    // Its hosts are gone, or get no ranks for another reason.
    pb::EventRecord e = event(events::kLinkSearch);
    e.set_detail("given up; all hosts are used again");
    faults->clear_link_search();
    persist();
    emit(std::move(e));
  }
  const auto ended = end_cordons(unix_now(), faults);
  if (ended.empty()) return;
  persist();
  for (const pb::Cordon& c : ended)
    emit_uncordoned(c.host(), "it is tried again");
}

// The mesh works: what failed on its hosts before is over.
void Coordinator::clear_suspicion() {
  note_link_test();
  if (durable_.host_faults().suspects().empty()) return;
  std::set<std::string> hosts;
  for (const pb::Durable::Member& p : durable_.participants())
    if (has_ranks(durable_, p.name())) hosts.insert(p.host());
  if (clear_suspects(hosts, unix_now(), durable_.mutable_host_faults()))
    persist();
}

// `name`: of a host, or of a worker on it.
Status Coordinator::lift_cordon(const std::string& name) {
  const Roster::Member* m = roster_.find_alive(name);
  pb::HostFaults* faults = durable_.mutable_host_faults();
  const std::string& host =
      m != nullptr && !is_cordoned(*faults, name) ? m->report.host() : name;
  if (!uncordon(host, faults)) {
    std::vector<std::string> hosts;
    for (const pb::Cordon& c : faults->cordons()) hosts.push_back(c.host());
    return not_found(fmt::format("'{}' is not cordoned; cordoned hosts: {}",
                                 name, hosts.empty() ? "none" : join(hosts)));
  }
  persist();
  emit_uncordoned(host, "`remesh uncordon`");
  return ok_status();
}

}  // namespace remesh::core
