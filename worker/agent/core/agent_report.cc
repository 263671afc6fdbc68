// What a worker reports.
#include "proto/limits/plausible.h"
#include "worker/agent/core/agent.h"

namespace remesh::agent {
namespace {

// Between reports with the many metrics of older generations.
constexpr int64_t kOlderMetricsEveryMs = 2000;
constexpr size_t kFewMetrics = 256;

}  // namespace

void Agent::report() {
  Send out;
  pb::Report& r = *out.message.mutable_report();
  r = about_;
  r.set_seq(++seq_);
  r.set_generation(generation_);
  r.set_state(state_);
  if (ranks_generation_ == generation_)
    for (const auto& [rank, s] : ranks_) *r.add_ranks() = s;
  r.set_leaving(leaving_);
  // A coordinator that was started again plans once it knows the states here,
  // and must know the steps before them by then.
  const bool with_older = urgent_ || metrics_.size() <= kFewMetrics ||
                          now_ms_ - older_sent_ms_ >= kOlderMetricsEveryMs;
  if (with_older) older_sent_ms_ = now_ms_;
  for (const pb::StepMetrics& m : metrics_)
    if ((with_older || m.generation() == generation_) &&
        r.metrics_size() < limits::kMaxMetrics)
      *r.add_metrics() = m;
  for (const pb::Branches::Origin& o : origins_) *r.add_origins() = o;
  r.set_coordinator_epoch(epoch_);
  if (directive_ && directive_->generation() == generation_)
    r.set_proof(directive_->proof());
  if (state_room_) r.set_state_room(*state_room_);
  if (directive_ && directive_->want_hardware() && hardware_) {
    if (hardware_->description.empty())
      r.set_hardware_error(hardware_->error);
    else
      r.set_hardware(hardware_->description);
  }
  r.set_busy(busy_);
  if (inventory_ && !busy_) {
    r.set_has_inventory(true);
    for (const pb::StateHolding& h : inventory_->holdings)
      *r.add_holdings() = h;
    for (const std::string& d : inventory_->damaged)
      if (r.damaged_size() < limits::kMaxDamages) r.add_damaged(d);
  }
  act(std::move(out));
  reported_ms_ = now_ms_;
  dirty_ = urgent_ = false;
}

}  // namespace remesh::agent
