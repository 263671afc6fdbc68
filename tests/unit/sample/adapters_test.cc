// A model with adapters has the same logits as it trains, from its checkpoint,
// and merged into a model of Hugging Face's files.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "checkpoint/huggingface/transfer.h"
#include "checkpoint/huggingface/weight_source.h"
#include "parallel/geometry/lora.h"
#include "proto/base/rng.h"
#include "tests/testing/engine.h"
#include "tests/testing/expect.h"
#include "tests/testing/local_comm.h"
#include "tests/testing/pieces.h"
#include "tests/unit/checkpoint/fixture.h"
#include "tests/unit/huggingface/small_folder.h"
#include "worker/sample/generator.h"

namespace remesh::sample {
namespace {

constexpr int64_t kTokens = 24;

class AdaptersTest : public ::testing::Test {
 protected:
  // Weights that make every logit depend on every adapter.
  void SetUp() override {
    std::vector<float> values;
    for (size_t t = 0; t < base_.tensors.size(); ++t) {
      values.resize(base_.tensors[t].size() / sizeof(float));
      for (size_t i = 0; i < values.size(); ++i)
        values[i] = (base_.shapes[t].shape.size() == 1 ? 1.0F : 0.0F) +
                    0.2F * random_normal(1, t, i);
      std::memcpy(base_.tensors[t].data(), values.data(),
                  base_.tensors[t].size());
    }
    base_.put_weights();
    for (size_t i = 0; i < adapters_.weights.size(); ++i)
      adapters_.weights[i] = 0.2F * random_normal(2, 0, i);
    for (int64_t i = 0; i < kTokens; ++i)
      tokens_.push_back(static_cast<int32_t>(i * i * 7 % 61));
  }
  static geometry::ModelConfig adapted(geometry::ModelConfig model) {
    model.lora = {.rank = 3, .alpha = 5, .targets = geometry::lora_targets()};
    return model;
  }
  // Of what follows each token.
  std::vector<float> logits_of(const std::string& path) const {
    std::vector<float> out;
    const auto weights = open_weights(*fs_, {.weights = path});
    EXPECT_OK(weights);
    if (!weights.ok()) return out;
    auto model =
        Generator::load(*weights, kernels::Dtype::kFp32, kTokens, *backend_);
    EXPECT_OK(model);
    for (const int32_t& t : tokens_) {
      const auto next = (*model)->extend({&t, 1});
      out.insert(out.end(), next.begin(), next.end());
    }
    return out;
  }
  // The same of an engine that trains the adapters.
  void logits_of_training(std::vector<float>* out) const {
    const auto world = comm::make_local_comms(1);
    ASSERT_OK_AND(const auto mesh, comm::Mesh::make(*world[0], {}));
    ASSERT_OK_AND(
        const auto engine,
        engine::make_engine(table_, *mesh, {.max_seq = kTokens}, *backend_));
    const auto to = engine->begin_state().weights;
    geometry::for_each_element(
        table_, geometry::pieces_to_load(engine->rank_shard()),
        [&](int64_t at, size_t param, int64_t element) {
          to[static_cast<size_t>(at)] =
              adapters_
                  .weights[static_cast<size_t>(table_.offset(param) + element)];
        });
    engine->commit_state(0);
    engine::FrozenBase& frozen = *engine->base();
    ASSERT_OK_AND(const auto source,
                  huggingface::WeightSource::open(*fs_, base_.path()));
    ASSERT_OK(source.load(frozen.table,
                          geometry::pieces_to_load(frozen.rank_shard),
                          frozen.weights.span(), [] {}));
    engine->state_loaded();
    const std::vector<int32_t> targets(tokens_.size());
    const model::MicroBatch batch{tokens_.data(), targets.data(), 1, kTokens};
    ASSERT_OK(engine->evaluate({&batch, 1}));
    out->resize(static_cast<size_t>(kTokens * table_.config().vocab_size));
    engine->stage(0).logits(0, kTokens, *out);
  }

  const std::unique_ptr<FileSystem> fs_ = posix_file_system();
  const std::unique_ptr<kernels::Backend> backend_ =
      kernels::make_reference_backend();
  huggingface::SmallFolder base_{huggingface::Dtype::kFp32,
                                 geometry::llama(24, 3, 4, 2, 52, 61)};
  const geometry::ParamTable table_ =
      geometry::ParamTable::make(adapted(base_.table.config()));
  store::State adapters_{table_.num_elements()};
  std::vector<int32_t> tokens_;
};

double largest_difference(const std::vector<float>& a,
                          const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double most = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
  return most;
}

TEST_F(AdaptersTest, AMergedModelHasTheLogitsOfTheAdapters) {
  const TempDir dir;
  ASSERT_OK_AND(const auto saved,
                store::save(*fs_, dir / "run", {7, 1}, table_, adapters_, 2));
  pb::Manifest manifest = *manifest::read_manifest(*fs_, saved.path);
  manifest.set_base(base_.path());
  ASSERT_OK(write_file(*fs_, path_join(saved.path, manifest::kManifestName),
                       manifest::encode(manifest)));
  ASSERT_OK(huggingface::export_model(*fs_, saved.path, dir / "merged",
                                      {.dtype = huggingface::Dtype::kFp32},
                                      [](uint64_t, uint64_t) {}));
  std::vector<float> trained;
  ASSERT_NO_FATAL_FAILURE(logits_of_training(&trained));
  const std::vector<float> merged = logits_of(dir / "merged");
  ASSERT_EQ(trained.size(), merged.size());
  EXPECT_LT(largest_difference(merged, trained), 1e-5);
  EXPECT_LT(largest_difference(merged, logits_of(saved.path)), 1e-5);
  EXPECT_GT(largest_difference(merged, logits_of(base_.path())), 0.1);
}

}  // namespace
}  // namespace remesh::sample
