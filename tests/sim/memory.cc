#include "tests/sim/memory.h"

#include <fmt/format.h>

#include "checkpoint/manifest/conversions.h"
#include "coordinator/core/survival.h"
#include "proto/base/check.h"

namespace remesh::sim {

void StateMemory::begin(int64_t generation, int rank, bool replica) {
  auto& records = segments_[{generation, rank, replica}];
  while (records.size() > 1) records.erase(records.begin());
}

void StateMemory::commit(const pb::StateHolding& holding, uint64_t tag) {
  begin(holding.generation(), holding.rank(), holding.replica());
  segments_[{holding.generation(), holding.rank(), holding.replica()}]
      .push_back({holding, tag});
}

void StateMemory::forget_before(int64_t generation, int64_t except) {
  std::erase_if(segments_, [&](const auto& s) {
    const int64_t of = std::get<0>(s.first);
    return of < generation && of != except;
  });
}

std::vector<pb::StateHolding> StateMemory::inventory() const {
  std::vector<pb::StateHolding> out;
  for (const auto& [key, records] : segments_)
    for (const Record& r : records) out.push_back(r.holding);
  return out;
}

const StateMemory::Record* StateMemory::find(int64_t generation, int64_t step,
                                             int rank) const {
  for (const bool replica : {false, true}) {
    const auto it = segments_.find({generation, rank, replica});
    if (it == segments_.end()) continue;
    for (const Record& r : it->second)
      if (r.holding.step() == step) return &r;
  }
  return nullptr;
}

pb::StateHolding make_holding(const geometry::ParamTable& table,
                              const pb::Assignment& a, int rank, int64_t step,
                              bool replica) {
  const auto sharding = core::full_sharding_of(a);
  CHECK(sharding.ok());
  const auto shard = geometry::make_rank_shard(table, *sharding, rank);
  CHECK(shard.ok());
  pb::StateHolding h;
  h.set_step(step);
  h.set_generation(a.generation());
  h.set_rank(rank);
  *h.mutable_sharding() = manifest::sharding_info(*sharding);
  h.set_model(geometry::model_id(table));
  h.set_elements(shard->zero.state_elements());
  h.set_tokens(step * 1000);
  h.set_sequences(step * 8);
  h.set_replica(replica);
  h.set_segment(
      fmt::format("g{}-{}{}", a.generation(), rank, replica ? "-replica" : ""));
  return h;
}

}  // namespace remesh::sim
