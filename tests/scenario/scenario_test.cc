// Runs every tests/scenario/*.txt and compares; --rewrite writes what the
// cores did into the files, to be read in the diff.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/scenario/scripted_cluster.h"
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
    ScriptedCluster cluster;
    std::vector<std::string> outputs;
    for (const Block& block : *blocks) {
      std::string output;
      for (const Command& command : block.commands) {
        auto said = cluster.execute(command);
        output +=
            said.ok() ? *said : "error: " + said.status().to_string() + "\n";
      }
      output = output.empty() ? "ok\n" : shortened(output);
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
