// The states that scripted ranks keep in memory.
#include <fmt/format.h>

#include "checkpoint/memory/replica_placement.h"
#include "coordinator/core/job_shape.h"
#include "proto/base/exit_code.h"
#include "tests/scenario/scripted_cluster.h"

namespace remesh::scenario {
pb::StateHolding ScriptedCluster::holding(int rank, int64_t step,
                                          bool replica) const {
  const auto table =
      geometry::ParamTable::make(core::shape_of(assignment_.job())->model);
  return sim::make_holding(table, assignment_, rank, step, replica);
}

// Each rank reads what it needs; all of it must be where the source says.
void ScriptedCluster::restore_states() {
  const pb::Source& source = assignment_.source();
  const auto ranks = world();
  for (const pb::StateHolding& h : source.states()) {
    const auto it = workers_.find(h.worker());
    const bool there =
        it != workers_.end() &&
        it->second.memory.find(h.generation(), h.step(), h.rank()) != nullptr;
    if (there && !spoiled_.contains({h.worker(), h.step()})) continue;
    end_rank(
        *ranks[0].first, *ranks[0].second, kExitBadSource, 0,
        fmt::format("step {} of rank {} on {} {}", h.step(), h.rank(),
                    h.worker(), there ? "does not verify" : "is not there"),
        static_cast<double>(now_) / 1000);
    return;
  }
  for (const auto& [w, r] : ranks) {
    r->committed = source.step();
    commit_state(*w, r->rank, source.step());
  }
  replicate(source.step());
  // Nothing is left to do but to save.
  if (source.step() >= job_.train().steps()) boundary(source.step());
}

void ScriptedCluster::commit_state(Worker& w, int rank, int64_t step) {
  if (keeps_state()) w.memory.commit(holding(rank, step, false), 0);
}

void ScriptedCluster::replicate(int64_t step, bool always) {
  const auto& elastic = job_.elastic();
  if (!keeps_state() || elastic.replicate_every() == 0 ||
      (!always && step % elastic.replicate_every() != 0))
    return;
  std::vector<memory::RankHost> places;
  std::vector<int> classes;
  const auto ranks = world();
  for (const auto& [w, r] : ranks) {
    places.push_back({w->name, w->host});
    classes.push_back(
        geometry::replica_group(sim::trainer_sharding(assignment_), r->rank));
  }
  const auto placement = memory::place_replicas(
      places, classes, static_cast<int>(elastic.replicas()));
  for (const auto& [w, r] : ranks)
    for (const int holder : placement.holders[static_cast<size_t>(r->rank)])
      ranks[static_cast<size_t>(holder)].first->memory.commit(
          holding(r->rank, step, true), 0);
}

// Once all have what they began with.
void ScriptedCluster::forget_older_states() {
  for (const auto& [w, r] : world()) w->memory.forget_before(live_);
}

}  // namespace remesh::scenario
