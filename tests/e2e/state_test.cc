// State in shared memory: no fault and no change of mesh loses a finished step,
// and the restored state is the saved one.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "tests/e2e/e2e.h"
#include "tests/testing/expect.h"
#include "tests/testing/records.h"

namespace remesh::e2e {
namespace {
namespace fs = std::filesystem;

// No checkpoint is written except at the end of the job.
Settings in_memory(Settings more = {}) {
  more.emplace("train.digest", "true");
  more.emplace("checkpoint.interval", "0");
  return more;
}

class StateTest : public E2e {
 protected:
  // State files in a worker's shared memory.
  size_t segments(const std::string& worker) {
    size_t n = 0;
    std::error_code ignored;
    for (const auto& e :
         fs::directory_iterator(c().state_folder(worker), ignored))
      n += e.is_regular_file() ? 1 : 0;
    return n;
  }
  size_t checkpoints() {
    std::error_code ignored;
    size_t n = 0;
    for (const auto& e : fs::directory_iterator(c().checkpoints(), ignored))
      n += e.path().filename().string().starts_with("step-") ? 1 : 0;
    return n;
  }
  // Every generation after the first was restored from memory without loss, and
  // its digest is that of its step. The last finished step of a generation can
  // be recorded as late as when the next one is planned, so it is the event
  // that shows that a generation trains.
  void expect_nothing_lost(int64_t generations) {
    EXPECT_TRUE(c().wait_for_event("training", generations - 1));
    const testing::Findings found =
        testing::check_records(c().metrics(), c().events(), {});
    for (const std::string& e : found.errors) ADD_FAILURE() << e;
    EXPECT_EQ(found.lost_steps, 0);
    EXPECT_GE(found.generations, generations);
    EXPECT_EQ(found.from_memory, found.generations - 1);
    EXPECT_EQ(found.digests, found.generations - 1);
  }
  void kill_rank(int rank, size_t ranks) {
    const auto pids = c().rank_pids(ranks);
    ASSERT_EQ(pids.size(), ranks);
    const size_t failures = c().events_named("failure").size();
    testing::send_signal(pids.at(rank), SIGKILL);
    ASSERT_TRUE(c().wait_for_event("failure", failures + 1));
  }
};

// Settings of a job on two ranks.
struct Mesh {
  const char* name;
  Settings job;
};

class MeshStateTest : public StateTest,
                      public ::testing::WithParamInterface<Mesh> {};

TEST_P(MeshStateTest, KilledRanksLoseNoStepAndNoBit) {
  Settings job = endless(
      in_memory({{"elastic.min_slots", "2"}, {"elastic.max_slots", "2"}}));
  job.insert(GetParam().job.begin(), GetParam().job.end());
  make(job);
  c().start_coordinator();
  for (const char* name : {"w1", "w2"}) c().start_worker({.name = name});
  for (const int rank : {0, 1}) {
    ASSERT_TRUE(c().wait_for_step(10 + 25 * rank));
    EXPECT_GE(segments("w1"), 1U);
    kill_rank(rank, 2);
    if (HasFatalFailure()) return;
    ASSERT_TRUE(c().wait_for_step(c().last_step() + 1));
  }
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 10));
  stop_in_order();
  for (const char* name : {"w1", "w2"}) expect_exit(c().worker(name), 0);
  expect_sequence(c().last_step());
  expect_nothing_lost(3);
  const auto disturbed = c().metric_lines();
  EXPECT_EQ(testing::first_difference(undisturbed_lines(job, 2), disturbed), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, MeshStateTest,
    ::testing::Values(Mesh{"DataParallel", {}},
                      // Which losses are spikes depends on those before.
                      Mesh{"SkippedSpikes",
                           {{"train.max_skipped_steps", "2"},
                            {"train.spike_factor", "0.01"},
                            {"optimizer.lr", "1e-7"}}},
                      Mesh{"Zero3ContextParallelAndAWindowInBf16",
                           {{"train.dtype", "\"bf16\""},
                            {"model.arch", "\"mistral\""},
                            {"model.sliding_window", "9"},
                            {"parallel.context_parallel_degree", "2"},
                            {"parallel.zero_stage", "3"}}},
                      Mesh{"InterleavedScheduleInBf16",
                           {{"train.dtype", "\"bf16\""},
                            {"train.global_batch_size", "32"},
                            {"model.n_layers", "4"},
                            {"parallel.pipeline_parallel_degree", "2"},
                            {"parallel.pipeline_schedule", "\"interleaved\""},
                            {"parallel.pipeline_chunks", "2"}}},
                      Mesh{"ZeroBubbleScheduleInBf16",
                           {{"train.dtype", "\"bf16\""},
                            {"parallel.pipeline_parallel_degree", "2"},
                            {"parallel.pipeline_schedule", "\"zb-h1\""}}}),
    [](const auto& info) { return std::string(info.param.name); });

class StuckPmixTest : public StateTest {
 protected:
  // The PMIx server of w1 locks up when it cleans up after ranks once the file
  // `trigger_` exists.
  void start() {
    trigger_ = c().folder() + "/stick";
    // The list of libraries is separated by spaces.
    const std::string library = c().folder() + "/stuck.so";
    fs::create_symlink(PMIX_STUCK, library);
    c().start_coordinator();
    c().start_worker({.name = "w1",
                      .prefix = {"env", "LD_PRELOAD=" + library,
                                 "REMESH_TEST_PMIX_STUCK=" + trigger_}});
    c().start_worker({.name = "w2"});
    ASSERT_TRUE(c().wait_for_step(5));
    ASSERT_TRUE(c().wait_for_dp(2));
    testing::write_whole(trigger_, "");
  }
  std::string trigger_;
};

// The next life of the worker would not know that it leaves.
TEST_F(StuckPmixTest, AWorkerThatLeavesDoesNotRestart) {
  make(endless(in_memory()));
  start();
  if (HasFatalFailure()) return;
  terminate_worker("w1");
  EXPECT_FALSE(fs::exists(trigger_));
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 5));
  stop_in_order();
}

// Its rank is killed, and its server locks up when it cleans up after it. The
// worker has the only copy of its half of the state.
TEST_F(StuckPmixTest, AWorkerRestartsAndKeepsItsState) {
  make(endless(in_memory({{"parallel.zero_stage", "1"},
                          {"elastic.replicate_every", "0"},
                          {"elastic.rejoin_wait_ms", "60000"}})));
  start();
  if (HasFatalFailure()) return;
  kill_rank(0, 2);
  const int64_t at = c().last_step();
  ASSERT_TRUE(c().wait_for_dp(2, at, 60'000));
  EXPECT_FALSE(fs::exists(trigger_));
  EXPECT_TRUE(c().worker("w1").running());  // still the same process
  std::string log;
  EXPECT_TRUE(testing::wait_until(
      [&] {
        log = testing::read_whole(c().run_dir() + "/logs/worker-w1.log");
        return log.find("the PMIx server does not answer") != std::string::npos;
      },
      kEndMs))
      << log;
  std::vector<std::string> joined;
  for (const Json& e : c().events_named("worker_joined"))
    joined.push_back(e.value("worker", ""));
  std::sort(joined.begin(), joined.end());
  EXPECT_EQ(joined, (std::vector<std::string>{"w1", "w1", "w2"}));
  expect_nothing_lost(2);
  stop_and_check();
}

// Each worker has the only copy of its half of the state.
TEST_F(StateTest, AReturningWorkerRestoresItsState) {
  make(endless(in_memory({{"parallel.zero_stage", "1"},
                          {"elastic.replicate_every", "0"},
                          {"elastic.rejoin_wait_ms", "60000"}})));
  start_services(2, 5);
  c().worker("w2").kill(SIGKILL);
  ASSERT_TRUE(c().worker("w2").wait_ms(kEndMs));
  EXPECT_GE(segments("w2"), 1U);
  ASSERT_TRUE(c().wait_for_event("failure"));
  const int64_t at = c().last_step();
  c().start_worker({.name = "w2"});
  ASSERT_TRUE(c().wait_for_dp(2, at));
  expect_nothing_lost(2);
  stop_and_check();
}

// `remesh status` says that the state is in the memory of this host, and names
// `remesh resume`.
TEST_F(StateTest, LocalWorkersTakeTheStatesOfOthersThatAreGone) {
  make(endless(in_memory(
      {{"parallel.zero_stage", "1"}, {"elastic.replicate_every", "0"}})));
  start_services(2, 5);
  kill_coordinator();
  for (const char* worker : {"w1", "w2"}) {
    c().worker(worker).kill(SIGKILL);
    ASSERT_TRUE(c().worker(worker).wait_ms(kEndMs));
  }
  const int64_t at = c().last_step();
  const size_t meshes = c().events_named("mesh").size();
  c().start_run(2, {"--resume"});
  ASSERT_TRUE(c().wait_for_event("mesh", meshes + 1));
  const Json mesh = c().events_named("mesh").back();
  EXPECT_EQ(mesh.value("source_kind", ""), "memory") << mesh;
  EXPECT_GE(mesh.value("step", int64_t{0}), at) << mesh;
  ASSERT_TRUE(c().wait_for_step(at + 3));
  interrupt();
}

// The journal has the number of the states' run; so has job.toml.
TEST_F(StateTest, ALostJournalCostsNoFinishedStep) {
  make(endless(
      in_memory({{"parallel.zero_stage", "1"}, {"elastic.min_slots", "2"}})));
  start_services(2, 5);
  fs::remove(c().run_dir() + "/journal");
  kill_coordinator();
  const int64_t at = c().last_step();
  c().start_coordinator();
  ASSERT_TRUE(c().wait_for_event("mesh", 2));
  const auto meshes = c().events_named("mesh");
  EXPECT_EQ(lost_steps(meshes[1]), 0);
  EXPECT_GE(meshes[1]["step"].get<int64_t>(), at);
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 3));
  stop_and_check();
}

// Its plan is of two workers, and three have trained since.
TEST_F(StateTest, AJournalFromABackupCostsNoFinishedStep) {
  make(endless(in_memory({{"parallel.zero_stage", "1"}})));
  start_services(2, 5);
  const std::string journal = c().run_dir() + "/journal";
  const std::string backup = c().folder() + "/backup";
  fs::copy_file(journal, backup);
  c().start_worker({.name = "w3"});
  ASSERT_TRUE(c().wait_for_dp(3));
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 3));
  kill_coordinator();
  fs::copy_file(backup, journal, fs::copy_options::overwrite_existing);
  const int64_t at = c().last_step();
  c().start_coordinator();
  ASSERT_TRUE(c().wait_for_event("journal_behind"));
  ASSERT_TRUE(c().wait_for_dp(3, at + 3));
  expect_no_step_lost();
  stop_and_check();
}

// The same, from before the job was resumed: in that journal it is done.
TEST_F(StateTest, AJournalFromBeforeTheResumeEndsNothing) {
  make(in_memory({{"train.steps", "10"}}));
  c().start_coordinator();
  c().start_worker({.name = "w1"});
  ASSERT_TRUE(c().wait_for_event("job_done"));
  expect_exit(c().coordinator(), 0);
  expect_exit(c().worker("w1"), 0);
  const std::string journal = c().run_dir() + "/journal";
  const std::string backup = c().folder() + "/backup";
  fs::copy_file(journal, backup);
  c().start_coordinator({"--resume", "--set", "train.steps=1000000"});
  c().start_worker({.name = "w1"});
  ASSERT_TRUE(c().wait_for_step(30));
  kill_coordinator();
  fs::copy_file(backup, journal, fs::copy_options::overwrite_existing);
  c().start_coordinator({"--set", "train.steps=1000000"});
  ASSERT_TRUE(c().wait_for_event("journal_behind"));
  EXPECT_EQ(c().events_named("job_done").size(), 1U);
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 3));
  expect_no_step_lost();
  stop_and_check();
}

TEST_F(StateTest, ALostHostCostsNoStepWithReplicas) {
  make(endless(in_memory({{"parallel.zero_stage", "1"}})));
  start_services(3, 5);
  c().lose_host("w2");
  EXPECT_EQ(segments("w2"), 0U);
  ASSERT_TRUE(c().wait_for_dp(2));
  const int64_t at = c().last_step();
  // Then lose another host, after a new one has joined.
  c().start_worker({.name = "w4"});
  ASSERT_TRUE(c().wait_for_dp(3, at));
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 3));
  c().lose_host("w1");
  ASSERT_TRUE(c().wait_for_dp(2, c().last_step() + 1));
  expect_nothing_lost(4);
  stop_and_check();
}

TEST_F(StateTest, PlannedChangesGoThroughMemory) {
  make(endless(in_memory({{"parallel.zero_stage", "1"}})));
  start_services(2, 5);
  c().start_worker({.name = "w3"});
  ASSERT_TRUE(c().wait_for_dp(3));
  expect_remesh(0, {"drain", "w1", c().run_dir()});
  expect_exit(c().worker("w1"), 0);
  ASSERT_TRUE(c().wait_for_dp(2));
  expect_remesh(0, {"scale", "1", c().run_dir()});
  ASSERT_TRUE(c().wait_for_dp(1));
  expect_remesh(2, {"scale", "0", c().run_dir()});
  expect_remesh(0, {"scale", "all", c().run_dir()});
  ASSERT_TRUE(c().wait_for_dp(2, c().last_step()));
  expect_remesh(0, {"mesh", "dp1,tp2", c().run_dir()});
  ASSERT_TRUE(testing::wait_until(
      [&] { return c().metrics().back()["mesh"]["tp"] == 2; }, 60'000));
  terminate_worker("w2");
  ASSERT_TRUE(c().wait_for_dp(1, c().last_step()));
  expect_nothing_lost(7);
  EXPECT_EQ(c().events_named("failure").size(), 0U);
  EXPECT_EQ(checkpoints(), 0U);
  stop_in_order();
  EXPECT_EQ(checkpoints(), 1U);
  expect_sequence(c().last_step());
}

// As systemd-logind does with /dev/shm when its user logs out.
TEST_F(StateTest, RemovedStatesAreReportedAndTrainingContinues) {
  make(endless(in_memory()));
  start_services(2, 5);
  for (const char* worker : {"w1", "w2"})
    for (const auto& e : fs::directory_iterator(c().state_folder(worker)))
      fs::remove(e.path());
  ASSERT_TRUE(c().wait_for_event("checkpoint_failed", 2));
  const Json told = c().events_named("checkpoint_failed").front();
  EXPECT_HAS(told.value("cause", ""), "enable-linger") << told;
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 5));
  stop_in_order();
  EXPECT_EQ(checkpoints(), 1U);
  expect_sequence(c().last_step());
}

// read_state.py is written from checkpoint/FORMAT.md alone.
class FormatTest : public StateTest {
 protected:
  // Reads a checkpoint, or these segments of its model.
  static Finished read_state(std::vector<std::string> paths) {
    paths.insert(paths.begin(),
                 {"/usr/bin/python3", "tests/e2e/read_state.py"});
    return testing::run_program(paths);
  }
  // The digest must be that of its step in metrics.jsonl.
  void expect_digest(const Finished& f) {
    ASSERT_EQ(f.exit.code, 0) << f.output;
    const Json read = Json::parse(f.output);
    const auto step = read["step"].get<int64_t>();
    ASSERT_TRUE(c().wait_for_step(step));
    for (const Json& m : c().metrics()) {
      if (m["step"] != step) continue;
      EXPECT_EQ(m["digest"], read["digest"]) << f.output;
      return;
    }
    ADD_FAILURE() << "step " << step << " is not in metrics.jsonl";
  }
  std::vector<std::string> segments_of_all() {
    std::vector<std::string> paths;
    for (const char* worker : {"w1", "w2"})
      for (const auto& e : fs::directory_iterator(c().state_folder(worker)))
        if (e.is_regular_file()) paths.push_back(e.path());
    return paths;
  }
};

TEST_F(FormatTest, AnIndependentReaderReadsCheckpointsAndLiveSegments) {
  make(endless(in_memory({{"parallel.zero_stage", "1"},
                          {"elastic.layouts", "[\"pp2,tp2\", \"dp2,tp2\"]"}})));
  c().start_coordinator();
  for (const char* name : {"w1", "w2"})
    c().start_worker({.name = name, .slots = 2});
  ASSERT_TRUE(c().wait_for_step(3, 60'000));
  for (const std::string layout : {"dp1,pp2,tp2", "dp2,tp2"}) {
    SCOPED_TRACE(layout);
    Finished f = c().remesh({"mesh", layout, c().run_dir()});
    ASSERT_EQ(f.exit.code, 0) << f.output;
    ASSERT_TRUE(c().wait_for_dp(layout[2] - '0', c().last_step(), 60'000));
    f = c().remesh({"checkpoint", "save", c().run_dir()});
    ASSERT_EQ(f.exit.code, 0) << f.output;
    std::set<std::string> saved;
    for (const auto& e : fs::directory_iterator(c().checkpoints()))
      if (e.path().filename().string().starts_with("step-"))
        saved.insert(e.path());
    ASSERT_FALSE(saved.empty());
    expect_digest(read_state({*saved.rbegin()}));
    // At any instant. Stopped, because it takes the reader longer than a step.
    const auto pids = c().rank_pids(4);
    ASSERT_EQ(pids.size(), 4U);
    for (const auto& [rank, pid] : pids) testing::send_signal(pid, SIGSTOP);
    std::vector<std::string> paths = segments_of_all();
    EXPECT_GE(paths.size(), 4U);
    paths.insert(paths.begin(), *saved.rbegin());
    f = read_state(paths);
    for (const auto& [rank, pid] : pids) testing::send_signal(pid, SIGCONT);
    expect_digest(f);
  }
  stop_and_check();
}

TEST_F(StateTest, AllFilesAreTheUsersAlone) {
  make(endless({{"checkpoint.interval", "5"}}));
  start_services(2, 8);
  ASSERT_TRUE(c().wait_for_event("checkpoint"));
  stop_in_order();
  size_t files = 0;
  for (const auto& e : fs::recursive_directory_iterator(c().run_dir())) {
    EXPECT_EQ(e.status().permissions() &
                  (fs::perms::group_all | fs::perms::others_all),
              fs::perms::none)
        << e.path();
    files += e.is_regular_file() ? 1 : 0;
  }
  EXPECT_GT(files, 10U);
}

TEST_F(StateTest, WithoutStatesInMemoryCheckpointsAreRestored) {
  make(endless({{"elastic.keep_state", "false"},
                {"train.digest", "true"},
                {"checkpoint.interval", "5"}}));
  start_services(2, 8);
  EXPECT_EQ(segments("w1") + segments("w2"), 0U);
  ASSERT_TRUE(c().wait_for_event("checkpoint"));
  kill_rank(1, 2);
  if (HasFatalFailure()) return;
  // Until the steps after the checkpoint have been computed again.
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 1));
  const Json mesh = c().events_named("mesh").back();
  EXPECT_HAS(mesh.value("source", ""), "step-") << mesh;
  expect_remesh(0, {"drain", "w2", c().run_dir()});
  expect_exit(c().worker("w2"), 0);
  ASSERT_TRUE(c().wait_for_dp(1));
  EXPECT_EQ(lost_steps(c().events_named("mesh").back()), 0);
  stop_and_check();
}

}  // namespace
}  // namespace remesh::e2e
