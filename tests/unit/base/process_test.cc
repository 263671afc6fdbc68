// Exit codes and texts, and BackgroundLoop.
#include "proto/base/process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <future>

#include "proto/base/background_loop.h"
#include "proto/base/exit_code.h"

namespace remesh {
namespace {

using std::chrono::milliseconds;
using Delay = std::optional<milliseconds>;

TEST(ExitCode, HasOneMeaningEach) {
  EXPECT_EQ(exit_code_of(ok_status()), kExitOk);
  EXPECT_EQ(exit_code_of(invalid_argument("x")), kExitUsage);
  EXPECT_EQ(exit_code_of(not_found("x")), kExitNotFound);
  EXPECT_EQ(exit_code_of(ended("x")), kExitEnded);
  EXPECT_EQ(exit_code_of(unavailable("x")), kExitTryAgain);
  EXPECT_EQ(exit_code_of(io_error("x")), kExitFailed);
}

TEST(Code, IsFoundByItsName) {
  EXPECT_STREQ(code_name(Code::kDenied), "denied");
  EXPECT_EQ(code_named(code_name(Code::kOk)), Code::kOk);
  EXPECT_EQ(code_named(code_name(Code::kNotFound)), Code::kNotFound);
  EXPECT_EQ(code_named(code_name(Code::kEnded)), Code::kEnded);
  EXPECT_EQ(code_named("of a newer version"), Code::kUnavailable);
}

// Of a program whose standard descriptors are closed, and that was started by
// one that ignores the ends of its children.
TEST(Process, UndoesWhatItsParentLeft) {
  const pid_t child = fork();
  if (child == 0) {
    close(STDIN_FILENO);
    close(STDERR_FILENO);
    signal(SIGCHLD, SIG_IGN);
    begin_program();
    const bool open_now =
        fcntl(STDIN_FILENO, F_GETFD) >= 0 && fcntl(STDERR_FILENO, F_GETFD) >= 0;
    const int next = open("/dev/null", O_RDONLY);
    const pid_t own = fork();
    if (own == 0) _exit(7);
    int status = 0;
    const bool waited = waitpid(own, &status, 0) == own && WIFEXITED(status) &&
                        WEXITSTATUS(status) == 7;
    _exit(open_now && next > STDERR_FILENO && waited ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Process, ExitTextNamesTheSignal) {
  EXPECT_EQ(exit_text(SIGKILL, 0), "signal 9 (SIGKILL)");
  EXPECT_EQ(exit_text(99, 0), "signal 99");
  EXPECT_EQ(exit_text(0, 65), "exit code 65");
  EXPECT_EQ(program_beside("no-such-program").status().code(), Code::kNotFound);
}

TEST(BackgroundLoop, RunsWhenItAsksToAndWhenWoken) {
  std::promise<void> second, third;
  int calls = 0;
  BackgroundLoop loop(
      [&]() -> Delay {
        ++calls;
        if (calls == 2) second.set_value();
        if (calls == 3) third.set_value();
        return calls == 1 ? Delay(milliseconds(1)) : std::nullopt;
      },
      {.first = milliseconds(1)});
  second.get_future().wait();  // two calls without a wake
  loop.wake();
  third.get_future().wait();
}

TEST(BackgroundLoop, EndsAtOnceHoweverLongItWouldWait) {
  for (const Delay first : {Delay(), Delay(std::chrono::hours(1))}) {
    BackgroundLoop loop([]() -> Delay { return std::nullopt; },
                        {.first = first, .min_gap = std::chrono::hours(1)});
  }
  std::promise<void> ran;
  BackgroundLoop loop(
      [&]() -> Delay {
        ran.set_value();
        return std::nullopt;
      },
      {.min_gap = std::chrono::hours(1)});
  loop.wake();
  ran.get_future().wait();
  loop.wake();  // within the gap: dropped with the loop
}

TEST(Process, ACommonHostNameIsMadeUnique) {
  EXPECT_EQ(host_identity("node7", 5), "node7");
  EXPECT_EQ(host_identity("localhost", 0x1a2b3c4d), "localhost-1a2b3c4d");
  EXPECT_EQ(host_identity("(none)", 1), "localhost-00000001");
  EXPECT_NE(host_identity("localhost", 1), host_identity("localhost", 2));
  EXPECT_EQ(host_identity(), host_identity());
  EXPECT_NE(host_id(), 0U);
  EXPECT_EQ(host_id(), host_id());
  EXPECT_TRUE(host_identity().starts_with(host_name())) << host_identity();
}

// Two containers may share the network and the name of their host, but not the
// states that they keep in memory.
TEST(Process, AHostWithAnotherShmIsAnotherHost) {
  const uint64_t here = host_id();
  constexpr int kCannot = 2;
  const pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWNS) != 0 ||
        mount("", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("shm", "/dev/shm", "tmpfs", 0, nullptr) != 0)
      _exit(kCannot);
    _exit(host_id() == here ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kCannot) GTEST_SKIP() << "needs mount";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Process, TheLimitOfOpenFilesIsRaised) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 64;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  raise_file_limit();
  rlimit after{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &after), 0);
  EXPECT_EQ(after.rlim_cur, std::min<rlim_t>(before.rlim_max, 65536));
  EXPECT_EQ(after.rlim_max, before.rlim_max);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

}  // namespace
}  // namespace remesh
