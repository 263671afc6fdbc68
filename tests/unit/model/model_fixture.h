// A small random model, and ways to run it through stages: in one piece, split
// into pipeline stages in one thread, or split over ranks that are threads.
// Shared by the tests of this folder.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "proto/base/check.h"
#include "proto/base/rng.h"
#include "tests/testing/initial_value.h"
#include "tests/testing/resident.h"
#include "worker/kernels/backend.h"
#include "worker/model/stage.h"

namespace remesh::model {

inline double relative_l2(const std::vector<float>& a,
                          const std::vector<float>& b) {
  CHECK(a.size() == b.size());
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

struct Model {
  // Weights are larger than at a start, so that every gradient counts.
  Model(const geometry::ModelConfig& config, int64_t num_tokens, uint64_t seed,
        float scale = 3)
      : table(geometry::ParamTable::make(config)) {
    for (size_t i = 0; i < table.size(); ++i)
      for (int64_t e = 0; e < table[i].numel(); ++e)
        weights.push_back(scale * geometry::initial_value(table[i], seed, e));
    const auto vocab = static_cast<uint64_t>(config.vocab_size);
    for (int64_t i = 0; i <= num_tokens; ++i)
      tokens.push_back(static_cast<int32_t>(
          random_u64(seed, 2, static_cast<uint64_t>(i)) % vocab));
  }
  // Microbatch `number` of B sequences of T tokens.
  MicroBatch batch(int64_t number, int64_t B, int64_t T) const {
    CHECK(static_cast<int64_t>(tokens.size()) > (number + 1) * B * T);
    const int32_t* at = tokens.data() + number * B * T;
    return {at, at + 1, B, T};
  }
  std::vector<float> zeros() const {
    return std::vector<float>(weights.size());
  }

  geometry::ParamTable table;
  std::vector<float> weights;
  std::vector<int32_t> tokens;
  const Model* base = nullptr;  // what adapters belong to
};

// f(element of the whole model's vector, element of the rank's, length).
template <typename F>
void for_each_part(const geometry::ShardTable& shard, const F& f) {
  for (size_t i = 0; i < shard.size(); ++i) {
    const geometry::ShardParam& p = shard[i];
    const int64_t columns = shard.spec(i).shape.back();
    for (int64_t r = 0; r < p.rect.rows; ++r)
      f(shard.table().offset(p.param) + (p.rect.row + r) * columns + p.rect.col,
        p.offset + r * p.rect.cols, p.rect.cols);
  }
}

// The part of the model that a rank has.
inline std::vector<float> shard_of(const std::vector<float>& whole,
                                   const geometry::ShardTable& shard) {
  std::vector<float> out(static_cast<size_t>(shard.num_elements()));
  for_each_part(shard, [&](int64_t from, int64_t to, int64_t n) {
    std::copy_n(whole.begin() + from, n, out.begin() + to);
  });
  return out;
}

// Adds a rank's part of the gradient, which sums what ranks share.
inline void add_shard(const std::vector<float>& part,
                      const geometry::ShardTable& shard,
                      std::vector<float>& whole) {
  for_each_part(shard, [&](int64_t to, int64_t from, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
      whole[static_cast<size_t>(to + i)] += part[static_cast<size_t>(from + i)];
  });
}

inline geometry::ShardTable make_shard(const geometry::ParamTable& table,
                                       const geometry::Layout& layout = {},
                                       const geometry::Coord& coord = {},
                                       int chunks = 1) {
  const auto bounds =
      geometry::stage_bounds(table.config(), layout.pp * chunks, /*T=*/16);
  CHECK(bounds.ok());
  auto shard =
      geometry::ShardTable::make(table, layout, coord, *bounds, chunks);
  CHECK_MSG(shard.ok(), shard.status().to_string().c_str());
  return std::move(shard).value();
}

// One rank's stages, all resident.
struct RankModel {
  RankModel(const Model& m, const geometry::Layout& layout,
            const geometry::Coord& coord, int chunks, StageOptions o,
            kernels::Backend& backend)
      : shard(make_shard(m.table, layout, coord, chunks)),
        weights(shard_of(m.weights, shard)),
        grads(weights.size()),
        hooks(shard, grads) {
    if (m.base != nullptr) {
      base.emplace(make_shard(m.base->table, layout, coord, chunks));
      frozen = shard_of(m.base->weights, *base);
      o.base = {&*base, frozen};
    }
    const std::vector<Recompute> all = o.recompute;  // of all layers
    for (o.chunk = 0; o.chunk < chunks; ++o.chunk) {
      if (!all.empty())
        o.recompute.assign(all.begin() + shard.first_layer(o.chunk),
                           all.begin() + shard.last_layer(o.chunk));
      auto made = Stage::create(shard, o, backend);
      CHECK_MSG(made.ok(), made.status().to_string().c_str());
      stages.push_back(std::move(made).value());
      model::load_weights(*stages.back(), shard, weights, o.chunk);
    }
  }

  geometry::ShardTable shard;
  std::optional<geometry::ShardTable> base;
  std::vector<float> frozen;
  std::vector<float> weights, grads;
  model::ResidentHooks hooks;
  std::vector<std::unique_ptr<Stage>> stages;  // by chunk
};

struct Passed {
  std::vector<double> loss;  // by microbatch
  std::vector<float> grads;  // of the complete model
};

struct Pipeline {
  int pp = 1;
  int chunks = 1;
  int microbatches = 1;  // all in flight at once, one slot each
  // Sizes of a microbatch; 0: the largest. When given, microbatches of the
  // largest size run first and are discarded.
  int64_t B = 0, T = 0;
  bool documents = false;  // in the sequences, as LocalBatch finds them
};

// The tokens of one context-parallel rank. `documents`: they end with tokens
// that are multiples of 5.
struct LocalBatch {
  LocalBatch(const MicroBatch& mb, int cp, int cp_index,
             bool documents = false) {
    for (int64_t n = 1; documents && n < mb.B * mb.T; ++n)
      if (mb.tokens_BT[n - 1] % 5 == 0 && n % mb.T != 0)
        document_starts.push_back(n);
    const auto positions = context_positions(mb.T, cp, cp_index);
    for (int64_t b = 0; b < mb.B; ++b)
      for (const int32_t t : positions) {
        tokens.push_back(mb.tokens_BT[b * mb.T + t]);
        targets.push_back(mb.targets_BT[b * mb.T + t]);
      }
    view = {tokens.data(), targets.data(), mb.B, mb.T, document_starts};
  }
  std::vector<int32_t> tokens, targets;
  std::vector<int64_t> document_starts;
  MicroBatch view;
};

// Forward of all microbatches, then backward of all, then, when split, the
// weight gradients of all: all pipeline stages of one tensor- and
// context-parallel rank, in one thread. `split`: the degrees and this rank's
// place (pp is taken from `p`). Gives this rank's part of the gradient.
inline Passed run_pipeline(const Model& m, const Pipeline& p, StageOptions o,
                           kernels::Backend& backend,
                           geometry::Layout layout = {},
                           geometry::Coord coord = {}) {
  o.num_slots = p.microbatches;
  layout.pp = p.pp;
  std::vector<std::unique_ptr<RankModel>> ranks;
  for (coord.pp = 0; coord.pp < p.pp; ++coord.pp)
    ranks.push_back(
        std::make_unique<RankModel>(m, layout, coord, p.chunks, o, backend));
  const int stages = p.pp * p.chunks;
  const auto rank = [&](int stage) -> RankModel& {
    return *ranks[static_cast<size_t>(stage % p.pp)];
  };
  const auto at = [&](int stage) -> Stage& {
    return *rank(stage).stages[static_cast<size_t>(stage / p.pp)];
  };
  Passed out;
  const auto pass = [&](int64_t B, int64_t T) {
    out = {.loss = {}, .grads = m.zeros()};
    for (const auto& r : ranks) std::fill(r->grads.begin(), r->grads.end(), 0);
    for (int i = 0; i < p.microbatches; ++i) {
      const LocalBatch mb(m.batch(i, B, T), layout.cp, coord.cp, p.documents);
      double loss = 0;
      for (int s = 0; s < stages; ++s)
        loss = at(s).forward(i, mb.view, s == 0 ? nullptr : at(s - 1).output(i),
                             rank(s).hooks);
      out.loss.push_back(loss);
    }
    for (int i = 0; i < p.microbatches; ++i) {
      const float* dy = nullptr;
      for (int s = stages; s-- > 0;)
        dy = at(s).backward(i, 0.01, dy, rank(s).hooks);
      CHECK(dy == nullptr);
    }
    if (!o.split_backward) return;
    for (int i = 0; i < p.microbatches; ++i)
      for (int s = 0; s < stages; ++s) at(s).backward_weight(i, rank(s).hooks);
  };
  pass(o.max_batch, o.max_seq);
  if (p.B > 0) pass(p.B, p.T);
  for (const auto& r : ranks) add_shard(r->grads, r->shard, out.grads);
  return out;
}

// The same split over tp x cp threads, each with a backend of its own. The loss
// is summed over context-parallel ranks, the gradient over all.
Passed run_split(const Model& m, const Pipeline& p, const StageOptions& options,
                 const geometry::Layout& layout);

}  // namespace remesh::model
