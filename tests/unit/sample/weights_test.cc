#include "worker/sample/weights.h"

#include <algorithm>
#include <filesystem>

#include "checkpoint/memory/segment.h"
#include "parallel/geometry/sharding.h"
#include "tests/testing/expect.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/huggingface/small_folder.h"

namespace remesh::sample {
namespace {

using geometry::ParamTable;
using memory::StateSegment;

constexpr uint64_t kRun = 0x77;

// Weight i of the model at a step.
float value(int64_t step, int64_t i) {
  return static_cast<float>(step * 1000 + i % 997);
}

class WeightsTest : public ::testing::Test {
 protected:
  // A segment for the state of a rank, in the folder of worker `name`.
  std::unique_ptr<StateSegment> make_rank(const std::string& name, int rank) {
    const std::string folder =
        shm_ / (memory::shared_folder_prefix() + name + "/state");
    std::filesystem::create_directories(folder);
    auto made = StateSegment::create(memory::segment_path(folder, kRun, rank),
                                     kRun, table_.num_elements());
    CHECK_MSG(made.ok(), made.status().to_string().c_str());
    return std::move(*made);
  }
  void commit(StateSegment& segment, int buffer, int64_t step,
              const geometry::Sharding& sharding, int rank) {
    const auto shard = geometry::make_rank_shard(table_, sharding, rank);
    CHECK_MSG(shard.ok(), shard.status().to_string().c_str());
    const auto pieces = geometry::held_pieces(*shard);
    int64_t elements = 0;
    for (const geometry::Piece& p : pieces)
      elements = std::max(elements, p.at + p.rect.rows * p.row_stride);
    segment.begin(buffer);
    const auto to = segment.write(buffer, elements).weights;
    for (const geometry::Piece& p : pieces)
      for (int64_t r = 0; r < p.rect.rows; ++r)
        for (int64_t c = 0; c < p.rect.cols; ++c)
          to[static_cast<size_t>(p.at + r * p.row_stride + c)] =
              value(step, table_.offset(p.param) +
                              (p.rect.row + r) *
                                  geometry::full_rect(table_[p.param]).cols +
                              p.rect.col + c);
    segment.commit({.step = step,
                    .generation = 1,
                    .rank = rank,
                    .sharding = sharding,
                    .model = geometry::model_id(table_),
                    .elements = elements});
  }
  // The step whose weights are read; -1: none.
  int64_t step_read(int64_t above_step) {
    const auto weights =
        weights_in_memory(table_.config(), kRun, above_step, shm_.path());
    if (!weights.ok()) {
      EXPECT_EQ(weights.status().code(), Code::kNotFound);
      return -1;
    }
    std::vector<float> got(static_cast<size_t>(table_.num_elements()));
    EXPECT_OK(weights->load(table_, got));
    const auto step = static_cast<int64_t>(got[0] / 1000);
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_EQ(got[i], value(step, static_cast<int64_t>(i))) << i;
    return step;
  }

  const ParamTable table_ = ParamTable::make(huggingface::small_model());
  ShmDir shm_;
};

TEST_F(WeightsTest, OfARunAreThoseOfTheNewestCompleteState) {
  geometry::Sharding sharding{.layout = {.pp = 2, .tp = 2},
                              .zero = {.stage = 0}};
  sharding.bounds = geometry::stage_bounds(table_.config(), 2, 16).value();
  std::vector<std::unique_ptr<StateSegment>> ranks;
  for (int r = 0; r < 4; ++r) ranks.push_back(make_rank(r < 2 ? "a" : "b", r));
  EXPECT_EQ(step_read(0), -1);
  for (int r = 0; r < 4; ++r) commit(*ranks[r], 0, 5, sharding, r);
  EXPECT_EQ(step_read(0), 5);
  EXPECT_EQ(step_read(4), 5);
  EXPECT_EQ(step_read(5), -1) << "no newer one than the checkpoint";
  // Three of four ranks are a step further.
  for (int r = 0; r < 3; ++r) commit(*ranks[r], 1, 6, sharding, r);
  EXPECT_EQ(step_read(0), 5);
  commit(*ranks[3], 1, 6, sharding, 3);
  EXPECT_EQ(step_read(0), 6);
  // One that is being replaced does not count.
  for (int r = 0; r < 4; ++r) ranks[r]->begin(1);
  EXPECT_EQ(step_read(0), 5);
  // Another run's, or another model's.
  EXPECT_EQ(weights_in_memory(table_.config(), kRun + 1, 0, shm_.path())
                .status()
                .code(),
            Code::kNotFound);
  geometry::ModelConfig other = table_.config();
  other.vocab_size += 8;
  EXPECT_EQ(weights_in_memory(other, kRun, 0, shm_.path()).status().code(),
            Code::kNotFound);
}

TEST_F(WeightsTest, ShardedWeightsAreAssembled) {
  geometry::Sharding sharding{.layout = {.dp = 2}, .zero = {.stage = 1}};
  sharding.bounds = geometry::stage_bounds(table_.config(), 1, 16).value();
  const auto a = make_rank("a", 0);
  const auto b = make_rank("b", 1);
  commit(*a, 0, 3, sharding, 0);
  EXPECT_EQ(step_read(0), -1) << "half of the weights";
  commit(*b, 0, 3, sharding, 1);
  EXPECT_EQ(step_read(0), 3);
}

}  // namespace
}  // namespace remesh::sample
