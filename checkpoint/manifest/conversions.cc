#include "checkpoint/manifest/conversions.h"

#include <fmt/format.h>

namespace remesh::manifest {

geometry::Layout layout_of(const pb::Mesh& mesh) {
  return {.dp = mesh.dp(), .pp = mesh.pp(), .tp = mesh.tp(), .cp = mesh.cp()};
}

pb::Mesh mesh_of(const geometry::Layout& layout) {
  pb::Mesh m;
  m.set_dp(layout.dp);
  m.set_pp(layout.pp);
  m.set_tp(layout.tp);
  m.set_cp(layout.cp);
  return m;
}

pb::Sharding sharding_info(const geometry::Sharding& sharding) {
  pb::Sharding out;
  *out.mutable_mesh() = mesh_of(sharding.layout);
  for (const auto bound : sharding.bounds)
    out.add_bounds(static_cast<int32_t>(bound));
  out.set_chunks(sharding.chunks);
  out.set_zero_stage(sharding.zero.stage);
  out.set_zero_shard_group(sharding.zero.shard_group);
  return out;
}

Result<geometry::Sharding> parse_sharding(const pb::Sharding& info) {
  const pb::Mesh& m = info.mesh();
  geometry::Sharding out;
  out.layout = layout_of(m);
  for (const int degree : {m.dp(), m.pp(), m.tp(), m.cp()})
    if (degree < 1)
      return corrupt(
          fmt::format("sharding: mesh {}: every degree is at least 1",
                      out.layout.to_string()));
  constexpr int64_t kMaxRanks = 1 << 20;
  int64_t world = 1;
  for (const int degree : {m.dp(), m.pp(), m.tp(), m.cp()})
    if ((world *= degree) > kMaxRanks)
      return corrupt(fmt::format("sharding: mesh {}: more than {} ranks",
                                 out.layout.to_string(), kMaxRanks));
  if (info.chunks() < 1)
    return corrupt(
        fmt::format("sharding: chunks: {}, must be at least 1", info.chunks()));
  if (info.bounds_size() != int64_t{m.pp()} * info.chunks() + 1)
    return corrupt(fmt::format("sharding: {} bounds for {} virtual stages",
                               info.bounds_size(),
                               int64_t{m.pp()} * info.chunks()));
  out.bounds.assign(info.bounds().begin(), info.bounds().end());
  out.chunks = info.chunks();
  if (info.zero_stage() < 0 || info.zero_stage() > 3 ||
      info.zero_shard_group() < 0)
    return corrupt(
        fmt::format("sharding: ZeRO stage {} in groups of {}; "
                    "allowed: stages 0 to 3",
                    info.zero_stage(), info.zero_shard_group()));
  out.zero = {.stage = info.zero_stage(),
              .shard_group = info.zero_shard_group()};
  return out;
}

pb::StateHolding holding_of(const memory::StateInfo& info,
                            const std::string& segment) {
  pb::StateHolding h;
  h.set_step(info.step);
  h.set_generation(info.generation);
  h.set_rank(info.rank);
  *h.mutable_sharding() = sharding_info(info.sharding);
  h.set_model(info.model);
  h.set_elements(info.elements);
  h.set_tokens(info.tokens);
  h.set_sequences(info.sequences);
  h.set_replica(info.replica);
  h.set_segment(segment);
  return h;
}

}  // namespace remesh::manifest
