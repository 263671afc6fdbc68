// Whatever fails while a file of the run directory is replaced, and wherever
// the machine stops: afterwards it has all of the old or all of the new bytes.

#include <functional>
#include <set>

#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/run_dir.h"
#include "tests/testing/expect.h"
#include "tests/testing/memory_file_system.h"
#include "tests/testing/resolved_job.h"

namespace remesh::rundir {
namespace {

using Fault = MemoryFileSystem::Fault;
using Survives = MemoryFileSystem::Survives;
using Torn = MemoryFileSystem::Torn;

constexpr char kRun[] = "/run";

pb::Job job(int64_t steps) {
  return resolved_job({"data.path=/data",
                       "train.steps=" + std::to_string(steps),
                       "train.eval_sequences=0"});
}

// A file of the run directory and how it is written; number 0 is there before.
struct Case {
  const char* name;
  std::string path;
  std::function<Status(FileSystem&, int)> write;
};

class RunDirCrashTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    ASSERT_OK(start_.create_dirs(kRun));
    ASSERT_OK(start_.sync_dir(""));
    ASSERT_OK(GetParam().write(start_, 0));
    old_ = *remesh::read_file(start_, GetParam().path, 1 << 20);
    const auto copy = start_.clone();
    ASSERT_OK(GetParam().write(*copy, 1));
    new_ = *remesh::read_file(*copy, GetParam().path, 1 << 20);
    ASSERT_NE(old_, new_);
  }

  // True when the file is the new one; it is the old one otherwise.
  bool is_new(MemoryFileSystem& fs, const std::string& where) {
    const auto text = remesh::read_file(fs, GetParam().path, 1 << 20);
    EXPECT_OK(text) << where;
    EXPECT_TRUE(*text == old_ || *text == new_) << where << *text;
    return *text == new_;
  }

  MemoryFileSystem start_;
  std::string old_, new_;
  std::mt19937_64 rng_{4711};
};

TEST_P(RunDirCrashTest, ACrashAtAnyCallLeavesTheOldOrTheNewFile) {
  std::set<bool> seen;
  for (auto [call, reached] = std::pair(int64_t{0}, true); reached; ++call)
    for (const Torn torn : {Torn::kHalf, Torn::kNothing, Torn::kAllButOneByte})
      for (const Survives survives :
           {Survives::kSyncedOnly, Survives::kAll, Survives::kSome}) {
        const auto fs = start_.clone();
        fs->fail_at(call, Fault::kCrash, torn);
        const Status done = GetParam().write(*fs, 1);
        reached = fs->calls() > call;
        fs->recover(survives, rng_);
        const std::string where = "call " + std::to_string(call) + ": ";
        const bool is = is_new(*fs, where);
        seen.insert(is);
        EXPECT_TRUE(is || !done.ok()) << where;
        EXPECT_OK(GetParam().write(*fs, 1)) << where;
        EXPECT_TRUE(is_new(*fs, where));
      }
  EXPECT_EQ(seen.size(), 2u);
}

TEST_P(RunDirCrashTest, AFailureAtAnyCallIsReportedAndLosesNothing) {
  for (const Fault fault : {Fault::kIoOnce, Fault::kFull})
    for (auto [call, reached] = std::pair(int64_t{0}, true); reached; ++call) {
      const auto fs = start_.clone();
      fs->fail_at(call, fault);
      const Status done = GetParam().write(*fs, 1);
      reached = fs->calls() > call;
      fs->fail_at(0, Fault::kNone);
      const std::string where = "call " + std::to_string(call) + ": ";
      EXPECT_TRUE(is_new(*fs, where) || !done.ok()) << where;
      EXPECT_OK(GetParam().write(*fs, 1)) << where;
      EXPECT_TRUE(is_new(*fs, where));
      EXPECT_EQ(fs->list(kRun)->size(), 1u) << where << "leftovers";
    }
}

INSTANTIATE_TEST_SUITE_P(
    Files, RunDirCrashTest,
    testing::Values(Case{"Endpoint", endpoint_path(kRun),
                         [](FileSystem& fs, int n) {
                           return write_endpoint(
                               fs, kRun,
                               {.address =
                                    "tcp://h:" + std::to_string(5710 + n),
                                .host = "h",
                                .pid = 7});
                         }},
                    Case{"Job", job_path(kRun),
                         [](FileSystem& fs, int n) {
                           return write_job(fs, job(10 + n), kRun);
                         }}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(RunDirCrash, AnotherTrainingIsRefused) {
  MemoryFileSystem fs;
  ASSERT_OK(fs.create_dirs(kRun));
  ASSERT_OK(write_job(fs, job(10), kRun));
  pb::Job other = job(10);
  other.mutable_train()->set_seed(9);
  const Status refused = check_job(fs, {other}, kRun, nullptr).status();
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_SAYS(refused, "train.seed: the run has 1");
}

}  // namespace
}  // namespace remesh::rundir
