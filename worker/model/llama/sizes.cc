#include "worker/model/llama/sizes.h"

#include "proto/base/check.h"

namespace remesh::model {

using geometry::Role;
using geometry::ShardParam;
using geometry::ShardTable;

Sizes sizes_of(const ShardTable& shard, int chunk) {
  const geometry::ModelConfig& c = shard.table().config();
  const int64_t layer = shard.first_layer(chunk);
  const auto rows = [&](Role role) {
    const int i = shard.find(role, layer);
    CHECK(i >= 0);
    return shard[static_cast<size_t>(i)].rect.rows;
  };
  Sizes s{.dim = c.dim,
          .heads = rows(Role::kQuery) / c.head_dim(),
          .kv_heads = rows(Role::kKey) / c.head_dim(),
          .head_dim = c.head_dim(),
          .hidden = rows(Role::kGate),
          .norm_eps = c.norm_eps,
          .qkv_bias = shard.find(Role::kQueryBias, layer) >= 0,
          .head_norm = shard.find(Role::kQueryNorm, layer) >= 0,
          .tp = shard.layout().tp,
          .tp_index = shard.coord().tp,
          .cp = shard.layout().cp,
          .cp_index = shard.coord().cp};
  CHECK(rows(Role::kUp) == s.hidden && s.heads % s.kv_heads == 0);
  if (shard.has_embedding(chunk) || shard.has_head(chunk)) {
    const bool head = shard.has_head(chunk) && !c.tie_embeddings;
    const int i = shard.find(head ? Role::kHead : Role::kEmbedding);
    CHECK(i >= 0);
    const ShardParam& p = shard[static_cast<size_t>(i)];
    s.vocab_begin = p.rect.row;
    s.vocab = p.rect.rows;
  }
  return s;
}

Rows rows_of(const Sizes& sizes, int64_t B, int64_t T) {
  Rows r{.B = B, .T = T / sizes.cp};
  r.N = B * r.T;
  r.n = (r.N + sizes.tp - 1) / sizes.tp;
  r.P = r.n * sizes.tp;
  return r;
}

}  // namespace remesh::model
