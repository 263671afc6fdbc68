#include "checkpoint/exchange/exchange_plan.h"

#include <fmt/format.h>

#include <map>
#include <optional>
#include <utility>

#include "proto/base/xxh3.h"

namespace remesh::exchange {
namespace {

using geometry::HeldPieces;
using geometry::ParamTable;
using geometry::Piece;
using geometry::RankShard;
using geometry::Sharding;
using geometry::Uncovered;

class Planner {
 public:
  Planner(const ParamTable& table, const Sharding& from,
          std::span<const OldState> sources, const Sharding& to,
          std::span<const Process> processes)
      : table_(table),
        from_(from),
        sources_(sources),
        to_(to),
        processes_(processes),
        stored_(table.size()) {}

  // Validates and indexes the inputs.
  Status prepare();
  // All copies into the vectors of new rank r.
  Status plan_rank(int r);
  Plan take(int me);

 private:
  struct Filled {
    Copy copy;
    int sender = -1;  // -1: the rank itself
  };

  Status index_sources();
  void find_reused();
  // The source of `group` that rank r reads itself (local) or is sent.
  std::optional<int> source_of(int group, int r, bool local) const;
  int sender_of(const Copy& copy, int r) const;

  const ParamTable& table_;
  const Sharding& from_;
  const std::span<const OldState> sources_;
  const Sharding& to_;
  const std::span<const Process> processes_;

  std::vector<std::vector<int>> of_group_;   // sources by replica group
  std::vector<std::vector<Piece>> held_;     // by group, if it has a source
  HeldPieces stored_;                        // the same by parameter
  std::map<int, std::vector<int>> on_host_;  // processes by host
  std::vector<std::vector<Piece>> wanted_;   // by group of the new mesh
  std::vector<int64_t> elements_;            // by group of the new mesh
  std::vector<int> reuse_;                   // by new rank
  std::vector<std::vector<Filled>> filled_;  // by new rank
};

Status Planner::prepare() {
  for (size_t i = 0; i < processes_.size(); ++i)
    on_host_[processes_[i].host].push_back(static_cast<int>(i));
  RETURN_IF_ERROR(index_sources());
  // Validates the new sharding before its groups are counted.
  RETURN_IF_ERROR(make_rank_shard(table_, to_, 0).status());
  const int world = to_.layout.world();
  if (static_cast<size_t>(world) > processes_.size())
    return invalid_argument(fmt::format("{} processes for the {} ranks of {}",
                                        processes_.size(), world,
                                        to_.layout.to_string()));
  for (int g = 0; g < num_replica_groups(to_); ++g) {
    ASSIGN_OR_RETURN(const RankShard rank,
                     make_rank_shard(table_, to_, first_rank_of_group(to_, g)));
    wanted_.push_back(held_pieces(rank));
    elements_.push_back(rank.zero.state_elements());
  }
  filled_.resize(static_cast<size_t>(world));
  find_reused();
  return ok_status();
}

Status Planner::index_sources() {
  RETURN_IF_ERROR(make_rank_shard(table_, from_, 0).status());
  of_group_.resize(static_cast<size_t>(num_replica_groups(from_)));
  held_.resize(of_group_.size());
  for (size_t i = 0; i < sources_.size(); ++i) {
    const int rank = sources_[i].rank;
    if (rank < 0 || rank >= from_.layout.world())
      return invalid_argument(
          fmt::format("a source of rank {}: {} has {} ranks", rank,
                      from_.layout.to_string(), from_.layout.world()));
    of_group_[static_cast<size_t>(replica_group(from_, rank))].push_back(
        static_cast<int>(i));
  }
  for (size_t g = 0; g < of_group_.size(); ++g) {
    if (of_group_[g].empty()) continue;
    ASSIGN_OR_RETURN(
        const RankShard rank,
        make_rank_shard(table_, from_,
                        first_rank_of_group(from_, static_cast<int>(g))));
    held_[g] = held_pieces(rank);
    for (const Piece& p : held_[g]) stored_.add(p, static_cast<int>(g));
  }
  return ok_status();
}

// In the order of ranks and sources; at most one rank reuses a source.
void Planner::find_reused() {
  std::vector<bool> taken(sources_.size(), false);
  for (int r = 0; r < to_.layout.world(); ++r) {
    const auto& wanted = wanted_[static_cast<size_t>(replica_group(to_, r))];
    int found = -1;
    for (size_t i = 0; i < sources_.size() && found < 0; ++i) {
      const auto group =
          static_cast<size_t>(replica_group(from_, sources_[i].rank));
      if (!taken[i] &&
          sources_[i].worker == processes_[static_cast<size_t>(r)].worker &&
          sources_[i].host == processes_[static_cast<size_t>(r)].host &&
          held_[group] == wanted)
        found = static_cast<int>(i);
    }
    if (found >= 0) taken[static_cast<size_t>(found)] = true;
    reuse_.push_back(found);
  }
}

// Spreads the ranks over the sources.
std::optional<int> Planner::source_of(int group, int r, bool local) const {
  const int here = processes_[static_cast<size_t>(r)].host;
  std::vector<int> able;
  for (const int s : of_group_[static_cast<size_t>(group)]) {
    const int host = sources_[static_cast<size_t>(s)].host;
    if ((host == here) == local && on_host_.contains(host)) able.push_back(s);
  }
  if (able.empty()) return std::nullopt;
  return able[static_cast<size_t>(r) % able.size()];
}

// Spreads the sending over the processes of the source's host.
int Planner::sender_of(const Copy& copy, int r) const {
  const auto& senders =
      on_host_.at(sources_[static_cast<size_t>(copy.source)].host);
  return senders[static_cast<size_t>(r + copy.source) % senders.size()];
}

Status Planner::plan_rank(int r) {
  if (reuse_[static_cast<size_t>(r)] >= 0) return ok_status();
  for (const Piece& p : wanted_[static_cast<size_t>(replica_group(to_, r))]) {
    Uncovered left(p.rect);
    for (const bool local : {true, false})
      stored_.fill(
          p, static_cast<size_t>(r), left,
          [&](int group) { return source_of(group, r, local); },
          [&](const Copy& copy) {
            filled_[static_cast<size_t>(r)].push_back(
                {copy, local ? -1 : sender_of(copy, r)});
          });
    if (!left.empty())
      return unavailable(fmt::format(
          "{}: row {}, column {} is in no state that can be reached",
          table_[p.param].name, left.first().row, left.first().col));
  }
  return ok_status();
}

Plan Planner::take(int me) {
  Plan plan;
  const int n = static_cast<int>(processes_.size());
  std::map<int, Stream> in, out;  // by distance
  const auto add = [n](std::map<int, Stream>& streams, int from, int to,
                       int peer, const Copy& c) {
    Stream& s = streams[(to - from + n) % n];
    s.peer = peer;
    s.elements += c.numel();
    s.copies.push_back(c);
  };
  for (int r = 0; r < to_.layout.world(); ++r)
    for (const Filled& f : filled_[static_cast<size_t>(r)]) {
      if (f.sender < 0 && r == me) plan.local.push_back(f.copy);
      if (f.sender < 0) continue;
      if (r == me) add(in, f.sender, me, f.sender, f.copy);
      if (f.sender == me) add(out, me, r, r, f.copy);
    }
  plan.reuses = reuse_;
  for (auto& [distance, s] : in) plan.receive.push_back(std::move(s));
  for (auto& [distance, s] : out) plan.send.push_back(std::move(s));
  if (me < to_.layout.world()) {
    plan.reuse = reuse_[static_cast<size_t>(me)];
    plan.elements = elements_[static_cast<size_t>(replica_group(to_, me))];
  }
  return plan;
}

uint64_t digest_of(const ParamTable& table, const Sharding& from,
                   std::span<const OldState> sources, const Sharding& to,
                   std::span<const Process> processes) {
  std::vector<int64_t> inputs = {static_cast<int64_t>(model_id(table))};
  for (const Sharding* s : {&from, &to}) {
    for (const int x : {s->layout.dp, s->layout.pp, s->layout.tp, s->layout.cp,
                        s->chunks, s->zero.stage, s->zero.shard_group})
      inputs.push_back(x);
    inputs.insert(inputs.end(), s->bounds.begin(), s->bounds.end());
  }
  for (const OldState& s : sources)
    inputs.insert(inputs.end(), {s.rank, s.host, s.worker});
  for (const Process& p : processes)
    inputs.insert(inputs.end(), {p.host, p.worker});
  return xxh3(inputs.data(), inputs.size() * sizeof(inputs[0]));
}

}  // namespace

Result<Plan> plan_exchange(const ParamTable& table, const Sharding& from,
                           std::span<const OldState> sources,
                           const Sharding& to,
                           std::span<const Process> processes, int me) {
  CHECK(me >= 0 && static_cast<size_t>(me) < processes.size());
  Planner planner(table, from, sources, to, processes);
  RETURN_IF_ERROR(planner.prepare());
  for (int r = 0; r < to.layout.world(); ++r)
    RETURN_IF_ERROR(planner.plan_rank(r));
  Plan plan = planner.take(me);
  plan.digest = digest_of(table, from, sources, to, processes);
  return plan;
}

}  // namespace remesh::exchange
