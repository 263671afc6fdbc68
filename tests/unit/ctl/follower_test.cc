// What `remesh run` learns from the coordinator's replies.
#include "coordinator/ctl/follower.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "coordinator/rundir/run_dir.h"
#include "proto/base/file_system.h"
#include "proto/wire/channel.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/testing/process.h"

namespace remesh::ctl {
namespace {

class FollowerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = wire::Server::bind("tcp://127.0.0.1:0", std::nullopt);
    ASSERT_OK(server);
    server_ = std::move(*server);
    ASSERT_OK(rundir::write_endpoint(
        *posix_file_system(), dir_.path(),
        {.address = server_->address(), .host = "h", .no_auth = true}));
    follower_.emplace(pb::Job(), dir_.path(), &screen_);
  }

  void poll() { follower_->poll(now_ms_, /*now_unix=*/0); }
  bool eventually(const std::function<bool()>& condition) {
    for (int i = 0; i < 2000; ++i) {
      poll();
      if (condition()) return true;
      testing::sleep_ms(5);
    }
    return false;
  }
  // Its next question; it waits for the reply then.
  wire::Received asked() {
    now_ms_ += 1000;
    std::optional<wire::Received> question;
    EXPECT_TRUE(eventually([&] {
      question = server_->receive();
      return question.has_value();
    }));
    return question.value_or(wire::Received());
  }
  // A stop that is pending has a worker, to tell the replies apart.
  void reply(const wire::Received& question, bool stop_requested) {
    pb::Envelope e;
    e.mutable_reply()->set_id(question.envelope.command().id());
    pb::JobStatus* s = e.mutable_reply()->mutable_status();
    s->set_state(pb::JobStatus::RUNNING);
    s->set_stop_requested(stop_requested);
    if (stop_requested) s->add_workers();
    (void)server_->send(question.peer, e);
  }

  testing::TempDir dir_;
  Screen screen_;
  std::unique_ptr<wire::Server> server_;
  std::optional<Follower> follower_;
  int64_t now_ms_ = 0;
};

// A full disk has no room for the event.
TEST_F(FollowerTest, ADeclinedStopIsSeenInTheStatus) {
  const wire::Received before = asked();
  follower_->await_stop();
  reply(before, false);
  for (int i = 0; i < 20; ++i) {
    poll();
    EXPECT_FALSE(follower_->stop_declined()) << "that was asked before";
    testing::sleep_ms(5);
  }
  reply(asked(), true);
  ASSERT_TRUE(eventually([&] { return follower_->has_workers(); }));
  EXPECT_FALSE(follower_->stop_declined());
  reply(asked(), false);
  ASSERT_TRUE(eventually([&] { return !follower_->has_workers(); }));
  EXPECT_TRUE(follower_->stop_declined());
  EXPECT_FALSE(follower_->stop_declined()) << "said once";
}

}  // namespace
}  // namespace remesh::ctl
