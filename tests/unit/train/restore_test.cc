// Any mesh loads what another mesh saved, bit by bit, and initial weights do
// not depend on the mesh.
#include "worker/train/restore.h"

#include <atomic>
#include <bit>
#include <random>

#include "checkpoint/huggingface/transfer.h"
#include "checkpoint/store/store.h"
#include "parallel/comm/mesh.h"
#include "proto/base/rng.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/testing/initial_value.h"
#include "tests/testing/local_comm.h"
#include "tests/testing/pieces.h"
#include "tests/testing/random_mesh.h"
#include "tests/testing/seed.h"
#include "tests/unit/huggingface/small_folder.h"

namespace remesh::train {
namespace {

using geometry::Coord;
using geometry::Layout;
using geometry::ModelConfig;
using geometry::ParamTable;
using geometry::Sharding;
using geometry::ShardTable;
using geometry::ZeroOptions;
using geometry::ZeroPlan;

struct Vectors {
  std::vector<float> weights, exp_avg, exp_avg_sq;
};

struct Rank {
  geometry::RankShard shard;
  Vectors v;
  geometry::StateView state() { return {v.weights, v.exp_avg, v.exp_avg_sq}; }
};

Rank make_rank(const ParamTable& table, const Sharding& sharding, int rank) {
  Rank r{.shard = make_rank_shard(table, sharding, rank).value(), .v = {}};
  const auto n = static_cast<size_t>(r.shard.zero.state_elements());
  r.v = {std::vector<float>(n, -1), std::vector<float>(n, -2),
         std::vector<float>(n, -3)};
  return r;
}

// The value of tensor `t` at element e of parameter `param`: any bit pattern,
// including NaNs.
float truth(size_t t, size_t param, int64_t e) {
  const uint64_t x = random_u64(t, param, static_cast<uint64_t>(e));
  return std::bit_cast<float>(static_cast<uint32_t>(x));
}
bool is_truth(float value, size_t t, size_t param, int64_t e) {
  return std::bit_cast<uint32_t>(value) ==
         std::bit_cast<uint32_t>(truth(t, param, e));
}

// f(position in the state vectors, parameter, element of the parameter).
template <typename F>
void for_each_element(const Rank& r, F f) {
  geometry::for_each_element(r.shard.shard.table(), held_pieces(r.shard), f);
}

void on_all_ranks(const Sharding& sharding,
                  const std::function<void(int, comm::Mesh&)>& f) {
  comm::on_ranks(sharding.layout.world(), [&](comm::Comm& comm) {
    f(comm.rank(), *comm::Mesh::make(comm, sharding.layout).value());
  });
}

// For thousands of cases, also in memory:
//   REMESH_TEST_CASES=5000 ctest -R '^(train_test|exchange_test)$'
TEST(Restore, WhatOneMeshSavesAnyOtherLoads) {
  const uint32_t seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto fs = posix_file_system();
  const int cases = test_cases(60);
  const testing::TempDir root;
  for (int trial = 0; trial < cases; ++trial) {
    const std::string dir = root.path() + "/" + std::to_string(trial);
    const ModelConfig config = geometry::random_config(random);
    const ParamTable table = ParamTable::make(config);
    const Sharding from = geometry::random_sharding(random, config, 12);
    const Sharding to = geometry::random_sharding(random, config, 12);
    SCOPED_TRACE(from.layout.to_string() + " to " + to.layout.to_string());
    for (int r = 0; r < from.layout.world(); ++r) {
      Rank rank = make_rank(table, from, r);
      for_each_element(rank, [&](int64_t i, size_t param, int64_t e) {
        const auto at = static_cast<size_t>(i);
        rank.v.weights[at] = truth(0, param, e);
        rank.v.exp_avg[at] = truth(1, param, e);
        rank.v.exp_avg_sq[at] = truth(2, param, e);
      });
      ASSERT_OK(store::write_shard(*fs, dir, {.step = 3, .generation = 1}, r,
                                   table, pieces_to_save(rank.shard),
                                   rank.state()));
    }
    pb::Manifest m;
    m.set_step(3);
    m.set_generation(1);
    *m.mutable_model() = manifest::model_info(config);
    ASSERT_OK_AND(const auto done,
                  store::commit(*fs, dir, m, from.layout.world(), table, {}));
    std::atomic<int> wrong{0};
    on_all_ranks(to, [&](int r, comm::Mesh& mesh) {
      Rank rank = make_rank(table, to, r);
      const auto loaded = load_checkpoint(
          *fs, done.path, 3, {.model = config}, mesh, [] {}, rank.shard,
          rank.state());
      if (!loaded.ok()) {
        ADD_FAILURE() << loaded.status().to_string();
        return;
      }
      for_each_element(rank, [&](int64_t i, size_t param, int64_t e) {
        const auto at = static_cast<size_t>(i);
        if (!is_truth(rank.v.weights[at], 0, param, e) ||
            !is_truth(rank.v.exp_avg[at], 1, param, e) ||
            !is_truth(rank.v.exp_avg_sq[at], 2, param, e))
          ++wrong;
      });
    });
    ASSERT_EQ(wrong, 0);
    ASSERT_OK(remove_all(*fs, dir));
  }
}

// As if its host did not have the folder, or another job.
TEST(Restore, OnlyARankThatCannotLoadHasTheReason) {
  const auto fs = posix_file_system();
  const testing::TempDir root;
  const ModelConfig config = huggingface::small_model();
  const ParamTable table = ParamTable::make(config);
  Rank whole = make_rank(table, {.bounds = {0, config.n_layers}}, 0);
  ASSERT_OK(store::write_shard(*fs, root.path(), {.step = 3, .generation = 1},
                               0, table, pieces_to_save(whole.shard),
                               whole.state()));
  pb::Manifest m;
  m.set_step(3);
  m.set_generation(1);
  *m.mutable_model() = manifest::model_info(config);
  ASSERT_OK_AND(const auto done,
                store::commit(*fs, root.path(), m, 1, table, {}));
  const Sharding to{.layout = {.dp = 3}, .bounds = {0, config.n_layers}};
  for (const Code code : {Code::kNotFound, Code::kInvalidArgument}) {
    std::vector<Status> status(3);
    on_all_ranks(to, [&](int r, comm::Mesh& mesh) {
      Rank rank = make_rank(table, to, r);
      const bool lacks = r == 1 && code == Code::kNotFound;
      const bool differs = r == 1 && code == Code::kInvalidArgument;
      status[static_cast<size_t>(r)] =
          load_checkpoint(
              *fs, lacks ? root.path() + "/none" : done.path, 3,
              {.model = config, .seed = differs ? 9U : 0U}, mesh, [] {},
              rank.shard, rank.state())
              .status();
    });
    EXPECT_EQ(status[1].code(), code) << status[1].to_string();
    for (const size_t r : {0U, 2U})
      EXPECT_EQ(status[r].code(), Code::kCancelled) << status[r].to_string();
  }
}

void check_fresh_weights(uint32_t seed) {
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int trial = 0; trial < 20; ++trial) {
    const ModelConfig config = geometry::random_config(random);
    const ParamTable table = ParamTable::make(config);
    const Sharding sharding = geometry::random_sharding(random, config, 12);
    std::atomic<int> wrong{0};
    on_all_ranks(sharding, [&](int r, comm::Mesh& mesh) {
      Rank rank = make_rank(table, sharding, r);
      fill_initial_weights(rank.shard, 9, 1 + r % 2, rank.v.weights);
      exchange_parts(
          mesh.data(), rank.shard, [] {}, rank.v.weights);
      for_each_element(rank, [&](int64_t i, size_t param, int64_t e) {
        const auto at = static_cast<size_t>(i);
        if (rank.v.weights[at] != geometry::initial_value(table[param], 9, e))
          ++wrong;
      });
    });
    ASSERT_EQ(wrong, 0) << sharding.layout.to_string();
  }
}

TEST(Restore, FreshWeightsAreTheSameOnAnyMesh) {
  check_fresh_weights(test_seed());
  check_fresh_weights(940962017);  // some ranks have no weights
}

// The weights of a Hugging Face folder, and of a checkpoint made from it. What
// the ranks save becomes the same file again.
TEST(Restore, GivenWeightsAreTheSameOnAnyMesh) {
  std::mt19937 random(test_seed());
  const auto fs = posix_file_system();
  for (int trial = 0; trial < 10; ++trial) {
    const ModelConfig config = geometry::random_config(random);
    const huggingface::SmallFolder f(huggingface::Dtype::kBf16, config, trial);
    ASSERT_OK_AND(const auto model,
                  huggingface::ModelFolder::open(*fs, f.path()));
    const ParamTable& table = model.table();
    const std::string checkpoints = f.path() + "/imported";
    ASSERT_OK(huggingface::import_model(*fs, model, checkpoints,
                                        [](uint64_t, uint64_t) {}));
    std::vector<std::vector<float>> whole;
    for (size_t p = 0; p < table.size(); ++p) {
      const geometry::Rect all = geometry::full_rect(table[p]);
      auto& values = whole.emplace_back(static_cast<size_t>(all.numel()));
      ASSERT_OK(model.read(p, all, values.data(), all.cols));
    }
    const Sharding sharding = geometry::random_sharding(random, config, 12);
    SCOPED_TRACE(config.arch + " " + sharding.layout.to_string());
    const std::string saved = f.path() + "/saved", exported = f.path() + "/hf";
    pb::Manifest m;
    m.set_step(3);
    m.set_generation(1);
    *m.mutable_model() = manifest::model_info(config);
    for (const std::string& from : {f.path(), checkpoints}) {
      std::atomic<int> wrong{0};
      on_all_ranks(sharding, [&](int r, comm::Mesh& mesh) {
        Rank rank = make_rank(table, sharding, r);
        const Status loaded = load_initial_weights(
            *fs, from, rank.shard, [] {}, rank.v.weights);
        if (!loaded.ok()) ADD_FAILURE() << loaded.to_string();
        exchange_parts(
            mesh.data(), rank.shard, [] {}, rank.v.weights);
        for_each_element(rank, [&](int64_t i, size_t param, int64_t e) {
          if (rank.v.weights[static_cast<size_t>(i)] !=
              whole[param][static_cast<size_t>(e)])
            ++wrong;
        });
        EXPECT_OK(store::write_shard(*fs, saved, {.step = 3, .generation = 1},
                                     r, table, pieces_to_save(rank.shard),
                                     rank.state()));
      });
      ASSERT_EQ(wrong, 0) << from;
      ASSERT_OK_AND(
          const auto done,
          store::commit(*fs, saved, m, sharding.layout.world(), table, {}));
      ASSERT_OK(huggingface::export_model(*fs, done.path, exported, {},
                                          [](uint64_t, uint64_t) {}));
      EXPECT_EQ(testing::read_whole(exported + "/model.safetensors"),
                testing::read_whole(f.path() + "/model.safetensors"));
      ASSERT_OK(remove_all(*fs, saved));
      ASSERT_OK(remove_all(*fs, exported));
    }
  }
}

TEST(Restore, WeightsOfAnotherModelAreAPermanentError) {
  const huggingface::SmallFolder f(huggingface::Dtype::kFp32);
  const auto fs = posix_file_system();
  ModelConfig config = huggingface::small_model();
  config.hidden_dim = 16;
  config.rope_theta = 5e5;
  const ParamTable table = ParamTable::make(config);
  Rank rank = make_rank(table, {.bounds = {0, config.n_layers}}, 0);
  const auto load = [&](const std::string& path) {
    return load_initial_weights(
        *fs, path, rank.shard, [] {}, rank.v.weights);
  };
  const Status other = load(f.path());
  EXPECT_EQ(other.code(), Code::kInvalidArgument);
  for (const char* part : {"model.init_from: ", "model.hidden_dim: ",
                           "checkpoint 12, job 16", "model.rope_theta: "})
    EXPECT_SAYS(other, part);
  for (const char* name : {"/nothing", "/model.safetensors"}) {
    const Status none = load(f.path() + name);
    EXPECT_EQ(none.code(), Code::kNotFound);
    EXPECT_SAYS(none, "has no model");
  }
}

TEST(Restore, OtherWeightsThanTheFrozenOnesAreAPermanentError) {
  huggingface::SmallFolder f(huggingface::Dtype::kFp32);
  const auto fs = posix_file_system();
  const ParamTable table = ParamTable::make(huggingface::small_model());
  Rank rank = make_rank(table, {.bounds = {0, table.config().n_layers}}, 0);
  std::string fingerprint;
  const auto load = [&] {
    return load_initial_weights(
        *fs, f.path(), rank.shard, [] {}, rank.v.weights, &fingerprint);
  };
  ASSERT_OK(load());
  EXPECT_EQ(fingerprint.size(), 32u);
  EXPECT_OK(load()) << "the same";
  f.tensors.back()[0] ^= 1;
  f.put_weights();
  const Status other = load();
  EXPECT_EQ(other.code(), Code::kInvalidArgument);
  EXPECT_SAYS(other,
              "model.init_from: " + f.path() + ": its weights are not those");
}

TEST(Restore, PackedPiecesAreDense) {
  const std::vector<geometry::Piece> in = {
      {.param = 0, .rect = {2, 1, 3, 4}, .at = 7, .row_stride = 9},
      {.param = 1, .rect = {0, 5, 1, 6}, .at = 100, .row_stride = 11}};
  int64_t n = 0;
  const auto out = packed(in, &n);
  EXPECT_EQ(n, 18);
  EXPECT_EQ(out[0].at, 0);
  EXPECT_EQ(out[0].row_stride, 4);
  EXPECT_EQ(out[1].at, 12);
}

}  // namespace
}  // namespace remesh::train
