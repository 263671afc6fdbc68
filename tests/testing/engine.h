// For tests and benchmarks: an Engine in one call, and initial weights.
#pragma once

#include <memory>

#include "worker/engine/engine.h"

namespace remesh::engine {

// Prepares and connects. Collective.
inline Result<std::unique_ptr<Engine>> make_engine(
    const geometry::ParamTable& table, comm::Mesh& mesh,
    const EngineOptions& options, kernels::Backend& backend,
    Progress progress = {}, StateStore* state = nullptr) {
  ASSIGN_OR_RETURN(auto engine,
                   Engine::prepare(table, mesh.layout(), mesh.world().rank(),
                                   options, backend, progress, state));
  RETURN_IF_ERROR(engine->connect(mesh));
  return engine;
}

// Initial weights (ShardTable::initial_values), no moments, step 0.
inline void initialise(Engine& engine, kernels::Backend& backend,
                       uint64_t seed) {
  const StateView to = engine.begin_state();
  for (size_t u = 0; u < engine.shard().units().size(); ++u) {
    const geometry::FlatRange r = engine.zero().update_range(u);
    engine.shard().initial_values(
        seed, r.begin,
        to.weights.subspan(static_cast<size_t>(engine.zero().state_offset(u)),
                           static_cast<size_t>(r.size())));
  }
  for (const std::span<float> v : {to.exp_avg, to.exp_avg_sq})
    if (!v.empty()) backend.zero(v.data(), v.size_bytes());
  engine.commit_state(0);
  if (FrozenBase* const base = engine.base())
    base->rank_shard.shard.initial_values(seed, 0, base->weights.span());
}

// make_engine() with initial weights: ready for a step.
inline Result<std::unique_ptr<Engine>> make_ready_engine(
    const geometry::ParamTable& table, comm::Mesh& mesh,
    const EngineOptions& options, kernels::Backend& backend, uint64_t seed,
    StateStore* state = nullptr) {
  ASSIGN_OR_RETURN(auto engine,
                   make_engine(table, mesh, options, backend, {}, state));
  initialise(*engine, backend, seed);
  engine->state_loaded();
  return engine;
}

}  // namespace remesh::engine
