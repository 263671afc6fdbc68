#include "coordinator/ctl/scratch_names.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/memory/segment_directory.h"
#include "proto/base/descriptor.h"
#include "tests/testing/files.h"

namespace remesh::ctl {
namespace {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

class ScratchNames : public ::testing::Test {
 protected:
  // The folder of the states that the worker with that folder has left.
  std::string states_of(const std::string& folder) {
    const std::string shared = dir_.path() + "/" + std::to_string(++count_);
    fs::create_directories(shared + "/state");
    std::ofstream(memory::owner_file(shared)) << folder << "\n";
    return shared + "/state";
  }
  Names names(const std::set<std::string>& state_folders) {
    return scratch_names(2, run_, root_, state_folders);
  }

  testing::TempDir dir_;
  std::string run_ = dir_.path() + "/run";
  std::string root_ = dir_.path() + "/scratch";
  std::string first_ = scratch_name("local-1", run_);
  std::string second_ = scratch_name("local-2", run_);
  int count_ = 0;
};

TEST_F(ScratchNames, AreThoseOfTheRun) {
  EXPECT_NE(first_, scratch_name("local-1", run_ + "2"));
  EXPECT_EQ(names({}), (Names{first_, second_}));
  EXPECT_EQ(names({states_of(root_ + "/" + second_)}),
            (Names{first_, second_}));
}

// As of a worker that was started by hand, or of a run that has moved.
TEST_F(ScratchNames, StatesOfWorkersThatAreGoneAreFound) {
  const std::string own = states_of(root_ + "/" + first_);
  const std::string others = states_of(root_ + "/node7");
  EXPECT_EQ(names({others}), (Names{"node7", second_}));
  EXPECT_EQ(names({own, others}), (Names{first_, "node7"}));
  EXPECT_EQ(names({states_of("/elsewhere/node8")}), (Names{first_, second_}));
  // It comes back by itself.
  fs::create_directories(root_ + "/node7");
  const std::string lock = root_ + "/node7/lock";
  const Descriptor held(open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(flock(held.get(), LOCK_EX), 0);
  EXPECT_EQ(names({others}), (Names{first_, second_}));
}

}  // namespace
}  // namespace remesh::ctl
