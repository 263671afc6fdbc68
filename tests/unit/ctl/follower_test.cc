// What `remesh run` learns from the coordinator's replies.
#include "coordinator/ctl/follower.h"

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/base/file_system.h"
#include "proto/rundir/paths.h"
#include "proto/wire/channel.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/testing/process.h"
#include "tests/testing/sentences.h"
#include "tests/testing/text_message.h"

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

// They may be worded in another way by the next release.
TEST_F(FollowerTest, SentencesDecideNothing) {
  std::vector<std::tuple<pb::JobStatus::State, bool, bool, bool>> seen;
  const auto as_it_is = [](const std::string& sentence) { return sentence; };
  for (const std::function<std::string(const std::string&)>& words :
       {std::function(as_it_is), std::function(reworded)}) {
    follower_.emplace(pb::Job(), dir_.path(), &screen_);
    follower_->await_stop();
    const wire::Received question = asked();
    pb::Envelope e;
    e.mutable_reply()->set_id(question.envelope.command().id());
    merge_text(
        "state: WAITING detail: 'too few slots: 1 offered' missing_slots: 2 "
        "wait_reason: WORKERS stop_requested: true problems { text: 'full' } "
        "workers { state: DEAD cordoned: 'no room' }",
        e.mutable_reply()->mutable_status());
    for_each_sentence(&e, words);
    (void)server_->send(question.peer, e);
    EXPECT_TRUE(eventually([&] { return follower_->lacks_slots(); }));
    std::ofstream events(rundir::events_path(dir_.path()), std::ios::app);
    for (const char* text :
         {"event: 'waiting' detail: 'too few slots: 1 offered'",
          "event: 'stop_declined' cause: 'no space left on device'",
          "event: 'job_failed' cause: 'no luck' detail: 'w1 was not "
          "reached'"}) {
      auto event = text_message<pb::EventRecord>(text);
      for_each_sentence(&event, words);
      events << rundir::event_line(event) << std::endl;
    }
    poll();
    EXPECT_EQ(follower_->reason(), words("no luck"));
    ASSERT_TRUE(rundir::end_of_run(dir_.path()).has_value());
    EXPECT_EQ(rundir::end_of_run(dir_.path())->outcome, follower_->outcome());
    seen.emplace_back(follower_->outcome(), follower_->lacks_slots(),
                      follower_->has_workers(), follower_->stop_declined());
  }
  EXPECT_EQ(seen[0], std::tuple(pb::JobStatus::FAILED, true, false, true));
  EXPECT_EQ(seen[0], seen[1]);
}

}  // namespace
}  // namespace remesh::ctl
