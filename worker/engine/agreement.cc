#include "worker/engine/agreement.h"

namespace remesh::engine {

std::array<double, Facts::kSize> Facts::to_array() const {
  return {loss_sum,  tokens,     square_sum,         stop,
          must_stop, stop_saves, shard_saved,        shard_failed,
          committed, gave_up,    checkpoint_request, gemm_flops_per_s};
}

Facts Facts::from_array(const std::array<double, kSize>& a) {
  return {.loss_sum = a[0],
          .tokens = a[1],
          .square_sum = a[2],
          .stop = a[3],
          .must_stop = a[4],
          .stop_saves = a[5],
          .shard_saved = a[6],
          .shard_failed = a[7],
          .committed = a[8],
          .gave_up = a[9],
          .checkpoint_request = a[10],
          .gemm_flops_per_s = a[11]};
}

}  // namespace remesh::engine
