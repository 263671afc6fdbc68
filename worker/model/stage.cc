#include "worker/model/stage.h"

#include <algorithm>
#include <string>
#include <vector>

#include "proto/base/check.h"
#include "worker/kernels/backend.h"
#include "worker/model/block.h"
#include "worker/model/head.h"
#include "worker/model/pool.h"
#include "worker/model/rope.h"
#include "worker/model/sizes.h"

namespace remesh::model {
namespace {

using geometry::ParamTable;
using geometry::Role;

// What one microbatch in flight holds.
struct Slot {
  int64_t B = 0, T = 0;
  bool forwarded = false;
  std::vector<BlockActivations> blocks;  // with full recompute only x is set
  HeadActivations head;                  // last stage
  float* output = nullptr;               // other stages, (N, D)
  int32_t* tokens = nullptr;             // first stage
  int64_t rows() const { return B * T; }
};

Status check_options(const ParamTable& table, const StageOptions& o,
                     const kernels::Backend& backend) {
  const int64_t layers = table.config().n_layers;
  if (o.num_layers < 1 || o.first_layer < 0 ||
      o.first_layer + o.num_layers > layers)
    return invalid_argument(
        "stage layers " + std::to_string(o.first_layer) + ".." +
        std::to_string(o.first_layer + o.num_layers - 1) +
        ": at least one, inside the model's " + std::to_string(layers));
  if (o.max_batch < 1 || o.max_seq < 1 || o.num_slots < 1)
    return invalid_argument(
        "stage: microbatch (" + std::to_string(o.max_batch) + "), sequence (" +
        std::to_string(o.max_seq) + ") and slots (" +
        std::to_string(o.num_slots) + ") must be at least 1");
  if (o.dtype == Dtype::kBf16 && !backend.supports_bf16())
    return unavailable(
        "bf16 needs AVX512-BF16 or AMX, which this machine lacks; allowed "
        "here: fp32");
  return ok_status();
}

class LlamaStage final : public Stage {
 public:
  LlamaStage(const ParamTable& table, const StageOptions& options,
             kernels::Backend& backend)
      : table_(table),
        o_(options),
        sizes_(sizes_of(table.config())),
        backend_(backend),
        weights_(backend),
        activations_(backend),
        buffers_(backend) {
    if (!o_.keep_dtype)
      o_.dtype = backend.product_dtype(o_.dtype, table.config().dim);
  }

  Status init();

  Dtype dtype() const override { return o_.dtype; }
  void load_weights(std::span<const float> master) override;
  double forward(int slot, const MicroBatch& mb, const float* x_in) override;
  const float* output(int slot) const override;
  const float* backward(int slot, double loss_scale, const float* dy_out,
                        std::span<float> grads,
                        const std::function<void(size_t)>& on_ready) override;
  double evaluate(const MicroBatch& mb, const float* x_in) override;
  void logits(int slot, int64_t rows, std::span<float> out) override;
  Memory memory() const override;

 private:
  int64_t max_rows() const { return o_.max_batch * o_.max_seq; }
  size_t param(Role role) const;
  Slot make_slot(bool keep);
  Slot& slot_at(int slot);
  void place_rope_tables();
  // Fills the slot's first x from tokens or x_in.
  void enter(Slot& s, const MicroBatch& mb, const float* x_in);
  double run_forward(Slot& s, const MicroBatch& mb, const float* x_in);
  // The activations layer i of the slot works in: its own or the shared ones.
  BlockActivations working(const Slot& s, size_t i) const;

  const ParamTable& table_;
  StageOptions o_;
  Sizes sizes_;
  kernels::Backend& backend_;
  Pool weights_, activations_, buffers_;
  RopeView rope_;
  const float* embedding_ = nullptr;  // (V, D), in the master weights
  std::vector<std::unique_ptr<Block>> blocks_;
  std::unique_ptr<Head> head_;
  std::vector<Slot> slots_;
  Slot scratch_slot_;        // evaluate()
  BlockActivations shared_;  // one layer: recomputation and evaluate()
  BlockScratch block_scratch_;
  StreamGradient dx_;
  bool evaluated_last_ = false;  // whose logits logits() gives
};

size_t LlamaStage::param(Role role) const {
  const int i = table_.find(role);
  CHECK(i >= 0);
  return static_cast<size_t>(i);
}

void LlamaStage::place_rope_tables() {
  const RopeTables t = make_rope_tables(table_.config(), o_.max_seq);
  float* cos = buffers_.floats(static_cast<int64_t>(t.cos.size()));
  float* sin = buffers_.floats(static_cast<int64_t>(t.sin.size()));
  if (cos == nullptr || sin == nullptr) return;
  backend_.copy(cos, t.cos.data(), t.cos.size() * sizeof(float));
  backend_.copy(sin, t.sin.data(), t.sin.size() * sizeof(float));
  rope_ = {cos, sin};
}

// keep: room for a backward; else every layer works in shared_, and x of
// consecutive layers alternates between two buffers.
Slot LlamaStage::make_slot(bool keep) {
  Slot s;
  const int64_t rows = max_rows();
  const bool full = o_.recompute == Recompute::kFull;
  float* alternate[2] = {nullptr, nullptr};
  if (!keep)
    for (float*& x : alternate) x = activations_.floats(rows * sizes_.dim);
  for (int64_t i = 0; i < o_.num_layers; ++i) {
    BlockActivations a;
    if (keep && !full)
      a = make_block_activations(activations_, sizes_, o_.dtype, rows);
    a.x = keep ? activations_.floats(rows * sizes_.dim) : alternate[i % 2];
    s.blocks.push_back(a);
  }
  if (o_.has_head) {
    const bool keep_logits = keep && !full && o_.dtype == Dtype::kBf16;
    s.head = make_head_activations(activations_, sizes_, o_.dtype, rows,
                                   keep_logits);
  } else {
    s.output = activations_.floats(rows * sizes_.dim);
  }
  if (o_.has_embedding) s.tokens = activations_.ints(rows);
  return s;
}

Status LlamaStage::init() {
  place_rope_tables();
  for (int64_t i = 0; i < o_.num_layers; ++i)
    blocks_.push_back(std::make_unique<Block>(
        table_, o_.first_layer + i, sizes_, o_.dtype, backend_, weights_));
  if (o_.has_head) {
    const bool tied = table_.config().tie_embeddings;
    head_ = std::make_unique<Head>(
        table_, param(tied ? Role::kEmbedding : Role::kHead), sizes_, o_.dtype,
        max_rows(), backend_, weights_, buffers_);
  }
  for (int i = 0; i < o_.num_slots; ++i) slots_.push_back(make_slot(true));
  scratch_slot_ = make_slot(false);
  shared_ = make_block_activations(buffers_, sizes_, o_.dtype, max_rows());
  block_scratch_ = make_block_scratch(buffers_, sizes_, o_.dtype, max_rows());
  dx_.fp32 = buffers_.floats(max_rows() * sizes_.dim);
  dx_.d = o_.dtype == Dtype::kFp32
              ? dx_.fp32
              : buffers_.get(max_rows() * sizes_.dim, o_.dtype);
  for (const Pool* pool : {&weights_, &activations_, &buffers_})
    RETURN_IF_ERROR(pool->status());
  const bool complete = std::all_of(blocks_.begin(), blocks_.end(),
                                    [](const auto& b) { return b->ok(); }) &&
                        (head_ == nullptr || head_->ok());
  if (!complete) return exhausted("no memory for the stage's weights");
  return ok_status();
}

void LlamaStage::load_weights(std::span<const float> master) {
  CHECK(static_cast<int64_t>(master.size()) == table_.num_elements());
  if (o_.has_embedding)
    embedding_ = master.data() + table_.offset(param(Role::kEmbedding));
  for (const auto& block : blocks_) block->load(master);
  if (head_ != nullptr) head_->load(master);
}

Slot& LlamaStage::slot_at(int slot) {
  CHECK(slot >= 0 && slot < o_.num_slots);
  return slots_[static_cast<size_t>(slot)];
}

BlockActivations LlamaStage::working(const Slot& s, size_t i) const {
  if (s.blocks[i].h1 != nullptr) return s.blocks[i];
  BlockActivations a = shared_;
  a.x = s.blocks[i].x;
  return a;
}

void LlamaStage::enter(Slot& s, const MicroBatch& mb, const float* x_in) {
  CHECK(mb.B >= 1 && mb.B <= o_.max_batch && mb.T >= 1 && mb.T <= o_.max_seq);
  s.B = mb.B;
  s.T = mb.T;
  const size_t token_bytes = static_cast<size_t>(s.rows()) * sizeof(int32_t);
  float* x = s.blocks.front().x;
  if (o_.has_embedding) {
    CHECK(mb.tokens_BT != nullptr);
    backend_.copy(s.tokens, mb.tokens_BT, token_bytes);
    CHECK_MSG(embedding_ != nullptr, "load_weights comes first");
    backend_.embedding(embedding_, 0, sizes_.vocab, s.tokens, s.rows(),
                       sizes_.dim, x);
  } else {
    CHECK(x_in != nullptr);
    backend_.copy(x, x_in,
                  static_cast<size_t>(s.rows() * sizes_.dim) * sizeof(float));
  }
  if (o_.has_head) {
    CHECK(mb.targets_BT != nullptr);
    backend_.copy(s.head.targets, mb.targets_BT, token_bytes);
  }
}

double LlamaStage::run_forward(Slot& s, const MicroBatch& mb,
                               const float* x_in) {
  enter(s, mb, x_in);
  const float* x1 = nullptr;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const BlockActivations a = working(s, i);
    blocks_[i]->forward(s.B, s.T, rope_, x1,
                        i == 0 ? nullptr : block_scratch_.branch, a,
                        block_scratch_, /*stop_before_down=*/false);
    x1 = a.x1;
  }
  if (o_.has_head)
    return head_->forward(s.rows(), x1, block_scratch_.branch, s.head);
  backend_.add(s.rows() * sizes_.dim, x1, block_scratch_.branch, s.output);
  return 0;
}

double LlamaStage::forward(int slot, const MicroBatch& mb, const float* x_in) {
  Slot& s = slot_at(slot);
  evaluated_last_ = false;
  s.forwarded = true;
  return run_forward(s, mb, x_in);
}

double LlamaStage::evaluate(const MicroBatch& mb, const float* x_in) {
  evaluated_last_ = true;
  return run_forward(scratch_slot_, mb, x_in);
}

const float* LlamaStage::output(int slot) const {
  CHECK(slot >= 0 && slot < o_.num_slots && !o_.has_head);
  return slots_[static_cast<size_t>(slot)].output;
}

const float* LlamaStage::backward(int slot, double loss_scale,
                                  const float* dy_out, std::span<float> grads,
                                  const std::function<void(size_t)>& on_ready) {
  CHECK(static_cast<int64_t>(grads.size()) == table_.num_elements());
  Slot& s = slot_at(slot);
  CHECK_MSG(s.forwarded, "backward without a forward in this slot");
  s.forwarded = false;
  const int64_t N = s.rows();
  const bool tied = table_.config().tie_embeddings;
  const auto ready = [&](Role role) {
    if (on_ready) on_ready(param(role));
  };
  if (o_.has_head) {
    head_->backward(N, loss_scale, s.head, block_scratch_.dh, dx_, grads);
    if (!tied) ready(Role::kHead);
    ready(Role::kFinalNorm);
  } else {
    CHECK(dy_out != nullptr);
    backend_.copy(dx_.fp32, dy_out,
                  static_cast<size_t>(N * sizes_.dim) * sizeof(float));
    if (dx_.rounded() != nullptr)
      backend_.convert(N * sizes_.dim, Dtype::kFp32, dx_.fp32, o_.dtype, dx_.d);
  }
  for (size_t i = blocks_.size(); i-- > 0;) {
    const BlockActivations a = working(s, i);
    if (o_.recompute == Recompute::kFull)
      blocks_[i]->forward(s.B, s.T, rope_, nullptr, nullptr, a, block_scratch_,
                          /*stop_before_down=*/true);
    blocks_[i]->backward(s.B, s.T, rope_, a, block_scratch_, dx_, grads,
                         on_ready);
  }
  if (o_.has_embedding)
    backend_.embedding_backward(
        dx_.fp32, s.tokens, 0, sizes_.vocab, N, sizes_.dim,
        grads.data() + table_.offset(param(Role::kEmbedding)));
  if (o_.has_embedding || (tied && o_.has_head)) ready(Role::kEmbedding);
  return o_.has_embedding ? nullptr : dx_.fp32;
}

void LlamaStage::logits(int slot, int64_t rows, std::span<float> out) {
  CHECK(o_.has_head);
  const Slot& s = evaluated_last_ ? scratch_slot_ : slot_at(slot);
  CHECK(rows >= 1 && rows <= s.rows());
  head_->logits(rows, s.head.h, out);
}

Stage::Memory LlamaStage::memory() const {
  Memory m{.weights = weights_.bytes(),
           .activations = activations_.bytes(),
           .buffers = buffers_.bytes()};
  for (const auto& b : blocks_) m.weights += b->weight_bytes();
  if (head_ != nullptr) m.weights += head_->weight_bytes();
  return m;
}

}  // namespace

Result<std::unique_ptr<Stage>> Stage::create(const ParamTable& table,
                                             const StageOptions& options,
                                             kernels::Backend& backend) {
  RETURN_IF_ERROR(check_options(table, options, backend));
  auto stage = std::make_unique<LlamaStage>(table, options, backend);
  RETURN_IF_ERROR(stage->init());
  return std::unique_ptr<Stage>(std::move(stage));
}

}  // namespace remesh::model
