// States that lie where the next mesh has no processes: on workers that leave,
// or that become spares. After a planned stop they are in a checkpoint; after a
// fault another mesh takes them up, and stops in order at once.
#include <fmt/format.h>

#include <algorithm>

#include "coordinator/core/coordinator.h"
#include "coordinator/core/job_shape.h"

namespace remesh::core {

// The mesh before, in its places, when everybody is there.
std::optional<planner::Deal> Coordinator::deal_as_before() const {
  const pb::Assignment& a = durable_.assignment();
  if (a.ranks_size() == 0) return std::nullopt;
  planner::Deal out{.layout = layout_of(a.mesh())};
  for (const pb::RankPlace& p : a.ranks()) {
    const auto it = members_.find(p.worker());
    if (it == members_.end() || !it->second.alive || it->second.sent_away ||
        it->second.report.slots() <= p.local_slot())
      return std::nullopt;
    out.ranks.push_back({.rank = p.rank(),
                         .worker = p.worker(),
                         .local_slot = p.local_slot(),
                         .threads = p.threads()});
  }
  return out;
}

// A mesh of these hosts' workers, whoever of them leaves, whatever was asked;
// with `less` slots than they have, so that a mesh may need all of the hosts.
std::optional<planner::Deal> Coordinator::deal_on(
    const std::set<std::string>& hosts, int less) const {
  planner::DealRequest r = request(/*everybody=*/true);
  std::erase_if(r.workers,
                [&](const auto& w) { return !hosts.contains(w.host); });
  for (; less > 0; --less) {
    const auto most = std::max_element(
        r.workers.begin(), r.workers.end(),
        [](const auto& a, const auto& b) { return a.slots < b.slots; });
    if (most == r.workers.end() || most->slots <= 1) return std::nullopt;
    --most->slots;
  }
  const auto dealt = planner::deal_mesh(r);
  if (!dealt.ok()) return std::nullopt;
  return *dealt;
}

// As few hosts as hold the state of that step between them.
std::set<std::string> Coordinator::hosts_needed(const CheckpointsScanned& scan,
                                                int64_t step) const {
  std::set<std::string> hosts;
  for (const auto& [name, m] : members_)
    if (m.alive && !m.sent_away) hosts.insert(m.report.host());
  const std::set<std::string> all = hosts;
  std::vector<pb::StateHolding> unused;
  for (const std::string& host : all) {
    hosts.erase(host);
    if (hosts.empty() || choose(scan, hosts, &unused).step < step)
      hosts.insert(host);
  }
  return hosts;
}

// Another deal on which a newer state can be begun with than `choice`; then
// that, and true.
bool Coordinator::rescue(const CheckpointsScanned& scan, planner::Deal* deal,
                         Choice* choice,
                         std::vector<pb::StateHolding>* messages) const {
  std::vector<pb::StateHolding> held;
  const int64_t best = choose(scan, {}, &held).step;
  if (best <= choice->step) return false;
  const auto take = [&](std::optional<planner::Deal> other) {
    if (!other) return false;
    Choice c = choose(scan, hosts_of(*other), &held);
    if (c.step < best) return false;
    other->reason =
        fmt::format("{} once more, where the state is, to save it for {}",
                    other->layout.to_string(), deal->layout.to_string());
    *deal = std::move(*other);
    *choice = std::move(c);
    *messages = std::move(held);
    return true;
  };
  if (take(deal_as_before())) return true;
  constexpr int kMostLess = 8;
  const auto take_on = [&](const std::set<std::string>& hosts) {
    for (int less = 0; less <= kMostLess; ++less)
      if (take(deal_on(hosts, less))) return true;
    return false;
  };
  // Those that hold it, and others where they have too few slots.
  std::set<std::string> hosts = hosts_needed(scan, best);
  if (take_on(hosts)) return true;
  for (const auto& [name, m] : members_)
    if (m.alive && !m.sent_away && hosts.insert(m.report.host()).second &&
        take_on(hosts))
      return true;
  return false;
}

}  // namespace remesh::core
