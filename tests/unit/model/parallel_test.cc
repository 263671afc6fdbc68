// Tensor, sequence and context parallelism: whatever the split, loss and
// gradients are those of one rank.
//
// tests/testing/seed.h says how to choose the cases.
#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <random>

#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/testing/local_comm.h"
#include "tests/testing/seed.h"
#include "tests/unit/model/model_fixture.h"

namespace remesh::model {
namespace {

struct Case {
  geometry::ModelConfig config;
  geometry::Layout layout;
  Pipeline pipeline;
  StageOptions options;

  std::string to_string() const {
    std::string recompute;
    for (const Recompute r : options.recompute)
      recompute += "nsf"[static_cast<int>(r)];
    return fmt::format(
        "{} chunks {}: {} window {} dim {} layers {} heads {}/{} hidden {} "
        "vocab {}{}; "
        "{} "
        "microbatches of {} x {}{} after {} x {}, recompute {}, {}",
        layout.to_string(), pipeline.chunks, config.arch, config.sliding_window,
        config.dim, config.n_layers, config.n_heads, config.n_kv_heads,
        config.hidden_dim, config.vocab_size,
        config.tie_embeddings ? " tied" : "", pipeline.microbatches, pipeline.B,
        pipeline.T, pipeline.documents ? " of documents" : "",
        options.max_batch, options.max_seq, recompute,
        options.split_backward ? "split" : "whole");
  }
};

Case random_case(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](std::initializer_list<int> from) {
    return from.begin()[random() % from.size()];
  };
  Case c;
  c.layout.tp = pick({1, 2, 2, 4, 4});
  c.layout.cp = c.layout.tp == 1 ? 2 : pick({1, 1, 2});
  if (c.layout.cp > 1 && random() % 4 == 0) c.layout.cp = 3;
  // Key and value heads that divide tp, or that tp divides.
  const int kv = pick({1, 2, 4, 8});
  const int groups = std::max(pick({1, 2, 3}), c.layout.tp / kv);
  c.config = {.dim = kv * groups * pick({2, 4, 6}),
              .n_layers = pick({1, 2, 3}),
              .n_heads = kv * groups,
              .n_kv_heads = kv,
              .hidden_dim = pick({4, 13, 26}),
              .vocab_size = pick({7, 50, 61}),
              .tie_embeddings = random() % 3 == 0};
  while (c.config.n_heads % c.layout.tp != 0) {
    c.config.n_heads *= 2;
    c.config.dim *= 2;
  }
  c.config.arch = std::array{"llama", "qwen2", "qwen3"}[seed % 3];
  if (seed % 6 == 0) {
    c.config.arch = "mistral";
    c.config.sliding_window = 1 + static_cast<int64_t>(seed / 6 % 12);
  }
  if (seed % 5 == 0) c.config.head_size = c.config.head_dim() + 2;
  c.pipeline.documents = seed % 2 == 0;
  c.pipeline.microbatches = pick({1, 2});
  if (c.config.n_layers >= 2 && random() % 3 == 0) c.layout.pp = 2;
  c.pipeline.pp = c.layout.pp;
  const int whole = 2 * c.layout.cp;
  c.options = {.max_batch = pick({1, 2, 3}),
               .max_seq = c.layout.cp > 1 ? whole * pick({1, 2, 5, 9})
                                          : pick({1, 5, 8, 33}),
               .split_backward = random() % 3 == 0};
  if (random() % 2 == 0) {  // smaller ones after larger ones
    c.pipeline.B = c.options.max_batch++;
    c.pipeline.T = c.options.max_seq;
    c.options.max_seq += c.layout.cp > 1 ? whole : 3;
  }
  for (int64_t i = 0; i < c.config.n_layers; ++i)
    c.options.recompute.push_back(static_cast<Recompute>(random() % 3));
  return c;
}

Model make_model(const Case& c, uint64_t seed, float scale = 3) {
  return {c.config,
          c.pipeline.microbatches * c.options.max_batch * c.options.max_seq,
          seed, scale};
}

std::vector<float> part(const Model& m, const std::vector<float>& x, size_t i) {
  const auto at = x.begin() + m.table.offset(i);
  return {at, at + m.table[i].numel()};
}

double size_of(const std::vector<float>& x) {
  double sum = 0;
  for (const float v : x) sum += static_cast<double>(v) * v;
  return std::sqrt(sum);
}

// What one rank's loss and gradients may be off, and what several may be off in
// any case. When one rank is off by more than half of the latter, several may
// be by twice as much: they may lose as much precision as it does. A gradient
// that is ill-conditioned may be off by kRoundings times what it changes by
// when each weight changes by up to `rounding` of itself, since activations and
// their gradients are rounded too. The largest factor of 8,000 cases is 6.3.
constexpr double kRoundings = 12;
struct Bounds {
  double loss, gradient;
  double one_loss, one_gradient;
  double rounding;
};

// The model with each weight changed by up to `rounding` of itself.
Model rounded(Model m, double rounding, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> change(-rounding, rounding);
  for (float& w : m.weights) w = static_cast<float>(w * (1 + change(random)));
  return m;
}

void expect_like_one_rank(const Case& c, uint64_t seed, const Bounds& bounds) {
  SCOPED_TRACE(fmt::format("seed {}: {}", seed, c.to_string()));
  const bool bf16 = c.options.dtype == Dtype::kBf16;
  const Model m = make_model(c, seed, bf16 ? 1 : 3);
  const auto reference = kernels::make_reference_backend();
  StageOptions plain = c.options;
  plain.dtype = Dtype::kFp32;
  plain.recompute.clear();
  plain.split_backward = false;
  if (c.pipeline.B > 0) {
    plain.max_batch = c.pipeline.B;
    plain.max_seq = c.pipeline.T;
  }
  const Pipeline one = {.microbatches = c.pipeline.microbatches,
                        .documents = c.pipeline.documents};
  const Passed want = run_pipeline(m, one, plain, *reference);
  const Passed got = run_split(m, c.pipeline, c.options, c.layout);
  const auto cpu = kernels::make_cpu_backend(1);
  StageOptions typed = plain;
  typed.dtype = c.options.dtype;
  const Passed alone = run_pipeline(m, one, typed, *cpu);
  for (size_t i = 0; i < want.loss.size(); ++i) {
    // The logits have a size of 1 or more, however small the loss is.
    const auto error = [&](double loss) {
      return std::abs(loss - want.loss[i]) / std::max(1.0, want.loss[i]);
    };
    const double cost = error(alone.loss[i]);
    EXPECT_LT(cost, bounds.one_loss) << "one rank";
    EXPECT_LT(error(got.loss[i]), std::max(bounds.loss, 2 * cost))
        << want.loss[i];
  }
  std::vector<std::vector<float>> nearby;  // gradients of rounded models
  const auto sensitivity = [&](size_t i, const std::vector<float>& w) {
    for (uint64_t n = nearby.size(); n < 4; ++n)
      nearby.push_back(
          run_pipeline(rounded(m, bounds.rounding, n), one, plain, *reference)
              .grads);
    double most = 0;
    for (const auto& grads : nearby)
      most = std::max(most, relative_l2(part(m, grads, i), w));
    return most;
  };
  const double whole = size_of(want.grads);
  for (size_t i = 0; i < m.table.size(); ++i) {
    // A gradient that cancels out consists of rounding errors only.
    const auto w = part(m, want.grads, i);
    const double scale = std::min(1.0, size_of(w) / (1e-3 * whole));
    const double cost = relative_l2(part(m, alone.grads, i), w) * scale;
    const double error = relative_l2(part(m, got.grads, i), w) * scale;
    if (cost < bounds.one_gradient &&
        error < std::max(bounds.gradient, 2 * cost))
      continue;
    const double conditioned = kRoundings * sensitivity(i, w) * scale;
    EXPECT_LT(cost, std::max(bounds.one_gradient, conditioned))
        << m.table[i].name << " of one rank";
    EXPECT_LT(error, std::max({bounds.gradient, 2 * cost, conditioned}))
        << m.table[i].name;
  }
}

constexpr Bounds kFp32Bounds = {.loss = 1e-6,
                                .gradient = 1e-5,
                                .one_loss = 1e-6,
                                .one_gradient = 1e-5,
                                .rounding = 0x1p-24};
constexpr Bounds kBf16Bounds = {.loss = 5e-3,
                                .gradient = 2e-2,
                                .one_loss = 5e-3,
                                .one_gradient = 3e-2,
                                .rounding = 0x1p-9};

TEST(Parallel, AnySplitGivesLossAndGradientsOfOneRank) {
  // A small loss; an ill-conditioned gradient.
  for (const uint32_t seed : test_seeds(60, {1052181776, 2000406}))
    if (!HasFailure())
      expect_like_one_rank(random_case(seed), seed, kFp32Bounds);
}

TEST(Parallel, AnySplitGivesLossAndGradientsOfOneRankInBf16) {
  if (!kernels::make_cpu_backend(1)->supports_bf16())
    GTEST_SKIP() << "needs bf16";
  for (const uint32_t seed : test_seeds(20, {2864165817})) {
    if (HasFailure()) break;
    Case c = random_case(seed);
    c.options.dtype = Dtype::kBf16;
    expect_like_one_rank(c, seed, kBf16Bounds);
  }
}

TEST(Parallel, RecomputationSplitAndStagesChangeNoBit) {
  const bool bf16 = kernels::make_cpu_backend(1)->supports_bf16();
  for (const uint32_t seed : test_seeds(12)) {
    if (HasFailure()) break;
    Case c = random_case(seed);
    c.config.tie_embeddings = false;
    if (bf16 && seed % 2 == 0) c.options.dtype = Dtype::kBf16;
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, c.to_string()));
    const Model m = make_model(c, seed);
    const Passed a = run_split(m, c.pipeline, c.options, c.layout);
    StageOptions plain = c.options;
    plain.recompute.clear();
    plain.split_backward = false;
    Pipeline one = c.pipeline;
    one.pp = one.chunks = 1;
    const Passed b = run_split(m, one, plain, c.layout);
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(a.grads, b.grads);
  }
}

// What one of four tensor-parallel ranks sees of a pipeline of two stages.
struct Shown {
  std::vector<float> output, dx, logits;  // all rows; dx: of the same place
  double loss = 0, evaluated = 0;
  int64_t vocab_begin = 0;
};

constexpr int64_t kBatch = 3, kSeq = 7;  // 21 rows: 6 a rank, 3 of them empty

Shown show(const Model& m, comm::Comm& comm) {
  const auto backend = kernels::make_cpu_backend(1);
  const geometry::Layout layout{.pp = 2, .tp = comm.size()};
  const StageOptions o{.max_batch = kBatch,
                       .max_seq = kSeq,
                       .tp = comm.size() > 1 ? &comm : nullptr};
  RankModel a(m, layout, {.pp = 0, .tp = comm.rank()}, 1, o, *backend);
  RankModel b(m, layout, {.pp = 1, .tp = comm.rank()}, 1, o, *backend);
  Stage& first = *a.stages[0];
  Stage& last = *b.stages[0];
  const MicroBatch mb = m.batch(0, kBatch, kSeq);
  Shown s;
  const auto n = static_cast<size_t>(first.stream_rows(kBatch, kSeq) *
                                     m.table.config().dim);
  first.forward(0, mb, nullptr, a.hooks);
  s.output.assign(first.output(0), first.output(0) + n);
  s.loss = last.forward(0, mb, first.output(0), b.hooks);
  const float* dx = last.backward(0, 1, nullptr, b.hooks);
  s.dx.assign(dx, dx + n);
  first.evaluate(mb, nullptr, a.hooks);
  s.evaluated = last.evaluate(mb, first.evaluated(), b.hooks);
  const geometry::ShardParam& head =
      b.shard[static_cast<size_t>(b.shard.find(geometry::Role::kHead))];
  s.vocab_begin = head.rect.row;
  s.logits.resize(static_cast<size_t>(kBatch * kSeq * head.rect.rows));
  last.logits(0, kBatch * kSeq, s.logits);
  return s;
}

std::vector<Shown> show_all(const Model& m, int tp) {
  std::vector<Shown> out(static_cast<size_t>(tp));
  comm::on_ranks(tp, [&](comm::Comm& comm) {
    out[static_cast<size_t>(comm.rank())] = show(m, comm);
  });
  return out;
}

TEST(Parallel, RanksHaveTheirRowsAndTheirPartOfTheLogits) {
  constexpr int64_t kVocab = 13;  // 4, 3, 3 and 3
  const Model m(geometry::llama(16, 2, 4, 2, 10, kVocab), kBatch * kSeq, 1);
  const Shown one = show_all(m, 1)[0];
  Shown all{.logits = std::vector<float>(one.logits.size())};
  for (const Shown& s : show_all(m, 4)) {
    EXPECT_EQ(s.evaluated, s.loss);
    EXPECT_NEAR(s.loss / one.loss, 1, 1e-6);
    all.output.insert(all.output.end(), s.output.begin(), s.output.end());
    all.dx.insert(all.dx.end(), s.dx.begin(), s.dx.end());
    const auto columns =
        static_cast<int64_t>(s.logits.size()) / (kBatch * kSeq);
    for (int64_t r = 0; r < kBatch * kSeq; ++r)
      std::copy_n(s.logits.begin() + r * columns, columns,
                  all.logits.begin() + r * kVocab + s.vocab_begin);
  }
  EXPECT_LT(relative_l2(all.logits, one.logits), 1e-5);
  for (auto* x : {&all.output, &all.dx}) {
    ASSERT_EQ(x->size(), 24U * 16);
    for (size_t i = one.output.size(); i < x->size(); ++i)
      EXPECT_EQ((*x)[i], 0.0F);
    x->resize(one.output.size());
  }
  EXPECT_LT(relative_l2(all.output, one.output), 1e-5);
  EXPECT_LT(relative_l2(all.dx, one.dx), 1e-5);
}

TEST(Parallel, RefusesSequencesThatTheRanksCannotShare) {
  const Model m(geometry::llama(16, 1, 2, 2, 10, 9), 1, 1);
  const auto shard = make_shard(m.table, {.cp = 2});
  const auto comms = comm::make_local_comms(2);
  const auto backend = kernels::make_cpu_backend(1);
  StageOptions o{.max_seq = 10, .cp = comms[0].get()};
  const auto refused = Stage::create(shard, o, *backend);
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  EXPECT_SAYS(refused, "allowed: a multiple of 4");
  o.max_seq = 12;
  EXPECT_OK(Stage::create(shard, o, *backend));
}

TEST(Parallel, PiecesOfASequenceBalanceTheMask) {
  EXPECT_EQ(context_positions(3, 1, 0), (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(context_positions(8, 2, 0), (std::vector<int32_t>{0, 1, 6, 7}));
  EXPECT_EQ(context_positions(8, 2, 1), (std::vector<int32_t>{2, 3, 4, 5}));
  int64_t work[3];
  for (const int i : {0, 1, 2}) {
    work[i] = 0;
    for (const int32_t t : context_positions(24, 3, i)) work[i] += t + 1;
  }
  EXPECT_EQ(work[0], work[1]);
  EXPECT_EQ(work[1], work[2]);
}

}  // namespace
}  // namespace remesh::model
