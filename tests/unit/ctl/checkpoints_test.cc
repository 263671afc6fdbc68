// `remesh checkpoint prune` on the files of a run.
#include <fmt/format.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/manifest/branch.h"
#include "checkpoint/manifest/manifest.h"
#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/lines.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/unit/checkpoint/fixture.h"

namespace remesh::ctl {
namespace {

namespace fs = std::filesystem;

class Prune : public ::testing::Test {
 protected:
  void put(const std::string& name, const std::string& text) {
    std::ofstream(dir_.path() + "/" + name) << text;
  }
  std::string folder(int64_t step) const {
    return dir_.path() + "/checkpoints/" + manifest::step_name(step);
  }
  void checkpoint(int64_t step, int64_t generation) {
    const auto files = posix_file_system();
    const auto table = geometry::ParamTable::make(store::smallest_model());
    const std::string all = dir_.path() + "/checkpoints";
    ASSERT_OK(manifest::claim(*files, all, generation));
    ASSERT_OK(store::save(*files, all, {.step = step, .generation = generation},
                          table, store::State(table.num_elements(), 1), 1,
                          {.keep_latest_k = 100}));
  }
  void steps(int64_t generation, int64_t first, int64_t last) {
    for (int64_t step = first; step <= last; step += 10) {
      pb::StepMetrics m;
      m.set_step(step);
      m.set_loss(2);
      m.set_generation(generation);
      log_ += rundir::metrics_line(m) + "\n";
    }
  }
  int prune(int keep) {
    put("job.toml", "[data]\npath = \"/d\"\n[model]\nvocab_size = 64\n");
    put("journal", "");
    put("metrics.jsonl", log_);
    CLI::App app;
    int code = -1;
    add_checkpoint_verbs(&app, &code);
    try {
      app.parse(
          fmt::format("checkpoint prune {} --keep {}", dir_.path(), keep));
    } catch (const CLI::Error& e) {
      ADD_FAILURE() << e.what();
    }
    return code;
  }

  testing::TempDir dir_;
  std::string log_;
};

TEST_F(Prune, KeepsTheNewestOfTheBranchThatTheRunContinued) {
  checkpoint(20, 1);
  checkpoint(40, 1);
  checkpoint(90, 1);  // did not load: the run went back to step 40
  checkpoint(60, 2);
  steps(1, 10, 90);
  steps(2, 50, 70);
  ASSERT_EQ(prune(2), kExitOk);
  EXPECT_FALSE(fs::exists(folder(20)));
  EXPECT_TRUE(fs::exists(folder(40)));
  EXPECT_TRUE(fs::exists(folder(60)));
  ASSERT_EQ(prune(1), kExitOk);
  EXPECT_FALSE(fs::exists(folder(40)));
  EXPECT_TRUE(fs::exists(folder(60)));
}

TEST_F(Prune, LeavesWhatSomebodyKeeps) {
  for (const int64_t step : {20, 40, 60}) checkpoint(step, 1);
  steps(1, 10, 60);
  testing::write_whole(path_join(folder(20), manifest::kKeepName), "best");
  ASSERT_EQ(prune(1), kExitOk);
  EXPECT_TRUE(fs::exists(folder(20)));
  EXPECT_FALSE(fs::exists(folder(40)));
  EXPECT_TRUE(fs::exists(folder(60)));
}

}  // namespace
}  // namespace remesh::ctl
