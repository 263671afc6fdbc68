// Two generations save in one folder, and the older one, which was given up, is
// stopped between looking and acting.

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "checkpoint/manifest/scan.h"
#include "checkpoint/store/store.h"
#include "tests/testing/expect.h"
#include "tests/testing/hooked_file_system.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/checkpoint/fixture.h"

namespace remesh::store {
namespace {

using geometry::ParamTable;

class FencingTest : public testing::Test {
 protected:
  std::string path_of(int64_t step) const {
    return folder_ + "/" + manifest::step_name(step);
  }
  // Generation 2 continues from step 2 of generation 1.
  Result<CommitResult> save_as(FileSystem& fs, int64_t generation,
                               int64_t step) {
    std::optional<manifest::Origin> origin;
    if (generation == 2) origin = {.step = 2, .generation = 1};
    return save(fs, folder_, {step, generation}, table_, state_, 1,
                {.keep_latest_k = 1}, Compression::kNone, origin);
  }
  // The generation that saved each valid step.
  std::map<int64_t, int64_t> steps() {
    std::map<int64_t, int64_t> out;
    const auto found = manifest::scan(*fs_, folder_);
    for (const manifest::Found& f : *found)
      if (f.status.ok()) out[f.step] = f.manifest.generation();
    return out;
  }
  // Saves a step as generation 1, which is stopped before the call numbered
  // `at` that changes a name or looks at the folder, until `meanwhile` is done.
  // Returns whether there was such a call.
  bool stopped_at(int at, int64_t step, const std::function<void()>& meanwhile,
                  Status* status) {
    static const std::set<std::string> kCalls = {"list", "look_up", "rename",
                                                 "remove", "sync_dir"};
    int calls = 0;
    HookedFileSystem fs([&](const std::string& call, const std::string&) {
      if (kCalls.contains(call) && ++calls == at) meanwhile();
      return ok_status();
    });
    *status = save_as(fs, 1, step).status();
    return calls >= at;
  }

  std::unique_ptr<FileSystem> fs_ = posix_file_system();
  const ParamTable table_ = ParamTable::make(tiny_model());
  const State state_ = random_state(table_.num_elements(), 5);
  const TempDir dir_;
  const std::string folder_ = dir_ / "checkpoints";
};

using Steps = std::map<int64_t, int64_t>;

// Wherever it is stopped, what the newer generation saved stays.
TEST_F(FencingTest, AFencedGenerationDoesNotTouchNewerCheckpoints) {
  int at = 1;
  for (bool stopped = true; stopped; ++at) {
    SCOPED_TRACE(at);
    std::filesystem::remove_all(folder_);
    ASSERT_OK(save_as(*fs_, 1, 2));
    // A damaged one, which a save of step 4 replaces.
    ASSERT_OK(fs_->create_dirs(path_of(4)));
    std::ofstream(path_of(4) + "/manifest.json") << "?";
    Status status;
    stopped = stopped_at(
        at, 4,
        [&] {
          ASSERT_OK(manifest::claim(*fs_, folder_, 2));
          ASSERT_OK(save_as(*fs_, 2, 3));
          ASSERT_OK(save_as(*fs_, 2, 4));
        },
        &status);
    EXPECT_EQ(steps()[4], stopped ? 2 : 1) << status.to_string();
  }
  EXPECT_GT(at, 15);
}

// The newer generation has begun to load when retention would remove its
// source.
TEST_F(FencingTest, AFencedGenerationKeepsTheSourceOfTheNewerOne) {
  int kept = 0;
  bool stopped = true;
  for (int at = 1; stopped; ++at) {
    SCOPED_TRACE(at);
    std::filesystem::remove_all(folder_);
    ASSERT_OK(save_as(*fs_, 1, 2));
    Status status;
    bool was_there = false;
    stopped = stopped_at(
        at, 4,
        [&] {
          ASSERT_OK(manifest::claim(*fs_, folder_, 2));
          was_there = steps().contains(2);
        },
        &status);
    if (was_there) ++kept;
    EXPECT_TRUE(!was_there || steps().contains(2)) << status.to_string();
  }
  EXPECT_GT(kept, 10);
}

// It was killed after it had set the newer generation's checkpoint aside.
TEST_F(FencingTest, ACheckpointThatWasMovedAsideIsMovedBack) {
  ASSERT_OK(save_as(*fs_, 1, 2));
  ASSERT_OK(save_as(*fs_, 2, 4));
  ASSERT_OK(fs_->rename(path_of(4), folder_ + "/" + manifest::old_name(4)));
  EXPECT_EQ(steps(), (Steps{}));
  ASSERT_OK(save(*fs_, folder_, {6, 3}, table_, state_, 1, {.keep_latest_k = 2},
                 Compression::kNone,
                 manifest::Origin{.step = 4, .generation = 2}));
  EXPECT_EQ(steps(), (Steps{{4, 2}, {6, 3}}));
}

}  // namespace
}  // namespace remesh::store
