#include "checkpoint/exchange/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "parallel/geometry/rect.h"
#include "proto/base/xxh3.h"

namespace remesh::exchange {
namespace {

using geometry::ParamTable;
using geometry::RankShard;
using geometry::Rect;
using geometry::Sharding;
using geometry::StatePiece;

// Where a parameter's part stands in the vectors of a content class.
struct Stored {
  int content = 0;
  Rect rect;
  int64_t at = 0, stride = 0;
};

int64_t position(const Rect& whole, int64_t at, int64_t stride,
                 const Rect& part) {
  return at + (part.row - whole.row) * stride + (part.col - whole.col);
}

class Planner {
 public:
  Planner(const ParamTable& table, const Sharding& from,
          std::span<const Source> sources, const Sharding& to,
          std::span<const Process> processes)
      : table_(table),
        from_(from),
        sources_(sources),
        to_(to),
        processes_(processes) {}

  // Reads the facts; fails when they cannot be.
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
  void find_adopters();
  // The source of `content` that rank r reads or is sent, or nullopt.
  std::optional<Filled> provider(int content, int r, bool local) const;
  void fill(const StatePiece& wanted, int r, std::vector<Rect>& left,
            bool local);

  const ParamTable& table_;
  const Sharding& from_;
  const std::span<const Source> sources_;
  const Sharding& to_;
  const std::span<const Process> processes_;

  std::vector<std::vector<int>> of_content_;     // sources by class
  std::vector<std::vector<StatePiece>> held_;    // by class; if it has a source
  std::vector<std::vector<Stored>> stored_;      // by parameter
  std::map<int, std::vector<int>> on_host_;      // processes by host
  std::vector<std::vector<StatePiece>> wanted_;  // by class of the new mesh
  std::vector<int64_t> elements_;                // by class of the new mesh
  std::vector<int> adopt_;                       // by new rank
  std::vector<std::vector<Filled>> filled_;      // by new rank
};

Status Planner::prepare() {
  for (size_t i = 0; i < processes_.size(); ++i)
    on_host_[processes_[i].host].push_back(static_cast<int>(i));
  RETURN_IF_ERROR(index_sources());
  // Checks the new sharding before its classes are counted.
  RETURN_IF_ERROR(make_rank_shard(table_, to_, 0).status());
  const int world = to_.layout.world();
  if (static_cast<size_t>(world) > processes_.size())
    return invalid_argument(fmt::format("{} processes for the {} ranks of {}",
                                        processes_.size(), world,
                                        to_.layout.to_string()));
  for (int c = 0; c < num_content_classes(to_); ++c) {
    ASSIGN_OR_RETURN(const RankShard rank,
                     make_rank_shard(table_, to_, first_of_class(to_, c)));
    wanted_.push_back(held_pieces(rank.shard, rank.zero));
    elements_.push_back(rank.zero.state_elements());
  }
  filled_.resize(static_cast<size_t>(world));
  find_adopters();
  return ok_status();
}

Status Planner::index_sources() {
  RETURN_IF_ERROR(make_rank_shard(table_, from_, 0).status());
  of_content_.resize(static_cast<size_t>(num_content_classes(from_)));
  held_.resize(of_content_.size());
  stored_.resize(table_.size());
  for (size_t i = 0; i < sources_.size(); ++i) {
    const int rank = sources_[i].rank;
    if (rank < 0 || rank >= from_.layout.world())
      return invalid_argument(
          fmt::format("a source of rank {}: {} has {} ranks", rank,
                      from_.layout.to_string(), from_.layout.world()));
    of_content_[static_cast<size_t>(content_class(from_, rank))].push_back(
        static_cast<int>(i));
  }
  for (size_t c = 0; c < of_content_.size(); ++c) {
    if (of_content_[c].empty()) continue;
    ASSIGN_OR_RETURN(
        const RankShard rank,
        make_rank_shard(table_, from_,
                        first_of_class(from_, static_cast<int>(c))));
    held_[c] = held_pieces(rank.shard, rank.zero);
    for (const StatePiece& p : held_[c])
      stored_[p.param].push_back({.content = static_cast<int>(c),
                                  .rect = rect_of(p.box),
                                  .at = p.at,
                                  .stride = p.row_stride});
  }
  return ok_status();
}

// In the order of ranks and sources; each source serves one.
void Planner::find_adopters() {
  std::vector<bool> taken(sources_.size(), false);
  for (int r = 0; r < to_.layout.world(); ++r) {
    const auto& wanted = wanted_[static_cast<size_t>(content_class(to_, r))];
    int found = -1;
    for (size_t i = 0; i < sources_.size() && found < 0; ++i) {
      const auto content =
          static_cast<size_t>(content_class(from_, sources_[i].rank));
      if (!taken[i] &&
          sources_[i].worker == processes_[static_cast<size_t>(r)].worker &&
          sources_[i].host == processes_[static_cast<size_t>(r)].host &&
          held_[content] == wanted)
        found = static_cast<int>(i);
    }
    if (found >= 0) taken[static_cast<size_t>(found)] = true;
    adopt_.push_back(found);
  }
}

// Ranks take turns among the holders, and among the processes of a host.
std::optional<Planner::Filled> Planner::provider(int content, int r,
                                                 bool local) const {
  const int here = processes_[static_cast<size_t>(r)].host;
  std::vector<int> able;
  for (const int s : of_content_[static_cast<size_t>(content)]) {
    const int host = sources_[static_cast<size_t>(s)].host;
    if ((host == here) == local && (local || on_host_.contains(host)))
      able.push_back(s);
  }
  if (able.empty()) return std::nullopt;
  Filled f;
  f.copy.source = able[static_cast<size_t>(r) % able.size()];
  if (!local) {
    const auto& senders =
        on_host_.at(sources_[static_cast<size_t>(f.copy.source)].host);
    f.sender = senders[static_cast<size_t>(r + content) % senders.size()];
  }
  return f;
}

void Planner::fill(const StatePiece& wanted, int r, std::vector<Rect>& left,
                   bool local) {
  const std::vector<Stored>& stored = stored_[wanted.param];
  const Rect whole = rect_of(wanted.box);
  // Not everybody begins with the same of those who hold the same.
  const size_t first =
      stored.empty() ? 0 : static_cast<size_t>(r) % stored.size();
  for (size_t k = 0; k < stored.size() && !left.empty(); ++k) {
    const Stored& s = stored[(first + k) % stored.size()];
    if (intersect(s.rect, whole).empty()) continue;
    const auto from = provider(s.content, r, local);
    if (!from) continue;
    std::vector<Rect> still;
    for (const Rect& rect : left) {
      const Rect part = intersect(rect, s.rect);
      if (part.empty()) {
        still.push_back(rect);
        continue;
      }
      Filled f = *from;
      f.copy.from_at = position(s.rect, s.at, s.stride, part);
      f.copy.from_stride = s.stride;
      f.copy.to_at = position(whole, wanted.at, wanted.row_stride, part);
      f.copy.to_stride = wanted.row_stride;
      f.copy.rows = part.rows;
      f.copy.cols = part.cols;
      filled_[static_cast<size_t>(r)].push_back(f);
      subtract(rect, part, still);
    }
    left = std::move(still);
  }
}

Status Planner::plan_rank(int r) {
  if (adopt_[static_cast<size_t>(r)] >= 0) return ok_status();
  for (const StatePiece& p :
       wanted_[static_cast<size_t>(content_class(to_, r))]) {
    std::vector<Rect> left = {rect_of(p.box)};
    fill(p, r, left, /*local=*/true);
    fill(p, r, left, /*local=*/false);
    if (!left.empty())
      return unavailable(fmt::format(
          "{}: row {}, column {} is in no state that can be reached",
          table_[p.param].name, left[0].row, left[0].col));
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
  plan.adopts = adopt_;
  for (auto& [distance, s] : in) plan.receive.push_back(std::move(s));
  for (auto& [distance, s] : out) plan.send.push_back(std::move(s));
  if (me < to_.layout.world()) {
    plan.adopt = adopt_[static_cast<size_t>(me)];
    plan.elements = elements_[static_cast<size_t>(content_class(to_, me))];
  }
  return plan;
}

uint64_t digest_of(const ParamTable& table, const Sharding& from,
                   std::span<const Source> sources, const Sharding& to,
                   std::span<const Process> processes) {
  std::vector<int64_t> facts = {static_cast<int64_t>(model_id(table))};
  for (const Sharding* s : {&from, &to}) {
    for (const int x : {s->layout.dp, s->layout.pp, s->layout.tp, s->layout.cp,
                        s->chunks, s->zero.stage, s->zero.shard_group})
      facts.push_back(x);
    facts.insert(facts.end(), s->bounds.begin(), s->bounds.end());
  }
  for (const Source& s : sources)
    facts.insert(facts.end(), {s.rank, s.host, s.worker});
  for (const Process& p : processes)
    facts.insert(facts.end(), {p.host, p.worker});
  return xxh3(facts.data(), facts.size() * sizeof(facts[0]));
}

}  // namespace

Result<Plan> plan_exchange(const ParamTable& table, const Sharding& from,
                           std::span<const Source> sources, const Sharding& to,
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
