// Exit codes and texts, and BackgroundLoop.
#include "proto/base/process.h"

#include <gtest/gtest.h>

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
  EXPECT_EQ(code_named(code_name(Code::kOk)), Code::kOk);
  EXPECT_EQ(code_named(code_name(Code::kNotFound)), Code::kNotFound);
  EXPECT_EQ(code_named(code_name(Code::kEnded)), Code::kEnded);
  EXPECT_EQ(code_named("of a newer version"), Code::kUnavailable);
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

}  // namespace
}  // namespace remesh
