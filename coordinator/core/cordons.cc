#include "coordinator/core/cordons.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "coordinator/core/link_search.h"
#include "coordinator/core/recovery.h"
#include "proto/base/exit_code.h"

namespace remesh::core {
namespace {

constexpr double kFirstCordonS = 10;
constexpr double kFirstLinkCordonS = 120;  // a failure costs a time limit
constexpr double kCordonPerCost = 10;
constexpr double kLongestCordonS = 3600;
constexpr int64_t kFailuresAtStart = 2;
// Ranks that die while they train, each soon after the first step since the one
// before.
constexpr int64_t kFailuresInTraining = 4;
constexpr double kSoonS = 60;
// Losses of a host closer to each other than this are counted together.
constexpr double kFlappingS = 300;
// A host that is not heard of any more is forgotten some time after its last
// failure, and the oldest ones when there are many.
constexpr double kForgottenS = 2 * kLongestCordonS;
constexpr int kMostSuspects = 256;
constexpr int64_t kNever = INT64_MAX;

double cordon_s(const pb::Cordon& c, double cost_s) {
  const int64_t doublings = std::clamp<int64_t>(c.failures() - 1, 0, 20);
  const double first =
      std::max(c.peer().empty() ? kFirstCordonS : kFirstLinkCordonS,
               kCordonPerCost * cost_s);
  return std::min(kLongestCordonS,
                  first * static_cast<double>(int64_t{1} << doublings));
}

double cordon_s(const pb::Cordon& c) { return cordon_s(c, c.cost_s()); }

void set_site(const Site& site, pb::Cordon* c) {
  c->set_host(site.host);
  if (!site.worker.empty()) c->set_worker(site.worker);
  if (!site.peer.empty()) c->set_peer(site.peer);
  if (site.in_training) c->set_in_training(true);
}

bool is_at(const pb::Cordon& c, const Site& s) {
  return c.worker() == s.worker && c.in_training() == s.in_training &&
         ((c.host() == s.host && c.peer() == s.peer) ||
          (!s.peer.empty() && c.host() == s.peer && c.peer() == s.host));
}

template <typename Cordons>
auto find_suspect(Cordons& all, const Site& s) {
  return std::ranges::find_if(all,
                              [&](const pb::Cordon& c) { return is_at(c, s); });
}

template <typename T, typename Condition>
bool erase_if(google::protobuf::RepeatedPtrField<T>* all, Condition condition) {
  const auto kept = std::remove_if(all->begin(), all->end(), condition);
  if (kept == all->end()) return false;
  all->erase(kept, all->end());
  return true;
}

// The exit code of the failure if it says why, otherwise 0.
int code_of(const pb::Cause& f) {
  return tells_why(f.exit_code()) ? f.exit_code() : 0;
}

// Whether the same is to be expected of each further attempt there for now.
bool cannot_continue(const pb::Cause& f) {
  return f.exit_code() == kExitFailed || f.exit_code() == kExitUnreadable;
}

void set_failure(const pb::Cause& f, pb::Cordon* c) {
  c->set_reason(text_of(f));
  c->clear_exit_code();
  if (code_of(f) != 0) c->set_exit_code(code_of(f));
}

// Whether none of the sites is proven, but other hosts are.
bool are_new(const std::vector<Site>& sites, const pb::Durable& durable) {
  const pb::HostFaults& faults = durable.host_faults();
  return faults.proven_size() > 0 &&
         std::ranges::none_of(
             sites, [&](const Site& s) { return is_proven(faults, s.host); });
}

// Whether ranks now die in training on at least as many hosts, this one among
// them, as there are others in the mesh.
bool die_everywhere(const std::string& host, double now_s,
                    const pb::HostFaults& faults) {
  std::set<std::string> hosts = {host};
  for (const pb::Cordon& c : faults.suspects())
    if (c.in_training() && now_s <= c.until()) hosts.insert(c.host());
  const auto others = std::ranges::count_if(
      faults.proven(), [&](const auto& h) { return !hosts.contains(h); });
  return std::ssize(hosts) >= others;
}

// Whether the state did not load on one host alone, so that others may load it.
// A second host that cannot load it shows that it is the state, if there is
// another one as new.
bool only_one_host_failed(const pb::Cause& f, const ClusterView& view) {
  return f.hosts_size() == 1 &&
         std::ranges::none_of(view.durable.host_faults().cordons(),
                              [&](const pb::Cordon& c) {
                                return c.host() != f.hosts(0) && is_alike(c, f);
                              }) &&
         source_is_there(view.roster, view.durable.assignment().source());
}

// Whether one of those that `of` names failed like this, and is cordoned for it
// or at fault.
template <typename F>
bool any_alike(const pb::HostFaults& faults, const pb::Cause& f, F of) {
  const auto alike = [&](const pb::Cordon& c) {
    return of(c) && !c.in_training() && is_alike(c, f);
  };
  return std::ranges::any_of(faults.cordons(), alike) ||
         std::ranges::any_of(faults.suspects(), [&](const pb::Cordon& c) {
           return c.peer().empty() && c.failures() >= kAtFault && alike(c);
         });
}

}  // namespace

std::vector<Site> sites_of(const pb::Cause& f, const ClusterView& view) {
  std::vector<Site> out;
  const std::set<std::string> workers(f.workers().begin(), f.workers().end());
  const auto known_bad = [&](const std::vector<Site>& sites) {
    return std::ranges::all_of(sites, [&](const Site& s) {
      return failures_of(view.durable.host_faults(), s) >= kFailuresAtStart;
    });
  };
  // A worker of a host that failed before may have joined since.
  const auto worker_works = [&](const auto& named) {
    const std::string& name = named.first;
    const auto& m = named.second;
    return m.alive && m.reported && !m.leaving() && m.report.slots() > 0 &&
           !workers.contains(name) &&
           !any_alike(view.durable.host_faults(), f,
                      [&](const pb::Cordon& c) { return c.worker() == name; });
  };
  // What the host lacks, and its connection, concern all of its workers. But
  // each may see other files.
  const bool of_worker =
      !f.silent() && (code_of(f) == 0 || (f.at_start() && cannot_continue(f)));
  for (const std::string& host : f.hosts()) {
    std::vector<Site> failed;
    bool others_work = false;
    const auto& suspects = view.durable.host_faults().suspects();
    // One worker after another cannot start its ranks: it is the host.
    const bool in_turn =
        f.at_start() && std::ranges::any_of(suspects, [&](const auto& c) {
          return c.host() == host && !c.worker().empty() && !c.in_training() &&
                 !workers.contains(c.worker()) && is_alike(c, f);
        });
    for (const auto& named : view.roster.members()) {
      if (named.second.report.host() != host) continue;
      if (workers.contains(named.first))
        failed.push_back({.host = host, .worker = named.first});
      others_work |= worker_works(named);
    }
    if (of_worker && !failed.empty() &&
        ((others_work && !in_turn) || known_bad(failed)))
      out.insert(out.end(), failed.begin(), failed.end());
    else
      out.push_back({.host = host});
  }
  return out;
}

bool concerns(const Site& s, const std::string& host,
              const std::string& worker) {
  return s.host == host && (s.worker.empty() || s.worker == worker);
}

bool concerns(const pb::Cordon& c, const std::string& host,
              const std::string& worker) {
  return concerns(Site{.host = c.host(), .worker = c.worker()}, host, worker);
}

bool is_proven(const pb::HostFaults& faults, const std::string& host) {
  return std::ranges::binary_search(faults.proven(), host);
}

pb::Cause of_unproven(pb::Cause f, const pb::HostFaults& faults) {
  if (!f.at_start() || code_of(f) != 0) return f;
  std::set<std::string> hosts(f.hosts().begin(), f.hosts().end());
  const bool between = !f.links().empty() || !f.between().empty();
  hosts.insert(f.links().begin(), f.links().end());
  hosts.insert(f.between().begin(), f.between().end());
  std::erase_if(hosts, [&](const std::string& host) {
    return is_proven(faults, host) ||
           (between && failures_of(faults, {.host = host}) < kFailuresAtStart);
  });
  if (hosts.empty() || faults.proven().empty()) return f;
  erase_if(f.mutable_hosts(),
           [&](auto& host) { return !hosts.contains(host); });
  if (between) f.mutable_hosts()->Assign(hosts.begin(), hosts.end());
  f.clear_links();
  f.clear_between();
  return f;
}

Blame blame_for(const pb::Cause& f, const std::vector<Site>& sites,
                const ClusterView& view, const pb::Elastic& elastic,
                bool others_can_run) {
  const int64_t most = elastic.max_same_failures();
  if (sites.empty()) return {};
  if (cannot_continue(f)) return {.sites = sites};
  const bool bad = source_is_bad(f, view.durable.assignment().source());
  if (f.exit_code() == kExitNoRoom || (bad && only_one_host_failed(f, view))) {
    // In the end an older source is better than none (failure_budget.h). It
    // makes no room, unless it is in memory.
    const bool older_helps =
        bad || view.durable.assignment().source().kind() == pb::Source::MEMORY;
    const bool wait =
        others_can_run || !older_helps ||
        failures_of(view.durable.host_faults(), sites[0]) + 1 < most;
    if (!wait && bad) return {.sites = sites, .enough = kNever};
    if (!wait) return {};
    // At the second failure there were no replicas to make room for.
    return {.sites = sites,
            .enough = f.exit_code() == kExitNoRoom ? 2 : 1,
            .others_can_run = others_can_run};
  }
  if (bad && !source_is_there(view.roster, view.durable.assignment().source()))
    return {};
  if (bad) return {.sites = sites, .enough = kNever};
  if (f.at_start()) {
    // A daemon may be restarted by people.
    const bool soon =
        others_can_run && (f.rank() >= 0 || f.silent() || f.hung());
    // A hang costs much more than the end of a process.
    const bool at_once = soon && f.hung() && are_new(sites, view.durable);
    return {.sites = sites,
            .enough = at_once ? 1
                      : soon  ? kFailuresAtStart
                              : most,
            .others_can_run = others_can_run};
  }
  const pb::FailureBudget& budget = view.durable.budget();
  const bool exhausted =
      budget.failures() >= elastic.max_failures_without_progress();
  // Before the job ends, others try without the site, but only a few times.
  const bool in_place_of_the_end =
      exhausted && others_can_run && (f.rank() >= 0 || f.silent()) &&
      failures_of(view.durable.host_faults(), sites[0]) < kFailuresInTraining;
  if (in_place_of_the_end || (f.rank() >= 0 && budget.same_failures() >= most))
    return {.sites = {sites[0]}};
  if (exhausted || !others_can_run || (f.rank() < 0 && !f.silent())) return {};
  if (f.silent())
    return {.sites = {sites[0]},
            .enough = kFailuresAtStart,
            .remembered_s = kFlappingS};
  Site site = sites[0];
  site.in_training = true;
  return {
      .sites = {site}, .enough = kFailuresInTraining, .remembered_s = kSoonS};
}

std::set<std::string> hosts_failed_alike(const pb::HostFaults& faults,
                                         const pb::Cause& f) {
  std::set<std::string> out;
  for (const auto* all : {&faults.cordons(), &faults.suspects()})
    for (const pb::Cordon& c : *all)
      if (c.peer().empty() && is_alike(c, f)) out.insert(c.host());
  return out;
}

bool failed_alike(const pb::HostFaults& faults, const std::string& host,
                  const std::string& worker, const pb::Cause& f) {
  return any_alike(faults, f, [&](const pb::Cordon& c) {
    return concerns(c, host, worker);
  });
}

bool is_alike(const pb::Cordon& c, const pb::Cause& f) {
  return c.exit_code() == code_of(f);
}

std::optional<int64_t> rescue_wait_ms(int64_t failures,
                                      const pb::Elastic& elastic) {
  constexpr int64_t kFirstMs = 10'000;
  if (failures < elastic.max_same_failures()) return 0;
  int64_t wait_ms = kFirstMs, waited_ms = 0;
  for (int64_t n = elastic.max_same_failures(); n < failures; ++n) {
    waited_ms += wait_ms;
    wait_ms *= 2;
    if (waited_ms >= kRescueMs) return std::nullopt;
  }
  return wait_ms;
}

bool is_cordoned(const pb::HostFaults& faults, const std::string& host,
                 const std::string& worker) {
  return is_apart(faults.link_search(), host) ||
         std::ranges::any_of(faults.cordons(), [&](const pb::Cordon& c) {
           return concerns(c, host, worker);
         });
}

std::string cordon_reason(const pb::HostFaults& faults, const std::string& host,
                          const std::string& worker) {
  for (const pb::Cordon& c : faults.cordons())
    if (concerns(c, host, worker)) return c.reason();
  if (is_apart(faults.link_search(), host))
    return search_text(faults.link_search());
  return "";
}

std::string site_text(const pb::Cordon& c) {
  return c.worker().empty() ? c.host()
                            : "worker " + c.worker() + " on " + c.host();
}

std::string cordons_text(const pb::HostFaults& faults) {
  std::string out;
  for (const pb::Cordon& c : faults.cordons())
    out += fmt::format("{}{} (cordoned: {})",
                       out.empty() ? "no ranks are placed on " : ", ",
                       site_text(c), c.reason());
  for (const std::string& host : faults.link_search().apart())
    out +=
        fmt::format("{}{} ({})", out.empty() ? "no ranks are placed on " : ", ",
                    host, search_text(faults.link_search()));
  return out;
}

double remaining_s(const pb::Cordon& c, double now_s) {
  return std::clamp(c.until() - now_s, 0.0, cordon_s(c));
}

double remaining_alone_s(const pb::Cordon& c, double now_s) {
  const double lasted_s = cordon_s(c) - remaining_s(c, now_s);
  const double alone_s = c.in_training() ? 0 : cordon_s(c, /*cost_s=*/0);
  return std::max(0.0, alone_s - lasted_s);
}

int64_t failures_of(const pb::HostFaults& faults, const Site& site) {
  const auto it = find_suspect(faults.suspects(), site);
  return it == faults.suspects().end() ? 0 : it->failures();
}

int64_t suspect(const Site& site, const pb::Cause& failure, double remembered_s,
                double now_s, pb::HostFaults* faults) {
  auto* all = faults->mutable_suspects();
  const bool ends_rows =
      site.in_training && die_everywhere(site.host, now_s, *faults);
  erase_if(all, [&](const pb::Cordon& c) {
    return now_s - c.until() > kForgottenS ||
           (ends_rows && c.in_training() && !is_at(c, site));
  });
  auto it = find_suspect(*all, site);
  if (it == all->end()) {
    if (all->size() >= kMostSuspects) all->DeleteSubrange(0, 1);
    set_site(site, all->Add());
    it = all->end() - 1;
  } else if (remembered_s > 0 && now_s > it->until()) {
    it->set_failures(0);  // long ago
  }
  it->set_failures(it->failures() + 1);
  it->set_until(now_s + remembered_s);
  set_failure(failure, &*it);
  return it->failures();
}

pb::Cordon cordon(const Site& site, const pb::Cause& failure, double now_s,
                  pb::HostFaults* faults) {
  erase_if(faults->mutable_cordons(), [&](const pb::Cordon& c) {
    return concerns(site, c.host(), c.worker());
  });
  pb::Cordon* c = faults->add_cordons();
  set_site(site, c);
  set_failure(failure, c);
  c->set_failures(std::max<int64_t>(1, failures_of(*faults, site)));
  if (failure.cost_s() > 0) c->set_cost_s(failure.cost_s());
  c->set_until(now_s + cordon_s(*c));
  // What is remembered for a while is so after the cordon.
  auto* all = faults->mutable_suspects();
  const auto it = find_suspect(*all, site);
  if (it != all->end() && it->until() > now_s)
    it->set_until(c->until() + (it->until() - now_s));
  return *c;
}

std::vector<pb::Cordon> end_cordons(double now_s, pb::HostFaults* faults) {
  // The clock may have been set back, or be another host's.
  for (pb::Cordon& c : *faults->mutable_cordons())
    if (c.until() - now_s > cordon_s(c)) c.set_until(now_s + cordon_s(c));
  for (pb::Cordon& c : *faults->mutable_suspects())
    c.set_until(std::min(c.until(), now_s + kLongestCordonS + kFlappingS));
  std::vector<pb::Cordon> ended;
  erase_if(faults->mutable_cordons(), [&](const pb::Cordon& c) {
    if (remaining_s(c, now_s) > 0) return false;
    ended.push_back(c);
    return true;
  });
  return ended;
}

bool end_cordon(const Site& site, pb::HostFaults* faults) {
  return erase_if(faults->mutable_cordons(), [&](const pb::Cordon& c) {
    return concerns(site, c.host(), c.worker());
  });
}

bool uncordon(const Site& site, pb::HostFaults* faults) {
  const auto is_there = [&](const pb::Cordon& c) {
    return concerns(site, c.host(), c.worker());
  };
  const bool apart =
      site.worker.empty() && is_apart(faults->link_search(), site.host);
  const bool cordoned = end_cordon(site, faults);
  if (!apart && !cordoned) return false;
  if (apart) faults->clear_link_search();
  erase_if(faults->mutable_suspects(), [&](const pb::Cordon& c) {
    return is_there(c) || (site.worker.empty() && c.peer() == site.host);
  });
  return true;
}

void begin_training(const std::set<std::string>& hosts, double now_s,
                    pb::HostFaults* faults) {
  for (pb::Cordon& c : *faults->mutable_suspects())
    if (c.in_training() && hosts.contains(c.host()))
      c.set_until(std::max(c.until(), now_s + kSoonS));
}

bool clear_suspects(const std::set<std::string>& hosts,
                    const std::set<std::string>& workers, double now_s,
                    pb::HostFaults* faults) {
  return erase_if(faults->mutable_suspects(), [&](const pb::Cordon& c) {
    return now_s >= c.until() && hosts.contains(c.host()) &&
           (c.peer().empty() || hosts.contains(c.peer())) &&
           (c.worker().empty() || workers.contains(c.worker()));
  });
}

}  // namespace remesh::core
