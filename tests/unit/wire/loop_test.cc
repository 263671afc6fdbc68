#include "proto/wire/loop.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <thread>

#include "proto/base/clock.h"
#include "tests/testing/expect.h"

namespace remesh::wire {
namespace {

struct Event {
  int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  ~Event() { close(fd); }
  void set() const {
    const uint64_t one = 1;
    (void)!write(fd, &one, sizeof(one));
  }
  void clear() const {
    uint64_t n = 0;
    (void)!read(fd, &n, sizeof(n));
  }
};

TEST(Loop, TicksAtLeastEveryPeriodAndReturnsTheCode) {
  Loop loop(10);
  int ticks = 0;
  const int64_t start = monotonic_ms();
  loop.on_tick([&] {
    if (++ticks == 5) loop.stop(7);
  });
  EXPECT_EQ(loop.run(), 7);
  EXPECT_GE(monotonic_ms() - start, 40);
}

TEST(Loop, WakesAtOnceForADescriptorAndTicksAfterIt) {
  Loop loop(5000);
  Event event;
  int calls = 0;
  bool ticked_after = false;
  loop.watch(event.fd, [&] {
    event.clear();
    ++calls;
  });
  loop.on_tick([&] {
    ticked_after = calls == 1;
    loop.stop(0);
  });
  std::thread writer([&] { event.set(); });
  EXPECT_EQ(loop.run(), 0);
  writer.join();
  EXPECT_TRUE(ticked_after);
}

TEST(Loop, HandlersMayRemoveAndReplaceEachOther) {
  Loop loop(20);
  Event a, b, c;
  int b_calls = 0, c_calls = 0, replaced = 0;
  a.set();
  b.set();
  c.set();
  loop.watch(a.fd, [&] {
    a.clear();
    loop.unwatch(b.fd);
    loop.watch(c.fd, [&] {
      c.clear();
      ++replaced;
    });
    loop.unwatch(a.fd);  // itself
  });
  loop.watch(b.fd, [&] { ++b_calls; });
  loop.watch(c.fd, [&] { ++c_calls; });
  int ticks = 0;
  loop.on_tick([&] {
    if (++ticks == 3) loop.stop(0);
  });
  loop.run();
  EXPECT_EQ(b_calls, 0);
  EXPECT_EQ(c_calls, 0);
  EXPECT_EQ(replaced, 1);
}

TEST(Loop, SignalsArriveAsEvents) {
  sigset_t before;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  {
    Loop loop(2000);
    std::vector<int> seen;
    ASSERT_OK(loop.watch_signals({SIGUSR1, SIGTERM}, [&](int s) {
      seen.push_back(s);
      if (seen.size() == 2) loop.stop(1);
    }));
    raise(SIGUSR1);
    raise(SIGTERM);
    EXPECT_EQ(loop.run(), 1);
    EXPECT_EQ(seen.size(), 2u);
    // A third, during stop, stays unread and must not end the process.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

TEST(Loop, StopInAHandlerSkipsTheRest) {
  Loop loop(1000);
  Event a, b;
  a.set();
  b.set();
  int calls = 0;
  loop.watch(a.fd, [&] { ++calls, loop.stop(3); });
  loop.watch(b.fd, [&] { ++calls, loop.stop(3); });
  loop.on_tick([&] { ++calls; });
  EXPECT_EQ(loop.run(), 3);
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace remesh::wire
