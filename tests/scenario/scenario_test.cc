// Runs every tests/scenario/*.txt and compares; --rewrite writes what the
// cores did into the files, to be read in the diff.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/scenario/scripted_cluster.h"
#include "tests/testing/expect.h"
#include "tests/testing/temp_dir.h"

namespace remesh::scenario {
namespace {

class ScenarioTest : public testing::Test {
 public:
  ScenarioTest(std::string path, bool rewrite)
      : path_(std::move(path)), rewrite_(rewrite) {}

  void TestBody() override {
    auto blocks = parse_scenario(read_whole(path_));
    ASSERT_TRUE(blocks.ok()) << path_ << ": " << blocks.status().to_string();
    auto cluster = std::make_unique<ScriptedCluster>(Command());
    Shortener shortener;
    std::vector<std::string> outputs;
    for (const Block& block : *blocks) {
      std::string output;
      for (const Command& command : block.commands) {
        if (command.name == "job")
          cluster = std::make_unique<ScriptedCluster>(command);
        auto said = cluster->execute(command);
        output +=
            said.ok() ? *said : "error: " + said.status().to_string() + "\n";
      }
      output = output.empty() ? "ok\n" : shortener.shortened(output);
      if (!rewrite_) {
        EXPECT_EQ(block.expected, output)
            << path_ << ":" << block.line << ":\n"
            << block.header << "(scenario_test --rewrite accepts)";
      }
      outputs.push_back(std::move(output));
    }
    if (rewrite_) std::ofstream(path_) << rewrite_scenario(*blocks, outputs);
  }

 private:
  std::string path_;
  bool rewrite_;
};

TEST(ScenarioFile, RewritingWhatWasExpectedChangesNothing) {
  const std::string text =
      "# why\njob steps=3\nworker a b\n----\n0 x\n0 y\n\ntime 5\n----\nok\n";
  auto blocks = parse_scenario(text);
  ASSERT_TRUE(blocks.ok());
  ASSERT_EQ(blocks->size(), 2u);
  EXPECT_EQ((*blocks)[0].commands[0].number("steps", 0), 3);
  EXPECT_EQ((*blocks)[0].commands[1].words,
            (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(rewrite_scenario(*blocks, {"0 x\n0 y\n", "ok\n"}), text);
}

TEST(ScenarioFile, QuotesKeepBlanks) {
  auto blocks = parse_scenario("rank 0 error=\"out of memory\" x\n----\n");
  ASSERT_TRUE(blocks.ok());
  const Command& c = (*blocks)[0].commands[0];
  EXPECT_EQ(c.text("error", ""), "out of memory");
  EXPECT_EQ(c.words, (std::vector<std::string>{"0", "x"}));
}

TEST(ScenarioFile, CommandsWithoutOutputAreRefused) {
  EXPECT_FALSE(parse_scenario("time 5\n").ok());
  EXPECT_FALSE(parse_scenario("----\nok\n").ok());
}

// Of a run of two workers and a spare one, which joins later.
std::vector<std::string> ordinary_output() {
  const std::string output =
      "510    journal running g1\n"
      "510    metrics step 1 g1\n"
      "520    metrics step 2 g1\n"
      "520    metrics step 3 g1\n"
      "520    metrics step 4 g1\n"
      "530    a is QUIESCED g1 holds g1:2\n"
      "530    b is IDLE g0\n"
      "530    event worker_joined g1 worker=b (1 slot on host-b)\n"
      "530    tell b IDLE g1\n"
      "530    b is IDLE g1\n"
      "530    c is IDLE g1 holds g1:2\n"
      "530    journal preparing g2 dp=2 ranks 0:a 1:c from step 2 scale=2\n"
      "530    event mesh g2 from dp=3 to dp=2\n"
      "530    tell a PREPARE g2\n"
      "530    tell b PREPARE g2\n"
      "530    tell c PREPARE g2\n"
      "530    a is IDLE g1 holds g1:2\n"
      "530    a is PREPARED g2 holds g1:2\n"
      "530    b is PREPARED g2\n"
      "530    c is PREPARED g2 holds g1:2\n"
      "530    journal running g2 scale=2\n"
      "530    tell a RUN g2\n"
      "530    tell b RUN g2\n"
      "530    tell c RUN g2\n"
      "530    a starts ranks 0 of g2\n"
      "530    a is RUNNING g2\n"
      "530    b is QUIESCED g2\n"
      "530    c starts ranks 1 of g2\n"
      "530    c is RUNNING g2\n"
      "530    ranks of g2 are connected\n"
      "540    metrics step 5 g2\n";
  std::vector<std::string> lines;
  std::istringstream in(output);
  for (std::string line; std::getline(in, line);) lines.push_back(line + "\n");
  return lines;
}

std::string shortened(const std::vector<std::string>& lines) {
  return Shortener().shortened(
      std::accumulate(lines.begin(), lines.end(), std::string()));
}

TEST(Shortener, LeavesOutWhatFollowsFromTheRest) {
  EXPECT_EQ(shortened(ordinary_output()),
            "510    metrics steps 1 to 2 g1 until 520, journaled\n"
            "520    metrics steps 3 to 4 g1\n"
            "530    a is QUIESCED g1 holds g1:2\n"
            "530    b joins g1 (1 slot on host-b)\n"
            "530    c is IDLE g1 holds g1:2\n"
            "530    g2 runs dp=2 ranks 0:a 1:c from step 2 scale=2 spare=b\n"
            "530    event mesh g2 from dp=3 to dp=2\n"
            "540    metrics step 5 g2\n");
  std::vector<std::string> lines = ordinary_output();
  lines.erase(lines.end() - 2);  // the ranks do not connect
  EXPECT_HAS(shortened(lines),
             "530    g2 starts dp=2 ranks 0:a 1:c from step 2 scale=2 spare=b\n"
             "530    event mesh g2 from dp=3 to dp=2\n"
             "530    a runs ranks 0 of g2\n");
}

TEST(Shortener, ShowsEveryOtherOutput) {
  const std::vector<std::string> lines = ordinary_output();
  std::set<std::string> seen = {shortened(lines)};
  const auto expect_new = [&](const std::vector<std::string>& other) {
    EXPECT_TRUE(seen.insert(shortened(other)).second) << shortened(other);
  };
  for (size_t i = 0; i < lines.size(); ++i) {
    std::vector<std::string> other = lines;
    other[i].insert(other[i].size() - 1, "1");
    expect_new(other);
    other[i] = "6" + lines[i];
    expect_new(other);
    other.erase(other.begin() + static_cast<ptrdiff_t>(i));
    expect_new(other);
    if (i + 1 == lines.size()) break;
    other = lines;
    std::swap(other[i], other[i + 1]);
    expect_new(other);
  }
}

}  // namespace
}  // namespace remesh::scenario

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  std::string dir = "tests/scenario";
  bool rewrite = false;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--rewrite") {
      rewrite = true;
    } else if (arg.rfind("--", 0) == 0) {
      std::printf(
          "scenario_test [--rewrite] [DIR=tests/scenario]: runs DIR/*.txt\n"
          "--rewrite: writes what happened into the files\n\nCommands:\n%s",
          remesh::scenario::ScriptedCluster::help().c_str());
      return arg == "--help" ? 0 : 2;
    } else {
      dir = arg;
    }
  }
  std::vector<std::filesystem::path> files;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(dir, error))
    if (entry.path().extension() == ".txt" &&
        entry.path().filename() != "CMakeLists.txt")
      files.push_back(entry.path());
  if (files.empty()) {
    std::printf("no scenarios (*.txt) in '%s'\n", dir.c_str());
    return 2;
  }
  std::sort(files.begin(), files.end());
  for (const auto& file : files) {
    const std::string path = file.string();
    testing::RegisterTest(
        "Scenario", file.stem().string().c_str(), nullptr, nullptr, __FILE__,
        __LINE__, [path, rewrite]() -> testing::Test* {
          return new remesh::scenario::ScenarioTest(path, rewrite);
        });
  }
  return RUN_ALL_TESTS();
}
