#include "parallel/geometry/model_work.h"

namespace remesh::geometry {
namespace {

// Each query takes its dot product with half the keys on average, and as many
// products with values.
double attention_work(const ParamSpec& query, int64_t T) {
  return static_cast<double>(query.shape[0] * T);
}

}  // namespace

ModelWork work_per_token(const ModelConfig& config, int64_t T) {
  ModelConfig one_layer = config;
  one_layer.n_layers = 1;
  const ParamTable table = ParamTable::make(one_layer);
  ModelWork work;
  for (const ParamSpec& s : table.specs()) {
    const auto elements = static_cast<double>(s.numel());
    if (s.layer == 0 && s.shape.size() == 2) work.block += elements;
    if (s.role == Role::kQuery) work.attention = attention_work(s, T);
    // Without a head of its own the embedding is the projection.
    if (s.role == Role::kEmbedding || s.role == Role::kHead)
      work.head = elements;
  }
  return work;
}

double flops_per_token(const ParamTable& table, int64_t T) {
  const ParamSpec& embedding =
      table[static_cast<size_t>(table.find(Role::kEmbedding))];
  const bool tied = table.find(Role::kHead) < 0;
  const int64_t parameters =
      table.num_elements() - (tied ? 0 : embedding.numel());
  double attention = 0;
  for (const ParamSpec& s : table.specs())
    if (s.role == Role::kQuery) attention += attention_work(s, T);
  return 6 * (static_cast<double>(parameters) + attention);
}

}  // namespace remesh::geometry
