#include "worker/board/step_metrics.h"

#include <cmath>

namespace remesh::board {

pb::StepMetrics to_metrics(const StepRecord& r, int64_t generation,
                           const pb::Mesh& mesh) {
  pb::StepMetrics m;
  m.set_step(r.step);
  m.set_loss(r.loss);
  m.set_grad_norm(r.grad_norm);
  m.set_lr(r.lr);
  if (r.skipped) m.set_skipped(true);
  m.set_tokens(r.tokens);
  m.set_tokens_per_s(r.tokens_per_s);
  m.set_step_s(r.step_s);
  m.set_generation(generation);
  *m.mutable_mesh() = mesh;
  m.set_time(r.time);
  if (!std::isnan(r.val_loss)) m.set_val_loss(r.val_loss);
  for (int32_t i = 0; i < r.validated; ++i)
    m.add_val_losses(r.val_losses.at(static_cast<size_t>(i)));
  if (r.flops_per_s > 0) m.set_flops_per_s(r.flops_per_s);
  if (r.gemm_flops_per_s > 0) m.set_gemm_flops_per_s(r.gemm_flops_per_s);
  if (r.mfu > 0) m.set_mfu(r.mfu);
  if (r.exposed_comm >= 0) m.set_exposed_comm(r.exposed_comm);
  if (r.bubble >= 0) m.set_bubble(r.bubble);
  if (r.has_digest) m.set_digest(r.digest);
  return m;
}

}  // namespace remesh::board
