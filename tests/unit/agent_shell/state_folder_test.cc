// Training states and scratch folders: what is kept, what is removed and when.
#include "worker/agent/shell/state_folder.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <ctime>
#include <filesystem>
#include <fstream>

#include "checkpoint/memory/segment_directory.h"
#include "tests/testing/process.h"
#include "tests/testing/segment_states.h"
#include "tests/testing/small_disk.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/agent_shell/num_entries.h"
#include "worker/agent/shell/scratch.h"

namespace remesh::agent {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kJob = 0xABC;
constexpr uint64_t kOther = 0xDEF;

std::string add_segment(const std::string& folder, uint64_t job, int64_t step) {
  std::string path =
      memory::segment_path(folder, job, memory::free_number(folder, job));
  auto s = memory::StateSegment::create(path, job, 8);
  EXPECT_OK(s);
  memory::StateInfo info = memory::info_of(step, 8);
  info.replica = true;
  memory::update(**s, info);
  return path;
}

void make_older(const std::string& path, int64_t seconds) {
  timespec times[2] = {};
  times[0].tv_sec = times[1].tv_sec = time(nullptr) - seconds;
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

class StatesTest : public ::testing::Test {
 protected:
  void TearDown() override {
    std::error_code ignored;
    for (const char* name : {"dead", "a"})
      fs::remove_all(shared_root_of(root() + "/" + name), ignored);
  }
  std::string root() const { return dir_ / "s"; }
  std::string states_of(const std::string& name) const {
    return state_folder_of(root() + "/" + name);
  }
  std::unique_ptr<Scratch> open(const std::string& name) {
    auto s = Scratch::open(root(), name);
    EXPECT_OK(s);
    return std::move(s).value();
  }
  // A worker that created segments of these jobs and was killed while a
  // generation ran.
  void leave_dead(const std::string& name, const std::vector<uint64_t>& jobs) {
    const pid_t child = fork();
    if (child == 0) {
      auto s = open(name);
      (void)s->make_state_folder();
      for (const uint64_t job : jobs) add_segment(s->state_folder(), job, 7);
      auto g = s->make_generation(3, 1 << 20);
      std::ofstream(g->shared + "/segment") << "x";
      std::ofstream(memory::segment_path(s->state_folder(), kJob, 9) + ".new")
          << "x";
      kill(getpid(), SIGKILL);
    }
    waitpid(child, nullptr, 0);
    ASSERT_TRUE(fs::exists(states_of(name)));
  }
  void make_old(const std::string& name, uint64_t job) {
    for (const auto& f : memory::list_segments(states_of(name), job))
      make_older(f.path, kStateKeptS + 5);
  }
  size_t num_segments(const std::string& name, uint64_t job) const {
    return memory::list_segments(states_of(name), job).size();
  }

  TempDir dir_;
};

TEST_F(StatesTest, TheInventoryListsTheRecords) {
  auto s = open("a");
  ASSERT_OK(s->make_state_folder());
  const std::string folder = s->state_folder();
  struct stat st {};
  ASSERT_EQ(stat(folder.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0700u);
  const std::string path = add_segment(folder, kJob, 7);
  add_segment(folder, kOther, 8);
  std::ofstream(memory::segment_path(folder, kJob, 1)) << "rubbish";
  std::ofstream(memory::segment_path(folder, kJob, 2) + ".new") << "x";
  const InventoryTaken e = take_inventory(folder, kJob);
  EXPECT_EQ(e.job, kJob);
  ASSERT_EQ(e.damaged.size(), 1u);
  EXPECT_HAS(e.damaged[0], memory::segment_path(folder, kJob, 1));
  EXPECT_FALSE(fs::exists(memory::segment_path(folder, kJob, 2) + ".new"));
  ASSERT_EQ(e.holdings.size(), 1u);
  EXPECT_EQ(e.holdings[0].ShortDebugString(),
            "step: 7 generation: 3 rank: 1 sharding { mesh { dp: 2 pp: 2 tp: 1 "
            "cp: 1 } bounds: 0 bounds: 1 bounds: 3 chunks: 1 zero_stage: 2 "
            "zero_shard_group: 1 } model: 77 elements: 8 tokens: 7000 "
            "sequences: 70 replica: true segment: \"" +
                path + "\"");
  EXPECT_EQ(describe_states(folder, kJob, e).rfind("1 states in 2 segments", 0),
            0u);
  EXPECT_HAS(describe_states(folder, kJob, e), ": steps 7");
  s->remove_states(kJob, false);
  EXPECT_EQ(num_segments("a", kOther), 1u);
}

TEST_F(StatesTest, OnlyAKilledWorkersStatesAreKeptForItsSuccessor) {
  leave_dead("a", {kJob});
  make_old("a", kJob);  // age does not matter
  {
    auto s = open("a");
    EXPECT_EQ(num_segments("a", kJob), 1u);
    EXPECT_EQ(num_entries(s->state_folder()), 1);  // not the unfinished one
    EXPECT_EQ(num_entries(shared_root_of(s->folder())), 2);  // state, owner
    EXPECT_EQ(num_entries(s->folder()), 2);                  // lock, pmix
    EXPECT_NE(s->cleaned(), "");
  }
  // They may still be needed.
  EXPECT_EQ(num_segments("a", kJob), 1u);
  {
    auto s = open("a");
    EXPECT_EQ(s->remove_states(kJob, false), 1);
  }
  EXPECT_FALSE(fs::exists(shared_root_of(root() + "/a")));
  EXPECT_FALSE(fs::exists(root()));
}

TEST_F(StatesTest, OthersSweepADeadWorkersStatesOnceTheyAreOld) {
  leave_dead("dead", {kJob, kOther});
  auto s = open("a");
  EXPECT_EQ(num_segments("dead", kJob), 1u);
  EXPECT_EQ(num_segments("dead", kOther), 1u);
  EXPECT_EQ(num_entries(shared_root_of(root() + "/dead")), 2);
  EXPECT_EQ(num_entries(root() + "/dead"), 1);  // the lock
  EXPECT_EQ(s->refresh_states(kJob), 0);
  make_old("dead", kJob);
  EXPECT_EQ(s->refresh_states(kJob), 1);
  EXPECT_EQ(num_segments("dead", kJob), 0u);
  EXPECT_EQ(num_segments("dead", kOther), 1u);
  make_old("dead", kOther);
  s.reset();  // its last clean-up
  EXPECT_FALSE(fs::exists(shared_root_of(root() + "/dead")));
  EXPECT_FALSE(fs::exists(root()));
}

// Databases have files of that name in their folders.
TEST_F(StatesTest, FoldersOfOtherProgramsAreLeftAlone) {
  fs::create_directories(root() + "/database/wal");
  std::ofstream(root() + "/database/lock") << "";
  fs::create_directories(root() + "/numbers");
  std::ofstream(root() + "/numbers/lock") << "17";
  fs::create_directories(root() + "/open");
  std::ofstream(root() + "/open/lock") << "17 23";
  fs::permissions(root() + "/open", fs::perms::all);
  fs::create_directory_symlink(root() + "/database", root() + "/link");
  open("a").reset();
  for (const char* path : {"database/wal", "numbers/lock", "open/lock", "link"})
    EXPECT_TRUE(fs::exists(root() + "/" + path)) << path;
}

// Anybody may make any name in /dev/shm.
TEST_F(StatesTest, ALinkInsteadOfItsSharedFolderIsNotFollowed) {
  fs::create_directories(dir_ / "home/work");
  fs::create_directories(root() + "/dead");
  std::ofstream(root() + "/dead/lock") << "1 1";
  const std::string shared = shared_root_of(root() + "/dead");
  fs::create_directory_symlink(dir_ / "home", shared);
  open("dead").reset();
  open("a").reset();
  EXPECT_TRUE(fs::exists(dir_ / "home/work"));
  for (const auto& folder : memory::state_folders(memory::kSharedMemory))
    EXPECT_NE(folder, shared + "/state");
  fs::remove(shared);
}

TEST_F(StatesTest, StatesOfALiveWorkerAreNotTouchedByOthers) {
  auto a = open("a");
  auto b = open("dead");  // not yet
  ASSERT_OK(b->make_state_folder());
  add_segment(b->state_folder(), kJob, 7);
  make_old("dead", kJob);
  EXPECT_EQ(a->refresh_states(kJob), 0);
  EXPECT_EQ(a->remove_states(kJob, true), 0);
  EXPECT_EQ(num_segments("dead", kJob), 1u);
}

TEST_F(StatesTest, UsedStatesStayAndOldOnesOfAnotherJobAreRemoved) {
  leave_dead("a", {kJob, kOther});
  make_old("a", kJob);
  make_old("a", kOther);
  auto s = open("a");
  EXPECT_EQ(s->refresh_states(0), 0);  // any of them may be needed
  EXPECT_TRUE(has_old_states(s->state_folder()));
  EXPECT_EQ(s->refresh_states(kJob), 1);
  EXPECT_EQ(num_segments("a", kJob), 1u);
  EXPECT_EQ(num_segments("a", kOther), 0u);
  EXPECT_FALSE(has_old_states(s->state_folder()));
}

// A daemon that never heard of the job's end, or a worker under another root.
// In a folder of the test: any other worker of this user would do the same.
TEST_F(StatesTest, UnclaimedStatesAreRemovedWhoeverHoldsThem) {
  fs::create_directory(dir_ / "shm");
  const auto in_folder = [&](const std::string& root, const char* name) {
    auto s = Scratch::open(root, name, 0, dir_ / "shm");
    EXPECT_OK(s);
    return std::move(s).value();
  };
  const auto dead = in_folder(root(), "dead");
  ASSERT_OK(dead->make_state_folder());
  const std::string lost = add_segment(dead->state_folder(), kJob, 7);
  const std::string used = add_segment(dead->state_folder(), kJob, 7);
  const std::string young = add_segment(dead->state_folder(), kOther, 7);
  {
    const auto owner = memory::StateSegment::open(
        used, kJob, memory::StateSegment::Mode::kWrite);
    ASSERT_OK(owner);
    for (const std::string& path : {lost, used})
      make_older(path, memory::kStateUnclaimedS + 5);
    in_folder(dir_ / "other", "b");
    EXPECT_FALSE(fs::exists(lost));
    EXPECT_TRUE(fs::exists(used));
  }
  make_older(young, memory::kStateUnclaimedS - 600);
  EXPECT_EQ(dead->refresh_states(0), 1);
  EXPECT_FALSE(fs::exists(used));
  EXPECT_TRUE(fs::exists(young));
  make_older(young, memory::kStateUnclaimedS + 5);
  EXPECT_EQ(dead->refresh_states(kOther), 0);
  EXPECT_TRUE(fs::exists(young));
}

TEST_F(StatesTest, StatesMayBeInAnotherFolder) {
  fs::create_directory(dir_ / "shm");
  {
    ASSERT_OK_AND(auto s, Scratch::open(root(), "a", 0, dir_ / "shm"));
    ASSERT_OK(s->make_state_folder());
    EXPECT_TRUE(s->state_folder().starts_with(dir_ / "shm/remesh-"));
    const auto room = s->state_room(kJob);
    const std::string path = add_segment(s->state_folder(), kJob, 7);
    // Others may write to the disk between two looks at its room.
    EXPECT_TRUE(testing::wait_until(
        [&] {
          return *s->state_room(kJob) ==
                 *s->state_room(kOther) + fs::file_size(path);
        },
        10'000));
    EXPECT_GT(room.value_or(0), 0u);
    ASSERT_OK_AND(auto g, s->make_generation(1, 1 << 20));
    EXPECT_TRUE(g.shared.starts_with(dir_ / "shm/remesh-"));
    EXPECT_EQ(s->remove_states(kJob, false), 1);
    EXPECT_FALSE(fs::exists(states_of("a")));
  }
  EXPECT_EQ(num_entries(dir_ / "shm"), 0);
  EXPECT_SAYS(Scratch::open(root(), "a", 0, dir_ / "none"), "--state-folder");
}

TEST_F(StatesTest, ATmpfsWithoutALimitHasRoomForMpi) {
  const testing::SmallDisk unlimited(dir_ / "shm", 0);
  if (!unlimited.mounted()) GTEST_SKIP() << "needs mount";
  ASSERT_OK_AND(auto s, Scratch::open(root(), "a", 0, unlimited.path()));
  ASSERT_OK_AND(auto g, s->make_generation(1, 1 << 20));
  EXPECT_TRUE(g.shared.starts_with(unlimited.path())) << g.shared;
}

TEST_F(StatesTest, TheEndOfAJobRemovesStatesOfDeadWorkers) {
  leave_dead("dead", {kJob, kOther});
  auto s = open("a");
  ASSERT_OK(s->make_state_folder());
  add_segment(s->state_folder(), kJob, 7);
  EXPECT_EQ(s->remove_states(kJob, false), 1);
  EXPECT_EQ(num_segments("dead", kJob), 1u);
  EXPECT_EQ(s->remove_states(kJob, true), 1);
  EXPECT_EQ(num_segments("dead", kOther), 1u);
}

TEST_F(StatesTest, AnEmptyFolderIsRemovedWithTheGeneration) {
  auto s = open("a");
  ASSERT_OK(s->make_generation(1, 1 << 20));
  ASSERT_OK(s->make_state_folder());
  s->remove_generation(1);
  EXPECT_FALSE(fs::exists(shared_root_of(s->folder())));
}

}  // namespace
}  // namespace remesh::agent
