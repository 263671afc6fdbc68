#include "tests/unit/engine/engine_fixture.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "parallel/geometry/batch.h"
#include "proto/base/check.h"
#include "proto/base/rng.h"
#include "tests/testing/engine.h"
#include "tests/testing/llama.h"
#include "tests/testing/local_comm.h"
#include "tests/unit/engine/whole_vector.h"

namespace remesh::engine {
namespace {

using geometry::ParamTable;

int32_t token(const Case& c, int64_t step, int64_t sequence, int64_t t) {
  return static_cast<int32_t>(
      random_u64(c.seed, static_cast<uint64_t>(step * 1000 + sequence),
                 static_cast<uint64_t>(t)) %
      static_cast<uint64_t>(c.model.vocab_size));
}

bool is_masked(const Case& c, int64_t sequence, int32_t target) {
  return c.masked == Masked::kAll ||
         (c.masked == Masked::kSome && target % 3 == 0) ||
         (c.masked == Masked::kAllButTheFirstSequence && sequence > 0);
}

// The microbatches of a step that data-parallel rank dp_index gets.
struct Batch {
  std::vector<int32_t> tokens, targets;
  std::vector<model::MicroBatch> microbatches;
};

Batch batch_of(const Case& c, int64_t step, int dp_index) {
  const int64_t B = c.options.max_batch;
  const int64_t T = c.options.max_seq;
  const auto mine = geometry::share_of(c.options.num_microbatches,
                                       c.options.shares, c.layout.dp, dp_index);
  Batch b;
  const int64_t begin = std::min(c.sequences, mine.begin * B);
  const int64_t end = std::min(c.sequences, mine.end * B);
  for (int64_t s = begin; s < end; ++s)
    for (int64_t t = 0; t < T; ++t) {
      b.tokens.push_back(token(c, step, s, t));
      const int32_t target = token(c, step, s, t + 1);
      b.targets.push_back(is_masked(c, s, target) ? -1 : target);
    }
  for (int64_t s = begin; s < end; s += B)
    b.microbatches.push_back({b.tokens.data() + (s - begin) * T,
                              b.targets.data() + (s - begin) * T,
                              std::min(B, end - s), T});
  return b;
}

struct Collected {
  std::mutex mutex;
  WholeVector grad, weights;
  Outcome outcome;
};

// Two buffers. The one that is not the state is NaN, so that reading it shows,
// and the state must not change while the next one is written.
class TwoBuffers final : public StateStore {
 public:
  Status reserve(const geometry::Sharding&, int64_t elements) override {
    for (auto& buffer : buffers_)
      for (auto& v : buffer) v.assign(static_cast<size_t>(elements), 0);
    return ok_status();
  }
  ConstStateView current() const override {
    const auto& b = buffers_[at_];
    return {b[0], b[1], b[2]};
  }
  StateView begin() override {
    before_ = buffers_[at_];
    auto& b = buffers_[1 - at_];
    return {b[0], b[1], b[2]};
  }
  void commit(int64_t step) override {
    for (size_t i = 0; i < before_.size(); ++i)
      CHECK_MSG(
          step == 0 || std::memcmp(before_[i].data(), buffers_[at_][i].data(),
                                   before_[i].size() * 4) == 0,
          "the state changed while the next one was made");
    for (auto& v : buffers_[at_])
      v.assign(v.size(), std::numeric_limits<float>::quiet_NaN());
    at_ = 1 - at_;
  }
  int copies() const override { return 2; }

 private:
  using Buffer = std::array<std::vector<float>, 3>;
  std::array<Buffer, 2> buffers_;
  Buffer before_;
  size_t at_ = 0;
};

Status train_rank(const Case& c, const ParamTable& table, comm::Comm& world,
                  Collected& out) {
  const auto backend = kernels::make_cpu_backend(1);
  ASSIGN_OR_RETURN(const auto mesh, comm::Mesh::make(world, c.layout));
  TwoBuffers store;
  ASSIGN_OR_RETURN(const auto engine,
                   engine::make_engine(table, *mesh, c.options, *backend, {},
                                       c.out_of_place ? &store : nullptr));
  if (c.out_of_place) CHECK(engine->sharding().layout == c.layout);
  engine::initialise(*engine, *backend, c.seed);
  engine->state_loaded();
  const auto& shard = engine->shard();
  for (int s = 0; s < c.steps; ++s) {
    const Batch b = batch_of(c, s, mesh->coord().dp);
    const ConstStateView state = engine->state();
    const std::vector<float> weights(state.weights.begin(),
                                     state.weights.end());
    const std::vector<float> average(state.exp_avg.begin(),
                                     state.exp_avg.end());
    const auto result = engine->run(
        {.lr = c.lr,
         .microbatches = b.microbatches,
         .global_tokens = c.sequences * c.options.max_seq,
         .accept = [&](double, double) { return s + 1 != c.skipped_step; }});
    if (!result.ok()) {
      const ConstStateView now = engine->state();
      CHECK_MSG(engine->step() == s &&
                    std::memcmp(now.weights.data(), weights.data(),
                                weights.size() * 4) == 0 &&
                    std::memcmp(now.exp_avg.data(), average.data(),
                                average.size() * 4) == 0,
                "a step that failed has changed the state");
      return result.status();
    }
    const StepResult& r = *result;
    CHECK(r.skipped == (s + 1 == c.skipped_step) && engine->step() == s + 1);
    const std::lock_guard lock(out.mutex);
    if (world.rank() == 0) {
      out.outcome.loss.push_back(r.loss);
      out.outcome.norm.push_back(r.grad_norm);
    }
    if (s > 0) continue;
    for (size_t u = 0; u < shard.units().size(); ++u)
      out.grad.add(shard, engine->zero().update_range(u).begin,
                   engine->gradient(u));
  }
  const Batch b = batch_of(c, 0, mesh->coord().dp);
  ASSIGN_OR_RETURN(const Evaluation e, engine->evaluate(b.microbatches));
  const std::lock_guard lock(out.mutex);
  if (world.rank() == 0) out.outcome.evaluated = e.loss_sum / e.targets;
  for (size_t u = 0; u < shard.units().size(); ++u) {
    const geometry::FlatRange r = engine->zero().update_range(u);
    out.weights.add(shard, r.begin,
                    engine->weights().subspan(
                        static_cast<size_t>(engine->zero().state_offset(u)),
                        static_cast<size_t>(r.size())));
  }
  return ok_status();
}

template <typename T>
T pick(uint64_t seed, uint64_t stream, std::initializer_list<T> of) {
  return of.begin()[random_u64(seed, stream, 0) % of.size()];
}

}  // namespace

std::string Case::to_string() const {
  const auto& o = options;
  const std::string lora =
      model.lora.rank == 0
          ? ""
          : fmt::format(", adapters of {}", fmt::join(model.lora.targets, " "));
  return fmt::format(
      "seed {}: dim {} layers {} heads {}/{} hidden {} vocab {}{}, {} zero {} "
      "group {} {} chunks {}, recompute {}/{}, {} sequences of {} by {}, {}, "
      "shares [{}]{}",
      seed, model.dim, model.n_layers, model.n_heads, model.n_kv_heads,
      model.hidden_dim, model.vocab_size, model.tie_embeddings ? " tied" : "",
      layout.to_string(), o.zero.stage, o.zero.shard_group,
      geometry::schedule_name(o.schedule), o.chunks,
      static_cast<int>(o.recompute), o.recompute_every, sequences, o.max_seq,
      o.max_batch, o.dtype == model::Dtype::kBf16 ? "bf16" : "fp32",
      fmt::join(o.shares, ", "), lora);
}

Outcome run_case(const Case& c) {
  const ParamTable table = ParamTable::make(c.model);
  Collected out{.grad = WholeVector(table), .weights = WholeVector(table)};
  std::vector<Status> status(static_cast<size_t>(c.layout.world()));
  comm::on_ranks(c.layout.world(), [&](comm::Comm& comm) {
    status[static_cast<size_t>(comm.rank())] = train_rank(c, table, comm, out);
  });
  for (const Status& s : status)
    if (!s.ok() && out.outcome.status.ok()) out.outcome.status = s;
  if (out.outcome.status.ok())
    out.outcome.inconsistent = out.grad.trouble() + out.weights.trouble();
  out.outcome.first_grad = out.grad.values();
  out.outcome.weights = out.weights.values();
  return std::move(out.outcome);
}

Outcome run_rank(const Case& c, comm::Comm& world) {
  const ParamTable table = ParamTable::make(c.model);
  Collected out{.grad = WholeVector(table), .weights = WholeVector(table)};
  out.outcome.status = train_rank(c, table, world, out);
  return std::move(out.outcome);
}

Difference largest_difference(const geometry::ModelConfig& model,
                              const std::vector<float>& got,
                              const std::vector<float>& want) {
  const ParamTable table = ParamTable::make(model);
  double whole = 0;
  for (const float x : want) whole += static_cast<double>(x) * x;
  Difference worst;
  for (size_t i = 0; i < table.size(); ++i) {
    double difference = 0;
    double size = 0;
    for (int64_t e = 0; e < table[i].numel(); ++e) {
      const auto at = static_cast<size_t>(table.offset(i) + e);
      const double d = static_cast<double>(got[at]) - want[at];
      difference += d * d;
      size += static_cast<double>(want[at]) * want[at];
    }
    // A gradient that cancels out consists of rounding errors only.
    const double value = std::sqrt(difference) /
                         std::max(std::sqrt(size), 1e-4 * std::sqrt(whole));
    if (!(value <= worst.value)) worst = {value, table[i].name};
  }
  return worst;
}

Case random_case(uint64_t seed, int ranks) {
  for (uint64_t attempt = 0;; ++attempt) {
    const uint64_t key = hash64(fmt::format("{}.{}", seed, attempt));
    const auto of = [&](uint64_t stream, std::initializer_list<int64_t> v) {
      return pick<int64_t>(key, stream, v);
    };
    Case c{.seed = seed};
    const int64_t heads = of(1, {2, 4, 4, 8});
    c.model =
        geometry::llama(heads * of(2, {4, 8, 6}), of(3, {1, 2, 3, 4, 5, 8}),
                        heads, heads / of(4, {1, 2, 2, 4}), of(5, {20, 32, 37}),
                        of(6, {32, 41, 63}), of(7, {0, 1}) == 1);
    c.model.arch = std::array{"llama", "qwen2", "qwen3"}[key % 3];
    if (key % 5 == 0) c.model.head_size = c.model.head_dim() + 2;
    c.layout = {.dp = static_cast<int>(of(8, {1, 1, 2, 3, 4})),
                .pp = static_cast<int>(of(9, {1, 1, 2, 2, 3, 4})),
                .tp = static_cast<int>(of(10, {1, 1, 2, 4})),
                .cp = static_cast<int>(of(11, {1, 1, 1, 2}))};
    EngineOptions& o = c.options;
    o.zero = {.stage = static_cast<int>(of(12, {0, 1, 2, 3})),
              .shard_group = static_cast<int>(of(13, {0, 0, 1, 2}))};
    o.schedule = static_cast<geometry::ScheduleKind>(of(14, {0, 1, 2, 2, 3}));
    o.chunks = o.schedule == geometry::ScheduleKind::kInterleaved1F1B
                   ? static_cast<int>(of(15, {1, 2, 2, 3}))
                   : 1;
    o.recompute = static_cast<model::Recompute>(of(16, {0, 1, 2}));
    o.recompute_every = static_cast<int>(of(17, {1, 1, 2}));
    o.max_batch = of(18, {1, 1, 2, 3});
    o.max_seq = of(19, {8, 12, 16});
    c.sequences = of(20, {1, 2, 3, 5, 7, 8});
    o.num_microbatches = (c.sequences + o.max_batch - 1) / o.max_batch;
    // Sometimes one rank has the others' share but for one microbatch each.
    if (o.num_microbatches > c.layout.dp && key % 7 < 3) {
      o.shares.assign(static_cast<size_t>(c.layout.dp), 1);
      o.shares[key % o.shares.size()] += o.num_microbatches - c.layout.dp;
    }
    o.optimizer = {.eps = 1e-5, .weight_decay = 0.1, .max_norm = 1};
    o.bucket_elements = of(21, {100, 1000, 1 << 20});
    if (key % 3 == 0) c.masked = Masked::kSome;
    if (c.layout.world() == 1 || c.layout.world() > ranks) continue;
    if (!c.model.validate().ok()) continue;
    const auto table = ParamTable::make(c.model);
    const auto backend = kernels::make_cpu_backend(1);
    if (Engine::prepare(table, c.layout, 0, o, *backend, {}).ok()) return c;
  }
}

Case reference_of(const Case& c) {
  Case r = c;
  r.layout = {};
  r.options.zero = {};
  r.options.schedule = geometry::ScheduleKind::k1F1B;
  r.options.chunks = 1;
  r.options.shares.clear();
  r.options.recompute = model::Recompute::kNone;
  return r;
}

}  // namespace remesh::engine
