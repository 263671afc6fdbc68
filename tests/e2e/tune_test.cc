// `remesh tune` with real runs.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "tests/e2e/e2e.h"
#include "tests/testing/expect.h"

namespace remesh::e2e {
namespace {

class TuneTest : public E2e {
 protected:
  std::string out() { return c().folder() + "/tune"; }
  std::vector<std::string> arguments(const std::vector<std::string>& more) {
    std::vector<std::string> args = {"tune", c().job_file(), "--steps",
                                     "4",    "--out",        out()};
    args.insert(args.end(), more.begin(), more.end());
    return args;
  }
  Json tune(std::vector<std::string> more, int code = 0) {
    more.emplace_back("--json");
    const Finished f = expect_remesh(code, arguments(more), 300'000);
    return Json::accept(f.output) ? Json::parse(f.output) : Json();
  }
};

TEST_F(TuneTest, MeasuresTheJobsSettingFirstAndContinuesWhereItEnded) {
  make({{"schedule.warmup_steps", "20"}, {"schedule.total_steps", "-1"}});
  const Json first = tune({"--local", "2", "--trials", "2"});
  ASSERT_EQ(first["trials"].size(), 2U) << first;
  EXPECT_EQ(first["trials"][0]["setting"],
            "dp2, micro-batch 2, ZeRO 0, recompute none, 1 thread");
  const Json all = tune(
      {"--local", "2", "--trials", "3", "--html", c().folder() + "/tune.html"});
  ASSERT_EQ(all["trials"].size(), 3U);
  double best = 1e9;
  for (size_t i = 0; i < 3; ++i) {
    const Json& t = all["trials"][i];
    if (i < 2) {
      EXPECT_EQ(t, first["trials"][i]);
    }
    if (t.contains("step_s")) best = std::min(best, t["step_s"].get<double>());
  }
  EXPECT_EQ(all["best"]["step_s"], best);
  EXPECT_TRUE(
      testing::read_whole(c().folder() + "/tune.html").ends_with("</html>\n"));
  // A page that cannot be written costs nothing else.
  const Finished no_page =
      expect_remesh(5, arguments({"--local", "2", "--trials", "3", "--html",
                                  c().folder() + "/none/tune.html"}));
  EXPECT_HAS(no_page.output, "best of 3 trials");
  // Runs that succeeded leave nothing, nor a link to the newest run.
  for (const auto& entry : std::filesystem::directory_iterator(out()))
    EXPECT_FALSE(entry.is_directory()) << entry.path();
  namespace fs = std::filesystem;
  EXPECT_EQ(fs::status(out()).permissions() & ~fs::perms::owner_all,
            fs::perms::none);
  // Trials of another job are not mixed with these.
  const Finished other =
      expect_remesh(2, arguments({"--local", "2", "--set", "train.seq_len=8"}));
  EXPECT_HAS(other.output, "trials of another job");
}

TEST_F(TuneTest, LearnsFromTrialsThatFail) {
  make();
  const std::string remesh = testing::program("remesh");
  // Every micro-batch but the job's fails.
  const Json j = tune(
      {"--trials", "5", "--fix", "recompute", "--fix", "threads", "--launch",
       "grep -q 'local_batch_size = 2' \"$1\" || { echo no room; exit 9; }; " +
           remesh + " run \"$1\" --run-dir \"$2\" --local 1"});
  ASSERT_GE(j["trials"].size(), 2U) << j;
  size_t failed = 0;
  for (const Json& t : j["trials"]) {
    if (t.contains("step_s")) continue;
    ++failed;
    EXPECT_EQ(t["error"], "exit code 9: no room");
  }
  EXPECT_EQ(failed, j["trials"].size() - 1);
  EXPECT_EQ(j["best"]["set"][5], "train.local_batch_size=2");
}

TEST_F(TuneTest, AnInterruptKeepsWhatWasMeasured) {
  make();
  std::vector<std::string> argv = arguments({"--local", "1", "--every"});
  argv.insert(argv.begin(), testing::program("remesh"));
  Process process({argv, c().folder() + "/tune.out", c().environment()});
  ASSERT_TRUE(testing::wait_until(
      [&] {
        return testing::read_whole(out() + "/trials.jsonl").find("step_s") !=
               std::string::npos;
      },
      60'000))
      << process.output();
  process.kill(SIGINT);
  ASSERT_TRUE(process.wait_ms(120'000)) << process.output();
  EXPECT_EQ(process.exit().code, 130) << process.output();
  EXPECT_HAS(process.output(), "best of");
  const std::string kept = testing::read_whole(out() + "/trials.jsonl");
  const Json j = tune({"--local", "1", "--trials", "1"});
  EXPECT_EQ(testing::read_whole(out() + "/trials.jsonl"), kept);
  EXPECT_GE(j["trials"].size(), 1U);
}

TEST_F(TuneTest, NamesAnInvalidLineAndAnotherWriter) {
  make();
  tune({"--local", "1", "--trials", "1"});
  const std::string log = out() + "/trials.jsonl";
  const std::string before = testing::read_whole(log);
  for (const char* bad : {R"({"set":"x","step_s":1})", R"({"set":[]})", "5",
                          R"({"set":[],"step_s":-1})"}) {
    testing::write_whole(log, before + bad + "\n");
    const Finished f = c().remesh(arguments({"--local", "1"}));
    EXPECT_NE(f.exit.code, 0) << f.output;
    EXPECT_HAS(f.output, "trials.jsonl:3: is not a trial");
  }
  testing::write_whole(log, before);
  const int fd = open(log.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(flock(fd, LOCK_EX), 0);
  const Finished f = c().remesh(arguments({"--local", "1"}));
  close(fd);
  EXPECT_EQ(f.exit.code, 75) << f.output;
  EXPECT_HAS(f.output, "another `remesh tune`");
  EXPECT_EQ(testing::read_whole(log), before);
}

}  // namespace
}  // namespace remesh::e2e
