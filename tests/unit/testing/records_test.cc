#include "tests/testing/records.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "tests/testing/files.h"
#include "tests/testing/process.h"

namespace remesh::testing {
namespace {

Json step(int64_t k, const std::string& digest) {
  return {{"step", k}, {"digest", digest}};
}

std::vector<Json> steps(int64_t last) {
  std::vector<Json> out;
  for (int64_t k = 1; k <= last; ++k)
    out.push_back(step(k, fmt::format("d{}", k)));
  return out;
}

// Of a generation that begins with the state of step `at`; an event's step is
// the last one finished.
Json mesh(int64_t generation, int64_t at, int64_t lost, double time) {
  return {{"event", "mesh"},   {"generation", generation},
          {"step", at + lost}, {"lost_steps", lost},
          {"time", time},      {"source", "memory of w1"}};
}

Json training(int64_t generation, const std::string& digest) {
  return {{"event", "training"},
          {"generation", generation},
          {"step", 99},
          {"lost_steps", 0},
          {"digest", digest}};
}

TEST(Records, OfASoundRunAreAccepted) {
  const Findings f = check_records(
      steps(9), {mesh(2, 4, 0, 1), training(2, "d4"), mesh(3, 7, 0, 2)}, {});
  EXPECT_EQ(f.errors, std::vector<std::string>{});
  EXPECT_EQ(f.steps, 9);
  EXPECT_EQ(f.generations, 2);
  EXPECT_EQ(f.from_memory, 2);
  EXPECT_EQ(f.digests, 1);
}

TEST(Records, AMissingOrRepeatedStepIsFound) {
  for (const int64_t k : {4, 6}) {
    std::vector<Json> m = steps(5);
    m.push_back(step(k + (k == 6), "d"));  // 4 again, or 7 without 6
    EXPECT_EQ(check_records(m, {}, {}).errors.size(), 1U);
  }
  EXPECT_EQ(
      check_records(steps(5), {{{"event", "metrics_gap"}}}, {}).errors.size(),
      1U);
}

TEST(Records, AWrongStateOfAStepIsFound) {
  EXPECT_EQ(check_records(steps(9), {mesh(2, 4, 0, 1), training(2, "d5")}, {})
                .errors.size(),
            1U);
  std::vector<Json> without = steps(2);
  without[1].erase("digest");
  EXPECT_EQ(check_records(without, {}, {}).errors.size(), 1U);
}

TEST(Records, LostStepsAreAnErrorOutsideTheWindows) {
  const std::vector<Json> events = {mesh(2, 4, 2, 10)};
  const Findings out = check_records(steps(9), events, {{11, 20}});
  EXPECT_EQ(out.lost_outside, 2);
  EXPECT_EQ(out.errors.size(), 1U);
  const Findings in = check_records(steps(9), events, {{9, 20}});
  EXPECT_EQ(in.lost_steps, 2);
  EXPECT_EQ(in.lost_outside, 0);
  EXPECT_EQ(in.errors.size(), 0U);
}

// Steps 5 and 6 were computed again, so their digests are of another branch;
// step 7 was not.
TEST(Records, DigestsOfStepsComputedAgainAreNotCompared) {
  for (const int64_t k : {5, 6, 7}) {
    const Findings f = check_records(steps(9),
                                     {mesh(2, 4, 2, 10), training(2, "d4"),
                                      mesh(3, k, 0, 30), training(3, "x")},
                                     {{9, 20}});
    EXPECT_EQ(f.errors.size(), k == 7 ? 1U : 0U)
        << k << ": " << (f.errors.empty() ? "" : f.errors[0]);
  }
}

TEST(Records, TheFirstDifferentLossIsFound) {
  const std::vector<std::string> a = {R"({"loss":1.5,"x":1})",
                                      R"({"loss":1.25})"};
  std::vector<std::string> b = {R"({"loss":1.5,"x":2})", R"({"loss":1.25})"};
  EXPECT_EQ(first_difference(a, b), 0);
  b[1] = R"({"loss":1.2500000000000002})";
  EXPECT_EQ(first_difference(a, b), 2);
  b.pop_back();
  EXPECT_EQ(first_difference(a, b), 2);
  b = {"{}"};
  EXPECT_EQ(first_difference(b, b), 1) << "no loss at all";
}

TEST(OwnAddressTest, NoTwoProcessesHaveTheSameHost) {
  const auto host_of = [](const std::string& address) {
    return address.substr(0, address.rfind(':'));
  };
  const TempDir dir;
  const std::string file = dir.path() + "/address";
  const pid_t child = fork();
  if (child == 0) {
    write_whole(file, own_address());
    _exit(0);
  }
  waitpid(child, nullptr, 0);
  const std::string mine = own_address(), its = read_whole(file);
  EXPECT_EQ(its.rfind("tcp://127.", 0), 0U) << its;
  EXPECT_NE(host_of(its), host_of(mine));
  EXPECT_NE(own_address(), mine);
}

TEST(JsonLinesTest, ReadsAppendedLinesAndStartsOverWhenTheFileIsTruncated) {
  const TempDir dir;
  const std::string path = dir.path() + "/m.jsonl";
  JsonLines lines(path);
  EXPECT_EQ(lines.read().size(), 0U);
  write_whole(path, "{\"a\":1}\n{\"a\":2");
  EXPECT_EQ(lines.read().size(), 1U);
  std::ofstream(path, std::ios::app) << "2}\n{\"a\":3}\n";
  ASSERT_EQ(lines.read().size(), 3U);
  EXPECT_EQ(lines.read()[1]["a"], 22);
  write_whole(path, "{\"a\":9}\n");
  ASSERT_EQ(lines.read().size(), 1U);
  EXPECT_EQ(lines.read()[0]["a"], 9);
}

TEST(JsonLinesDeathTest, ALineThatIsNoObjectIsNotSkipped) {
  const TempDir dir;
  const std::string path = dir.path() + "/m.jsonl";
  write_whole(path, "{\"a\":1}\n{\"a\":2\n");
  EXPECT_DEATH((void)JsonLines(path).read(), "not a JSON object: ..a.:2");
}

}  // namespace
}  // namespace remesh::testing
