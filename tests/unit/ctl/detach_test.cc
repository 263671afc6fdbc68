#include "coordinator/ctl/detach.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "tests/testing/expect.h"

namespace remesh::ctl {
namespace {

// The child takes the signal when it is ready for it.
TEST(Detached, AnInterruptReachesAChildThatDoesNotRunYet) {
  sigset_t set, before;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigprocmask(SIG_BLOCK, &set, &before);
  ASSERT_OK_AND(Detached both, Detached::start());
  if (both.child() == 0) {
    int taken = 0;
    sigwait(&set, &taken);
    _exit(taken == SIGTERM ? 7 : 8);
  }
  raise(SIGINT);
  EXPECT_EQ(both.exit_code_of_parent(), 7);
  for (const int s : {SIGINT, SIGTERM, SIGHUP}) ::signal(s, SIG_DFL);
  sigprocmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace
}  // namespace remesh::ctl
