// For tests and benchmarks that compute with a Stage without an Engine: all
// weights stay loaded, and gradients are added into one flat vector.
#pragma once

#include <functional>
#include <span>
#include <utility>

#include "proto/base/check.h"
#include "worker/model/stage.h"

namespace remesh::model {

// on_ready may be empty.
class ResidentHooks final : public UnitHooks {
 public:
  ResidentHooks(const geometry::ShardTable& shard, std::span<float> grads,
                std::function<void(int)> on_ready = {})
      : shard_(shard), grads_(grads), on_ready_(std::move(on_ready)) {}
  void need(int) override {}
  void release(int) override {}
  float* grads(int unit) override {
    // A pass that adds no gradients may do without the vector.
    CHECK(static_cast<int64_t>(grads_.size()) == shard_.num_elements());
    return grads_.data() + shard_.units()[static_cast<size_t>(unit)].begin;
  }
  void ready(int unit) override {
    if (on_ready_) on_ready_(unit);
  }

 private:
  const geometry::ShardTable& shard_;
  std::span<float> grads_;
  std::function<void(int)> on_ready_;
};

// Loads all units of a chunk from the rank's flat vector.
inline void load_weights(Stage& stage, const geometry::ShardTable& shard,
                         std::span<const float> master, int chunk = 0) {
  CHECK(static_cast<int64_t>(master.size()) == shard.num_elements());
  for (size_t u = 0; u < shard.units().size(); ++u) {
    const geometry::Unit& unit = shard.units()[u];
    if (unit.chunk == chunk)
      stage.load_unit(static_cast<int>(u),
                      master.subspan(static_cast<size_t>(unit.begin),
                                     static_cast<size_t>(unit.numel())));
  }
}

}  // namespace remesh::model
