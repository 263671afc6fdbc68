// The fence relay and the checkpoint watch.
#include <fmt/format.h>

#include "coordinator/core/checkpoint_watch.h"
#include "coordinator/core/fence_relay.h"
#include "tests/testing/expect.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

pb::FenceIn fence(const std::string& worker, const std::string& blob) {
  pb::FenceIn f;
  f.set_worker(worker);
  f.set_index(0);
  f.set_blob(blob);
  return f;
}

using Names = std::vector<std::string>;

TEST(FenceRelay, IsCompleteWhenEveryWorkerWithRanksContributed) {
  FenceRelay relay;
  pb::Durable d = running({"b", "a"});
  d.mutable_assignment()->add_workers("spare");
  EXPECT_TRUE(relay.add(fence("a", "A"), d).workers.empty());
  EXPECT_TRUE(relay.misses("b"));
  const auto done = relay.add(fence("b", "B"), d);
  EXPECT_EQ(done.result.blob(), "BA")
      << "in the order of the assignment's workers";
  EXPECT_EQ(done.workers, (Names{"a", "b"}));
  EXPECT_EQ(relay.add(fence("a", "A"), d).workers, Names{"a"})
      << "repeated for the one that asks again";
  relay.clear();
  EXPECT_TRUE(relay.add(fence("b", "B"), d).workers.empty());
}

// Ranks of generation 1, one on each worker, which have committed step 9.
struct Watched : RosterFixture {
  CheckpointWatch watch;

  explicit Watched(const std::vector<std::string>& workers = {"a"}) {
    durable = running(workers);
  }
  // The number of events of a report with these fields of the worker's rank.
  size_t hear(const std::string& fields, const std::string& worker = "a") {
    pb::Report r = running_report(worker, 0, worker == "a" ? 0 : 1, 9);
    merge_text(fields, r.mutable_ranks(0));
    RosterFixture::hear(r);
    return watch.observe(roster, 1, 9).size();
  }
};

TEST(CheckpointWatch, AnnouncesEachSaveAndEachErrorOnce) {
  Watched w;
  EXPECT_EQ(w.hear("checkpoint_step: 5"), 1U);
  EXPECT_EQ(w.hear("checkpoint_step: 5"), 0U);
  ASSERT_EQ(w.hear("checkpoint_step: 5 checkpoint_error: 'disk full'"), 1U);
  EXPECT_EQ(w.watch.last_error(), "disk full");
  EXPECT_EQ(w.hear("checkpoint_step: 5 checkpoint_error: 'disk full'"), 0U);
  EXPECT_EQ(w.hear("checkpoint_step: 6"), 1U);
  EXPECT_EQ(w.watch.newest_step(), 6);
  EXPECT_EQ(w.watch.last_error(), "");
  EXPECT_TRUE(w.watch.observe(w.roster, 2, 9).empty())
      << "of another generation";
}

TEST(CheckpointWatch, ACheckpointIsSavedOnceAllRanksHaveCommittedIt) {
  CheckpointWatch watch;
  RosterFixture f;
  f.durable = running({"a", "b"});
  pb::Report r = running_report("a", 1, 0, 9);
  r.mutable_ranks(0)->set_checkpoint_step(9);
  f.hear(r);
  EXPECT_TRUE(watch.observe(f.roster, 1, 7).empty());
  EXPECT_EQ(watch.newest_step(), -1);
  EXPECT_EQ(watch.observe(f.roster, 1, 8).size(), 1U);
}

// Its state may be in memory, and must not be removed when the job fails.
TEST(CheckpointWatch, ADamagedCheckpointIsNotSaved) {
  CheckpointWatch watch;
  watch.know(8);
  CheckpointsScanned scan{.valid = {{.step = 4}, {.step = 8}}};
  EXPECT_EQ(watch.go_back(8, 8, scan, {}), 8);
  scan = {.valid = {{.step = 4}}, .invalid = {{.step = 8}}};
  EXPECT_EQ(watch.go_back(8, 8, scan, {}), 4);
  EXPECT_EQ(watch.newest_step(), 4);
}

TEST(CheckpointWatch, ADamageIsNewOnceHoweverItIsWorded) {
  CheckpointWatch watch;
  InvalidCheckpoint c{.step = 8, .path = "step-8", .why = "8 of 9 bytes"};
  EXPECT_EQ(watch.new_damages({.invalid = {c}}).size(), 1U);
  c.why = "7 of 9 bytes";
  EXPECT_TRUE(watch.new_damages({.invalid = {c}}).empty());
  c.code = Code::kNotFound;
  EXPECT_EQ(watch.new_damages({.invalid = {c}}).size(), 1U);
}

TEST(CheckpointWatch, ACheckpointThatDoesNotLoadIsNotSaved) {
  CheckpointWatch watch;
  watch.know(8);
  const auto refused =
      text_message<pb::Refusals>("checkpoints: 'step-8' checkpoint_steps: 8");
  const CheckpointsScanned scan{
      .valid = {{.step = 4, .path = "step-4"}, {.step = 8, .path = "step-8"}}};
  EXPECT_EQ(watch.go_back(8, 8, scan, refused), 4);
  EXPECT_EQ(watch.newest_step(), 4);
}

// Its rank has failed as often as the one of the generation before, of which
// nobody has heard that a save succeeded meanwhile.
TEST(CheckpointWatch, TheFirstFailedSaveOfAGenerationCounts) {
  Watched w;
  const auto hear = [&](int64_t saved, const std::string& error) {
    return w.hear(
        fmt::format("checkpoint_step: {} failed_saves: 1 "
                    "checkpoint_error: '{}' checkpoint_code: '{}'",
                    saved, error, code_name(Code::kExhausted)));
  };
  EXPECT_EQ(hear(-1, "step-5: no space"), 1U);
  EXPECT_EQ(hear(7, "step-5: no space"), 1U) << "saved";
  w.watch.begin_generation();
  EXPECT_EQ(hear(-1, "step-9: no space"), 1U);
  EXPECT_EQ(w.watch.last_error(), "step-9: no space");
}

TEST(CheckpointWatch, ACauseIsAnnouncedOnceForAllRanksAndSteps) {
  CheckpointWatch watch;
  Roster roster;
  const pb::Durable d = running({"a"});
  uint64_t seq = 0;
  const auto hear = [&](int64_t saved, int64_t step, const Status& why) {
    pb::Report r = running_report("a", ++seq, 0, 9);
    *r.add_ranks() = r.ranks(0);
    for (int i = 0; i < 2; ++i) {
      r.mutable_ranks(i)->set_rank(i);
      r.mutable_ranks(i)->set_checkpoint_step(saved);
      r.mutable_ranks(i)->set_failed_saves(step / 10);
      r.mutable_ranks(i)->set_checkpoint_error(
          fmt::format("/c/.step-{}/shard-{}.h5: {}", step, i, why.message()));
      r.mutable_ranks(i)->set_checkpoint_code(code_name(why.code()));
    }
    roster.on_report(r, d, kSilentMs, 0);
    return watch.observe(roster, 1, 100).size();
  };
  EXPECT_EQ(hear(-1, 10, exhausted("no space")), 1U);
  EXPECT_EQ(hear(-1, 20, exhausted("the disk is full")), 0U);
  EXPECT_EQ(hear(-1, 30, io_error("no space")), 1U);
  EXPECT_EQ(hear(-1, 40, exhausted("no space")), 0U);
  EXPECT_HAS(watch.last_error(), "step-40");
  EXPECT_EQ(hear(50, 60, exhausted("no space")), 2U)
      << "saved, then failed again";
  EXPECT_EQ(hear(70, 60, exhausted("in other words")), 1U)
      << "saved; the same failure in other words is none";
}

TEST(CheckpointWatch, StatesThatAreNotKeptAreAnnouncedForEachWorker) {
  Watched w({"a", "b"});
  for (const char* worker : {"a", "b"})
    EXPECT_EQ(
        w.hear(fmt::format("checkpoint_error: 'not kept' checkpoint_code: '{}'",
                           code_name(Code::kUnavailable)),
               worker),
        1U)
        << worker;
}

TEST(CheckpointWatch, CodesThatItDoesNotKnowAreOneCause) {
  Watched w;
  size_t announced = 0;
  for (int i = 1; i <= 100; ++i)
    announced += w.hear(
        fmt::format("checkpoint_step: -1 checkpoint_error: 'of a newer worker' "
                    "checkpoint_code: 'code-{}'",
                    i));
  EXPECT_EQ(announced, 1U);
}

TEST(CheckpointWatch, AStopIsDeclinedWhenTheCountGrows) {
  Watched w;
  const auto hear = [&](int64_t declined) {
    (void)w.hear(fmt::format("declined_stops: {}", declined));
    return w.watch.stop_declined(w.view());
  };
  hear(2);
  pb::Finish finish;
  w.watch.expect_stop(w.roster, &finish);
  EXPECT_FALSE(hear(2));
  EXPECT_TRUE(hear(3));
  EXPECT_FALSE(hear(3));
}

}  // namespace
}  // namespace remesh::core
