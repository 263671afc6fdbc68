#include "parallel/geometry/model_work.h"

#include "parallel/geometry/lora.h"

namespace remesh::geometry {
namespace {

// Each query takes its dot product with keys, and as many products with values.
double attention_work(const ParamSpec& query, const ModelConfig& config,
                      int64_t T) {
  return 2 * static_cast<double>(query.shape[0]) * mean_keys(config, T);
}

}  // namespace

double mean_keys(const ModelConfig& config, int64_t T) {
  const auto tokens = static_cast<double>(T);
  const auto window = static_cast<double>(config.sliding_window);
  if (window == 0 || window >= tokens) return tokens / 2;
  return window * (1 - window / tokens / 2);
}

ModelWork work_per_token(const ModelConfig& config, int64_t T) {
  ModelConfig one_layer = config.base();
  one_layer.n_layers = 1;
  const ParamTable table = ParamTable::make(one_layer);
  ModelWork work;
  for (const ParamSpec& s : table.specs()) {
    const auto elements = static_cast<double>(s.numel());
    if (s.layer == 0 && s.shape.size() == 2) work.block += elements;
    if (s.role == Role::kQuery) work.attention = attention_work(s, config, T);
    // Without a head of its own the embedding is the projection.
    if (s.role == Role::kEmbedding || s.role == Role::kHead)
      work.head = elements;
  }
  return work;
}

double flops_per_token(const ModelConfig& config, int64_t T) {
  const ParamTable table = ParamTable::make(config.base());
  const bool adapters = config.lora.rank > 0;
  const bool tied = table.find(Role::kHead) < 0;
  double sum = 0;
  for (const ParamSpec& s : table.specs()) {
    const bool looked_up = s.role == Role::kEmbedding && !tied;
    const bool trained = !adapters || has_adapter(s, config.lora);
    if (!looked_up) sum += (trained ? 6 : 4) * static_cast<double>(s.numel());
    if (s.role == Role::kQuery) sum += 6 * attention_work(s, config, T);
  }
  return sum;
}

}  // namespace remesh::geometry
