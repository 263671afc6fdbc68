// The ranks' log files, and where a worker finds its coordinator.
#include "worker/agent/shell/rank_logs.h"

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "proto/rundir/file_tail.h"
#include "proto/rundir/paths.h"
#include "tests/testing/expect.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/agent_shell/num_entries.h"
#include "worker/agent/shell/address.h"

namespace remesh::agent {
namespace {

TEST(RankLogs, TheLastLinesAreThoseThatAreNotBlank) {
  using Lines = std::vector<std::string>;
  EXPECT_EQ(last_lines("one\ntwo\n\n  \n", 1, 100), Lines{"two"});
  EXPECT_EQ(last_lines("one\ntwo\n\n  \n", 3, 100), (Lines{"two", "one"}));
  EXPECT_EQ(last_lines("only", 1, 100), Lines{"only"});
  EXPECT_EQ(last_lines("", 1, 100), Lines());
  EXPECT_EQ(last_lines("\n\n", 1, 100), Lines());
  EXPECT_EQ(last_lines("\x1b[31mred\tx\r\n", 1, 100), Lines{"[31mred x"});
  EXPECT_EQ(last_lines("abcdef", 1, 3), Lines{"abc"});
  EXPECT_EQ(last_lines("ab\xc3\xa9", 1, 3),
            Lines{"ab"});  // not half a character
}

TEST(RankLogs, TheLastLineIsOfTheFileModifiedLast) {
  TempDir dir;
  const RankLogPaths p{dir / "l", dir / "o"};
  EXPECT_TRUE(log_tail(p, 1, 100).empty());
  std::ofstream(p.log) << "step 1\n";
  EXPECT_EQ(log_tail(p, 1, 100), std::vector<std::string>{"step 1"});
  std::ofstream(p.out) << "";
  EXPECT_EQ(log_tail(p, 1, 100), std::vector<std::string>{"step 1"});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::ofstream(p.out) << "Segmentation fault\n";
  EXPECT_EQ(log_tail(p, 1, 100),
            std::vector<std::string>{"Segmentation fault"});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::ofstream(p.log, std::ios::app) << "step 2\n";
  EXPECT_EQ(log_tail(p, 1, 100), std::vector<std::string>{"step 2"});
}

// Another member of the group would learn from the events what it may not read.
TEST(RankLogs, ALinkInTheFolderOfAGroupIsNotRead) {
  TempDir dir;
  const std::string folder = rundir::rank_logs_path(dir.path(), 3);
  std::filesystem::create_directories(folder);
  dir.write("secret", "secret\n");
  const RankLogPaths p = rank_log_paths(folder, 0);
  std::filesystem::create_symlink(dir / "secret", p.log);
  ASSERT_EQ(mkfifo(p.out.c_str(), 0600), 0) << "which nobody opens";
  EXPECT_TRUE(log_tail(p, 1, 100).empty());
  std::filesystem::remove(p.log);
  std::ofstream(p.log) << "step 1\n";
  EXPECT_EQ(log_tail(p, 1, 100), std::vector<std::string>{"step 1"});
  std::filesystem::create_directory_symlink(folder, dir / "logs/gen-4");
  EXPECT_TRUE(log_tail(rank_log_paths(dir / "logs/gen-4", 0), 1, 9).empty());
}

TEST(RankLogs, OutputsOpenWithTheirFolder) {
  TempDir dir;
  RankOutputs outputs;
  const std::string folder = rundir::rank_logs_path(dir.path(), 3);
  ASSERT_OK(outputs.open(folder, {0, 5}));
  EXPECT_EQ(write(outputs.fd(5), "x", 1), 1);
  EXPECT_EQ(outputs.fd(1), -1);
  EXPECT_EQ(log_tail(rank_log_paths(folder, 5), 1, 9),
            std::vector<std::string>{"x"});
  // Another member of the group may make links in RUN/logs.
  const std::string link = rundir::rank_logs_path(dir.path(), 4);
  std::filesystem::create_directory(dir / "other");
  std::filesystem::create_directory_symlink(dir / "other", link);
  EXPECT_FALSE(RankOutputs().open(link, {0}).ok());
  EXPECT_EQ(num_entries(dir / "other"), 0);
  std::ofstream(dir / "file") << "";
  EXPECT_SAYS(RankOutputs().open(dir / "file/logs", {0}), "file/logs");
}

TEST(RankLogs, OldGenerationsArePruned) {
  TempDir dir;
  for (int g = 1; g <= 13; ++g)
    std::filesystem::create_directories(rundir::rank_logs_path(dir.path(), g));
  std::filesystem::create_directory(dir / "logs/gen-x");
  remove_old_logs(dir.path(), 13, 5);
  EXPECT_EQ(num_entries(dir / "logs"), 6);
  EXPECT_TRUE(std::filesystem::exists(dir / "logs/gen-9"));
  EXPECT_FALSE(std::filesystem::exists(dir / "logs/gen-8"));
}

// ------------------------------------------------------------------ address

TEST(Address, NamesAndAddressesAreChecked) {
  EXPECT_TRUE(valid_name("node-7.rack_2"));
  for (const char* bad : {"", "-a", ".", "a b", "a/b", "a,b"})
    EXPECT_FALSE(valid_name(bad)) << bad;
  EXPECT_FALSE(valid_name(std::string(65, 'a')));
  EXPECT_FALSE(CoordinatorAddress::parse("nowhere").ok());
  EXPECT_FALSE(CoordinatorAddress::parse("http://head:80").ok());
  TempDir dir;
  ASSERT_OK_AND(auto later, CoordinatorAddress::parse(dir / "later"));
  EXPECT_EQ(later.read().status().code(), Code::kNotFound);
  auto a = CoordinatorAddress::parse(dir.path());
  ASSERT_OK(a);
  EXPECT_FALSE(a->fixed());
  EXPECT_FALSE(a->read().ok());
  std::ofstream(dir / "coordinator.addr") << "tcp://h:1\npid=3\n";
  EXPECT_EQ(*a->read(), "tcp://h:1");
}

// After "done" the worker removes every state.
TEST(Address, TheNameOfTheLastEventTellsHowARunEnded) {
  TempDir dir;
  std::ofstream events(dir / "events.jsonl");
  const auto outcome_after = [&](const std::string& text) {
    events << text << std::flush;
    return look_up(dir.path()).outcome;
  };
  EXPECT_EQ(outcome_after(""), pb::JobStatus::UNKNOWN);
  EXPECT_EQ(outcome_after("{\"event\":\"job_failed\"}\n"),
            pb::JobStatus::FAILED);
  // Other places that have the words.
  for (const char* line :
       {R"({"event":"failure","cause":"\"event\":\"job_done\""})",
        R"({"event":"failure","last_log":["event","job_done"]})",
        R"({"from":{"event":"job_done"},"event":"mesh"})",
        R"(damaged "event":"job_done")"})
    EXPECT_EQ(outcome_after(std::string(line) + "\n"), pb::JobStatus::UNKNOWN)
        << line;
  EXPECT_EQ(outcome_after("{ \"step\" : 9, \"event\" : \"job_done\" }\n"),
            pb::JobStatus::DONE);
  // A line that is still being written does not count yet.
  EXPECT_EQ(outcome_after("{\"event\":\"job_stopped\"}"), pb::JobStatus::DONE);
  EXPECT_EQ(outcome_after("\n"), pb::JobStatus::STOPPED);
}

TEST(FileTail, HasCompleteLinesOnly) {
  TempDir dir;
  EXPECT_TRUE(rundir::read_last_lines(dir / "f").empty());
  std::ofstream out(dir / "f");
  out << std::string(rundir::kTailBytes, 'x') << "\n\nlast\ntorn" << std::flush;
  EXPECT_EQ(rundir::read_last_lines(dir / "f"),
            (std::vector<std::string>{"", "last"}));
  EXPECT_EQ(rundir::read_tail(dir / "f", 6), "t\ntorn");
}

}  // namespace
}  // namespace remesh::agent
