#include "worker/engine/agreement.h"

namespace remesh::engine {

std::array<double, StepVotes::kSize> StepVotes::to_array() const {
  return {loss_sum,        tokens,      targets,
          square_sum,      stop,        must_stop,
          stop_saves,      shard_saved, shard_failed,
          committed,       gave_up,     checkpoint_request,
          gemm_flops_per_s};
}

StepVotes StepVotes::from_array(const std::array<double, kSize>& a) {
  return {.loss_sum = a[0],
          .tokens = a[1],
          .targets = a[2],
          .square_sum = a[3],
          .stop = a[4],
          .must_stop = a[5],
          .stop_saves = a[6],
          .shard_saved = a[7],
          .shard_failed = a[8],
          .committed = a[9],
          .gave_up = a[10],
          .checkpoint_request = a[11],
          .gemm_flops_per_s = a[12]};
}

}  // namespace remesh::engine
