// The outbox: order, what depends on a write, and disks that are full or
// stalled.
#include "coordinator/server/outbox.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "coordinator/server/wait.h"

namespace remesh::server {
namespace {

// A disk whose writes return when they are let, and fail while it is full.
class Disk {
 public:
  Outbox::Write write(const std::string& text) {
    return [this, text] {
      std::unique_lock lock(mutex_);
      ++begun_;
      changed_.notify_all();
      changed_.wait(lock, [this] { return !stalled_; });
      if (full_) return exhausted("FILE: full");
      written_.push_back(text);
      return ok_status();
    };
  }
  void set(bool stalled, bool full) {
    const std::lock_guard lock(mutex_);
    stalled_ = stalled;
    full_ = full;
    changed_.notify_all();
  }
  void wait_for_tries(int n) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return begun_ >= n; });
  }
  int tries() {
    const std::lock_guard lock(mutex_);
    return begun_;
  }
  std::vector<std::string> written() {
    const std::lock_guard lock(mutex_);
    return written_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stalled_ = false;
  bool full_ = false;
  int begun_ = 0;
  std::vector<std::string> written_;
};

using Texts = std::vector<std::string>;

class OutboxTest : public testing::Test {
 protected:
  void write(const std::string& text) {
    outbox_->write("FILE",
                   [disk = disk_, w = disk_->write(text)] { return w(); });
  }
  void then(const std::string& text) {
    outbox_->then([this, text] { done_.push_back(text); });
  }
  // Delivers until that much was done.
  void wait_for_done(size_t n) {
    while (done_.size() < n) {
      pollfd fd{outbox_->fd(), POLLIN, 0};
      poll(&fd, 1, -1);
      outbox_->deliver();
    }
  }

  // Shared with writes that outlive the outbox.
  std::shared_ptr<Disk> disk_ = std::make_shared<Disk>();
  Texts done_;
  Texts notes_;
  std::unique_ptr<Outbox> outbox_ = std::make_unique<Outbox>(Outbox::Options{
      .retry_ms = 1,
      .stalled_ms = 100,
      .patience_ms = 10,
      .note = [this](const Status& s) { notes_.push_back(s.message()); }});
};

TEST_F(OutboxTest, ActionsThatDependOnNoWriteRunAtOnce) {
  then("a");
  EXPECT_EQ(done_, Texts{"a"});
}

TEST_F(OutboxTest, WritesInOrderAndReleasesDependentActions) {
  disk_->set(/*stalled=*/true, /*full=*/false);
  write("1");
  then("a");
  write("2");
  then("b");
  const uint64_t two = outbox_->newest();
  disk_->wait_for_tries(1);
  outbox_->deliver();
  EXPECT_EQ(done_, Texts{});
  EXPECT_FALSE(outbox_->written(two));
  disk_->set(false, false);
  wait_for_done(2);
  EXPECT_EQ(disk_->written(), (Texts{"1", "2"}));
  EXPECT_EQ(done_, (Texts{"a", "b"}));
  EXPECT_TRUE(outbox_->written(two));
}

// A journal of which only the newest state counts. A state of another epoch is
// not replaced: the files may refuse it.
TEST_F(OutboxTest, AStateReplacesAnEarlierOneNotYetWritten) {
  disk_->set(/*stalled=*/true, /*full=*/false);
  const auto put = [&](const std::string& text, uint64_t epoch) {
    outbox_->write(
        "FILE", [disk = disk_, w = disk_->write(text)] { return w(); }, 100,
        epoch);
    then(text);
  };
  put("1", 7);
  disk_->wait_for_tries(1);
  for (const char* text : {"2", "3", "4"}) put(text, 7);
  write("event");
  put("5", 7);
  put("6", 8);
  put("7", 8);
  disk_->set(false, false);
  wait_for_done(7);
  EXPECT_EQ(disk_->written(), (Texts{"1", "4", "event", "5", "7"}));
  EXPECT_EQ(done_, (Texts{"1", "2", "3", "4", "5", "6", "7"}));
  EXPECT_TRUE(outbox_->written(outbox_->newest()));
  EXPECT_FALSE(outbox_->full());
}

// A worker that is started again and again makes events and states for as long
// as nothing can be written. Metrics depend on the state before them.
TEST_F(OutboxTest, AStalledDiskTakesLittleMemory) {
  outbox_ = std::make_unique<Outbox>(
      Outbox::Options{.retry_ms = 1, .full_bytes = 1000, .patience_ms = 10});
  disk_->set(/*stalled=*/true, /*full=*/false);
  const auto make = [&](const std::string& text) {
    return [disk = disk_, w = disk_->write(text)] { return w(); };
  };
  write("metrics");
  disk_->wait_for_tries(1);
  for (int i = 1; i <= 100; ++i) {
    const std::string n = std::to_string(i);
    outbox_->write("STATE", make("state " + n), 400, 1);
    then(n);
    outbox_->write_line("EVENTS", make("event " + n), 100);
  }
  EXPECT_TRUE(outbox_->full());
  EXPECT_EQ(outbox_->take_dropped(), 0);
  outbox_->write_line("EVENTS", make("the last event"), 100, /*keep=*/true);
  write("more metrics");
  outbox_->write("STATE", make("state 101"), 400, 1);
  then("101");
  disk_->set(false, false);
  wait_for_done(101);
  EXPECT_EQ(disk_->written(),
            (Texts{"metrics", "state 100", "event 1", "event 2", "event 3",
                   "event 4", "event 5", "event 6", "the last event",
                   "more metrics", "state 101"}));
  EXPECT_FALSE(outbox_->full());
  EXPECT_EQ(outbox_->take_dropped(), 94);
  EXPECT_EQ(outbox_->take_dropped(), 0);
}

// What may happen after a state waits for the one in its place, too.
TEST_F(OutboxTest, ActionsOfAReplacedStateWaitForItsReplacement) {
  disk_->set(/*stalled=*/true, /*full=*/false);
  const auto make = [&](const std::string& text) {
    return [disk = disk_, w = disk_->write(text)] { return w(); };
  };
  write("first");
  disk_->wait_for_tries(1);
  outbox_->write("STATE", make("old"), 1, 1);
  then("old");
  const uint64_t old = outbox_->newest();
  outbox_->write_line("EVENTS", make("event"), 1);
  outbox_->write("STATE", make("new"), 1, 1);
  then("new");
  EXPECT_FALSE(outbox_->written(old));
  disk_->set(false, false);
  wait_for_done(2);
  outbox_->finish(/*patience_ms=*/60'000);
  EXPECT_EQ(disk_->written(), (Texts{"first", "new", "event"}));
  EXPECT_EQ(done_, (Texts{"old", "new"}));
}

TEST_F(OutboxTest, ReplaceableStatesTakeTheMemoryOfOne) {
  disk_->set(/*stalled=*/true, /*full=*/false);
  for (int i = 0; i < 10'000; ++i)
    outbox_->write(
        "FILE", [disk = disk_, w = disk_->write("s")] { return w(); }, 1 << 20,
        1);
  EXPECT_FALSE(outbox_->full());
  disk_->set(false, false);
}

TEST_F(OutboxTest, ReleasedActionsMayWriteAgain) {
  outbox_->write("FILE", disk_->write("1"));
  outbox_->then([this] {
    write("2");
    then("b");
  });
  wait_for_done(1);
  EXPECT_EQ(disk_->written(), (Texts{"1", "2"}));
}

TEST_F(OutboxTest, AFullDiskIsTriedAgainUntilThereIsRoom) {
  disk_->set(false, /*full=*/true);
  write("1");
  write("2");
  then("a");
  disk_->wait_for_tries(50);
  outbox_->deliver();
  EXPECT_EQ(done_, Texts{});
  while (!outbox_->problem()) continue;
  EXPECT_EQ(outbox_->problem()->text(), "FILE: full");
  EXPECT_GT(outbox_->take_waited().unwritten_ms, 0);
  disk_->set(false, false);
  wait_for_done(1);
  EXPECT_EQ(disk_->written(), (Texts{"1", "2"}));
  EXPECT_FALSE(outbox_->problem());
  EXPECT_EQ(notes_, (Texts{"FILE: full", ""}));
}

TEST_F(OutboxTest, ActionsWaitForLinesThatDoNotFail) {
  disk_->set(/*stalled=*/true, false);
  outbox_->write_line(
      "EVENTS", [disk = disk_, w = disk_->write("1")] { return w(); }, 1);
  then("a");
  disk_->wait_for_tries(1);
  outbox_->deliver();
  EXPECT_EQ(done_, Texts{});
  disk_->set(false, false);
  wait_for_done(1);
  EXPECT_EQ(disk_->written(), Texts{"1"});
}

// The journal is overwritten in place, and the log of events has to grow.
TEST_F(OutboxTest, LinesThatDoNotFitHoldNothingBack) {
  disk_->set(false, /*full=*/true);
  const auto line = [&](const std::string& text, bool keep = false) {
    outbox_->write_line(
        "EVENTS", [disk = disk_, w = disk_->write(text)] { return w(); }, 1,
        keep);
  };
  const auto state = std::make_shared<Texts>();  // that has room
  const auto write_state = [&](const std::string& text) {
    outbox_->write("STATE", [state, text] {
      state->push_back(text);
      return ok_status();
    });
  };
  line("1");
  then("when it has failed");
  wait_for_done(1);
  write_state("a");
  line("2");
  write_state("b");
  then("after b");
  wait_for_done(2);
  EXPECT_EQ(*state, (Texts{"a", "b"}));
  while (!outbox_->problem()) continue;
  EXPECT_EQ(outbox_->problem()->text(), "FILE: full");
  // The last line of a job is waited for.
  line("the end", /*keep=*/true);
  then("after the end");
  disk_->wait_for_tries(disk_->tries() + 3);
  outbox_->deliver();
  EXPECT_EQ(done_.size(), 2U);
  disk_->set(false, false);
  wait_for_done(3);
  EXPECT_EQ(disk_->written(), (Texts{"1", "2", "the end"}));
  EXPECT_EQ(notes_, (Texts{"FILE: full", ""}));
}

TEST_F(OutboxTest, ARefusedWriteIsNotRetriedAndNothingFollows) {
  outbox_->write("FILE", [] { return cancelled("taken over"); });
  write("2");
  then("a");
  pollfd fd{outbox_->fd(), POLLIN, 0};
  poll(&fd, 1, -1);
  ASSERT_TRUE(outbox_->refused());
  EXPECT_EQ(outbox_->refused()->message(), "taken over");
  outbox_->finish(/*patience_ms=*/60'000);  // nothing is left to wait for
  outbox_->deliver();
  EXPECT_EQ(disk_->written(), Texts{});
  EXPECT_EQ(done_, Texts{});
}

TEST_F(OutboxTest, AStalledDiskIsNamedAndDelaysNothing) {
  disk_->set(/*stalled=*/true, false);
  write("1");
  while (!outbox_->problem()) continue;
  EXPECT_EQ(outbox_->problem()->text(), "FILE: the storage does not answer");
  while (outbox_->take_waited().stalled_ms < Wait::kCreditedMs) continue;
  outbox_.reset();
  disk_->set(false, false);
}

TEST_F(OutboxTest, ASlowDiskIsNoProblemYet) {
  outbox_ = std::make_unique<Outbox>(Outbox::Options{
      .retry_ms = 1, .stalled_ms = INT64_MAX, .patience_ms = 10});
  disk_->set(/*stalled=*/true, false);
  write("1");
  int64_t waited = 0;
  while (waited < 2000) waited += outbox_->take_waited().stalled_ms;
  EXPECT_FALSE(outbox_->problem());
  outbox_.reset();
  disk_->set(false, false);
}

TEST_F(OutboxTest, PendingWritesAreLostAtTheEnd) {
  disk_->set(false, /*full=*/true);
  write("1");
  disk_->wait_for_tries(1);
  outbox_.reset();
  disk_->set(false, false);
  EXPECT_EQ(disk_->written(), Texts{});
}

TEST(Wait, IsCreditedInFullOnceItIsLong) {
  Wait w;
  w.begin(1000);
  EXPECT_EQ(w.take_ms(1299), 0);
  EXPECT_EQ(w.take_ms(1300), 300);
  EXPECT_EQ(w.take_ms(1320), 20);
  w.end(1350);
  EXPECT_EQ(w.take_ms(9000), 30);
  EXPECT_EQ(w.take_ms(9000), 0);
  w.begin(9000);
  w.end(9299);
  EXPECT_EQ(w.take_ms(9999), 0) << "short ones are no wait";
  w.begin(10'000);
  w.end(10'400);
  w.begin(10'400);
  w.end(10'800);
  EXPECT_EQ(w.take_ms(10'800), 800);
}

}  // namespace
}  // namespace remesh::server
