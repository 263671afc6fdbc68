#include "coordinator/core/state_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "proto/base/check.h"
#include "proto/base/text.h"

namespace remesh::core {
namespace {

using geometry::ParamTable;

// Begun by one worker: a host keeps states of a few steps.
constexpr int kMostGroups = 64;

// Holdings that may be combined.
struct Group {
  int64_t step = 0;
  int64_t generation = 0;
  geometry::Sharding sharding;
  int64_t tokens = 0, sequences = 0;
  std::vector<size_t> members;
  std::map<int, int64_t> elements;  // of a state, by replica group

  bool takes(const Holding& h) const {
    return h.info.step() == step && h.info.generation() == generation &&
           h.sharding == sharding && h.info.tokens() == tokens &&
           h.info.sequences() == sequences;
  }
  std::string name() const {
    return fmt::format("step {} of generation {} ({})", step, generation,
                       sharding.layout.to_string());
  }
};

// The newest step of the generation that may be chosen.
int64_t last_step(const Inventory& in, int64_t generation) {
  const auto known = in.known_steps.find(generation);
  return known == in.known_steps.end() ? INT64_MAX : known->second;
}

// Why a holding cannot be combined with its group; nothing if it can.
std::optional<std::string> refusal(const ParamTable& table, const Holding& h,
                                   Group& g) {
  const int rank = h.info.rank();
  // Check the sharding before ranks are counted by it.
  const auto shard = g.elements.empty()
                         ? make_rank_shard(table, h.sharding, rank).status()
                         : ok_status();
  if (!shard.ok()) return shard.message();
  if (rank < 0 || rank >= h.sharding.layout.world())
    return h.sharding.layout.to_string() + " has no such rank";
  const int content = replica_group(h.sharding, rank);
  if (!g.elements.contains(content))
    g.elements[content] =
        make_rank_shard(table, h.sharding, rank).value().zero.state_elements();
  if (g.elements[content] != h.info.elements())
    return fmt::format("{} elements, not {}", h.info.elements(),
                       g.elements[content]);
  return std::nullopt;
}

std::vector<Group> groups_of(const ParamTable& table, const Inventory& in,
                             std::vector<std::string>& notes) {
  const uint64_t model = geometry::model_id(table);
  std::vector<Group> groups;
  std::map<std::pair<int64_t, int64_t>, std::vector<size_t>> of_step;
  std::map<std::string, int> begun;  // groups, by worker
  for (size_t i = 0; i < in.holdings.size(); ++i) {
    const Holding& h = in.holdings[i];
    const auto note = [&](const std::string& no) {
      notes.push_back(fmt::format("worker {}: step {} of rank {}: {}",
                                  h.info.worker(), h.info.step(), h.info.rank(),
                                  no));
    };
    if (h.info.model() != model) {
      note("belongs to another model");
      continue;
    }
    std::vector<size_t>& known = of_step[{h.info.step(), h.info.generation()}];
    auto at = std::ranges::find_if(
        known, [&](size_t g) { return groups[g].takes(h); });
    if (at == known.end()) {
      const int count = ++begun[h.info.worker()];
      if (count > kMostGroups) {
        if (count == kMostGroups + 1) note("too many other states");
        continue;
      }
      at = known.insert(at, groups.size());
      groups.push_back({.step = h.info.step(),
                        .generation = h.info.generation(),
                        .sharding = h.sharding,
                        .tokens = h.info.tokens(),
                        .sequences = h.info.sequences()});
    }
    if (const auto no = refusal(table, h, groups[*at]))
      note(*no);
    else
      groups[*at].members.push_back(i);
  }
  std::erase_if(groups, [](const Group& g) { return g.members.empty(); });
  std::ranges::sort(notes);
  return groups;
}

// For each rank the first holding on each host: its own state before replicas,
// then by name.
std::vector<size_t> sources_of(const Inventory& in, const Group& g) {
  std::vector<size_t> order;
  for (const size_t i : g.members)
    if (in.hosts.empty() || in.hosts.contains(in.holdings[i].info.host()))
      order.push_back(i);
  using Key = std::tuple<int, bool, const std::string&, const std::string&>;
  const auto key = [&](size_t i) {
    const pb::StateHolding& h = in.holdings[i].info;
    return Key(h.rank(), h.replica(), h.worker(), h.segment());
  };
  std::ranges::sort(order, [&](size_t a, size_t b) { return key(a) < key(b); });
  std::set<std::pair<int, std::string>> there;
  std::erase_if(order, [&](size_t i) {
    const pb::StateHolding& h = in.holdings[i].info;
    return !there.emplace(h.rank(), h.host()).second;
  });
  return order;
}

// Why no generation can start from the group; nothing if one can, with its
// sources.
std::optional<std::string> obstacle(const ParamTable& table,
                                    const Inventory& in, const Group& g,
                                    std::vector<size_t>* sources) {
  if (const int64_t last = last_step(in, g.generation); g.step > last)
    return fmt::format("is beyond step {}", last);
  if (in.refused.contains({g.generation, g.step}))
    return "failed to load before";
  if (const int64_t by = abandoned_by(in.first_steps, g.generation, g.step);
      by != 0)
    return fmt::format("is on a branch that generation {} abandoned", by);
  *sources = sources_of(in, g);
  std::vector<int> ranks;
  for (const size_t i : *sources) ranks.push_back(in.holdings[i].info.rank());
  const Status complete = geometry::check_complete(table, g.sharding, ranks);
  if (complete.ok()) return std::nullopt;
  return "is incomplete: " + complete.message();
}

const CheckpointInfo* newest_checkpoint(const Inventory& in,
                                        std::vector<std::string>& notes) {
  const CheckpointInfo* best = nullptr;
  for (const CheckpointInfo& c : in.checkpoints) {
    if (c.step > last_step(in, c.generation)) continue;
    if (const int64_t by = abandoned_by(in.first_steps, c.generation, c.step);
        by != 0) {
      notes.push_back(fmt::format(
          "{} is on a branch that generation {} abandoned", c.path, by));
      continue;
    }
    if (best == nullptr ||
        std::tie(c.step, c.path) > std::tie(best->step, best->path))
      best = &c;
  }
  return best;
}

// Adds the first few notes, so that the reason stays one line.
std::string with_notes(const std::string& why,
                       const std::vector<std::string>& notes) {
  constexpr size_t kShown = 4;
  std::vector<std::string> shown(
      notes.begin(), notes.begin() + std::min(kShown, notes.size()));
  if (notes.size() > kShown)
    shown.push_back(fmt::format("and {} more", notes.size() - kShown));
  return shown.empty() ? why : why + "; " + join(shown, "; ");
}

std::string describe_sources(const Inventory& in,
                             const std::vector<size_t>& sources) {
  std::set<std::string> workers;
  std::set<int> own, replicas;
  for (const size_t i : sources) {
    const pb::StateHolding& h = in.holdings[i].info;
    workers.insert(h.worker());
    (h.replica() ? replicas : own).insert(h.rank());
  }
  std::erase_if(replicas, [&](int r) { return own.contains(r); });
  return fmt::format("{} ranks' own state{} in the memory of {}", own.size(),
                     replicas.empty() ? ""
                                      : fmt::format(" and replicas of rank {}",
                                                    fmt::join(replicas, ", ")),
                     join({workers.begin(), workers.end()}));
}

StateChoice from_memory(const Inventory& in, const Group& g,
                        std::vector<size_t> sources) {
  StateChoice c;
  c.kind = pb::Source::MEMORY;
  c.step = g.step;
  c.generation = g.generation;
  c.why = fmt::format("newest complete state: {}: {}", g.name(),
                      describe_sources(in, sources));
  c.sources = std::move(sources);
  return c;
}

}  // namespace

int64_t abandoned_by(const std::vector<FirstStep>& first_steps,
                     int64_t generation, int64_t step) {
  int64_t by = 0;
  for (const FirstStep& f : first_steps)
    if (f.after < generation && generation < f.generation && f.step <= step)
      by = by == 0 ? f.generation : std::min(by, f.generation);
  return by;
}

StateChoice choose_state(const ParamTable* table, const Inventory& in) {
  CHECK(table != nullptr || in.holdings.empty());
  std::vector<std::string> notes;
  std::vector<Group> groups;
  if (table != nullptr) groups = groups_of(*table, in, notes);
  // Newest step first, then oldest generation, then most holdings.
  std::ranges::stable_sort(groups, [](const Group& a, const Group& b) {
    return std::tuple(a.step, -a.generation, a.members.size(), a.name()) >
           std::tuple(b.step, -b.generation, b.members.size(), b.name());
  });
  const CheckpointInfo* const saved = newest_checkpoint(in, notes);
  StateChoice c;
  for (const Group& g : groups) {
    if (saved != nullptr && g.step < saved->step) break;
    std::vector<size_t> sources;
    const auto no = obstacle(*table, in, g, &sources);
    if (!no) {
      c = from_memory(in, g, std::move(sources));
      c.why = with_notes(c.why, notes);
      return c;
    }
    notes.push_back(g.name() + " " + *no);
  }
  if (saved != nullptr) {
    c.kind = pb::Source::CHECKPOINT;
    c.step = saved->step;
    c.generation = saved->generation;
    c.path = saved->path;
    c.why = with_notes(in.holdings.empty()
                           ? "newest checkpoint"
                           : "newest checkpoint; no newer step is complete in "
                             "memory",
                       notes);
    return c;
  }
  c.why = with_notes(
      in.last_finished == 0
          ? "start of the job"
          : fmt::format("starting over: no state of the {} finished steps is "
                        "complete in memory and no checkpoint was saved",
                        in.last_finished),
      notes);
  return c;
}

std::set<std::string> fewest_hosts(const Inventory& in, const StateChoice& c,
                                   const std::vector<std::string>& order) {
  std::map<int, std::set<std::string>> holders;  // by part
  std::map<std::string, std::set<int>> parts;    // by host
  for (const size_t i : c.sources) {
    const Holding& h = in.holdings[i];
    const int part = replica_group(h.sharding, h.info.rank());
    holders[part].insert(h.info.host());
    parts[h.info.host()].insert(part);
  }
  std::set<std::string> out;
  for (const std::string& host : order) {
    const std::set<int>& its = parts[host];
    if (std::ranges::any_of(its, [&](int p) { return holders[p].size() == 1; }))
      out.insert(host);
    else
      for (const int p : its) holders[p].erase(host);
  }
  return out;
}

}  // namespace remesh::core
