// Whatever fails while saving, and wherever the machine stops: afterwards there
// is no new checkpoint or the whole one, and the older ones are untouched.
#include <gtest/gtest.h>

#include <cstdio>
#include <set>

#include "tests/unit/checkpoint/fixture.h"
#include "tests/unit/checkpoint/memory_file_system.h"

namespace remesh::store {
namespace {

using Fault = manifest::MemoryFileSystem::Fault;
using Survives = manifest::MemoryFileSystem::Survives;
using manifest::MemoryFileSystem;

constexpr uint64_t kSeed = 4711;
constexpr char kFolder[] = "run/checkpoints";

// Two parameters' worth of model is enough: the calls are the same.
geometry::ModelConfig smallest() {
  return {.dim = 2,
          .n_layers = 1,
          .n_heads = 1,
          .n_kv_heads = 1,
          .hidden_dim = 1,
          .vocab_size = 2,
          .tie_embeddings = true};
}

class CrashTest : public testing::Test {
 protected:
  // Step 1 is saved and durable; the run directory is somebody else's.
  void SetUp() override {
    ASSERT_TRUE(start_.create_dirs("run").ok());
    ASSERT_TRUE(start_.sync_dir("").ok());
    const auto done = save(start_, kFolder, {1, 1}, table_, one_, 2, keep_);
    ASSERT_TRUE(done.ok()) << done.status().to_string();
  }

  // Step 2 replaces step 1 (keep_latest_k = 1), so that removal is under
  // test too.
  Result<Committed> second(MemoryFileSystem& fs, int64_t generation) {
    return save(fs, kFolder, {2, generation}, table_, two_, 2, keep_);
  }

  // The newest valid checkpoint must be all of step 1 or all of step 2.
  // Returns its step.
  int64_t check(MemoryFileSystem& fs, const std::string& where) {
    const auto found = manifest::scan(fs, kFolder);
    EXPECT_TRUE(found.ok()) << where << found.status().to_string();
    if (!found.ok()) return 0;
    const manifest::Found* best = manifest::choose_newest_valid(*found);
    EXPECT_NE(best, nullptr) << where;
    if (best == nullptr) return 0;
    State loaded;
    const Status s = load_whole(fs, best->path, table_, loaded);
    EXPECT_TRUE(s.ok()) << where << s.to_string();
    EXPECT_TRUE(same_bits(loaded, best->step == 1 ? one_ : two_)) << where;
    return best->step;
  }

  const geometry::ParamTable table_ = geometry::ParamTable::llama(smallest());
  const State one_ = random_state(table_.num_elements(), 1);
  const State two_ = random_state(table_.num_elements(), 2);
  MemoryFileSystem start_;
  const Retention keep_{.keep_latest_k = 1};
};

TEST_F(CrashTest, ACrashAtAnyCallLeavesOneOrTheOtherWhole) {
  std::mt19937_64 rng(kSeed);
  std::set<int64_t> seen;
  bool through = false;
  int64_t call = 0;
  for (; !through; ++call)
    for (const Survives survives :
         {Survives::kSyncedOnly,
          call % 2 == 0 ? Survives::kSome : Survives::kAll}) {
      const auto copy = start_.clone();
      MemoryFileSystem& fs = *copy;
      fs.fail_at(call, Fault::kCrash);
      const auto done = second(fs, 2);
      through = fs.calls() <= call;
      fs.recover(survives, rng);
      const std::string where = "seed " + std::to_string(kSeed) + " call " +
                                std::to_string(call) + ": ";
      const int64_t step = check(fs, where);
      seen.insert(step);
      // What was reported saved is saved.
      if (done.ok()) {
        EXPECT_EQ(step, 2) << where;
      }
      if (survives != Survives::kSyncedOnly && call % 4 != 0) continue;
      // The next generation finishes the work and leaves no debris.
      const auto again = second(fs, 3);
      EXPECT_TRUE(again.ok()) << where << again.status().to_string();
      EXPECT_EQ(check(fs, where), 2);
      if (again.ok() && !again->existed) {
        EXPECT_EQ(*fs.list(kFolder),
                  (std::vector<std::string>{"step-00000002"}))
            << where;
      }
    }
  EXPECT_EQ(seen, (std::set<int64_t>{1, 2}));
  EXPECT_GT(call, 50);
  std::printf("%lld crash points\n", static_cast<long long>(call));
}

TEST_F(CrashTest, AFailureAtAnyCallIsReportedAndLosesNothing) {
  std::mt19937_64 rng(kSeed);
  for (const Fault fault : {Fault::kIoOnce, Fault::kFull}) {
    bool through = false;
    for (int64_t call = 0; !through; ++call) {
      const auto copy = start_.clone();
      MemoryFileSystem& fs = *copy;
      fs.fail_at(call, fault);
      const auto done = second(fs, 2);
      through = fs.calls() <= call;
      fs.fail_at(0, Fault::kNone);
      const std::string where = "call " + std::to_string(call) + ": ";
      const int64_t step = check(fs, where);
      if (done.ok()) {
        EXPECT_EQ(step, 2) << where;
      } else if (fault == Fault::kFull) {
        EXPECT_EQ(done.status().code(), Code::kExhausted)
            << where << done.status().to_string();
      }
      if (call % 4 != 0) continue;
      // The same generation may try again in the same place.
      const auto again = second(fs, 2);
      EXPECT_TRUE(again.ok()) << where << again.status().to_string();
      EXPECT_EQ(check(fs, where), 2);
    }
  }
}

TEST_F(CrashTest, AReadErrorWhileLoadingIsReported) {
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

}  // namespace
}  // namespace remesh::store
