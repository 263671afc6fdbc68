#include "coordinator/ctl/preflight.h"

#include <gtest/gtest.h>
#include <sys/mount.h>

#include <algorithm>
#include <optional>

#include "parallel/jobfile/jobfile.h"
#include "proto/base/file_system.h"
#include "proto/data/index.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/testing/resolved_job.h"
#include "tests/testing/small_disk.h"

namespace remesh::ctl {
namespace {

pb::Job kept_job() {
  return resolved_job({"data.path=/d", "model.dim=64", "model.n_layers=2",
                       "model.n_heads=2", "model.n_kv_heads=2",
                       "model.hidden_dim=64", "train.seq_len=32"});
}

// What it says of the shared memory in that folder; "" if it does not.
std::string problem_of(const std::string& shared, const std::string& run) {
  const auto needs = look_ahead(
      {.job = kept_job(), .run_dir = run, .workers = 1, .shared = shared});
  const auto it = std::find_if(needs.begin(), needs.end(), [](const Need& n) {
    return n.what == "shared memory";
  });
  EXPECT_NE(it, needs.end());
  if (it == needs.end()) return "";
  EXPECT_TRUE(it->fatal);
  return it->problem;
}

TEST(PreflightTest, AMissingFolderOfStatesIsANeedThatIsNotMet) {
  const testing::TempDir dir;
  const std::string run = dir.path() + "/run";
  EXPECT_EQ(problem_of(dir.path(), run), "");
  const std::string missing = dir.path() + "/shm";
  EXPECT_HAS(problem_of(missing, run), missing + " is missing");
  testing::write_whole(missing, "");
  EXPECT_HAS(problem_of(missing, run), "is missing");
}

TEST(PreflightTest, ATmpfsWithoutALimitHasRoom) {
  const testing::TempDir dir;
  const testing::SmallDisk unlimited(dir.path() + "/shm", 0);
  if (!unlimited.mounted()) GTEST_SKIP() << "needs mount";
  EXPECT_EQ(problem_of(unlimited.path(), dir.path() + "/run"), "");
}

TEST(PreflightTest, AReadOnlyFolderOfStatesIsANeedThatIsNotMet) {
  const testing::TempDir dir;
  const testing::SmallDisk disk(dir.path() + "/shm", 1 << 24);
  if (!disk.mounted()) GTEST_SKIP() << "needs mount";
  EXPECT_EQ(problem_of(disk.path(), dir.path() + "/run"), "");
  ASSERT_EQ(
      mount("", disk.path().c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr),
      0);
  EXPECT_HAS(problem_of(disk.path(), dir.path() + "/run"), "cannot be wr");
}

// A coordinator may be on a host that has no data.
TEST(PreflightTest, OnlyWorkersNeedTheData) {
  const testing::TempDir dir;
  for (const int workers : {0, 1}) {
    const auto needs = look_ahead({.job = kept_job(),
                                   .run_dir = dir.path() + "/run",
                                   .workers = workers,
                                   .shared = dir.path()});
    ASSERT_EQ(needs[0].what, "data");
    EXPECT_NE(needs[0].problem, "");
    EXPECT_EQ(needs[0].fatal, workers > 0);
  }
}

// What it says of the tokenizer, for a data set with that of this id; nothing
// if it says nothing.
std::optional<Need> tokenizer_need(const std::string& model,
                                   const std::string& id) {
  const testing::TempDir dir;
  data::Index index{.tokenizer = id, .vocab_size = 257};
  index.train = {{"train-00000.tok", 100, std::string(32, '0')}};
  index.source_id = std::string(32, '0');
  index.data_id = data::data_id_of(index);
  dir.write(data::kIndexName, data::index_to_json(index));
  pb::Job job = kept_job();
  job.mutable_data()->set_path(dir.path());
  job.mutable_model()->set_init_from(model);
  for (const Need& n : look_ahead({.job = job,
                       .run_dir = dir.path() + "/run",
                       .workers = 1,
                       .shared = dir.path()}))
    if (n.what == "tokenizer") return n;
  return std::nullopt;
}

TEST(PreflightTest, ATokenizerThatIsNotTheModelsIsNoted) {
  const testing::TempDir model;
  const std::string text = "{}";
  const std::string hash = xxh128_text(text);
  EXPECT_FALSE(tokenizer_need(model.path(), "bytes")) << "it has none";
  const std::string file = model.write("tokenizer.json", text);
  model.write("tokenizer.model", "another format of it");
  EXPECT_FALSE(tokenizer_need("", "bytes")) << "a run of its own";
  const auto same = tokenizer_need(model.path(), "tokenizer.json:" + hash);
  ASSERT_TRUE(same);
  EXPECT_EQ(same->problem, "");
  for (const std::string id : {"bytes", "tokenizer.json:0123"}) {
    const auto other = tokenizer_need(model.path(), id);
    ASSERT_TRUE(other);
    EXPECT_EQ(other->needed, file);
    EXPECT_EQ(other->here, id);
    EXPECT_HAS(other->problem, "prepare it again with --tokenizer " + file);
    EXPECT_FALSE(other->fatal);
  }
}

}  // namespace
}  // namespace remesh::ctl
