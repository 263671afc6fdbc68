#include "coordinator/ctl/client.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <thread>

#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "parallel/jobfile/jobfile.h"
#include "proto/base/file_system.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/testing/resolved_job.h"

namespace remesh::ctl {
namespace {

pb::Job job_of(const std::string& steps) {
  return resolved_job(
      {"data.path=/d", "train.seq_len=32", "train.steps=" + steps});
}

// It has the lock of the directory before it writes its job there.
TEST(RunningCoordinator, IsComparedOnceItsJobIsWritten) {
  const testing::TempDir dir;
  const std::string run = dir.path() + "/run";
  EXPECT_EQ(running_coordinator({job_of("3"), {}}, run).value(), 0);
  const auto lock = rundir::RunLock::acquire(run);
  ASSERT_TRUE(lock.ok()) << lock.status().message();
  auto answer = std::async(std::launch::async, [&] {
    return running_coordinator({job_of("3"), {}}, run);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const auto fs = posix_file_system();
  ASSERT_TRUE(rundir::write_job(*fs, job_of("4"), run).ok());
  const Status refused = answer.get().status();
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_SAYS(refused, "(train.steps 4 -> 3");
  EXPECT_EQ(running_coordinator({job_of("4"), {}}, run).value(), getpid());
}

// As after `remesh stop`: it dismisses the workers before it leaves.
TEST(RunningCoordinator, IsNotFollowedOnceItsJobHasEnded) {
  const testing::TempDir dir;
  const std::string run = dir.path() + "/run";
  auto lock = rundir::RunLock::acquire(run);
  ASSERT_TRUE(lock.ok()) << lock.status().message();
  ASSERT_TRUE(rundir::write_job(*posix_file_system(), job_of("3"), run).ok());
  pb::EventRecord end;
  end.set_event("job_stopped");
  testing::write_whole(rundir::events_path(run),
                       rundir::event_line(end) + "\n");
  auto answer = std::async(std::launch::async, [&] {
    return running_coordinator({job_of("3"), {}}, run);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  lock->reset();
  EXPECT_EQ(answer.get().value(), 0);
}

// On a disk that has failed, say.
TEST(FindTarget, ARunWhoseAddressCannotBeReadIsNotOneWithoutACoordinator) {
  const testing::TempDir dir;
  const std::string& run = dir.path();
  ASSERT_OK(rundir::write_job(*posix_file_system(), job_of("3"), run));
  ASSERT_OK(find_target(run));
  const std::string address = rundir::endpoint_path(run);
  std::filesystem::create_symlink(address, address);  // ELOOP
  const Status failed = find_target(run).status();
  EXPECT_EQ(failed.code(), Code::kIo) << failed.to_string();
  EXPECT_SAYS(failed, "coordinator.addr");
}

}  // namespace
}  // namespace remesh::ctl
