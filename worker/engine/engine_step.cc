// A step of an Engine: passes, agreement, update.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "proto/base/check.h"
#include "worker/engine/engine.h"
#include "worker/engine/hooks.h"
#include "worker/engine/timer.h"

namespace remesh::engine {

using geometry::Pass;
using geometry::PipeOp;

namespace {

trace::Category category_of(Pass pass) {
  switch (pass) {
    case Pass::kForward:
      return trace::Category::kForward;
    case Pass::kBackward:
      return trace::Category::kBackward;
    case Pass::kWeight:
      return trace::Category::kWeight;
  }
  return trace::Category::kForward;
}

int tag_of(const PipeOp& op, int stage, int num_stages) {
  return (op.microbatch * num_stages + stage) * 2 +
         (op.pass == Pass::kForward ? 0 : 1);
}

}  // namespace

// Takes this rank's part of every sequence (context parallelism).
void Engine::take_part(std::span<const model::MicroBatch> sequences) {
  microbatches_.assign(sequences.begin(), sequences.end());
  for (const model::MicroBatch& mb : sequences)
    CHECK(mb.B >= 1 && mb.B <= options_.max_batch && mb.T >= 1 &&
          mb.T <= options_.max_seq);
  const geometry::Layout& layout = rank_shard_.shard.layout();
  if (layout.cp == 1) return;
  size_t total = 0;
  for (const model::MicroBatch& mb : sequences)
    total += 2 * static_cast<size_t>(mb.B * mb.T / layout.cp);
  part_tokens_.resize(total);
  int32_t* to = part_tokens_.data();
  for (model::MicroBatch& mb : microbatches_) {
    const std::vector<int32_t> positions =
        model::context_positions(mb.T, layout.cp, rank_shard_.shard.coord().cp);
    for (const int32_t** tokens : {&mb.tokens_BT, &mb.targets_BT}) {
      const int32_t* from = *tokens;
      *tokens = to;
      for (int64_t b = 0; b < mb.B; ++b)
        for (const int32_t t : positions) *to++ = from[b * mb.T + t];
    }
  }
}

Status Engine::expect(const std::vector<PipeOp>& ops) {
  const int pp = rank_shard_.shard.layout().pp;
  const int me = rank_shard_.shard.coord().pp;
  std::vector<PipeLinks::Message> messages;
  for (const PipeOp& op : ops) {
    if (static_cast<size_t>(op.microbatch) >= microbatches_.size()) continue;
    const int stage = op.chunk * pp + me;
    const int stages = pp * options_.chunks;
    const auto add = [&](int from_stage) {
      messages.push_back(
          {.from = from_stage % pp,
           .tag = tag_of(op, from_stage, stages),
           .elements =
               elements(microbatches_[static_cast<size_t>(op.microbatch)])});
    };
    if (op.pass == Pass::kForward && stage > 0) add(stage - 1);
    if (op.pass == Pass::kBackward && stage + 1 < stages) add(stage + 1);
  }
  return links_->expect(std::move(messages));
}

// All tensor-parallel ranks have the same loss; one of them counts it.
void Engine::count(const model::MicroBatch& mb, double loss,
                   StepVotes& votes) const {
  if (rank_shard_.shard.coord().tp != 0) return;
  votes.loss_sum += loss;
  const int64_t tokens = mb.B * mb.T / rank_shard_.shard.layout().cp;
  votes.tokens += static_cast<double>(tokens);
  votes.targets += static_cast<double>(
      std::count_if(mb.targets_BT, mb.targets_BT + tokens,
                    [](int32_t target) { return target >= 0; }));
}

Status Engine::forward(const PipeOp& op, StepVotes& votes) {
  const auto c = static_cast<size_t>(op.chunk);
  const auto m = static_cast<size_t>(op.microbatch);
  const model::MicroBatch& mb = microbatches_[m];
  CHECK(!free_slots_[c].empty());
  const int slot = free_slots_[c].back();
  free_slots_[c].pop_back();
  slot_of_[c][m] = slot;
  const int key = slot * options_.chunks + op.chunk;
  links_->sent(key);  // the slot's output may be overwritten
  const float* x = nullptr;
  if (!first_stage(op.chunk)) {
    ASSIGN_OR_RETURN(x, links_->receive());
  }
  model::Stage& stage = *stages_[c];
  const double loss = stage.forward(slot, mb, x, *hooks_);
  if (last_stage(op.chunk)) {
    count(mb, loss, votes);
    return ok_status();
  }
  const int pp = rank_shard_.shard.layout().pp;
  const int at = schedule_.stage(rank_shard_.shard.coord().pp, op.chunk);
  backend_.synchronize();
  links_->send(key, {stage.output(slot), static_cast<size_t>(elements(mb))},
               (at + 1) % pp, tag_of(op, at, schedule_.num_stages()));
  return ok_status();
}

Status Engine::backward(const PipeOp& op, double scale) {
  const auto c = static_cast<size_t>(op.chunk);
  const auto m = static_cast<size_t>(op.microbatch);
  const float* dy = nullptr;
  if (!last_stage(op.chunk)) {
    ASSIGN_OR_RETURN(dy, links_->receive());
  }
  const float* dx = stages_[c]->backward(slot_of_[c][m], scale, dy, *hooks_);
  if (first_stage(op.chunk)) return ok_status();
  const int pp = rank_shard_.shard.layout().pp;
  const int at = schedule_.stage(rank_shard_.shard.coord().pp, op.chunk);
  backend_.synchronize();
  return links_->send_copy(
      {dx, static_cast<size_t>(elements(microbatches_[m]))}, (at - 1) % pp,
      tag_of(op, at, schedule_.num_stages()));
}

// Gathers with the data-parallel ranks that have this microbatch. In a step of
// one microbatch they may wait for a unit's gradient before they continue.
void Engine::join(const PipeOp& op) {
  const bool last = op.pass == schedule_.last_pass();
  PipeOp all = op;
  if (last) all.pass = Pass::kBackward;
  for (const int u : units_needed(rank_shard_.shard, all)) {
    if (op.pass != Pass::kWeight) store_->join(u);
    if (last && schedule_.num_microbatches == 1) grads_->ready(u);
  }
}

Status Engine::run_pass(const PipeOp& op, double scale, StepVotes& votes) {
  const auto c = static_cast<size_t>(op.chunk);
  const auto m = static_cast<size_t>(op.microbatch);
  if (m >= microbatches_.size()) {
    join(op);
    return ok_status();
  }
  progress_.microbatch(op.microbatch);
  const trace::Span span(tracer_, category_of(op.pass),
                         {{"microbatch", op.microbatch}, {"chunk", op.chunk}});
  if (op.pass == Pass::kForward) return forward(op, votes);
  hooks_->set_last(m + 1 == microbatches_.size());
  if (op.pass == Pass::kBackward)
    RETURN_IF_ERROR(backward(op, scale));
  else
    stages_[c]->backward_weight(slot_of_[c][m], *hooks_);
  if (op.pass == schedule_.last_pass()) {
    free_slots_[c].push_back(slot_of_[c][m]);
    slot_of_[c][m] = -1;
  }
  return ok_status();
}

Status Engine::run_passes(const StepInput& in, StepVotes& votes) {
  CHECK_MSG(
      static_cast<int>(in.microbatches.size()) <= schedule_.num_microbatches,
      "more microbatches than this rank's share");
  progress_.phase(pb::RankStatus::COMPUTE);
  take_part(in.microbatches);
  const std::vector<PipeOp>& ops =
      schedule_.ranks[static_cast<size_t>(rank_shard_.shard.coord().pp)];
  grads_->begin();
  store_->begin(blocks_needed(rank_shard_.shard, ops));
  RETURN_IF_ERROR(expect(ops));
  const double scale = 1.0 / static_cast<double>(in.global_tokens);
  for (const PipeOp& op : ops) RETURN_IF_ERROR(run_pass(op, scale, votes));
  progress_.microbatch(static_cast<int64_t>(in.microbatches.size()));
  links_->finish();
  return ok_status();
}

StepResult Engine::agree(const StepInput& in, StepVotes votes,
                         StepSeconds times) {
  const int64_t units = num_global_units(table_.config());
  // StepVotes, squares by unit, times.
  std::vector<double> sums(static_cast<size_t>(kNumVotes + units + 2), 0);
  double* const squares = sums.data() + kNumVotes;
  for (size_t u = 0; u < rank_shard_.shard.units().size(); ++u)
    squares[global_unit(rank_shard_.shard, u)] += square_sum(
        backend_, options_.optimizer, rank_shard_, u, grads_->reduced(u));
  if (in.votes) {
    StepVotes more = in.votes();
    more.loss_sum = votes.loss_sum;
    more.tokens = votes.tokens;
    more.targets = votes.targets;
    votes = more;
  }
  std::memcpy(sums.data(), &votes, sizeof(votes));
  squares[units] = times.exposed();
  squares[units + 1] = times.pipeline;
  progress_.tick();
  {
    const Timer timer(times.agree);
    mesh_->world().all_reduce(std::span<double>(sums), comm::Op::kSum);
  }
  progress_.tick();
  StepResult r{.times = times};
  std::memcpy(static_cast<void*>(&r.agreed), sums.data(), sizeof(r.agreed));
  r.agreed.square_sum = 0;
  for (int64_t u = 0; u < units; ++u) r.agreed.square_sum += squares[u];
  const double targets = std::max(1.0, r.agreed.targets);
  r.loss = r.agreed.loss_sum / targets;
  r.grad_scale = static_cast<double>(in.global_tokens) / targets;
  r.grad_norm = std::sqrt(r.agreed.square_sum) * r.grad_scale;
  const double world = mesh_->world().size();
  r.mean_exposed_s = squares[units] / world;
  r.mean_bubble_s = squares[units + 1] / world;
  return r;
}

void Engine::update(double lr, double grad_scale, bool skip) {
  progress_.phase(pb::RankStatus::UPDATE);
  const trace::Span span(tracer_, trace::Category::kOptimizer);
  const ConstStateView from = state();
  const StateView to = begin_state();
  store_->set_master(to.weights);
  const UpdateStep step{
      .number = step_ + 1, .lr = lr, .grad_scale = grad_scale};
  for (size_t u = 0; u < rank_shard_.shard.units().size(); ++u) {
    if (skip)
      keep_unit(backend_, rank_shard_, u, from, to);
    else
      update_unit(backend_, options_.optimizer, step, rank_shard_, u,
                  grads_->reduced(u), from, to);
    store_->updated(u);
    progress_.tick();
  }
  commit_state(step_ + 1);
  store_->update_done([this] { progress_.tick(); });
}

Result<StepResult> Engine::run(const StepInput& in) {
  CHECK_MSG(mesh_ != nullptr, "connect() comes first");
  CHECK(in.global_tokens > 0);
  const trace::Span span(tracer_, trace::Category::kStep,
                         {{"step", step_ + 1}});
  waited_ = {};
  StepVotes votes;
  {
    const Timer timer(waited_.compute);
    RETURN_IF_ERROR(run_passes(in, votes));
  }
  const double in_passes = waited_.reduce;
  progress_.phase(pb::RankStatus::REDUCE);
  grads_->finish([this] {
    progress_.tick();
    if (poll_) poll_();
  });
  StepSeconds times = waited_;
  times.compute -=
      times.pipeline + times.tensor + times.context + times.gather + in_passes;
  StepResult r = agree(in, votes, times);
  CHECK_MSG(static_cast<int64_t>(r.agreed.tokens) == in.global_tokens,
            "the ranks' microbatches are not the global batch");
  r.skipped = in.accept && !in.accept(r.loss, r.grad_norm);
  if (!r.skipped && (!std::isfinite(r.loss) || !std::isfinite(r.grad_norm)))
    return invalid_argument(fmt::format(
        "training has diverged: at step {} the loss is {} and the gradient "
        "norm {}; the update was not made. {}",
        step_ + 1, r.loss, r.grad_norm,
        step_ == 0
            ? "No learning rate mends that: it is what the initial weights "
              "give, those of model.init_from if it is set"
            : fmt::format("Continue from step {} with a lower learning rate: "
                          "remesh resume --set optimizer.lr=...",
                          step_)));
  {
    const Timer timer(r.times.update);
    update(in.lr,
           r.grad_scale *
               clip_coefficient(options_.optimizer.max_norm, r.grad_norm),
           r.skipped);
  }
  r.times.gather = waited_.gather;
  r.times.update -= waited_.gather - times.gather;
  return r;
}

Status Engine::evaluate_pass(const PipeOp& op, StepVotes& votes) {
  const auto m = static_cast<size_t>(op.microbatch);
  if (m >= microbatches_.size()) {
    join(op);
    return ok_status();
  }
  const model::MicroBatch& mb = microbatches_[m];
  const float* x = nullptr;
  if (!first_stage(op.chunk)) {
    ASSIGN_OR_RETURN(x, links_->receive());
  }
  model::Stage& stage = *stages_[static_cast<size_t>(op.chunk)];
  const double loss = stage.evaluate(mb, x, *hooks_);
  if (last_stage(op.chunk)) {
    count(mb, loss, votes);
    return ok_status();
  }
  const int at = schedule_.stage(rank_shard_.shard.coord().pp, op.chunk);
  backend_.synchronize();
  return links_->send_copy(
      {stage.evaluated(), static_cast<size_t>(elements(mb))},
      (at + 1) % rank_shard_.shard.layout().pp,
      tag_of(op, at, schedule_.num_stages()));
}

Result<Evaluation> Engine::evaluate(
    std::span<const model::MicroBatch> microbatches) {
  CHECK_MSG(mesh_ != nullptr, "connect() comes first");
  // With weights that are gathered, all must walk the same list.
  auto n = static_cast<int64_t>(microbatches.size());
  if (rank_shard_.shard.layout().dp > 1)
    mesh_->data().all_reduce(std::span<int64_t>(&n, 1), comm::Op::kMax);
  const geometry::Schedule schedule = geometry::forward_schedule(
      rank_shard_.shard.layout().pp, options_.chunks, n);
  const std::vector<PipeOp>& ops =
      schedule.ranks[static_cast<size_t>(rank_shard_.shard.coord().pp)];
  StepVotes votes;
  take_part(microbatches);
  store_->begin(blocks_needed(rank_shard_.shard, ops));
  RETURN_IF_ERROR(expect(ops));
  for (const PipeOp& op : ops) RETURN_IF_ERROR(evaluate_pass(op, votes));
  links_->finish();
  double sums[2] = {votes.loss_sum, votes.targets};
  mesh_->world().all_reduce(std::span<double>(sums), comm::Op::kSum);
  progress_.tick();
  return Evaluation{.loss_sum = sums[0], .targets = sums[1]};
}

}  // namespace remesh::engine
