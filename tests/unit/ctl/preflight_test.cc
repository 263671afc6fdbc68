#include "coordinator/ctl/preflight.h"

#include <gtest/gtest.h>
#include <sys/mount.h>

#include <algorithm>

#include "parallel/jobfile/jobfile.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/testing/small_disk.h"

namespace remesh::ctl {
namespace {

pb::Job kept_job() {
  const auto parsed = jobfile::parse_job(
      "", {},
      {"data.path=/d", "model.dim=64", "model.n_layers=2", "model.n_heads=2",
       "model.n_kv_heads=2", "model.hidden_dim=64", "train.seq_len=32"});
  EXPECT_OK(parsed);
  jobfile::DataInfo info;
  info.vocab_size = 257;
  return jobfile::resolve(parsed.value(), info).value();
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

}  // namespace
}  // namespace remesh::ctl
