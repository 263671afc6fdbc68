// Who may start, continue and end a run, and that nothing is lost when it goes
// wrong.
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>

#include "proto/base/rng.h"
#include "tests/e2e/e2e.h"
#include "tests/testing/expect.h"
#include "tests/testing/seed.h"

namespace remesh::e2e {
namespace {

class StartTest : public E2e {
 protected:
  std::unique_ptr<Process> run(const std::string& output,
                               std::vector<std::string> more = {},
                               std::vector<std::string> prefix = {}) {
    std::vector<std::string> argv = std::move(prefix);
    for (const std::string& arg :
         {testing::program("remesh"), std::string("run"), c().job_file(),
          std::string("--run-dir"), c().run_dir()})
      argv.push_back(arg);
    argv.insert(argv.end(), more.begin(), more.end());
    return std::make_unique<Process>(testing::ProcessOptions{
        argv, c().folder() + "/" + output, c().environment()});
  }
  // Starts `remesh run`, which trains past step 3.
  void train(const std::vector<std::string>& more = {}) {
    c().start_run(1, more);
    ASSERT_TRUE(c().wait_for_step(3)) << c().describe();
  }
  // `remesh run --resume` goes on past that step, and loses none.
  void expect_continues(int64_t after) {
    c().start_run(1, {"--resume"});
    ASSERT_TRUE(c().wait_for_step(after + 3));
    EXPECT_EQ(lost_steps(c().events_named("mesh").back()), 0);
    interrupt();
  }
  // Runs a script of deploy/examples in the cluster's folder.
  Finished example(const std::string& script,
                   const std::vector<std::string>& arguments,
                   int64_t timeout_ms) {
    const std::string programs = testing::program("remesh");
    std::vector<std::string> argv = {
        "env", "-C", c().folder(),
        fmt::format("PATH={}:{}", programs.substr(0, programs.rfind('/')),
                    std::getenv("PATH")),
        std::filesystem::absolute("deploy/examples/" + script).string()};
    argv.insert(argv.end(), arguments.begin(), arguments.end());
    return testing::run_program(argv, timeout_ms, c().environment());
  }
  // As somebody does by hand. Returns the new text.
  static std::string edit_rate(const std::string& job_file) {
    const std::string before = "\nlr = 0.001\n";
    std::string text = testing::read_whole(job_file);
    const size_t at = text.find(before);
    EXPECT_NE(at, std::string::npos) << text;
    if (at == std::string::npos) return text;
    text.replace(at, before.size(), "\nlr = 0.01\n");
    testing::write_whole(job_file, text);
    return text;
  }
  // A run whose newest state is ahead of its metrics, and that nobody runs.
  // Returns the last step in the metrics.
  int64_t leave_states_ahead() {
    make(endless({{"checkpoint.interval", "0"}}));
    c().start_run(1);
    EXPECT_TRUE(c().wait_for_step(5));
    const pid_t coordinator = c().status()["coordinator"]["pid"];
    testing::send_signal(coordinator, SIGSTOP);
    const int64_t heard = c().last_step();
    // The rank logs its steps itself.
    EXPECT_TRUE(testing::wait_until(
        [&] {
          return testing::read_whole(c().run_dir() + "/logs/gen-1/rank-0.log")
                     .find(fmt::format(" step={} ", heard + 100)) !=
                 std::string::npos;
        },
        kEndMs));
    c().run().kill(SIGKILL);
    EXPECT_TRUE(c().run().wait_ms(kEndMs));
    EXPECT_TRUE(testing::wait_until(
        [&] { return testing::process_state(coordinator).empty(); }, kEndMs));
    return c().last_step();
  }
};

TEST_F(StartTest, OfRunsStartedInOneDirectoryOneTrains) {
  for (int round = 0; round < test_cases(3); ++round) {
    make({{"train.steps", "12"}, {"checkpoint.interval", "0"}});
    std::vector<std::unique_ptr<Process>> runs;
    for (int i = 0; i < 3; ++i)
      runs.push_back(run(fmt::format("run-{}.out", i), {"--local", "1"}));
    for (auto& r : runs) ASSERT_TRUE(r->wait_ms(60'000)) << c().describe();
    for (auto& r : runs) {
      if (r->exit().code == 0) continue;  // its own, or one that it followed
      const std::string said = r->output();
      EXPECT_TRUE(
          (r->exit().code == 75 &&
           said.find("another coordinator (pid ") != std::string::npos) ||
          (r->exit().code == 4 &&
           said.find("finished at step 12") != std::string::npos))
          << r->exit().code << ": " << said;
    }
    expect_sequence(12);
    EXPECT_EQ(c().events_named("coordinator_started").size(), 1U);
    EXPECT_EQ(c().events_named("job_done").size(), 1U);
    for (const char* file : {"job.toml", "journal", "logs/coordinator.log"})
      EXPECT_TRUE(std::filesystem::exists(c().run_dir() + "/" + file)) << file;
  }
}

TEST_F(StartTest, FewerStepsThanTheNewestStateAreRefused) {
  const int64_t in_metrics = leave_states_ahead();
  const Finished refused =
      expect_remesh(2, {"resume", c().run_dir(), "--local", "1", "--set",
                        fmt::format("train.steps={}", in_metrics + 20)});
  EXPECT_HAS(refused.output, "is in the memory of this host until ");
  EXPECT_EQ(c().last_step(), in_metrics) << "nothing was started";
  c().start_run(1, {"--resume"});
  ASSERT_TRUE(c().wait_for_step(in_metrics + 110));
  interrupt();
  const Json mesh = c().events_named("mesh").back();
  EXPECT_EQ(lost_steps(mesh), 0);
  EXPECT_HAS(mesh.value("source", ""), "memory") << mesh;
}

// The state is on another host, as far as the coordinator can see.
TEST_F(StartTest, FewerStepsThanARemoteStateAreRefusedOnceItIsReported) {
  const std::vector<std::string> with_other_memory = {
      "unshare",
      "-m",
      "sh",
      "-c",
      "mount -t tmpfs tmpfs /dev/shm && exec \"$@\"",
      "sh"};
  auto probe = with_other_memory;
  probe.emplace_back("true");
  if (testing::run_program(probe).exit.code != 0) GTEST_SKIP() << "needs mount";
  const int64_t in_metrics = leave_states_ahead();
  c().start_coordinator(
      {"--resume", "--set", fmt::format("train.steps={}", in_metrics + 20)},
      with_other_memory);
  // The successor of the one that `remesh run` had started.
  const auto run = std::filesystem::canonical(c().run_dir()).string();
  c().start_worker({.name = "local-1",
                    .more = {"--scratch-name",
                             fmt::format("local-1-{:016x}", hash64(run))}});
  expect_exit(c().coordinator(), 2);
  EXPECT_HAS(c().coordinator().output(), "is finished (newest complete state");
  ASSERT_TRUE(c().wait_for_event("job_stopped"));
  const Json end = c().events_named("job_stopped").back();
  EXPECT_GE(end["step"], in_metrics + 100);
  expect_exit(c().worker("local-1"), 0);
  expect_continues(end["step"]);
}

TEST_F(StartTest, AChangedJobReachesRunningRanks) {
  make(endless({{"train.steps", "100000"}}));
  start_services(1);
  kill_coordinator();
  const int64_t steps = c().last_step() + 2000;
  c().start_coordinator({"--resume", "--set",
                         fmt::format("train.steps={}", steps), "--set",
                         "optimizer.lr=0.5"});
  ASSERT_TRUE(c().wait_for_event("job_changed")) << c().describe();
  ASSERT_TRUE(c().wait_for_event("generation_ended")) << c().describe();
  EXPECT_HAS(c().events_named("generation_ended")[0].value("detail", ""),
             "optimizer.lr 0.001 -> 0.5");
  ASSERT_TRUE(c().wait_for_status([&](const Json& s) {
    return s["steps"] == steps && s["generation"] == 2 &&
           s["state"] == "running";
  }) != nullptr);
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 3));
  EXPECT_GT(c().metrics().back()["lr"], 0.01);
  EXPECT_EQ(lost_steps(c().events_named("mesh").back()), 0);
  stop_in_order();
}

TEST_F(StartTest, AJobFileEditedInTheRunIsRefused) {
  make({{"train.steps", "20"}});
  expect_exit(c().start_run(1), 0);
  const std::string file = c().run_dir() + "/job.toml";
  const std::string text = edit_rate(file);
  std::vector<std::string> resume = {"resume", c().run_dir(), "--local",
                                     "1",      "--set",       "train.steps=25"};
  const Finished refused = expect_remesh(2, resume);
  EXPECT_HAS(refused.output, "edited by hand: optimizer.lr 0.001 -> 0.01");
  EXPECT_EQ(c().status()["state"], "done");
  EXPECT_EQ(testing::read_whole(file), text);
  const Finished fork =
      c().remesh({"fork", c().run_dir(), "--out", c().folder() + "/fork",
                  "--set", "train.steps=25"});
  EXPECT_EQ(fork.exit.code, 2) << fork.output;
  EXPECT_HAS(fork.output, "edited by hand: optimizer.lr 0.001 -> 0.01");
  resume.emplace_back("--accept-edits");
  expect_remesh(0, resume);
  EXPECT_HAS(c().events_named("job_changed").back().value("detail", ""),
             "optimizer.lr 0.001 -> 0.01");
  expect_sequence(25);
}

TEST_F(StartTest, ARunWhoseCoordinatorCannotRestartSaysWhy) {
  make(endless());
  ASSERT_NO_FATAL_FAILURE(train({"--stop-timeout", "1"}));
  const std::string file = c().run_dir() + "/job.toml";
  const std::string text = testing::read_whole(file);
  edit_rate(file);
  testing::send_signal(c().status()["coordinator"]["pid"], SIGKILL);
  expect_exit(c().run(), 2);
  EXPECT_HAS(c().run().output(), "failed at step ");
  EXPECT_HAS(c().run().output(), "cannot be started again: exit code 2: ");
  testing::write_whole(file, text);
  expect_continues(c().last_step());
}

TEST_F(StartTest, AnIgnoredHangupSignalStaysIgnored) {
  make(endless());
  const auto kept = run("kept.out", {"--local", "1"},
                        {"sh", "-c", "trap '' HUP; exec \"$@\"", "sh"});
  ASSERT_TRUE(c().wait_for_step(3));
  kept->kill(SIGHUP);
  ASSERT_TRUE(c().wait_for_step(c().last_step() + 20));
  EXPECT_TRUE(c().events_named("stop_requested").empty());
  kept->kill(SIGINT);
  expect_exit(*kept, 130);
}

TEST_F(StartTest, StopEndsIfTheCoordinatorDoesNotAnswer) {
  make(endless({{"checkpoint.interval", "0"}}));
  ASSERT_NO_FATAL_FAILURE(train({"--stop-timeout", "1"}));
  const pid_t coordinator = c().status()["coordinator"]["pid"];
  testing::send_signal(coordinator, SIGSTOP);
  c().run().kill(SIGINT);
  expect_exit(c().run(), 3);
  EXPECT_HAS(c().run().output(), "has not answered the stop within 1 s");
  expect_continues(c().last_step());
}

TEST_F(StartTest, ARunEndsIfNoWorkerCanStart) {
  make(endless());
  testing::write_whole(c().folder() + "/file", "");
  std::vector<std::string> argv = {
      "env", "REMESH_SCRATCH=" + c().folder() + "/file/below"};
  const auto failed = run("failed.out", {"--local", "2"}, argv);
  expect_exit(*failed, 3);
  EXPECT_HAS(failed->output(), "no worker can run here");
}

TEST_F(StartTest, DivergedTrainingIsNotRetried) {
  make(endless({{"optimizer.lr", "1e308"},
                {"schedule.warmup_steps", "0"},
                {"elastic.keep_state", "false"}}));
  expect_exit(c().start_run(1), 3);
  EXPECT_HAS(c().run().output(), "training has diverged: at step ");
  EXPECT_EQ(c().events_named("failure").size(), 1U);
  EXPECT_EQ(c().events_named("mesh").size(), 1U);
}

TEST_F(StartTest, StepsThatAreNotFiniteAreSkippedUpToALimit) {
  make(endless({{"optimizer.lr", "1e308"},
                {"schedule.warmup_steps", "0"},
                {"elastic.keep_state", "false"},
                {"train.max_skipped_steps", "3"}}));
  expect_exit(c().start_run(2), 3);
  EXPECT_HAS(c().run().output(), "training has diverged: at step 5");
  const auto skipped = c().events_named("step_skipped");
  ASSERT_EQ(skipped.size(), 3U);
  EXPECT_EQ(skipped[0]["step"], 2);
  EXPECT_EQ(skipped[2]["step"], 4);
  EXPECT_EQ(c().last_step(), 4);
}

TEST_F(StartTest, AForkContinuesWithAnotherLearningRateBatchOrData) {
  make({{"train.steps", "20"}});
  expect_exit(c().start_run(1), 0);
  const auto losses = raw_losses(c().metric_lines());
  const std::string fork = c().folder() + "/fork";
  const auto forked = [&](std::vector<std::string> more) {
    std::filesystem::remove_all(fork);
    std::vector<std::string> args = {"fork", c().run_dir(), "--at",
                                     "10",   "--out",       fork};
    args.insert(args.end(), more.begin(), more.end());
    return c().remesh(args);
  };
  EXPECT_EQ(forked({"--set", "model.dim=32"}).exit.code, 2);
  EXPECT_EQ(forked({"--set", "train.steps=10"}).exit.code, 2);
  EXPECT_EQ(forked({"--set", "data.sequence_offset=0"}).exit.code, 2);
  EXPECT_FALSE(std::filesystem::exists(fork));
  const auto trained = [&](const std::vector<std::string>& more) {
    const Finished made = forked(more);
    EXPECT_EQ(made.exit.code, 0) << made.output;
    expect_remesh(0, {"resume", fork, "--local", "1"});
    return raw_losses(
        testing::split_lines(testing::read_whole(fork + "/metrics.jsonl")));
  };
  // Without a change it is the same training.
  EXPECT_EQ(trained({}), losses);
  const auto hot = trained({"--set", "optimizer.lr=0.01"});
  ASSERT_EQ(hot.size(), 20U);
  EXPECT_TRUE(std::equal(hot.begin(), hot.begin() + 11, losses.begin()));
  EXPECT_NE(hot[12], losses[12]);
  // Twice the batch: step 11 has the sequences of steps 11 and 12.
  const auto wide = trained(
      {"--set", "train.global_batch_size=60", "--set", "optimizer.lr=0"});
  const auto still = trained({"--set", "optimizer.lr=0"});
  ASSERT_EQ(wide.size(), 20U);
  EXPECT_NEAR(std::stod(wide[10]),
              (std::stod(still[10]) + std::stod(still[11])) / 2, 1e-6);
  EXPECT_NEAR(std::stod(wide[14]),
              (std::stod(still[18]) + std::stod(still[19])) / 2, 1e-6);
}

TEST_F(StartTest, TheExampleScriptSweepsTheLearningRate) {
  if (testing::run_program({"jq", "--version"}).exit.code != 0)
    GTEST_SKIP() << "needs jq";
  make(endless({{"checkpoint.interval", "0"}}));
  const Finished f =
      example("sweep.sh", {c().job_file(), "5", "1e-3", "1e-4"}, 120'000);
  EXPECT_EQ(f.exit.code, 0)
      << f.output << testing::read_whole(c().folder() + "/sweep.log");
  for (const char* lr : {"lr-1e-3", "lr-1e-4"})
    EXPECT_HAS(f.output, fmt::format("{}  step ", lr));
}

// All weights, and adapters.
class FineTuneTest : public StartTest,
                     public ::testing::WithParamInterface<const char*> {};

TEST_P(FineTuneTest, TheExampleScriptSurvivesAKill) {
  if (testing::run_program({"jq", "--version"}).exit.code != 0)
    GTEST_SKIP() << "needs jq";
  make(endless());
  std::string text;
  for (int i = 0; i < 6000; ++i)
    text += fmt::format("He said {} to {}.{}", i * i % 89, i * i % 97,
                        i % 40 == 0 ? "\n" : " ");
  testing::write_whole(c().folder() + "/text.txt", text);
  const Finished f =
      example("finetune.sh",
              {std::filesystem::absolute("deploy/data/stories260k").string(),
               "text.txt", "tuned", "--set", GetParam()},
              240'000);
  EXPECT_EQ(f.exit.code, 0)
      << f.output << testing::read_whole(c().folder() + "/tuned/log");
  // The tuned model continues as the text does.
  const size_t at = f.output.find("tuned/model:");
  ASSERT_NE(at, std::string::npos) << f.output;
  EXPECT_NE(f.output.find(" to ", at), std::string::npos) << f.output;
  const std::string run = c().folder() + "/tuned/run";
  // And predicts a part of it better on which it was not trained.
  std::vector<double> val_losses;
  for (const std::string& line :
       testing::split_lines(testing::read_whole(run + "/metrics.jsonl"))) {
    const Json step = Json::parse(line);
    if (step.contains("val_loss"))
      val_losses.push_back(step["val_loss"].get<double>());
  }
  ASSERT_GE(val_losses.size(), 2U);
  EXPECT_LT(val_losses.back(), val_losses.front());
  const Finished alone =
      c().remesh({"model", "export", run, "--adapters", "--out",
                  c().folder() + "/adapters", "--json"});
  const bool adapters = std::string(GetParam()).starts_with("lora");
  EXPECT_EQ(alone.exit.code, adapters ? 0 : 2) << alone.output;
  if (!adapters) return;
  // The run's own model is the merged one, and its text begins in the same way.
  const std::string merged = c().folder() + "/merged";
  const Finished whole =
      c().remesh({"model", "export", run, "--dtype", "fp32", "--like",
                  c().folder() + "/tuned/model", "--out", merged});
  ASSERT_EQ(whole.exit.code, 0) << whole.output;
  const auto continued = [&](const std::string& model) {
    return Json::parse(
        c().remesh({"sample", model, "--prompt", "He said ", "--temperature",
                    "0", "--tokens", "20", "--dtype", "fp32", "--json"})
            .output)["text"];
  };
  EXPECT_EQ(continued(run), continued(merged));
}
INSTANTIATE_TEST_SUITE_P(, FineTuneTest,
                         ::testing::Values("train.seed=1", "lora.rank=8"));

// A newer checkpoint beside the frozen model changes nothing, and other weights
// in its place start nothing.
TEST_F(StartTest, AdaptersResumeOnTheirOwnModelAlone) {
  namespace fs = std::filesystem;
  const testing::TempDir models;
  const std::string base = models.path() + "/base";
  for (const char* seed : {"1", "2"}) {
    make({{"train.steps", "4"},
          {"train.seed", seed},
          {"checkpoint.interval", "2"}});
    expect_exit(c().start_run(1), 0);
    fs::rename(c().run_dir() + "/checkpoints", models.path() + "/" + seed);
  }
  const std::string step = "/step-00000002";
  fs::create_directory(base);
  fs::rename(models.path() + "/1" + step, base + step);
  make(endless({{"model.init_from", "\"" + base + "\""},
                {"lora.rank", "2"},
                {"checkpoint.interval", "0"}}));
  ASSERT_NO_FATAL_FAILURE(train());
  // The optimizer's state is that of the adapters alone: two moments in fp32,
  // twice, as the state is in shared memory.
  constexpr int kElements =
      2 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128));
  const Json::json_pointer rank("/workers/0/ranks/0");
  const Json status = c().wait_for_status(
      [&](const Json& s) { return s.contains(rank / "memory"); });
  ASSERT_FALSE(status.is_null()) << c().describe();
  for (const char* account : {"memory", "predicted_memory"})
    EXPECT_EQ(status[rank / account / "optimizer"], 2 * 2 * 4 * kElements);
  expect_remesh(0, {"stop"});
  expect_exit(c().run(), 4);

  for (const char* change : {"lora.rank=4", "lora.alpha=8"}) {
    const Finished f =
        expect_remesh(2, {"fork", c().run_dir(), "--out",
                          c().folder() + "/fork", "--set", change});
    EXPECT_HAS(f.output, "a fork keeps the model");
  }

  fs::rename(models.path() + "/1/step-00000004", base + "/step-00000004");
  const int64_t last = c().last_step();
  c().start_run(1, {"--resume"});
  ASSERT_TRUE(c().wait_for_step(last + 3)) << c().describe();
  expect_remesh(0, {"stop"});
  expect_exit(c().run(), 4);

  fs::remove_all(base + step);
  fs::rename(models.path() + "/2" + step, base + step);
  const auto starts = c().events_named("coordinator_started").size();
  const std::string refusal =
      base + step +
      ": its weights are not those of the model that the adapters belong to";
  expect_exit(c().start_run(1, {"--resume"}), 3);
  EXPECT_HAS(c().run().output(), "frozen model: " + refusal);
  EXPECT_EQ(c().events_named("coordinator_started").size(), starts);
  for (const Finished& f :
       {c().remesh({"sample", c().run_dir(), "--tokens", "1"}),
        c().remesh({"model", "export", c().run_dir(), "--out",
                    models.path() + "/out"})}) {
    EXPECT_EQ(f.exit.code, 3) << f.output;
    EXPECT_HAS(f.output, refusal);
  }
}

TEST_F(StartTest, CommandsWithoutARunMeanTheOneThatTrains) {
  make(endless());
  ASSERT_NO_FATAL_FAILURE(train());
  expect_remesh(0, {"wait", "--step", "5"});
  const Finished drained =
      expect_remesh(0, {"drain", "local-1", "--wait", "--json"});
  const Json status = Json::parse(drained.output);
  EXPECT_TRUE(status["workers"].empty() ||
              status["workers"][0]["state"] == "dead")
      << status;
  const Finished listed = c().remesh({"ls", "--json"});
  const Json runs = Json::parse(listed.output)["runs"];
  ASSERT_EQ(runs.size(), 1u) << listed.output;
  EXPECT_EQ(runs[0]["state"], "training");
  // A second one makes the command ambiguous.
  const std::string other = c().folder() + "/other";
  Process second({{testing::program("remesh"), "run", c().job_file(),
                   "--run-dir", other, "--local", "1"},
                  c().folder() + "/other.out",
                  c().environment()});
  ASSERT_TRUE(testing::wait_until(
      [&] {
        return testing::read_whole(other + "/metrics.jsonl")
                   .find("\"step\":3") != std::string::npos;
      },
      kEndMs));
  const Finished several = expect_remesh(2, {"stop"});
  EXPECT_HAS(several.output, "several runs are training");
  EXPECT_HAS(several.output, other);
  second.kill(SIGINT);
  expect_exit(second, 130);
  expect_remesh(0, {"stop"});
  expect_exit(c().run(), 4);
}

TEST_F(StartTest, ARemovedRunDirectoryEndsTheRun) {
  make(endless({{"checkpoint.interval", "0"}}));
  ASSERT_NO_FATAL_FAILURE(train());
  std::filesystem::rename(c().run_dir(), c().folder() + "/moved");
  ASSERT_TRUE(testing::wait_until(
      [&] {
        return c().run().output().find("is gone; the ranks train on") !=
               std::string::npos;
      },
      60'000))
      << c().run().output();
  c().run().kill(SIGINT);
  expect_exit(c().run(), 3);
  EXPECT_HAS(c().run().output(), "the run directory is gone");
  EXPECT_LACKS(c().run().output(), "What to try next");
  // It can be continued where it is now.
  std::filesystem::rename(c().folder() + "/moved", c().run_dir());
  expect_continues(c().last_step());
}

TEST_F(StartTest, AJobMayComeFromAPipe) {
  make({{"train.steps", "5"}});
  const Finished f = testing::run_program(
      {"bash", "-c", "\"$0\" run - --run-dir \"$2\" --local 1 < <(cat \"$1\")",
       testing::program("remesh"), c().job_file(), c().run_dir()},
      60'000, c().environment());
  EXPECT_EQ(f.exit.code, 0) << f.output;
  expect_sequence(5);
}

TEST_F(StartTest, AFolderOfOtherFilesDoesNotBecomeARun) {
  make(endless());
  std::filesystem::create_directory(c().run_dir());
  testing::write_whole(c().run_dir() + "/thesis.tex", "x");
  expect_exit(c().start_run(1), 2);
  EXPECT_HAS(c().run().output(), "thesis.tex");
  EXPECT_FALSE(std::filesystem::exists(c().run_dir() + "/journal"));
  EXPECT_FALSE(std::filesystem::exists(c().run_dir() + "/coordinator.lock"));
}

}  // namespace
}  // namespace remesh::e2e
