#include "worker/engine/agreement.h"

namespace remesh::engine {

std::array<double, Facts::kSize> Facts::to_array() const {
  return {
      loss_sum,        tokens,       square_sum, stop,    must_stop,
      shard_saved,     shard_failed, committed,  gave_up, checkpoint_request,
      gemm_flops_per_s};
}

Facts Facts::from_array(const std::array<double, kSize>& a) {
  return {.loss_sum = a[0],
          .tokens = a[1],
          .square_sum = a[2],
          .stop = a[3],
          .must_stop = a[4],
          .shard_saved = a[5],
          .shard_failed = a[6],
          .committed = a[7],
          .gave_up = a[8],
          .checkpoint_request = a[9],
          .gemm_flops_per_s = a[10]};
}

}  // namespace remesh::engine
