// tests/e2e/read_state.py, which is written from checkpoint/FORMAT.md alone,
// reads what this code writes: checkpoints, and segments of any mesh.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "checkpoint/manifest/scan.h"
#include "checkpoint/memory/segment.h"
#include "checkpoint/store/store.h"
#include "checkpoint/store/verify.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/testing/llama.h"
#include "tests/testing/process.h"
#include "tests/testing/seed.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/exchange/states.h"
#include "worker/train/digest.h"

namespace remesh::train {
namespace {

using exchange::State;
using geometry::ParamTable;
using geometry::Sharding;
using nlohmann::json;

// A state that both forms hold, as every rank of a mesh has it.
struct Case {
  ParamTable table;
  Sharding sharding;
  uint64_t salt = 0;
};

// What the reader must print of it.
json expected(const Case& c, int64_t step) {
  uint64_t digest = 0;
  for (int rank = 0; rank < c.sharding.layout.world(); ++rank)
    digest += state_digest(
        make_rank_shard(c.table, c.sharding, rank).value(),
        exchange::state_of(c.table, c.sharding, rank, c.salt).view());
  return {{"step", step},
          {"parameters", c.table.num_elements()},
          {"digest", fmt::format("{:016x}", digest)}};
}

json read_state(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(),
                   {"/usr/bin/python3", "tests/e2e/read_state.py"});
  const testing::Finished f = testing::run_program(arguments);
  EXPECT_EQ(f.exit.code, 0) << f.output;
  return json::parse(f.output, nullptr, /*allow_exceptions=*/false);
}

// The path of a checkpoint of it, one shard a rank.
std::string save(const Case& c, int64_t step, const std::string& folder,
                 store::Compression compression) {
  const auto fs = posix_file_system();
  const store::SaveId id{.step = step, .generation = 4};
  const int world = c.sharding.layout.world();
  for (int rank = 0; rank < world; ++rank) {
    const auto shard = make_rank_shard(c.table, c.sharding, rank).value();
    EXPECT_OK(store::write_shard(
        *fs, folder, id, rank, c.table, pieces_to_save(shard),
        exchange::state_of(c.table, c.sharding, rank, c.salt).view(),
        {.compression = compression}));
  }
  pb::Manifest m;
  m.set_step(id.step);
  m.set_generation(id.generation);
  *m.mutable_model() = manifest::model_info(c.table.config());
  const auto done = store::commit(*fs, folder, m, world, c.table, {});
  EXPECT_OK(done);
  return done.ok() ? done->path : "";
}

// Segments of all ranks in `dir`, with the state of `step` and one of the step
// before, and a replica of rank 0's. The last rank is a step ahead, unless it
// holds everything.
std::vector<std::string> commit(const Case& c, int64_t step,
                                const ShmDir& dir) {
  const int world = c.sharding.layout.world();
  std::vector<std::string> paths;
  for (int file = 0; file <= world; ++file) {
    const bool replica = file == world;
    const int rank = replica ? 0 : file;
    const State state = exchange::state_of(c.table, c.sharding, rank, c.salt);
    const auto elements = static_cast<int64_t>(state.v[0].size());
    paths.push_back(dir / fmt::format("state-{:016x}-{}", 7, file));
    const auto segment = memory::StateSegment::create(
        paths.back(), 7, elements + static_cast<int64_t>(c.salt % 3000));
    if (!segment.ok()) {
      ADD_FAILURE() << segment.status().to_string();
      continue;
    }
    memory::StateInfo info{.generation = 4,
                           .rank = rank,
                           .sharding = c.sharding,
                           .model = model_id(c.table),
                           .elements = elements,
                           .replica = replica};
    const auto put = [&](int buffer, int64_t at_step, const State& s) {
      (*segment)->begin(buffer);
      const auto to = (*segment)->write(buffer, elements);
      for (size_t v = 0; v < geometry::kNumStateVectors; ++v)
        std::copy(s.v[v].begin(), s.v[v].end(), to[v].begin());
      info.step = at_step;
      info.content.reset();
      if (replica)
        info.content = memory::content_hash((*segment)->read(buffer, elements));
      (*segment)->commit(info);
    };
    const int older = file % 2;
    const bool partial = num_replica_groups(c.sharding) > 1;
    const int64_t ahead = partial && rank == world - 1 ? 1 : 0;
    put(older, step - 1 + ahead, ahead == 0 ? State(elements) : state);
    put(1 - older, step + ahead, ahead == 0 ? state : State(elements));
  }
  return paths;
}

void expect_read(const Case& c) {
  constexpr int64_t kStep = 12;
  const testing::TempDir folder;
  const ShmDir dir;
  const std::string checkpoint = save(
      c, kStep, folder.path(),
      c.salt % 2 == 0 ? store::Compression::kNone : store::Compression::kZlib);
  json on_disk = read_state({checkpoint});
  std::vector<std::string> arguments = commit(c, kStep, dir);
  arguments.insert(arguments.begin(), checkpoint);
  EXPECT_EQ(read_state(arguments), on_disk);
  // Of the weights alone, which the digest covers.
  EXPECT_EQ(on_disk.erase("sha256"), 1U);
  EXPECT_EQ(on_disk, expected(c, kStep));
}

TEST(Format, AnIndependentReaderReadsCheckpointsAndSegmentsOfAnyMesh) {
  geometry::ModelConfig tied =
      geometry::llama(24, 3, 6, 2, 9, 17, /*tied=*/true);
  geometry::ModelConfig biased = tied;
  biased.tie_embeddings = false;
  biased.n_heads = 4;
  biased.arch = "qwen2";
  geometry::ModelConfig normed = biased;
  normed.arch = "qwen3";
  normed.head_size = 8;
  normed.n_layers = 5;
  const std::vector<std::pair<geometry::ModelConfig, Sharding>> cases = {
      {tied,
       {.layout = {.dp = 2, .pp = 2, .tp = 2},
        .bounds = {0, 1, 3},
        .zero = {.stage = 1}}},
      // Ranks share key/value heads.
      {biased, {.layout = {.dp = 2, .tp = 4}, .bounds = {0, 3}}},
      {normed,
       {.layout = {.dp = 4, .pp = 2, .cp = 2},
        .bounds = {0, 1, 2, 4, 5},
        .chunks = 2,
        .zero = {.stage = 3, .shard_group = 4}}}};
  uint64_t salt = 0;
  for (const auto& [config, sharding] : cases) {
    SCOPED_TRACE(sharding.layout.to_string());
    expect_read({ParamTable::make(config), sharding, ++salt});
  }
}

// The example of checkpoint/FORMAT.md, as its table has it.
TEST(Format, TheExampleOfTheOrderOfElementsIsTrue) {
  const ParamTable table = ParamTable::make(geometry::llama(8, 2, 2, 1, 3, 9));
  const Sharding sharding{.layout = {.dp = 2, .pp = 2, .tp = 2},
                          .bounds = {0, 1, 2},
                          .zero = {.stage = 1}};
  const auto rank = make_rank_shard(table, sharding, 3).value();
  EXPECT_EQ(rank.zero.state_elements(), 88);
  std::string rows = "| at | parameter | rows | columns |\n|---|---|---|---|\n";
  for (const geometry::Piece& p : held_pieces(rank))
    rows += fmt::format("| {} | `{}` | {}-{} | {}-{} |\n", p.at,
                        table[p.param].name, p.rect.row,
                        p.rect.row + p.rect.rows - 1, p.rect.col,
                        p.rect.col + p.rect.cols - 1);
  EXPECT_HAS(testing::read_whole("checkpoint/FORMAT.md"), rows);
}

// Saved by the build that preceded this test; its digest is that of the step in
// metrics.jsonl.
TEST(Format, ACheckpointOfAnEarlierBuildLoads) {
  constexpr char kPath[] = "tests/unit/checkpoint/format2/step-00000003";
  constexpr uint64_t kDigest = 0xf3f878e4b9c4583a;
  const auto fs = posix_file_system();
  ASSERT_OK_AND(const auto m, manifest::read_checkpoint(*fs, kPath));
  const ParamTable table =
      ParamTable::make(manifest::model_config(m.model()).value());
  const Sharding one{.layout = {}, .bounds = {0, table.config().n_layers}};
  const auto rank = make_rank_shard(table, one, 0).value();
  State state(rank.zero.state_elements());
  ASSERT_OK(store::load(*fs, kPath, m, table, held_pieces(rank), state.mut()));
  EXPECT_EQ(state_digest(rank, state.view()), kDigest);
  EXPECT_TRUE(store::verify(*fs, kPath).ok);
}

TEST(Format, AnIndependentReaderReadsStatesOfRandomMeshes) {
  const uint32_t seed = test_seed();
  std::mt19937 random(seed);
  for (int k = 0; k < test_cases(4); ++k) {
    const geometry::ModelConfig config = geometry::random_config(random);
    const Sharding sharding = geometry::random_sharding(random, config, 16);
    SCOPED_TRACE(fmt::format("seed {}, case {}, {}", seed, k,
                             sharding.layout.to_string()));
    expect_read({ParamTable::make(config), sharding, random()});
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace remesh::train
