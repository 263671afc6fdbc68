#include "proto/base/check.h"
#include "worker/model/stage.h"

namespace remesh::model {

ResidentHooks::ResidentHooks(const geometry::ShardTable& shard,
                             std::span<float> grads,
                             std::function<void(int)> on_ready)
    : shard_(shard), grads_(grads), on_ready_(std::move(on_ready)) {}

float* ResidentHooks::grads(int unit) {
  // A pass that adds no gradients may do without the vector.
  CHECK(static_cast<int64_t>(grads_.size()) == shard_.num_elements());
  return grads_.data() + shard_.units()[static_cast<size_t>(unit)].begin;
}

void ResidentHooks::ready(int unit) {
  if (on_ready_) on_ready_(unit);
}

}  // namespace remesh::model
