#include "coordinator/server/syncer.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>

#include "tests/testing/expect.h"

namespace remesh::server {
namespace {

bool soon(const std::function<bool()>& what) {
  for (int i = 0; i < 1000 && !what(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return what();
}

class SyncerTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = testing::TempDir() + "/remesh-syncer-" + std::to_string(getpid());
    fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ASSERT_GE(fd_, 0);
  }
  void TearDown() override {
    close(fd_);
    std::filesystem::remove(path_);
  }
  int64_t mtime_ns() const {
    return std::filesystem::last_write_time(path_).time_since_epoch().count();
  }

  std::string path_;
  int fd_ = -1;
};

TEST_F(SyncerTest, AStepIsDurableOnceItsSyncHasSucceeded) {
  std::atomic<bool> fails = true;
  Syncer syncer(fd_, fd_, 1, [&](int fd) {
    if (!fails) return fdatasync(fd);
    errno = EIO;
    return -1;
  });
  EXPECT_EQ(syncer.synced_step(), 0);
  ASSERT_EQ(write(fd_, "one\n", 4), 4);
  syncer.wrote(1, 4);
  ASSERT_TRUE(soon([&] { return syncer.problem().has_value(); }));
  EXPECT_HAS(*syncer.problem(), "metrics.jsonl: sync");
  EXPECT_EQ(syncer.synced_step(), 0);
  EXPECT_FALSE(syncer.sync_metrics().ok());
  // What failed once is written again, because the kernel may have dropped it.
  const int64_t before = mtime_ns();
  fails = false;
  ASSERT_TRUE(soon([&] { return syncer.synced_step() == 1; }));
  ASSERT_TRUE(soon([&] { return !syncer.problem().has_value(); }));
  EXPECT_GE(mtime_ns(), before);
  EXPECT_EQ(std::filesystem::file_size(path_), 4u);
}

TEST_F(SyncerTest, ASyncOfTheOwnerCountsAtOnce) {
  Syncer syncer(fd_, fd_, 3'600'000);
  syncer.wrote(7, 0);
  ASSERT_OK(syncer.sync_metrics());
  EXPECT_EQ(syncer.synced_step(), 7);
}

}  // namespace
}  // namespace remesh::server
