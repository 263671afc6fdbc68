#include "coordinator/server/journal.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <random>

#include "tests/testing/expect.h"
#include "tests/testing/hooked_file_system.h"
#include "tests/testing/seed.h"
#include "tests/testing/temp_dir.h"

namespace remesh::server {
namespace {

namespace fs = std::filesystem;

class JournalTest : public testing::Test {
 protected:
  static pb::Durable state(int64_t generation) {
    pb::Durable d;
    d.set_epoch(7);
    d.set_phase(pb::Durable::RUNNING);
    d.set_generation(generation);
    // Long, so that a state is several pages.
    d.mutable_cause()->set_what(
        std::string(20'000, static_cast<char>('a' + generation % 26)));
    return d;
  }

  const std::unique_ptr<FileSystem> files_ = posix_file_system();
  const TempDir dir_;
  const std::string path_ = dir_ / "journal";
};

TEST_F(JournalTest, GivesBackTheNewestState) {
  {
    ASSERT_OK_AND(auto j, Journal::open(*files_, path_));
    EXPECT_FALSE(j->restored().has_value());
    for (int i = 1; i <= 5; ++i) {
      ASSERT_OK(j->persist(state(i)));
    }
  }
  ASSERT_OK_AND(auto j, Journal::open(*files_, path_));
  ASSERT_TRUE(j->restored().has_value());
  EXPECT_EQ(j->restored()->SerializeAsString(), state(5).SerializeAsString());
}

TEST_F(JournalTest, OneThatCannotBeExaminedNowIsNotReplaced) {
  {
    ASSERT_OK_AND(auto j, Journal::open(*files_, path_));
    ASSERT_OK(j->persist(state(1)));
  }
  HookedFileSystem stale([](const std::string& call, const auto&) {
    return call == "look_up" ? errno_error("journal", ESTALE) : ok_status();
  });
  EXPECT_EQ(Journal::open(stale, path_).status().code(), Code::kIo);
  ASSERT_OK_AND(const auto j, Journal::open(*files_, path_));
  ASSERT_TRUE(j->restored().has_value());
  EXPECT_EQ(j->restored()->generation(), 1);
}

TEST_F(JournalTest, APhaseOfALaterReleaseIsNotTakenForWaiting) {
  {
    ASSERT_OK_AND(auto j, Journal::open(*files_, path_));
    pb::Durable later;
    ASSERT_TRUE(later.ParseFromString(std::string("\x10\x63", 2)));
    ASSERT_OK(j->persist(later));
  }
  EXPECT_SAYS(Journal::open(*files_, path_), "later release");
}

// Of two coordinators that both have the journal open the younger wins, and of
// two of one epoch the one that wrote last.
TEST_F(JournalTest, OfTwoWritersTheYoungerWins) {
  ASSERT_OK_AND(auto older, Journal::open(*files_, path_));
  ASSERT_OK(older->persist(state(1)));
  ASSERT_OK_AND(auto younger, Journal::open(*files_, path_));
  ASSERT_OK(older->persist(state(2)));
  pb::Durable d = state(3);
  EXPECT_EQ(younger->persist(d).code(), Code::kCancelled)
      << "of the same epoch, and state 2 was written since it looked";
  d.set_epoch(8);
  ASSERT_OK(younger->persist(d));
  const Status refused = older->persist(state(4));
  EXPECT_EQ(refused.code(), Code::kCancelled) << refused.to_string();
  EXPECT_SAYS(refused, "epoch 8");
  d.set_generation(5);
  ASSERT_OK(younger->persist(d));
  ASSERT_OK_AND(auto next, Journal::open(*files_, path_));
  EXPECT_EQ(next->restored()->SerializeAsString(), d.SerializeAsString());
}

// A writer says over a pipe which state it has persisted, and is killed at any
// moment: the next life finds that state, or the one that was under way.
TEST_F(JournalTest, AKilledWriterLosesNothingItPersisted) {
  int64_t reached = 0;
  const uint32_t seed = test_seed();
  std::mt19937 random(seed);
  for (int round = 0; round < 15; ++round) {
    int said[2];
    ASSERT_EQ(pipe(said), 0);
    const pid_t child = fork();
    if (child == 0) {
      auto j = Journal::open(*files_, path_);
      if (!j.ok()) _exit(1);
      for (int64_t g = reached + 1;; ++g) {
        if (!(*j)->persist(state(g)).ok()) _exit(2);
        (void)!write(said[1], &g, sizeof(g));
      }
    }
    close(said[1]);
    // Let it get going, then a random moment more.
    int64_t heard = 0;
    ASSERT_EQ(read(said[0], &heard, sizeof(heard)),
              static_cast<ssize_t>(sizeof(heard)))
        << "seed " << seed << ", round " << round;
    usleep(random() % 20'000);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    for (int64_t g = 0; read(said[0], &g, sizeof(g)) == sizeof(g);) heard = g;
    close(said[0]);

    auto j = Journal::open(*files_, path_);
    ASSERT_OK(j) << ", seed " << seed;
    ASSERT_TRUE((*j)->restored().has_value());
    const int64_t found = (*j)->restored()->generation();
    EXPECT_GE(found, heard) << "seed " << seed << ", round " << round;
    EXPECT_LE(found, heard + 1) << "seed " << seed << ", round " << round;
    EXPECT_EQ((*j)->restored()->cause().what(), state(found).cause().what());
    reached = found;
  }
}

TEST_F(JournalTest, AFailedPersistLeavesTheStateBefore) {
  {
    ASSERT_OK_AND(auto j, Journal::open(*files_, path_));
    ASSERT_OK(j->persist(state(1)));
    // No file of this process may grow: the disk is full.
    ::signal(SIGXFSZ, SIG_IGN);
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    rlimit none = before;
    none.rlim_cur = fs::file_size(path_);
    setrlimit(RLIMIT_FSIZE, &none);
    pb::Durable big = state(2);
    big.mutable_cause()->set_what(std::string(500'000, 'x'));
    const Status full = j->persist(big);
    setrlimit(RLIMIT_FSIZE, &before);
    ASSERT_FALSE(full.ok());
    // And when there is room again, it continues.
    ASSERT_OK(j->persist(state(3)));
  }
  ASSERT_OK_AND(auto j, Journal::open(*files_, path_));
  EXPECT_EQ(j->restored()->generation(), 3);
}

// Another member of the group that owns the run directory may put a link there,
// to a file of a size that a journal can have.
TEST_F(JournalTest, NothingIsWrittenThroughALink) {
  ASSERT_OK_AND(const auto j, Journal::open(*files_, path_));
  const std::string mine = dir_ / "mine", content(300'000, 'x');
  std::ofstream(mine, std::ios::binary) << content;
  fs::remove(path_);
  fs::create_symlink(mine, path_);
  EXPECT_EQ(j->persist(state(1)).code(), Code::kIo);
  EXPECT_EQ(*read_file(*files_, mine, content.size()), content);
}

TEST_F(JournalTest, OtherFilesAreRefusedWithWhatToDo) {
  for (const std::string& content :
       {std::string(), std::string("hello"), std::string(10'000, 'x')}) {
    std::ofstream(path_, std::ios::binary) << content;
    const auto j = Journal::open(*files_, path_);
    ASSERT_FALSE(j.ok()) << content.size();
    EXPECT_EQ(j.status().code(), Code::kCorrupt) << j.status().message();
    EXPECT_SAYS(j, "mv " + path_);
    std::ifstream in(path_, std::ios::binary);
    const std::string after((std::istreambuf_iterator<char>(in)), {});
    EXPECT_EQ(after, content) << "it must be left as it is";
    fs::remove(path_);
  }
}

}  // namespace
}  // namespace remesh::server
