#include "coordinator/ctl/find_checkpoint.h"

#include "checkpoint/huggingface/transfer.h"
#include "tests/testing/expect.h"
#include "tests/unit/huggingface/small_folder.h"

namespace remesh::ctl {
namespace {

TEST(FindCheckpoint, TheModelThatARunContinues) {
  const auto files = posix_file_system();
  const huggingface::SmallFolder model(huggingface::Dtype::kFp32);
  const testing::TempDir run;
  const auto start = [&](const std::string& init) {
    testing::write_whole(run.path() + "/journal", "");
    testing::write_whole(
        run.path() + "/job.toml",
        "[data]\npath = \"/d\"\n[model]\n" + init + "\n[train]\nsteps = 10\n");
  };
  ASSERT_OK_AND(
      const auto saved,
      huggingface::import_model(
          *files, *huggingface::ModelFolder::open(*files, model.path()),
          run.path() + "/checkpoints", [](uint64_t, uint64_t) {}));
  start("init_from = \"" + model.path() + "\"");
  for (const std::string& target :
       {run.path(), run.path() + "/checkpoints", saved.path})
    EXPECT_EQ(model_continued(*files, target, saved.path), model.path());
  // Another model is there now.
  geometry::ModelConfig other = huggingface::small_model();
  other.vocab_size = 12;
  model.put("config.json", huggingface::config_json({.model = other},
                                                    huggingface::Dtype::kFp32));
  EXPECT_EQ(model_continued(*files, run.path(), saved.path), "");
  start("init_from = \"" + saved.path + "\"");
  EXPECT_EQ(model_continued(*files, run.path(), saved.path), "");
  start("vocab_size = 11");
  EXPECT_EQ(model_continued(*files, run.path(), saved.path), "");
}

}  // namespace
}  // namespace remesh::ctl
