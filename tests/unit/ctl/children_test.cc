#include "coordinator/ctl/children.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "coordinator/rundir/run_dir.h"
#include "tests/testing/expect.h"
#include "tests/testing/process.h"
#include "tests/testing/temp_dir.h"

namespace remesh::ctl {
namespace {

class ChildrenTest : public ::testing::Test {
 protected:
  std::string log() const { return dir_ + "/log"; }
  // The number that a shell wrote into a file.
  int number_in(const std::string& name) const {
    for (int i = 0; i < 6000; ++i) {
      std::ifstream in(dir_ + "/" + name);
      if (int pid = 0; in >> pid) return pid;
      usleep(10'000);
    }
    return 0;
  }
  static bool gone_soon(int pid) {
    for (int i = 0; i < 6000 && alive(pid); ++i) usleep(10'000);
    return !alive(pid);
  }
  // A zombie is not.
  static bool alive(int pid) {
    const std::string state = testing::process_state(pid);
    return !state.empty() && state != "Z" && state != "X";
  }
  const TempDir temp_;
  const std::string dir_ = temp_.path();
};

TEST_F(ChildrenTest, ReportsHowChildrenEnded) {
  Children children;
  ASSERT_OK(children.start(1, {"/bin/sh", "-c", "echo hello; exit 5"}, log()));
  ASSERT_OK(children.start(2, {"/bin/sh", "-c", "kill -9 $$"}, log()));
  std::map<int, std::string> ended;
  for (int i = 0; i < 6000 && ended.size() < 2; ++i) {
    for (const Ended& e : children.reap()) ended[e.child] = e.to_text();
    usleep(10'000);
  }
  EXPECT_EQ(ended[1], "exit code 5");
  EXPECT_EQ(ended[2], "signal 9 (SIGKILL)");
  EXPECT_EQ(rundir::read_file(log()).value(), "hello\n");
}

TEST_F(ChildrenTest, TheLogIsKeptWhenStdinIsClosed) {
  const int stdin_fd = dup(STDIN_FILENO);
  close(STDIN_FILENO);
  {
    Children children;
    EXPECT_OK(children.start(1, {"/bin/sh", "-c", "cat; echo hello"}, log()));
    for (int i = 0; i < 6000 && children.reap().empty(); ++i) usleep(10'000);
  }
  dup2(stdin_fd, STDIN_FILENO);
  close(stdin_fd);
  EXPECT_EQ(rundir::read_file(log()).value(), "hello\n");
}

TEST_F(ChildrenTest, OutputIsNotWrittenThroughSymbolicLinks) {
  const std::string mine = dir_ + "/mine";
  std::ofstream(mine) << "kept";
  std::filesystem::create_symlink(mine, log());
  Children children;
  EXPECT_SAYS(children.start(1, {"/bin/sh", "-c", "echo hello"}, log()),
              "through a link");
  EXPECT_EQ(rundir::read_file(mine).value(), "kept");
}

// What a process prints before there is a folder for it.
TEST_F(ChildrenTest, OutputInMemoryDoesNotFollowLinks) {
  const Output output;
  Children children;
  ASSERT_OK(children.start(1, {"/bin/sh", "-c", "echo hello"}, output.path()));
  for (int i = 0; i < 6000 && children.reap().empty(); ++i) usleep(10'000);
  EXPECT_EQ(output.lines(), std::vector<std::string>{"hello"});
}

TEST_F(ChildrenTest, AMissingProgramIsNamed) {
  Children children;
  const auto pid = children.start(1, {dir_ + "/none"}, log());
  ASSERT_FALSE(pid.ok());
  EXPECT_SAYS(pid, dir_ + "/none");
  EXPECT_TRUE(children.reap().empty());
}

TEST_F(ChildrenTest, KillAllTakesOrphansToo) {
  int orphan = 0;
  {
    Children children;
    // A grandchild in a session of its own, that ignores what it can.
    const std::string script =
        "setsid sh -c 'trap \"\" TERM HUP INT; echo $$ > " + dir_ +
        "/pid; while :; do sleep 1; done' & wait";
    ASSERT_OK(children.start(1, {"/bin/sh", "-c", script}, log()));
    orphan = number_in("pid");
    ASSERT_GT(orphan, 0);
  }
  EXPECT_FALSE(alive(orphan));
}

TEST_F(ChildrenTest, NoChildOutlivesAKilledParent) {
  const pid_t parent = fork();
  if (parent == 0) {
    Children children;
    (void)children
        .start(1,
               {"/bin/sh", "-c", "echo $$ > " + dir_ + "/pid; exec sleep 100"},
               log())
        .ok();
    pause();
    _exit(0);
  }
  const int child = number_in("pid");
  ASSERT_GT(child, 0);
  EXPECT_TRUE(alive(child));
  kill(parent, SIGKILL);
  waitpid(parent, nullptr, 0);
  EXPECT_TRUE(gone_soon(child));
}

}  // namespace
}  // namespace remesh::ctl
