// Properties of the coordinator's core that a scenario would only sample.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "coordinator/core/assignment.h"
#include "coordinator/core/coordinator.h"
#include "proto/base/exit_code.h"
#include "tests/testing/seed.h"
#include "tests/unit/core/builders.h"
#include "tests/unit/core/one_worker.h"

namespace remesh::core {
namespace {

TEST(JoinWindow, WorkersThatKeepJoiningDelayTheStartForTenWindows) {
  Coordinator core({.job = text_message<pb::Job>(
                        "train { global_batch_size: 4 local_batch_size: 1 } "
                        "elastic { join_window_ms: 100 }")});
  int64_t now = 0;
  core.start(now);
  const auto hear = [&](const std::string& worker, uint64_t incarnation) {
    pb::Report r = report(worker, 1, incarnation);
    return !all_of<ScanCheckpoints>(core.on(received(r), now)).empty();
  };
  hear("a", 1);
  // A daemon that crashes in a loop.
  for (uint64_t life = 1; !hear("b", life) && now < 10'000; ++life) now += 90;
  EXPECT_GE(now, 1000);
  EXPECT_LT(now, 1200);
}

// The naive twin of choose_source.
std::optional<int64_t> newest_good(const CheckpointsScanned& scan,
                                   const std::set<std::string>& refused) {
  std::vector<int64_t> good;
  for (const CheckpointInfo& c : scan.valid)
    if (!refused.contains(c.path)) good.push_back(c.step);
  if (good.empty()) return std::nullopt;
  return *std::max_element(good.begin(), good.end());
}

TEST(Source, IsTheNewestValidCheckpointThatHasNotFailedToLoad) {
  const uint64_t seed = test_seed();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937_64 rng(seed);
  for (int round = 0; round < 200; ++round) {
    OneWorker w;
    CheckpointsScanned scan;
    std::set<int64_t> steps;
    for (uint64_t n = rng() % 6; n > 0; --n)
      steps.insert(static_cast<int64_t>(1 + rng() % 900));
    for (const int64_t step : steps) {
      const std::string path = fmt::format("step-{}", step);
      if (rng() % 4 == 0)
        scan.invalid.push_back({.step = step, .path = path, .why = "damaged"});
      else
        scan.valid.push_back({.step = step, .path = path, .recent = {}});
    }
    std::shuffle(scan.valid.begin(), scan.valid.end(), rng);
    std::set<std::string> refused;
    // Each choice fails to load (exit code 65), until none is left.
    while (true) {
      w.run(scan);
      const auto expected = newest_good(scan, refused);
      if (!expected) break;
      ASSERT_EQ(w.phase(), pb::Durable::RUNNING);
      const pb::Source& s = w.durable().assignment().source();
      ASSERT_EQ(s.kind(), pb::Source::CHECKPOINT);
      ASSERT_EQ(s.step(), *expected);
      refused.insert(s.path());
      w.fail(65);
      w.pass(40'000);  // back-off
    }
    if (steps.empty()) {
      EXPECT_EQ(w.durable().assignment().source().kind(), pb::Source::INIT);
    } else {
      EXPECT_EQ(w.phase(), pb::Durable::FAILED) << "never fresh weights";
    }
  }
}

TEST(BackOff, GrowsFromTheThirdFailureAndIsBounded) {
  OneWorker w;
  std::vector<int64_t> waits;
  for (int i = 0; i < 16; ++i) {
    w.run({});
    ASSERT_EQ(w.phase(), pb::Durable::RUNNING) << i;
    w.scan_asked_ms = -1;
    const int64_t failed_ms = w.now();
    w.fail(1, i);  // at another step each time
    while (w.scan_asked_ms < 0 && w.now() < failed_ms + 60'000) w.pass(50);
    ASSERT_GE(w.scan_asked_ms, 0);
    waits.push_back(w.scan_asked_ms - failed_ms);
  }
  EXPECT_EQ(waits[0], 0);
  EXPECT_EQ(waits[1], 0);
  EXPECT_GE(waits[2], 250);
  EXPECT_TRUE(std::is_sorted(waits.begin(), waits.end()));
  EXPECT_GE(waits.back(), 30'000);
  EXPECT_LE(waits.back(), 30'050);
}

// Nor does lack of room end it before, which others may have taken for a while.
TEST(Failures, TheSameRankAtTheSameStepStopsTheJobAtTheLimit) {
  for (const int code : {1, int{kExitNoRoom}})
    for (const int64_t limit : {1, 2, 3, 7}) {
      OneWorker w(limit);
      for (int64_t i = 1; i <= limit; ++i) {
        w.run({});
        ASSERT_EQ(w.phase(), pb::Durable::RUNNING) << i << " of " << limit;
        w.fail(code, 5);
        w.pass(40'000);
      }
      EXPECT_EQ(w.phase(), pb::Durable::FAILED) << limit;
    }
}

// If the journal is lost, a worker may have ranks of an earlier generation of
// the same number.
TEST(Metrics, AreAcceptedFromParticipantsOnly) {
  OneWorker w;
  w.run({});
  ASSERT_EQ(w.phase(), pb::Durable::RUNNING);
  const auto rank = text_message<pb::RankStatus>("rank: 0 committed_step: 1");
  w.report(pb::Report::RUNNING, rank, "outsider", 9.0);
  w.report(pb::Report::RUNNING, rank, "a", 2.0);
  const auto recorded = all_of<AppendMetrics>(w.last);
  ASSERT_EQ(recorded.size(), 1U);
  EXPECT_EQ(recorded[0].metrics.loss(), 2.0);
}

// A lost journal does not bring a number back that a checkpoint knows.
TEST(Numbers, ContinueAboveThoseOfTheCheckpoints) {
  CheckpointsScanned claimed;
  claimed.claimed = 7;
  CheckpointsScanned recorded;
  recorded.valid = {
      {.step = 3, .generation = 7, .path = "step-3", .recent = {}}};
  for (const CheckpointsScanned& scan : {claimed, recorded}) {
    OneWorker w;
    w.run(scan);
    EXPECT_EQ(w.phase(), pb::Durable::RUNNING);
    EXPECT_EQ(w.durable().generation(), 8);
  }
}

// Generation 2 starts over although a rank of generation 1 that is cut off has
// saved step 3, which is found later. From then on step 4 of generation 2 is on
// an abandoned branch, also for a coordinator that restarts.
TEST(Branches, BetweenARestoredStepAndItsGenerationAreAbandoned) {
  const CheckpointsScanned early{
      .valid = {{.step = 3, .generation = 1, .path = "step-3", .recent = {}}}};
  CheckpointsScanned both = early;
  both.valid.push_back(
      {.step = 4, .generation = 2, .path = "step-4", .recent = {}});
  OneWorker w;
  for (int64_t failed = 0; failed < 2; ++failed) {
    w.run({});
    ASSERT_EQ(w.phase(), pb::Durable::RUNNING);
    w.fail(1, failed);
  }
  w.run(early);
  ASSERT_EQ(w.durable().generation(), 3);
  EXPECT_EQ(w.durable().assignment().source().path(), "step-3");
  w.fail(1, 3);
  w.pass(1000);  // back-off
  w.run(both);
  ASSERT_EQ(w.durable().generation(), 4);
  EXPECT_EQ(w.durable().assignment().source().path(), "step-3");
  w.fail(1, 4);
  w.pass(1000);
  w.restart(3);
  w.pass(1000);
  w.run(both);
  ASSERT_EQ(w.durable().generation(), 5);
  EXPECT_EQ(w.durable().assignment().source().path(), "step-3");
}

// By them a rank judges whether the next losses are spikes.
TEST(PastSteps, OfAGenerationAreThoseOfItsSource) {
  CheckpointsScanned scan;
  for (const int64_t step : {2, 3}) {
    scan.valid.push_back({.step = step,
                          .generation = 1,
                          .path = fmt::format("step-{}", step),
                          .recent = {}});
    for (int64_t i = 1; i <= step; ++i) {
      pb::StepMetrics& m = scan.valid.back().recent.emplace_back();
      m.set_generation(1);
      m.set_step(i);
      m.set_loss(static_cast<double>(10 + i));
      if (i == 2) m.set_skipped(true);
    }
  }
  OneWorker w;
  for (const int64_t source : {3, 2}) {
    w.run(scan);
    const pb::Assignment& a = w.durable().assignment();
    ASSERT_EQ(a.source().step(), source);
    ASSERT_EQ(a.past_steps_size(), source);
    for (int i = 0; i < source; ++i) {
      EXPECT_EQ(a.past_steps(i).loss(), 11 + i);
      EXPECT_EQ(a.past_steps(i).skipped(), i == 1);
    }
    w.fail(65);  // the source does not load
    w.pass(40'000);
  }
}

TEST(PastSteps, AreThoseOnTheDataOfTheJob) {
  std::vector<pb::StepMetrics> recent(3);
  for (int i = 0; i < 3; ++i) {
    recent[static_cast<size_t>(i)].set_step(i + 1);
    recent[static_cast<size_t>(i)].set_loss(11 + i);
  }
  const StepLedger ledger(3, recent, {});
  // A fork after step 3, and after step 2, and a run that begins with other
  // sequences than the first.
  for (const auto& [offset, known] : {std::pair{-12, 0}, {-8, 1}, {8, 3}}) {
    pb::Assignment a;
    a.mutable_job()->mutable_train()->set_global_batch_size(4);
    a.mutable_job()->mutable_data()->set_sequence_offset(offset);
    a.mutable_source()->set_step(3);
    add_past_steps(ledger, /*generation=*/1, {}, &a);
    ASSERT_EQ(a.past_steps_size(), known) << offset;
    if (known > 0) {
      EXPECT_EQ(a.past_steps(known - 1).loss(), 13);
    }
  }
}

// Its service manager restarts a worker that crashes.
TEST(Drain, TakesEveryLifeOfAWorkerUntilOneWasSentAway) {
  Options o;
  o.job = small_job();
  o.job.mutable_elastic()->set_keep_state(false);
  o.restored = running({"a", "b"});
  std::optional<Coordinator> core(o);
  (void)core->start(0);
  (void)core->on(received(running_report("a", 1, 0, 1)), 10);
  (void)core->on(received(running_report("b", 1, 1, 1)), 10);
  (void)core->on(
      CommandReceived{1, text_message<pb::Command>("kind: DRAIN worker: 'b'")},
      20);
  EXPECT_EQ(core->durable().phase(), pb::Durable::FINISHING);
  // What the incarnation of b is told when it joins.
  const auto told = [&](uint64_t incarnation, int64_t now_ms) {
    pb::Directive::Goal goal = pb::Directive::UNKNOWN;
    for (const SendDirective& s : all_of<SendDirective>(
             core->on(received(report("b", 1, incarnation)), now_ms)))
      if (s.directive.worker() == "b") goal = s.directive.goal();
    return goal;
  };
  EXPECT_EQ(told(2, 30), pb::Directive::LEAVE);
  // The coordinator is restarted, too.
  o.restored = core->durable();
  core.emplace(o);
  (void)core->start(40);
  EXPECT_EQ(told(3, 50), pb::Directive::LEAVE);
  const auto written = all_of<Persist>(core->on(PeerLost{"b", ""}, 60));
  EXPECT_FALSE(core->roster().considers_live("b", 3));
  ASSERT_FALSE(written.empty());
  o.restored = written.back().durable;
  core.emplace(o);
  (void)core->start(115);
  EXPECT_EQ(told(4, 120), pb::Directive::IDLE) << "started again by hand";
}

// A coordinator that did not run for a while has not heard of every worker.
TEST(End, IsSentToWorkersThatWereSilentDuringAnAbsence) {
  OneWorker idle;
  idle.stop();
  EXPECT_EQ(all_of<Exit>(idle.last).size(), 1U) << "nobody is there";
  OneWorker absent;
  absent.be_absent(5000);
  absent.stop();
  ASSERT_EQ(absent.phase(), pb::Durable::STOPPED);
  EXPECT_TRUE(all_of<Exit>(absent.last).empty());
  absent.be_absent(5000);
  absent.report(pb::Report::IDLE);
  EXPECT_TRUE(all_of<Exit>(absent.last).empty()) << "absent again";
  const auto told = all_of<SendDirective>(absent.last);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_EQ(told[0].directive.goal(), pb::Directive::SHUTDOWN);
  absent.pass(4000);
  EXPECT_TRUE(absent.ended());
}

// Nobody has found the coordinator when it starts.
TEST(Restart, AStopWaitsForWorkersThatMayHoldStepsThatAreNotSaved) {
  for (const bool discards : {false, true}) {
    Options o{.job = small_job()};
    merge_text("elastic { keep_state: true rejoin_wait_ms: 0 }", &o.job);
    set_small_model(&o.job);
    o.restored = running({"a"}, pb::Durable::WAITING);
    o.restored->mutable_stop()->set_asked(true);
    o.restored->mutable_stop()->set_discards(discards);
    o.last_finished_step = 9;
    Coordinator core(std::move(o));
    (void)core.start(0);
    EXPECT_EQ(core.durable().phase(),
              discards ? pb::Durable::STOPPED : pb::Durable::WAITING);
    (void)core.on(Tick{}, kReconnectSlackMs - 1);
    EXPECT_EQ(core.status().wait_reason(), discards
                                               ? pb::JobStatus::NOTHING
                                               : pb::JobStatus::FINISHED_STEPS);
    (void)core.on(Tick{}, kReconnectSlackMs);
    EXPECT_EQ(core.durable().phase(), pb::Durable::STOPPED);
  }
}

// Ranks do not notice that a stop was withdrawn in the middle of a long step.
TEST(DeclinedStop, IsAskedForAgainAfterAStepWithoutIt) {
  OneWorker w;
  w.run({});
  const auto hear = [&](int64_t committed, int64_t declined) {
    pb::RankStatus rank;
    rank.set_rank(0);
    rank.set_committed_step(committed);
    rank.set_declined_stops(declined);
    w.report(pb::Report::RUNNING, rank);
    return w.phase();
  };
  EXPECT_EQ(hear(5, 0), pb::Durable::RUNNING);
  w.stop(/*discard=*/false);
  EXPECT_EQ(w.phase(), pb::Durable::FINISHING);
  EXPECT_EQ(hear(6, 1), pb::Durable::RUNNING);
  w.stop(/*discard=*/false);
  w.pass(2000);
  EXPECT_EQ(w.phase(), pb::Durable::RUNNING);
  EXPECT_EQ(hear(7, 1), pb::Durable::RUNNING) << "it began with the request";
  EXPECT_EQ(hear(8, 1), pb::Durable::FINISHING);
  // Steps may be shorter than a message takes.
  EXPECT_EQ(hear(9, 2), pb::Durable::RUNNING);
  EXPECT_EQ(hear(90, 2), pb::Durable::RUNNING);
  w.stop(/*discard=*/false);
  EXPECT_EQ(w.phase(), pb::Durable::RUNNING);
  w.pass(1000);
  EXPECT_EQ(w.phase(), pb::Durable::FINISHING);
}

// A worker kills ranks that make no progress while it hears no coordinator, as
// where the storage of both does not answer while the last step is saved.
TEST(End, OfTheLastStepIsNotThatOfRanksThatTheirWorkerKilled) {
  for (const bool killed : {false, true}) {
    OneWorker w;
    w.run({});
    ASSERT_EQ(w.phase(), pb::Durable::RUNNING);
    auto rank = text_message<pb::RankStatus>("rank: 0 committed_step: 1000");
    w.report(pb::Report::RUNNING, rank, "a", /*loss=*/2.0);
    w.scan_asked_ms = -1;
    rank.set_exited(true);
    rank.set_signal(killed ? 9 : 0);
    rank.set_killed_by_worker(killed);
    w.report(pb::Report::QUIESCED, rank);
    EXPECT_EQ(w.phase(), killed ? pb::Durable::WAITING : pb::Durable::DONE);
    EXPECT_EQ(w.scan_asked_ms >= 0, killed) << "for the checkpoint";
  }
}

TEST(Restart, TheMeshThatIsAdoptedWasMeasuredBefore) {
  Options o{.job = small_job()};
  merge_text(
      "parallel { tensor_parallel_degree: -1 } elastic { keep_state: false }",
      &o.job);
  set_small_model(&o.job);
  o.restored = running({"a"});
  for (int step = 1; step <= 9; ++step) {
    pb::StepMetrics& s = o.recent_metrics.emplace_back();
    s.set_generation(step < 3 ? 0 : 1);  // the first two are not counted
    s.set_step(step);
    s.set_step_s(2.5);
  }
  o.last_finished_step = 9;
  Coordinator core(std::move(o));
  (void)core.start(0);
  pb::Report r = running_report("a", 1, 0, 9);
  merge_text("exited: true exit_code: 1", r.mutable_ranks(0));
  (void)core.on(received(r), 50);
  merge_text("seq: 2 state: QUIESCED", &r);
  (void)core.on(received(r), 100);
  (void)core.on(CheckpointsScanned{}, 150);
  EXPECT_EQ(core.durable().generation(), 2);
  EXPECT_TRUE(core.durable().assignment().prediction().starts_with(
      "2.5 s a step measured before"))
      << core.durable().assignment().prediction();
}

TEST(Status, AJobWaitsForWorkersAlsoIfOnlyAnAnswerIsMissing) {
  Roster roster;
  pb::Durable d;
  d.set_state_job(1);
  pb::Report r = report("a", 0);  // without a list of its states
  for (int64_t now = 0; now <= 3000; now += 100) {
    r.set_seq(r.seq() + 1);
    roster.on_report(r, d, kSilentMs, now);
    (void)roster.expire(d, /*dead_after_ms=*/60'000, now);
  }
  const Options options;
  const std::optional<planner::JobShape> shape;
  const MeshPolicy policy(small_job(), shape);
  const StepLedger ledger;
  Gathering::Wait wait;
  const auto status = [&] {
    return StatusReporter().status(
        {.view = {.roster = roster, .durable = d, .now_ms = 3000},
         .options = options,
         .shape = shape,
         .policy = policy,
         .ledger = ledger,
         .waiting_for = wait});
  };
  EXPECT_EQ(status().detail(), "waiting for a on host-a to list its states");
  EXPECT_EQ(status().wait_reason(), pb::JobStatus::WORKERS);
  wait = {pb::JobStatus::SHARED_MEMORY, "host-b is full"};
  EXPECT_EQ(status().wait_reason(), pb::JobStatus::SHARED_MEMORY);
  d.set_phase(pb::Durable::PREPARING);
  EXPECT_EQ(status().wait_reason(), pb::JobStatus::NOTHING);
}

// Whatever is restored, what comes first is in the journal with a younger
// epoch, so that nothing of the older life can be mistaken for it.
TEST(Restart, JournalsANewerEpochFirst) {
  for (int phase = 0; phase <= pb::Durable::Phase_MAX; ++phase) {
    Options o{.job = text_message<pb::Job>(
                  "train { steps: 10 global_batch_size: 1 local_batch_size: 1 "
                  "}")};
    o.restored = text_message<pb::Durable>("epoch: 41 generation: 3");
    o.restored->set_phase(static_cast<pb::Durable::Phase>(phase));
    Coordinator c(std::move(o));
    const auto actions = c.start(1000);
    ASSERT_FALSE(actions.empty());
    const auto* p = std::get_if<Persist>(&actions.front());
    ASSERT_NE(p, nullptr);
    EXPECT_EQ(p->durable.epoch(), 42u);
    EXPECT_EQ(p->durable.generation(), 3);
  }
}

}  // namespace
}  // namespace remesh::core
