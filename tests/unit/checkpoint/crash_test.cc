// Whatever fails during a save, and wherever the machine stops: afterwards the
// new checkpoint is absent or complete, and the older ones are untouched.
//
// Exhaustive: every call of a save, every way it can fail there, and the
// possible states of the disk afterwards (the extremes and random ones).

#include <cstdio>
#include <set>

#include "tests/testing/expect.h"
#include "tests/testing/memory_file_system.h"
#include "tests/unit/checkpoint/fixture.h"

namespace remesh::store {
namespace {

using Fault = MemoryFileSystem::Fault;
using Survives = MemoryFileSystem::Survives;
using Torn = MemoryFileSystem::Torn;

constexpr uint64_t kSeed = 4711;
constexpr char kFolder[] = "run/checkpoints";

struct Case {
  const char* name;
  int ranks;
  Compression compression;
  bool replaces;  // a damaged checkpoint of the same step exists
};

class CrashTest : public testing::TestWithParam<Case> {
 protected:
  // Step 1 is saved and durable; the run directory already exists.
  void SetUp() override {
    ASSERT_OK(start_.create_dirs("run"));
    ASSERT_OK(start_.sync_dir(""));
    const Retention keep{.keep_latest_k = 2};
    ASSERT_OK(save(start_, kFolder, {1, 1}, table_, one_, 2, keep));
    if (!GetParam().replaces) return;
    ASSERT_OK_AND(const auto two,
                  save(start_, kFolder, {2, 1}, table_, one_, 2, keep));
    const std::string shard = two.path + "/" + manifest::shard_name(0);
    ASSERT_OK(write_file(start_, shard, "cut"));
  }

  // Step 2 replaces step 1 (keep_latest_k = 1), so that removal is tested
  // too.
  Result<CommitResult> second(MemoryFileSystem& fs, int64_t generation) {
    return save(fs, kFolder, {2, generation}, table_, two_, GetParam().ranks,
                {.keep_latest_k = 1}, GetParam().compression);
  }

  // The newest valid checkpoint must be all of step 1 or all of step 2.
  // Returns its step.
  int64_t check(MemoryFileSystem& fs, const std::string& where) {
    const auto found = manifest::scan(fs, kFolder);
    EXPECT_OK(found) << where;
    if (!found.ok()) return 0;
    const manifest::Found* best = manifest::choose_newest_valid(*found);
    EXPECT_NE(best, nullptr) << where;
    if (best == nullptr) return 0;
    State loaded;
    EXPECT_OK(load_whole(fs, best->path, table_, loaded)) << where;
    EXPECT_TRUE(same_bits(loaded, best->step == 1 ? one_ : two_)) << where;
    return best->step;
  }

  // The machine stops at `call`. Returns false if the save makes fewer calls.
  bool crash(int64_t call, Torn torn, Survives survives) {
    const auto copy = start_.clone();
    MemoryFileSystem& fs = *copy;
    fs.fail_at(call, Fault::kCrash, torn);
    const auto done = second(fs, 2);
    const bool reached = fs.calls() > call;
    wrote_ = fs.failed_a_write();
    fs.recover(survives, rng_);
    const std::string where = "seed " + std::to_string(kSeed) + " call " +
                              std::to_string(call) + ": ";
    const int64_t step = check(fs, where);
    seen_.insert(step);
    // What was reported as saved is saved.
    if (done.ok()) {
      EXPECT_EQ(step, 2) << where;
    }
    ++num_crashes_;
    // The next generation saves step 2 and leaves no debris.
    if (torn == Torn::kHalf && survives == Survives::kSyncedOnly) {
      const auto again = second(fs, 3);
      EXPECT_OK(again) << where;
      EXPECT_EQ(check(fs, where), 2);
      if (again.ok() && !again->existed) {
        EXPECT_EQ(*fs.list(kFolder),
                  (std::vector<std::string>{"step-00000002"}))
            << where;
      }
    }
    return reached;
  }

  const geometry::ParamTable table_ =
      geometry::ParamTable::make(smallest_model());
  const State one_ = random_state(table_.num_elements(), 1);
  const State two_ = random_state(table_.num_elements(), 2);
  std::mt19937_64 rng_{kSeed};
  MemoryFileSystem start_;
  bool wrote_ = false;
  std::set<int64_t> seen_;
  int64_t num_crashes_ = 0;
};

TEST_P(CrashTest, ACrashAtAnyCallLeavesOneCompleteCheckpoint) {
  int64_t call = 0;
  for (bool reached = true; reached; ++call)
    for (const Torn torn :
         {Torn::kHalf, Torn::kNothing, Torn::kAllButOneByte}) {
      // Only writes tear.
      if (torn != Torn::kHalf && !wrote_) continue;
      for (const Survives survives :
           {Survives::kSyncedOnly, Survives::kAll, Survives::kSome}) {
        // The extent of the last write matters only if it survives.
        if (torn != Torn::kHalf && survives != Survives::kAll) continue;
        reached = crash(call, torn, survives);
      }
      // Of the last variant; all of one call do the same.
      wrote_ = wrote_ && reached;
    }
  EXPECT_EQ(seen_, (std::set<int64_t>{1, 2}));
  EXPECT_GT(call, 20);
  std::printf("%lld calls, %lld crashes\n", static_cast<long long>(call - 1),
              static_cast<long long>(num_crashes_));
}

TEST_P(CrashTest, AFailureAtAnyCallIsReportedAndLosesNothing) {
  for (const Fault fault : {Fault::kIoOnce, Fault::kFull}) {
    bool reached = true;
    for (int64_t call = 0; reached; ++call) {
      const auto copy = start_.clone();
      MemoryFileSystem& fs = *copy;
      fs.fail_at(call, fault);  // a write is a short one
      const auto done = second(fs, 2);
      reached = fs.calls() > call;
      fs.fail_at(0, Fault::kNone);
      const std::string where = "call " + std::to_string(call) + ": ";
      const int64_t step = check(fs, where);
      if (done.ok()) {
        EXPECT_EQ(step, 2) << where;
      } else if (fault == Fault::kFull) {
        EXPECT_EQ(done.status().code(), Code::kExhausted)
            << where << done.status().to_string();
      }
      // The same generation may try again in the same place.
      EXPECT_OK(second(fs, 2)) << where;
      EXPECT_EQ(check(fs, where), 2);
    }
  }
}

TEST_P(CrashTest, AReadErrorWhileLoadingIsReported) {
  MemoryFileSystem& fs = start_;
  for (int64_t call = 0;; ++call) {
    fs.fail_at(call, Fault::kIoOnce);
    State loaded;
    const Status s =
        load_whole(fs, std::string(kFolder) + "/step-00000001", table_, loaded);
    if (fs.calls() <= call) break;
    EXPECT_FALSE(s.ok()) << call;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Saves, CrashTest,
    testing::Values(Case{"OneRank", 1, Compression::kNone, false},
                    Case{"ThreeRanks", 3, Compression::kNone, false},
                    Case{"Compressed", 2, Compression::kZlib, false},
                    Case{"ReplacingADamagedOne", 2, Compression::kNone, true}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace remesh::store
