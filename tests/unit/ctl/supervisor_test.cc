// The core of `remesh run`, driven by events and invented times.
#include "coordinator/ctl/supervisor.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

namespace remesh::ctl {
namespace {

using Texts = std::vector<std::string>;

std::string text_of(const Action& action) {
  struct Visitor {
    std::string operator()(const StartCoordinator&) const {
      return "start coordinator";
    }
    std::string operator()(const StartWorker& a) const {
      return fmt::format("start worker {}", a.number);
    }
    std::string operator()(const SignalChild& a) const {
      return fmt::format("signal {} to {}", a.signal, a.child);
    }
    std::string operator()(const KillAll&) const { return "kill all"; }
    std::string operator()(const SendStop&) const { return "send stop"; }
    std::string operator()(const PrintWelcome&) const { return "welcome"; }
    std::string operator()(const Say& a) const { return "say " + a.text; }
    std::string operator()(const SetNote& a) const { return "note " + a.text; }
    std::string operator()(const Exit& a) const {
      return fmt::format("exit {}", a.code);
    }
  };
  return std::visit(Visitor{}, action);
}

class SupervisorTest : public ::testing::Test {
 protected:
  static constexpr int kPid = 7;

  void make(Supervisor::Options options = {}) {
    options.logs = "LOGS";
    supervisor_.emplace(std::move(options));
    now_ = 1000;
  }
  Texts dispatch(const Event& event) {
    Texts out;
    for (const Action& a : supervisor_->on(event, now_))
      out.push_back(text_of(a));
    return out;
  }
  // A coordinator of our own that listens, and `workers` started workers.
  void start(int workers, bool respawn = false) {
    make({.local_workers = workers, .respawn = respawn});
    EXPECT_EQ(dispatch(Begin{}), Texts{"start coordinator"});
    EXPECT_EQ(tick(), Texts{});
    EXPECT_EQ(tick({.coordinator_listens = true}).size(), 1U + workers);
  }
  // A followed coordinator and `workers` local workers.
  void follow(int workers = 0) {
    make({.local_workers = workers});
    EXPECT_EQ(dispatch(Begin{.lock_holder = 42}),
              Texts{"say a coordinator already runs this job (pid 42); "
                    "following it"});
    tick({.coordinator_listens = true, .coordinator_alive = true});
  }
  Texts tick(Tick e = {}, int64_t after_ms = Supervisor::kTickMs) {
    now_ += after_ms;
    e.trained = trained_;
    return dispatch(e);
  }
  Texts interrupt(int64_t after_ms = Supervisor::kInterruptGapMs) {
    now_ += after_ms;
    return dispatch(Interrupt{});
  }
  Texts exited(int child, int code, int signal = 0,
               const std::string& last_line = "") {
    return dispatch(ChildExited{
        {.pid = kPid, .child = child, .exit_code = code, .signal = signal},
        last_line});
  }
  // Milliseconds until the coordinator is restarted.
  int64_t restart_delay() {
    for (int64_t ms = 0; ms <= 10'000; ms += 10) {
      if (tick({}, ms == 0 ? 0 : 10) == Texts{"start coordinator"}) return ms;
    }
    return -1;
  }

  std::optional<Supervisor> supervisor_;
  int64_t now_ = 0;
  bool trained_ = true;  // as the ticks say
};

const std::string kTerm = fmt::format("signal {} to ", SIGTERM);

TEST_F(SupervisorTest, StartsTheWorkersOnceTheCoordinatorListens) {
  make({.local_workers = 2});
  EXPECT_EQ(dispatch(Begin{}), Texts{"start coordinator"});
  EXPECT_EQ(tick(), Texts{});
  EXPECT_EQ(tick({.coordinator_listens = true}),
            (Texts{"welcome", "start worker 1", "start worker 2"}));
  EXPECT_EQ(tick({.coordinator_listens = true}), Texts{});
}

TEST_F(SupervisorTest, ExitsWithTheCoordinatorsCodeWhenTheWorkersHaveLeft) {
  for (const int code : {0, 3}) {
    start(2);
    EXPECT_EQ(exited(kCoordinator, code), Texts{});
    EXPECT_EQ(tick(), Texts{});
    EXPECT_EQ(exited(1, 0), Texts{});
    EXPECT_EQ(tick(), Texts{});
    EXPECT_EQ(exited(2, 3), Texts{}) << "no report once the job has ended";
    EXPECT_EQ(tick(), Texts{fmt::format("exit {}", code)});
    EXPECT_EQ(tick(), Texts{}) << "exits once";
  }
}

// Its coordinator may be killed while the disk is stalled: the journal still
// says that the job has stopped.
TEST_F(SupervisorTest, ResumesUntilTheJournalShowsThatTheJobContinues) {
  start(0);
  for (const bool continued : {false, true}) {
    tick({.coordinator_listens = true, .continued = continued});
    exited(kCoordinator, 0, SIGKILL);
    std::optional<StartCoordinator> restart;
    for (int i = 0; i < 20 && !restart; ++i, now_ += Supervisor::kTickMs)
      for (const Action& a :
           supervisor_->on(Tick{.continued = continued}, now_))
        if (const auto* s = std::get_if<StartCoordinator>(&a)) restart = *s;
    ASSERT_TRUE(restart.has_value());
    EXPECT_EQ(restart->resume, !continued);
  }
}

TEST_F(SupervisorTest, AUsageErrorOfTheCoordinatorEndsIt) {
  start(1);
  EXPECT_EQ(exited(kCoordinator, 2), Texts{kTerm + "1"});
  exited(1, 0);
  EXPECT_EQ(tick(), Texts{"exit 2"});
}

TEST_F(SupervisorTest, ACoordinatorThatCannotStartIsNotStartedAgain) {
  for (const int code : {3, 4, 5, 75}) {
    make({.local_workers = 1});
    dispatch(Begin{});
    EXPECT_EQ(exited(kCoordinator, code), Texts{fmt::format("exit {}", code)});
    EXPECT_TRUE(supervisor_->failed_to_start());
  }
}

TEST_F(SupervisorTest, ARestartedCoordinatorMayFindTheJobEnded) {
  for (const auto& [outcome, code] : {std::pair{pb::JobStatus::DONE, 0},
                                      std::pair{pb::JobStatus::FAILED, 3}}) {
    start(0);
    exited(kCoordinator, 0, SIGKILL);
    restart_delay();
    tick({.outcome = outcome});
    EXPECT_EQ(exited(kCoordinator, 4), Texts{});
    EXPECT_EQ(tick(), Texts{fmt::format("exit {}", code)});
    EXPECT_FALSE(supervisor_->failed_to_start());
  }
}

TEST_F(SupervisorTest, SaysOnceWhatToDoWhenSlotsAreLacking) {
  make({.hint = "HINT"});
  dispatch(Begin{});
  tick({.coordinator_listens = true});
  const Tick lacking{.coordinator_listens = true, .lacks_slots = true};
  EXPECT_EQ(tick(lacking), Texts{});
  EXPECT_EQ(tick(lacking, Supervisor::kHintMs - 1), Texts{});
  EXPECT_EQ(tick(lacking, 1), Texts{"say HINT"});
  EXPECT_EQ(tick(lacking, 10 * Supervisor::kHintMs), Texts{});
  EXPECT_EQ(tick({.coordinator_listens = true}), Texts{});
  EXPECT_EQ(tick(lacking), Texts{});
  EXPECT_EQ(tick(lacking, Supervisor::kHintMs), Texts{"say HINT"});
}

TEST_F(SupervisorTest, WorkersThatDoNotLeaveAreTerminatedThenKilled) {
  start(2);
  exited(1, 0);
  exited(kCoordinator, 0);
  EXPECT_EQ(tick({}, Supervisor::kLeaveMs), Texts{});
  EXPECT_EQ(tick({}, 1), Texts{kTerm + "2"});
  EXPECT_EQ(tick({}, Supervisor::kTerminateMs), Texts{});
  EXPECT_EQ(tick({}, 1), Texts{"kill all"});
  EXPECT_EQ(tick(), Texts{"exit 0"});
}

TEST_F(SupervisorTest, RestartsACrashedCoordinatorWithGrowingDelay) {
  start(1);
  const int64_t delays[] = {100, 100, 200, 400, 800, 1600, 3200, 5000, 5000};
  for (const int64_t delay : delays) {
    EXPECT_EQ(exited(kCoordinator, 0, SIGKILL, "workers connect with: RUN"),
              Texts{"say the coordinator ended with signal 9 (SIGKILL); "
                    "restarting it, training continues"})
        << "a line of its start is no reason";
    EXPECT_EQ(restart_delay(), delay);
  }
}

TEST_F(SupervisorTest, GivesUpAfterTooManyCrashesWithinAMinute) {
  start(1);
  Texts last;
  int crashes = 0;
  while (last.empty() || last[0].starts_with("say")) {
    last = exited(kCoordinator, 1);
    ++crashes;
    if (last[0].starts_with("say")) {
      EXPECT_GE(restart_delay(), 0);
    }
    ASSERT_LE(crashes, 20);
  }
  EXPECT_EQ(crashes, 11);
  EXPECT_EQ(last, Texts{kTerm + "1"});
  EXPECT_EQ(supervisor_->reason(),
            "the coordinator died 11 times within a minute, the last time "
            "with exit code 1; see LOGS");
  exited(1, 0);
  EXPECT_EQ(tick(), Texts{"exit 3"});
}

// Such as a full disk, which may last.
TEST_F(SupervisorTest, ACoordinatorThatExitsWith75IsRestarted) {
  start(0);
  for (int i = 0; i < 30; ++i) {
    ASSERT_TRUE(exited(kCoordinator, 75)[0].starts_with("say")) << i;
    EXPECT_GE(restart_delay(), 0);
  }
  EXPECT_EQ(supervisor_->reason(), "");
}

TEST_F(SupervisorTest, OldCrashesDoNotCount) {
  start(0);
  for (int i = 0; i < 30; ++i) {
    ASSERT_TRUE(exited(kCoordinator, 0, SIGSEGV)[0].starts_with("say"));
    EXPECT_EQ(restart_delay(), 100);
    now_ += Supervisor::kRestartWindowMs + 1;
  }
}

TEST_F(SupervisorTest, TheFirstInterruptStopsTheSecondKills) {
  start(2);
  EXPECT_EQ(dispatch(Interrupt{}),
            (Texts{"say saving and stopping; press Ctrl-C again to kill "
                   "immediately",
                   "note saving and stopping", "send stop"}));
  EXPECT_TRUE(supervisor_->interrupted());
  EXPECT_EQ(tick(), Texts{});
  EXPECT_EQ(interrupt(Supervisor::kInterruptGapMs - Supervisor::kTickMs - 1),
            Texts{})
      << "of the same cause";
  EXPECT_EQ(interrupt(1), (Texts{"say killing all processes",
                                 fmt::format("signal {} to 0", SIGKILL),
                                 kTerm + "1", kTerm + "2"}));
  EXPECT_EQ(exited(kCoordinator, 0, SIGKILL), Texts{}) << "not restarted";
  exited(1, 130);
  EXPECT_EQ(tick({}, Supervisor::kAskAgainMs), Texts{});
  EXPECT_EQ(tick({}, 1), Texts{kTerm + "2"}) << "asked twice";
  EXPECT_EQ(tick({}, Supervisor::kKillRanksMs - Supervisor::kAskAgainMs - 1),
            Texts{});
  EXPECT_EQ(tick({}, 1), Texts{"kill all"});
  EXPECT_EQ(tick(), Texts{"exit 130"});
}

TEST_F(SupervisorTest, TheThirdInterruptExitsWithoutWaiting) {
  start(1);
  interrupt();
  interrupt();
  EXPECT_EQ(interrupt(), Texts{"exit 130"});
}

TEST_F(SupervisorTest, AnInterruptedRunThatSavedExitsWith130) {
  start(1);
  dispatch(Interrupt{});
  dispatch(StopAnswered{true});
  exited(kCoordinator, 0);
  exited(1, 0);
  EXPECT_EQ(tick(), Texts{"exit 130"});
}

TEST_F(SupervisorTest, AFailureWhileStoppingIsAFailure) {
  start(0);
  dispatch(Interrupt{});
  exited(kCoordinator, 3);
  EXPECT_EQ(tick(), Texts{"exit 3"});
}

TEST_F(SupervisorTest, StopIsSentAgainUntilItIsAcceptedAndAfterARestart) {
  start(0);
  dispatch(Interrupt{});
  EXPECT_EQ(tick({}, Supervisor::kStopResendMs - 1), Texts{});
  EXPECT_EQ(tick({}, 1), Texts{"send stop"});
  EXPECT_EQ(dispatch(StopAnswered{false}), Texts{});
  EXPECT_EQ(tick({}, Supervisor::kStopResendMs), Texts{"send stop"});
  dispatch(StopAnswered{true});
  EXPECT_EQ(tick({}, Supervisor::kStopResendMs), Texts{});
  exited(kCoordinator, 0, SIGKILL);
  EXPECT_EQ(tick({}, 100), (Texts{"start coordinator", "send stop"}));
  EXPECT_EQ(dispatch(StopDeclined{}), Texts{}) << "it was not asked yet";
  // A coordinator that is killed while it saves leaves its time to the next.
  dispatch(StopAnswered{true});
  EXPECT_EQ(tick({}, 60'000), Texts{});
  exited(kCoordinator, 0, SIGKILL);
  EXPECT_EQ(tick({}, 100), (Texts{"start coordinator", "send stop"}));
}

TEST_F(SupervisorTest, AnInterruptAfterADeclinedStopTriesAgain) {
  start(1);
  dispatch(Interrupt{});
  dispatch(StopAnswered{true});
  EXPECT_EQ(dispatch(StopDeclined{}).size(), 2U);
  EXPECT_EQ(tick({}, Supervisor::kStopResendMs), Texts{}) << "not asked again";
  const Texts again = interrupt();
  EXPECT_EQ(again.back(), "send stop");
  exited(kCoordinator, 0);
  exited(1, 0);
  EXPECT_EQ(tick(), Texts{"exit 130"});
}

TEST_F(SupervisorTest, AStopThatCannotBeJournaledIsRequestedAgain) {
  start(0);
  dispatch(Interrupt{});
  EXPECT_EQ(dispatch(StopAnswered{false, "the disk is full"}),
            Texts{"say the disk is full; asking again"});
  EXPECT_EQ(tick({}, Supervisor::kStopResendMs), Texts{"send stop"});
  EXPECT_EQ(dispatch(StopAnswered{false, "the disk is full"}), Texts{});
  EXPECT_EQ(tick({}, Supervisor::kStopResendMs), Texts{"send stop"});
  dispatch(StopAnswered{true});
  exited(kCoordinator, 0);
  EXPECT_EQ(tick(), Texts{"exit 130"});
  // It has answered, whatever the answer.
  start(0);
  dispatch(Interrupt{});
  dispatch(StopAnswered{false, "the disk is full"});
  EXPECT_EQ(tick({}, 30'000)[0],
            "say the coordinator has not accepted the stop within 30 s "
            "(--stop-timeout): the disk is full; the job is not saved, killing "
            "all processes");
}

TEST_F(SupervisorTest, AWorkerThatDiesIsReported) {
  start(2);
  EXPECT_EQ(exited(1, 0), Texts{}) << "a clean exit was asked for";
  EXPECT_EQ(exited(2, 3, 0, "no room in /dev/shm"),
            (Texts{"say worker process 7 ended with exit code 3",
                   "say no room in /dev/shm"}));
  start(1);
  EXPECT_EQ(exited(1, 0, SIGKILL, "an old line"),
            Texts{"say worker process 7 ended with signal 9 (SIGKILL)"});
  EXPECT_EQ(tick({}, 10'000), Texts{}) << "not restarted without --respawn";
}

TEST_F(SupervisorTest, RespawnRestartsAWorkerThatDied) {
  start(2, /*respawn=*/true);
  exited(2, 0, SIGKILL);
  EXPECT_EQ(tick({}, Supervisor::kRespawnDelayMs - 1), Texts{});
  EXPECT_EQ(tick({}, 1), Texts{"start worker 2"});
  EXPECT_EQ(tick(), Texts{});
  exited(2, 75, 0, "no room");
  EXPECT_EQ(tick({}, Supervisor::kRespawnDelayMs), Texts{"start worker 2"});
  exited(1, 0);
  EXPECT_EQ(tick({}, Supervisor::kRespawnDelayMs), Texts{})
      << "one that was drained stays away";
  dispatch(Interrupt{});
  dispatch(StopAnswered{true});
  exited(2, 0, SIGKILL);
  EXPECT_EQ(tick({}, Supervisor::kRespawnDelayMs), Texts{}) << "stopping";
}

TEST_F(SupervisorTest, AProgramThatCannotBeStarted) {
  start(2);
  EXPECT_EQ(dispatch(StartFailed{2, "start W: denied"}),
            Texts{"say start W: denied"});
  exited(kCoordinator, 0);
  exited(1, 0);
  EXPECT_EQ(tick(), Texts{"exit 0"});
  make();
  dispatch(Begin{});
  EXPECT_EQ(dispatch(StartFailed{kCoordinator, "start C: denied"}), Texts{});
  EXPECT_EQ(supervisor_->reason(), "start C: denied");
  EXPECT_EQ(tick(), Texts{"exit 3"});
}

TEST_F(SupervisorTest, AFollowedJobEndsWithItsOutcome) {
  for (const auto& [outcome, code] : {std::pair(pb::JobStatus::DONE, 0),
                                      {pb::JobStatus::STOPPED, 4},
                                      {pb::JobStatus::FAILED, 3}}) {
    follow(1);
    const Tick ended{.coordinator_alive = true, .outcome = outcome};
    EXPECT_EQ(tick(ended), Texts{kTerm + "1"});
    exited(1, 0);
    EXPECT_EQ(tick(ended), Texts{fmt::format("exit {}", code)});
  }
}

TEST_F(SupervisorTest, AJobThatAnotherStoppedIsNotDone) {
  start(0);
  tick({.outcome = pb::JobStatus::STOPPED});
  exited(kCoordinator, 0);
  EXPECT_EQ(tick({.outcome = pb::JobStatus::STOPPED}), Texts{"exit 4"});
  start(0);
  interrupt();
  exited(kCoordinator, 0);
  EXPECT_EQ(tick({.outcome = pb::JobStatus::STOPPED}), Texts{"exit 130"});
}

TEST_F(SupervisorTest, EndsWhenNoWorkerIsLeftAndNoneWouldRun) {
  for (const bool respawn : {false, true}) {
    start(2, respawn);
    const Tick alone{.coordinator_listens = true};
    const Tick heard{.coordinator_listens = true, .has_workers = true};
    exited(1, 2, 0, "wrong usage");
    exited(2, respawn ? 5 : 75, 0, "no PMIx");
    EXPECT_EQ(tick(heard, 60'000), Texts{}) << "of somebody else";
    EXPECT_EQ(tick(alone), Texts{});
    EXPECT_EQ(tick(alone, Supervisor::kNoWorkerMs),
              Texts{fmt::format("signal {} to 0", SIGTERM)});
    EXPECT_EQ(supervisor_->reason(), "no worker can run here: no PMIx");
    exited(kCoordinator, 0, SIGTERM);
    EXPECT_EQ(tick(), Texts{"exit 3"});
  }
  start(2);
  exited(1, 3);
  exited(2, 0, SIGKILL);
  EXPECT_EQ(tick({}, 60'000), Texts{}) << "the next one may fare better";
}

TEST_F(SupervisorTest, EndsWhenNoWorkerCanBeStarted) {
  start(1);
  EXPECT_EQ(dispatch(StartFailed{1, "no more processes"}),
            Texts{"say no more processes"});
  const Tick alone{.coordinator_listens = true};
  EXPECT_EQ(tick(alone), Texts{});
  EXPECT_EQ(tick(alone, Supervisor::kNoWorkerMs),
            Texts{fmt::format("signal {} to 0", SIGTERM)});
  EXPECT_EQ(supervisor_->reason(), "no worker can run here: no more processes");
  exited(kCoordinator, 0, SIGTERM);
  EXPECT_EQ(tick(), Texts{"exit 3"});
  start(1, /*respawn=*/true);
  dispatch(StartFailed{1, "no more processes"});
  EXPECT_EQ(tick(alone), Texts{});
  EXPECT_EQ(tick(alone, Supervisor::kRespawnDelayMs), Texts{"start worker 1"});
}

TEST_F(SupervisorTest, AnUnansweredStopEnds) {
  start(1);
  interrupt();
  Texts last;
  int64_t waited = 0;
  for (; waited < 60'000 && (last.empty() || last[0] == "send stop");
       waited += 500)
    last = tick({}, 500);
  EXPECT_EQ(waited, 30'000);
  EXPECT_EQ(last[0],
            "say the coordinator has not answered the stop within 30 s "
            "(--stop-timeout); the job is not saved, killing all processes");
  EXPECT_EQ(last[1], fmt::format("signal {} to 0", SIGKILL));
  exited(kCoordinator, 0, SIGKILL);
  exited(1, 130);
  EXPECT_EQ(tick(), Texts{"exit 3"});
}

TEST_F(SupervisorTest, GivesUpSoonIfTheCoordinatorDiesBeforeAnyStep) {
  trained_ = false;
  start(0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(exited(kCoordinator, 0, SIGABRT, "no threads left"),
              Texts{"say the coordinator ended with signal 6 (SIGABRT): no "
                    "threads left; restarting it"});
    EXPECT_GE(restart_delay(), 0);
  }
  exited(kCoordinator, 0, SIGABRT, "no threads left");
  EXPECT_EQ(supervisor_->reason(),
            "the coordinator died 4 times within a minute and before any step, "
            "the last time with signal 6 (SIGABRT): no threads left; see LOGS");
  EXPECT_EQ(tick(), Texts{"exit 3"});
}

TEST_F(SupervisorTest, AnInterruptEndsTheFollowingNotTheJob) {
  follow(1);
  EXPECT_EQ(dispatch(Interrupt{}),
            (Texts{"say no longer following; training continues, `remesh "
                   "stop` ends it",
                   kTerm + "1"}));
  EXPECT_EQ(tick({}, Supervisor::kLeaveMs + 1), Texts{})
      << "its step may take long";
  exited(1, 0);
  EXPECT_EQ(tick(), Texts{"exit 130"});
}

// Another follower was faster, or job.toml was edited meanwhile.
TEST_F(SupervisorTest, AReplacementThatDoesNotStartKillsNoWorker) {
  follow(1);
  tick();
  tick({}, Supervisor::kTakeOverMs);
  ASSERT_FALSE(supervisor_->following());
  EXPECT_EQ(exited(kCoordinator, 75), Texts{});
  EXPECT_TRUE(supervisor_->following());
  EXPECT_EQ(tick({.coordinator_alive = true}, Supervisor::kTakeOverMs),
            Texts{});
  tick();
  tick({}, Supervisor::kTakeOverMs);
  ASSERT_FALSE(supervisor_->following());
  EXPECT_EQ(exited(kCoordinator, 2, 0, "job.toml was edited"),
            Texts{kTerm + "1"});
  EXPECT_EQ(supervisor_->reason(),
            "the coordinator cannot be started again: exit code 2: "
            "job.toml was edited");
  exited(1, 0);
  EXPECT_EQ(tick(), Texts{"exit 2"});
}

TEST_F(SupervisorTest, AFollowedCoordinatorThatIsGoneIsReplaced) {
  follow(1);
  EXPECT_TRUE(supervisor_->following());
  EXPECT_EQ(tick(), Texts{});
  EXPECT_EQ(tick({.coordinator_alive = true}, Supervisor::kTakeOverMs), Texts{})
      << "somebody restarted it";
  EXPECT_EQ(tick(), Texts{});
  EXPECT_EQ(tick({.run_dir_gone = true}, Supervisor::kTakeOverMs), Texts{})
      << "there is nothing to continue";
  EXPECT_EQ(tick(), Texts{});
  EXPECT_EQ(tick({}, Supervisor::kTakeOverMs - 1), Texts{});
  EXPECT_EQ(tick({}, 1),
            (Texts{"say the followed coordinator is gone; starting a new one",
                   "start coordinator"}));
  EXPECT_FALSE(supervisor_->following());
  exited(1, 0, SIGKILL);
  EXPECT_EQ(tick({.coordinator_listens = true}),
            (Texts{"welcome", "start worker 1"}));
}

}  // namespace
}  // namespace remesh::ctl
