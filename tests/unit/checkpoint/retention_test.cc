// What retention and the commit of a checkpoint must not touch.

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/manifest/branch.h"
#include "checkpoint/manifest/scan.h"
#include "checkpoint/store/store.h"
#include "tests/testing/expect.h"
#include "tests/testing/hooked_file_system.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/checkpoint/fixture.h"

namespace remesh::store {
namespace {

using Numbers = std::vector<int64_t>;

class RetentionTest : public testing::Test {
 protected:
  std::string path_of(int64_t step) const {
    return path_join(folder_, manifest::step_name(step));
  }
  std::string old_path(int64_t step) const {
    return path_join(folder_, manifest::old_name(step));
  }
  // As a process does that is killed before it removes it, or puts it back.
  void set_aside(int64_t step) {
    ASSERT_OK(fs_->rename(path_of(step), old_path(step)));
  }
  Status save_step(FileSystem& fs, int64_t step, int64_t keep_latest_k) {
    return save(fs, folder_, {step, 1}, table_, state_, 1,
                {.keep_latest_k = keep_latest_k})
        .status();
  }
  void keep(int64_t step) {
    ASSERT_OK(write_file_atomically(
        *fs_, path_join(path_of(step), manifest::kKeepName), "best"));
  }
  Numbers steps() {
    Numbers out;
    const auto found = manifest::scan(*fs_, folder_);
    for (const manifest::Found& f : *found) out.push_back(f.step);
    return out;
  }

  std::unique_ptr<FileSystem> fs_ = posix_file_system();
  const geometry::ParamTable table_ = geometry::ParamTable::make(tiny_model());
  const State state_ = random_state(table_.num_elements(), 3);
  const SaveId first_{.step = 1, .generation = 1};
  const TempDir dir_;
  const std::string folder_ = dir_ / "checkpoints";
  const std::string tmp_ = path_join(folder_, ".tmp-step-00000001.g1");
};

TEST_F(RetentionTest, WhatIsKeptStaysAndIsNotMoved) {
  int moved = 0;
  HookedFileSystem fs([&](const std::string& call, const std::string& path) {
    moved += call == "rename" && path == path_of(1) ? 1 : 0;
    return ok_status();
  });
  ASSERT_OK(save_step(fs, 1, 1));
  keep(1);
  EXPECT_TRUE(manifest::scan(fs, folder_)->at(0).kept);
  for (const int64_t step : {2, 3}) ASSERT_OK(save_step(fs, step, 1));
  EXPECT_EQ(steps(), (Numbers{3, 1}));
  EXPECT_EQ(moved, 0);
}

// Somebody asks for it while retention is about to remove it.
TEST_F(RetentionTest, WhatIsKeptAtTheLastMomentStays) {
  HookedFileSystem fs([&](const std::string& call, const std::string& path) {
    if (call == "rename" && path == path_of(1)) keep(1);
    return ok_status();
  });
  for (const int64_t step : {1, 2}) ASSERT_OK(save_step(fs, step, 1));
  EXPECT_EQ(steps(), (Numbers{2, 1}));
  ASSERT_OK(save_step(fs, 3, 1));
  EXPECT_EQ(steps(), (Numbers{3, 1}));
}

TEST_F(RetentionTest, WhatMayBeKeptStays) {
  HookedFileSystem fs([&](const std::string& call, const std::string& path) {
    return call == "look_up" &&
                   path == path_join(path_of(1), manifest::kKeepName)
               ? unavailable(path + ": input/output error")
               : ok_status();
  });
  for (const int64_t step : {1, 2, 3}) ASSERT_OK(save_step(fs, step, 1));
  EXPECT_EQ(steps(), (Numbers{3, 1}));
}

// Its disk does not answer: it may be as good as ever.
TEST_F(RetentionTest, WhatCannotBeReadNowStays) {
  ASSERT_OK(save_step(*fs_, 1, 3));
  HookedFileSystem fs([&](const std::string& call, const std::string& path) {
    return call == "open" && path.starts_with(path_of(1))
               ? unavailable(path + ": input/output error")
               : ok_status();
  });
  ASSERT_OK(save_step(fs, 2, 3));
  EXPECT_EQ(steps(), (Numbers{2, 1}));
}

// The same of one that was set aside, and cannot be read or put back now.
TEST_F(RetentionTest, WhatWasSetAsideStaysUntilItIsKnown) {
  for (const char* failing : {"open", "rename"}) {
    SCOPED_TRACE(failing);
    std::filesystem::remove_all(folder_);
    ASSERT_OK(save_step(*fs_, 1, 3));
    set_aside(1);
    HookedFileSystem fs([&](const std::string& call, const std::string& path) {
      return call == failing && path.starts_with(old_path(1))
                 ? unavailable(path + ": input/output error")
                 : ok_status();
    });
    ASSERT_OK(save_step(fs, 2, 3));
    EXPECT_EQ(steps(), Numbers{2});
    ASSERT_OK(save_step(*fs_, 3, 3));
    EXPECT_EQ(steps(), (Numbers{3, 2, 1}));
  }
}

// Its step is saved again: it makes way, and stays.
TEST_F(RetentionTest, WhatIsKeptStaysEvenIfItWasSetAside) {
  ASSERT_OK(save_step(*fs_, 1, 1));
  keep(1);
  set_aside(1);
  ASSERT_OK(fs_->create_dirs(path_of(1)));  // no checkpoint
  ASSERT_OK(save_step(*fs_, 1, 1));
  EXPECT_OK(manifest::read_checkpoint(
      *fs_, folder_ + "/kept-step-00000001-before-generation-1"));
  EXPECT_EQ(steps(), Numbers{1});
}

// The process is killed while it removes one.
TEST_F(RetentionTest, WhatIsLeftOfACheckpointIsNotPutBack) {
  ASSERT_OK(save_step(*fs_, 1, 1));
  int removed = 0;
  HookedFileSystem fs([&](const std::string& call, const std::string& path) {
    return call == "remove" && path.starts_with(old_path(1) + "/") &&
                   ++removed > 1
               ? unavailable(path + ": input/output error")
               : ok_status();
  });
  ASSERT_OK(save_step(fs, 2, 1));
  EXPECT_EQ(removed, 2);
  ASSERT_TRUE(fs_->exists(old_path(1)));
  ASSERT_OK(save_step(*fs_, 3, 3));
  EXPECT_EQ(steps(), (Numbers{3, 2}));
  EXPECT_FALSE(fs_->exists(old_path(1)));
}

// The folder may hold larger steps, which the job went back from.
TEST_F(RetentionTest, WhatWasJustSavedStays) {
  for (const int64_t step : {10, 11, 5}) ASSERT_OK(save_step(*fs_, step, 1));
  EXPECT_EQ(steps(), (Numbers{11, 5}));
}

// As below a /scratch that only its owner may list.
TEST_F(RetentionTest, AFolderWhoseParentCannotBeReadIsAsGoodAsAny) {
  HookedFileSystem fs([&](const std::string& call, const std::string& path) {
    return call == "sync_dir" && path == dir_.path()
               ? Status(Code::kDenied, path + ": permission denied")
               : ok_status();
  });
  for (const int64_t step : {1, 2}) {
    ASSERT_OK(save_step(fs, step, 1));
  }
  EXPECT_EQ(steps(), Numbers{2});
}

// What is reported as not saved is not there.
TEST_F(RetentionTest, AFolderThatCannotBeSyncedGetsNoCheckpoint) {
  HookedFileSystem fs([&](const std::string& call, const std::string& path) {
    return call == "sync_dir" && path == dir_.path()
               ? unavailable(path + ": input/output error")
               : ok_status();
  });
  EXPECT_EQ(save_step(fs, 1, 1).code(), Code::kUnavailable);
  EXPECT_EQ(steps(), Numbers());
}

// A newer generation claims the folder while the last file is written.
TEST_F(RetentionTest, AFencedGenerationPublishesNothing) {
  HookedFileSystem fs([&](const std::string& call, const std::string& path) {
    return call == "sync_dir" && path == tmp_
               ? manifest::claim(*fs_, folder_, 2)
               : ok_status();
  });
  EXPECT_EQ(save_step(fs, 1, 3).code(), Code::kCancelled);
  EXPECT_EQ(steps(), Numbers());
}

// A newer generation claims it when this one has saved, and has begun to clean
// up: what is set aside may be of its doing.
TEST_F(RetentionTest, AFencedGenerationPutsNothingBack) {
  ASSERT_OK(save_step(*fs_, 1, 3));
  set_aside(1);
  bool published = false;
  int lists = 0;
  HookedFileSystem fs([&](const std::string& call, const std::string& path) {
    if (call == "rename" && path.ends_with(".tmp-step-00000002.g1"))
      published = true;
    return published && call == "list" && path == folder_ && ++lists == 3
               ? manifest::claim(*fs_, folder_, 2)
               : ok_status();
  });
  ASSERT_OK(save_step(fs, 2, 3));
  EXPECT_GE(lists, 3);
  EXPECT_EQ(steps(), Numbers{2});
  EXPECT_TRUE(fs_->exists(old_path(1)));
}

TEST_F(RetentionTest, AnEarlierAttemptDoesNotVouchForAShard) {
  ASSERT_OK(write_shards(*fs_, folder_, first_, table_, state_, 1));
  ASSERT_EQ(missing_shards(*fs_, folder_, first_, 1), std::vector<int>());
  HookedFileSystem fs([&](const std::string& call, const std::string& path) {
    return call != "remove" && call != "look_up" &&
                   path.ends_with(manifest::shard_name(0))
               ? unavailable(path + ": input/output error")
               : ok_status();
  });
  ASSERT_FALSE(write_shards(fs, folder_, first_, table_, state_, 1).ok());
  EXPECT_EQ(missing_shards(*fs_, folder_, first_, 1), std::vector<int>{0});
}

TEST_F(RetentionTest, ATruncatedShardIsNotPublished) {
  ASSERT_OK(write_shards(*fs_, folder_, first_, table_, state_, 1));
  const std::string shard = path_join(tmp_, manifest::shard_name(0));
  std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 1);
  const auto done =
      commit(*fs_, folder_, manifest_of(table_, first_), 1, table_, {});
  EXPECT_EQ(done.status().code(), Code::kCorrupt) << done.status().to_string();
  EXPECT_EQ(steps(), Numbers());
}

}  // namespace
}  // namespace remesh::store
