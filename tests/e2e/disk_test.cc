// Full disks and damaged files.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <set>

#include "tests/e2e/e2e.h"
#include "tests/testing/expect.h"
#include "tests/testing/seed.h"
#include "tests/testing/small_disk.h"

namespace remesh::e2e {
namespace {
namespace fs = std::filesystem;

class DiskTest : public E2e {
 protected:
  // Trains to step 20 with checkpoints at 10 and 20.
  void train_to_20();
  std::unique_ptr<testing::SmallDisk> make_on_small_disk(Settings more);
};

void DiskTest::train_to_20() {
  make({{"train.steps", "20"}});
  expect_exit(c().start_run(1), 0);
}

// Flips one bit in the middle of the file.
void damage(const std::string& path) {
  std::fstream f(path, std::ios::in | std::ios::out | std::ios::binary);
  f.seekg(static_cast<std::streamoff>(fs::file_size(path) / 2));
  char byte = 0;
  f.get(byte);
  f.seekp(static_cast<std::streamoff>(fs::file_size(path) / 2));
  f.put(static_cast<char>(byte ^ 1));
}

std::string shard_of(const std::string& checkpoint) {
  for (const auto& e : fs::directory_iterator(checkpoint))
    if (e.path().filename().string().starts_with("shard"))
      return e.path().string();
  return "";
}

// A job with 24 MiB for its checkpoints; null without permission to mount.
std::unique_ptr<testing::SmallDisk> DiskTest::make_on_small_disk(
    Settings more) {
  make();
  auto disk =
      std::make_unique<testing::SmallDisk>(c().folder() + "/disk", 24 << 20);
  if (!disk->mounted()) return nullptr;
  more["checkpoint.folder"] = "\"" + disk->path() + "\"";
  testing::write_whole(c().job_file(),
                       testing::tiny_job(data_path(), endless(more)));
  return disk;
}

TEST_F(DiskTest, AFullDiskStopsSavingButNotTraining) {
  const auto disk = make_on_small_disk({{"elastic.keep_state", "false"}});
  if (disk == nullptr) GTEST_SKIP() << "needs mount";
  start_services(1, 12);
  ASSERT_TRUE(c().wait_for_event("checkpoint"));
  disk->fill(64 << 10);
  ASSERT_TRUE(c().wait_for_event("checkpoint_failed"));
  const int64_t full_at = c().last_step();
  EXPECT_HAS(c().events_named("checkpoint_failed")[0].value("cause", ""),
             "No space left");
  kill_coordinator();
  disk->fill(0);
  c().start_coordinator();
  ASSERT_TRUE(c().wait_for_step(full_at + 10));
  // A change of mesh would lose work, so it is postponed.
  c().start_worker({.name = "late"});
  ASSERT_TRUE(c().wait_for_event("change_put_off"));
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 10));
  EXPECT_EQ(c().events_named("mesh").size(), 1U);
  expect_remesh(3, {"checkpoint", "save", c().run_dir()});
  disk->free();
  const size_t saved = c().events_named("checkpoint").size();
  ASSERT_TRUE(c().wait_for_event("checkpoint", saved + 1));
  stop_and_check();
  EXPECT_EQ(c().events_named("failure").size(), 0U);
}

TEST_F(DiskTest, AFullDiskDoesNotBlockAChangeOfMesh) {
  const auto disk = make_on_small_disk({});
  if (disk == nullptr) GTEST_SKIP() << "needs mount";
  start_services(2, 12);
  disk->fill(64 << 10);
  ASSERT_TRUE(c().wait_for_event("checkpoint_failed"));
  c().start_worker({.name = "late"});
  ASSERT_TRUE(c().wait_for_dp(3));
  EXPECT_EQ(lost_steps(c().events_named("mesh").back()), 0);
  // Each rank reports each failed save once.
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 20));
  std::set<std::string> told;
  for (const Json& e : c().events_named("checkpoint_failed"))
    EXPECT_TRUE(told.insert(e.value("cause", "")).second) << e;
  disk->free();
  stop_and_check();
  EXPECT_EQ(c().events_named("failure").size(), 0U);
}

// The last save fails again and again; nothing is lost, and the job ends when
// there is room. Its last step is not one of those that are replicated.
TEST_F(DiskTest, AFullDiskAtTheEndMakesTheJobWait) {
  const auto disk = make_on_small_disk({{"train.steps", "150"},
                                        {"parallel.zero_stage", "1"},
                                        {"elastic.replicate_every", "7"}});
  if (disk == nullptr) GTEST_SKIP() << "needs mount";
  disk->fill(64 << 10);
  start_services(2, 12);
  ASSERT_TRUE(c().wait_for_event("waiting_for_room", 4, 60'000));
  EXPECT_EQ(c().events_named("job_failed").size(), 0U);
  disk->free();
  ASSERT_TRUE(c().wait_for_event("job_done", 1, 60'000));
  expect_exit(c().coordinator(), 0);
  expect_sequence(150);
  expect_no_step_lost();
}

// A job that cannot be saved says so at once and continues; without saving it
// stops, and resumes from the memory of the worker's host.
TEST_F(DiskTest, AFullDiskDeclinesAStop) {
  const auto disk = make_on_small_disk({});
  if (disk == nullptr) GTEST_SKIP() << "needs mount";
  start_services(1, 12);
  disk->fill(64 << 10);
  const Finished declined = expect_remesh(3, {"stop", c().run_dir()});
  EXPECT_HAS(declined.output, "No space left");
  EXPECT_HAS(declined.output, "--discard");
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 5));
  expect_remesh(0, {"stop", "--discard", c().run_dir()});
  expect_exit(c().coordinator(), 0);
  const int64_t last = c().last_step();
  EXPECT_HAS(c().events_named("job_stopped")[0].value("detail", ""), "w1");
  EXPECT_EQ(c().events_named("mesh").size(), 1U);
  disk->free();
  c().start_coordinator({"--resume"});
  c().start_worker({.name = "w1"});
  ASSERT_TRUE(c().wait_for_step(last + 3));
  stop_and_check();
  expect_no_step_lost();
}

// Nothing of what the coordinator writes fits: training continues, a rank that
// dies is replaced when there is room, and `remesh run` survives.
TEST_F(DiskTest, AFullRunDirectoryDoesNotStopTraining) {
  make(endless({{"checkpoint.interval", "0"}}));
  const testing::SmallDisk disk(c().run_dir(), 24 << 20);
  if (!disk.mounted()) GTEST_SKIP() << "needs mount";
  Process& run = c().start_run(2);
  ASSERT_TRUE(c().wait_for_step(5));
  ASSERT_TRUE(c().wait_for_dp(2));
  const size_t changes = c().events_named("training").size();
  disk.fill(0);
  const auto problem_lasts = [](int64_t seconds) {
    return [seconds](const Json& s) {
      if (s.value("problems", Json::array()).empty()) return false;
      const std::string text = s["problems"][0].get<std::string>();
      return std::stoll(text.substr(text.rfind("for ") + 4)) >= seconds;
    };
  };
  const Json first = c().wait_for_status(problem_lasts(1));
  ASSERT_FALSE(first.is_null());
  // What cannot be written is refused at once, and not done later.
  using Words = std::vector<std::string>;
  for (const Words& asked : {Words{"stop"}, Words{"stop", "--discard"},
                             Words{"checkpoint", "save"}}) {
    Words words = asked;
    words.push_back(c().run_dir());
    const Finished refused = expect_remesh(3, words);
    EXPECT_HAS(refused.output, "No space left");
  }
  const Json later = c().wait_for_status(problem_lasts(12), 40'000);
  ASSERT_FALSE(later.is_null());
  EXPECT_GE(later["step"].get<int64_t>(), first["step"].get<int64_t>() + 5);
  EXPECT_EQ(later["state"], "running");
  EXPECT_EQ(later["coordinator"]["pid"], first["coordinator"]["pid"]);
  const pid_t pid = later["workers"].at(0)["ranks"].at(0)["pid"];
  ASSERT_EQ(testing::send_signal(pid, SIGKILL), 0);
  // How far the change gets depends on what still fits.
  Json last;
  ASSERT_FALSE(c().wait_for_status([&](const Json& s) {
                    last = s;
                    return s["state"] != "running" ||
                           s["generation"] != later["generation"];
                  })
                   .is_null())
      << last.dump(1);
  disk.free();
  ASSERT_TRUE(c().wait_for_event("failure"));
  ASSERT_TRUE(c().wait_for_event("training", changes + 1));
  EXPECT_EQ(lost_steps(c().events_named("mesh").back()), 0);
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 3));
  EXPECT_EQ(c().events_named("worker_lost").size(), 0U);
  EXPECT_EQ(c().events_named("stop_requested").size(), 0U);
  run.kill(SIGINT);
  expect_exit(run, 130);
  expect_sequence(c().last_step());
}

// Full at a random instant, and for 5 to 60 seconds if several cases are asked
// for: training does not notice, and every step is in the record.
TEST_F(DiskTest, AFullRunDirectoryAtAnyInstantCostsNothing) {
  const bool thorough = test_cases(1) > 1;
  for (const uint32_t seed : test_seeds(1)) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937 random(seed);
    const int64_t steps = thorough ? 4000 : 60;
    make({{"train.steps", std::to_string(steps)},
          {"checkpoint.interval", "50"}});
    const testing::SmallDisk disk(c().run_dir(), 48 << 20);
    if (!disk.mounted()) GTEST_SKIP() << "needs mount";
    Process& run = c().start_run(3);
    ASSERT_TRUE(c().wait_for_dp(3));
    ASSERT_TRUE(c().wait_for_step(1 + random() % (thorough ? 500 : 30)));
    disk.fill(0);
    testing::sleep_ms(thorough ? 5000 + random() % 55'000 : 1000);
    disk.free();
    expect_exit(run, 0, 120'000);
    expect_sequence(steps);
    EXPECT_EQ(c().events_named("failure").size(), 0U);
    // A mesh at the last step waits until that can be saved.
    for (const Json& mesh : c().events_named("mesh"))
      EXPECT_TRUE(mesh["step"] == 0 || mesh["step"] == steps) << c().describe();
    double longest = 0, before = 0;
    for (const Json& m : c().metrics()) {
      const double time = m.value("time", 0.0);
      if (before > 0) longest = std::max(longest, time - before);
      before = time;
    }
    fmt::print("seed {}: at most {:.3f} s between two steps\n", seed, longest);
  }
}

// As at the start of a coordinator: after 3 nobody would start it again.
TEST_F(DiskTest, AWorkerWithoutRoomForItsFilesCanBeStartedLater) {
  make();
  const testing::SmallDisk disk(c().folder() + "/full", 64 << 10);
  if (!disk.mounted()) GTEST_SKIP() << "needs mount";
  disk.fill(0);
  const Finished f = testing::run_program(
      {testing::program("remesh-worker"), "--connect", "tcp://127.0.0.1:9",
       "--no-auth", "--scratch", disk.path()});
  EXPECT_EQ(f.exit.code, 75) << f.output;
  EXPECT_HAS(f.output, "No space left");
}

// A coordinator that finds no room at the start asks to be started again, which
// systemd, Slurm and `remesh run` do: it is not the end of the job.
TEST_F(DiskTest, ACoordinatorWithoutDiskSpaceCanBeRestartedLater) {
  make(endless());
  const testing::SmallDisk disk(c().run_dir(), 24 << 20);
  if (!disk.mounted()) GTEST_SKIP() << "needs mount";
  const auto start = [&] {
    return testing::run_program({testing::program("remesh-coordinator"),
                                 c().job_file(), "--run-dir", c().run_dir()});
  };
  disk.fill(0);
  const Finished fresh = start();
  EXPECT_EQ(fresh.exit.code, 75) << fresh.output;
  EXPECT_HAS(fresh.output, "No space left");
  disk.free();
  start_services(1, 3);
  const int64_t at = c().last_step();
  kill_coordinator();
  disk.fill(0);
  // It takes the run over.
  c().start_coordinator();
  EXPECT_FALSE(c().wait_for_status([&](const Json& s) {
                    return s["state"] == "running" &&
                           s["step"].get<int64_t>() >= at + 5;
                  })
                   .is_null())
      << c().coordinator().output();
  disk.free();
  ASSERT_TRUE(c().wait_for_step(at + 3));
  EXPECT_TRUE(c().events_named("failure").empty());
  stop_and_check();
}

// The same with the run directory on that disk, and Ctrl-C.
TEST_F(DiskTest, AFullRunDirectoryDeclinesAnInterrupt) {
  // A save under way would take the room for the lines of metrics, too.
  make(endless({{"elastic.min_slots", "2"}, {"checkpoint.interval", "0"}}));
  const testing::SmallDisk disk(c().run_dir(), 24 << 20);
  if (!disk.mounted()) GTEST_SKIP() << "needs mount";
  c().start_run(2);
  ASSERT_TRUE(c().wait_for_step(12));
  disk.fill(512 << 10);
  c().run().kill(SIGINT);
  ASSERT_TRUE(c().wait_for_event("stop_declined"));
  const Json declined = c().events_named("stop_declined").front();
  EXPECT_HAS(declined.value("cause", ""), "No space left") << declined;
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 10));
  EXPECT_EQ(c().events_named("mesh").size(), 1U);
  disk.free();
  interrupt();
  expect_sequence(c().last_step());
}

TEST_F(DiskTest, ADamagedCheckpointIsReplacedByThePreviousOne) {
  train_to_20();
  damage(shard_of(c().checkpoints() + "/step-00000020"));
  expect_remesh(3, {"checkpoint", "verify", c().run_dir()});
  expect_exit(c().start_run(1, {"--resume", "--set", "train.steps=30"}), 0);
  expect_sequence(30);
  const Json mesh = c().events_named("mesh").back();
  EXPECT_HAS(mesh.value("source", ""), "step-00000010") << mesh;
  EXPECT_HAS(mesh.value("detail", ""), "skipped") << mesh;
  EXPECT_EQ(lost_steps(mesh), 10);
}

TEST_F(DiskTest, WithAllCheckpointsDamagedTheJobFailsWithTheReason) {
  train_to_20();
  for (const char* step : {"/step-00000010", "/step-00000020"})
    damage(shard_of(c().checkpoints() + step));
  expect_exit(c().start_run(1, {"--resume", "--set", "train.steps=30"}), 3);
  const std::string last = testing::tail(c().run().output(), 1);
  EXPECT_HAS(last, "none can be loaded");
  EXPECT_EQ(c().last_step(), 20);
  for (const Json& e : c().events_named("mesh"))
    EXPECT_TRUE(e["generation"] == 1 ||
                e.value("source", "").find("initial") == std::string::npos)
        << e;
}

// As when their file system is not mounted.
TEST_F(DiskTest, AJobWhoseCheckpointsAreMissingDoesNotStartOver) {
  train_to_20();
  fs::remove_all(c().checkpoints());
  expect_exit(c().start_run(1, {"--resume", "--set", "train.steps=30"}), 3);
  const std::string last = testing::tail(c().run().output(), 1);
  EXPECT_HAS(last, "make the folder available");
  EXPECT_EQ(c().last_step(), 20);
}

// The data set is gone for a while, as when its file system is not mounted.
// Steps were made with it, so that this is no error in the job.
TEST_F(DiskTest, AJobWaitsForItsDataSet) {
  make(endless());
  const std::string copy = c().folder() + "/data";
  fs::copy(data_path(), copy, fs::copy_options::recursive);
  testing::write_whole(
      c().job_file(),
      testing::tiny_job(copy, endless({{"elastic.max_same_failures", "1"}})));
  start_services(2, 12);
  fs::rename(copy, copy + ".away");
  testing::send_signal(c().rank_pids(2).at(0), SIGKILL);
  ASSERT_TRUE(c().wait_for_event("waiting_for_inputs", 4, 60'000));
  const Json waits = c().events_named("waiting_for_inputs").back();
  EXPECT_HAS(waits.value("detail", ""), copy) << waits;
  EXPECT_HAS(expect_remesh(0, {"status", c().run_dir()}).output,
             "waiting for inputs");
  fs::rename(copy + ".away", copy);
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 10));
  stop_and_check();
  EXPECT_EQ(c().events_named("job_failed").size(), 0U);
}

TEST_F(DiskTest, ADamagedDataSetStopsTheJobWithItsCause) {
  make(endless());
  // A copy, because other tests use the original.
  const std::string copy = c().folder() + "/data";
  fs::copy(data_path(), copy, fs::copy_options::recursive);
  testing::write_whole(c().job_file(),
                       testing::tiny_job(copy, endless({
                                                   {"checkpoint.interval", "5"},
                                               })));
  for (const auto& e : fs::recursive_directory_iterator(copy))
    if (e.is_regular_file() && e.file_size() > 100'000)
      fs::resize_file(e.path(), e.file_size() / 2);
  c().start_run(1);
  ASSERT_TRUE(c().run().wait_ms(60'000));
  EXPECT_TRUE(c().run().exit().code == 3 || c().run().exit().code == 2);
  const std::string last = testing::tail(c().run().output(), 1);
  EXPECT_HAS(last, copy);
}

}  // namespace
}  // namespace remesh::e2e
