#include <fmt/format.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "proto/base/check.h"
#include "proto/base/log.h"
#include "proto/base/progress_bar.h"
#include "proto/base/rng.h"
#include "proto/base/status.h"
#include "proto/base/text.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"

namespace remesh {
namespace {

Result<int> half(int x) {
  if (x % 2 != 0) return invalid_argument("x must be even");
  return x / 2;
}
Result<int> quarter(int x) {
  ASSIGN_OR_RETURN(const int h, half(x));
  return half(h);
}

TEST(Status, FailurePassesThroughAssignOrReturn) {
  EXPECT_EQ(*quarter(8), 2);
  EXPECT_EQ(quarter(6).status().to_string(),
            "invalid_argument: x must be even");
  EXPECT_EQ(quarter(6).status().with_context("job").message(),
            "job: x must be even");
}

TEST(Log, ValuesWithSpacesAreQuoted) {
  EXPECT_EQ(format_event("rank_failed", {{"rank", 3}, {"cause", "signal 9"}}),
            "rank_failed rank=3 cause=\"signal 9\"");
  EXPECT_EQ(format_event("x", {{"k", "a\"b\n"}}), "x k=\"a\\\"b\\n\"");
}

class LogFile : public ::testing::Test {
 protected:
  std::string path() const { return dir_.path() + "/logs/x.log"; }
  std::string text() const { return testing::read_whole(path()); }
  std::shared_ptr<Logger> open() const {
    return Logger::open({.name = "x", .path = path()});
  }

  testing::TempDir dir_;
};

TEST_F(LogFile, HasTheLinesInOrder) {
  auto log = open();
  for (int i = 0; i < 1000; ++i) log->info("line", {{"i", i}});
  ASSERT_TRUE(log->flush());
  size_t at = 0;
  for (int i = 0; i < 1000; ++i) {
    at = text().find(fmt::format("x: line i={}\n", i), at);
    ASSERT_NE(at, std::string::npos) << i;
  }
}

TEST_F(LogFile, HasTheLastLinesWhenTheLoggerEnds) {
  open()->info("the last");
  EXPECT_HAS(text(), "the last");
}

TEST_F(LogFile, HasTheLinesBeforeAFailedCheck) {
  const auto fail = [&] {
    const auto log = open();
    log->info("before");
    CHECK(log == nullptr);
  };
  EXPECT_DEATH(fail(), "CHECK failed");
  EXPECT_HAS(text(), "before");
}

// As on a disk that is stalled: nobody reads the pipe.
TEST_F(LogFile, AnUnwritableFileDelaysNobody) {
  std::filesystem::create_directories(dir_.path() + "/logs");
  ASSERT_EQ(mkfifo(path().c_str(), 0600), 0);
  auto log = open();
  constexpr int kLines = 10'000;
  for (int i = 0; i < kLines; ++i) log->info("line", {{"i", i}});
  EXPECT_FALSE(log->flush());
  std::ifstream reader(path());
  std::vector<std::string> lines;
  for (std::string line; std::getline(reader, line);) {
    lines.push_back(line.substr(line.find("line")));
    if (lines.back() == fmt::format("line i={}", kLines - 1)) break;
  }
  // The newest lines were kept.
  EXPECT_LT(lines.size(), kLines / 2);
  ASSERT_GT(lines.size(), 1000U);
  EXPECT_EQ(lines[lines.size() - 1000],
            fmt::format("line i={}", kLines - 1000));
  EXPECT_TRUE(log->flush());
}

TEST_F(LogFile, IsOpenedOnceThatIsPossible) {
  const std::string folder = dir_.path() + "/logs";
  testing::write_whole(folder, "a file");
  auto log = open();
  log->info("too early");
  ASSERT_TRUE(log->flush());
  std::filesystem::remove(folder);
  log->info("now");
  ASSERT_TRUE(log->flush());
  EXPECT_HAS(text(), "now");
}

TEST_F(LogFile, IsRotatedWithinItsNumberOfFiles) {
  for (const size_t files : {1, 2}) {
    const std::string folder = fmt::format("{}/{}", dir_.path(), files);
    auto log = Logger::open({.name = "x",
                             .path = folder + "/x.log",
                             .max_bytes = 200,
                             .max_files = files});
    for (int i = 0; i < 100; ++i) log->info("line", {{"i", i}});
    ASSERT_TRUE(log->flush());
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder),
                            std::filesystem::directory_iterator()),
              static_cast<ptrdiff_t>(files));
    EXPECT_HAS(testing::read_whole(folder + "/x.log"), "i=99");
  }
}

// Another member of the group that owns the folder may put a link there, also
// while the file is open: it is rotated.
TEST_F(LogFile, DoesNotWriteThroughSymbolicLinks) {
  namespace fs = std::filesystem;
  fs::create_directories(dir_.path() + "/logs");
  const std::string mine = dir_.path() + "/mine";
  testing::write_whole(mine, "kept");
  fs::create_symlink(mine, path());
  auto log = Logger::open({.name = "x", .path = path(), .max_bytes = 200});
  log->info("lost");
  ASSERT_TRUE(log->flush());
  EXPECT_EQ(testing::read_whole(mine), "kept");
  fs::remove(path());
  log->info("written");
  ASSERT_TRUE(log->flush());
  EXPECT_HAS(text(), "written");
  fs::create_symlink(mine, dir_.path() + "/logs/x.1.log");
  for (int i = 0; i < 10; ++i) log->info("of some length", {{"i", i}});
  ASSERT_TRUE(log->flush());
  EXPECT_EQ(testing::read_whole(mine), "kept");
}

TEST_F(LogFile, SaysOnceThatLinesAreLost) {
  std::filesystem::create_directories(path());
  ::testing::internal::CaptureStderr();
  auto log = open();
  for (int i = 0; i < 5; ++i) {
    log->info("line", {{"i", i}});
    (void)log->flush();
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  const std::string lost = "x: lines of the log are lost";
  EXPECT_HAS(said, lost);
  EXPECT_EQ(said.find(lost), said.rfind(lost)) << said;
}

// Known answers of Philox4x32-10 from Random123's kat_vectors.
TEST(Rng, PhiloxGivesTheKnownAnswers) {
  const auto zero = philox(0, 0, 0);
  EXPECT_EQ(zero[0], 0x6627e8d5U);
  EXPECT_EQ(zero[3], 0x9b00dbd8U);
  const auto ones = philox(~0ULL, ~0ULL, ~0ULL);
  EXPECT_EQ(ones[0], 0x408f276dU);
}

TEST(Rng, NormalsHaveUnitVarianceAndNoMean) {
  double sum = 0;
  double squares = 0;
  constexpr int kCount = 100000;
  for (int i = 0; i < kCount; ++i) {
    const double x = random_normal(7, 1, static_cast<uint64_t>(i));
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / kCount, 0, 0.02);
  EXPECT_NEAR(squares / kCount, 1, 0.02);
}

TEST(Text, NearestNameFindsTyposOnly) {
  EXPECT_EQ(nearest_name("stesp", {"seq_len", "steps"}), "steps");
  EXPECT_EQ(nearest_name("banana", {"seq_len", "steps"}), "");
  EXPECT_EQ(nearest_name("ps", {"run", "ls"}), "ls");
  EXPECT_EQ(nearest_name("x", {"run", "ls"}), "");
  EXPECT_EQ(nearest_name("", {"run", "ls"}), "");
  EXPECT_EQ(format_duration(200), "3m20s");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(progress_text("reading", "", 1 << 20, 4 << 20, 2, 100),
            "reading [=======.......................]  25%  1.0 MiB of 4.0 MiB"
            "  512.0 KiB/s  6.0s left");
  EXPECT_EQ(progress_text("evaluating", "question", 1, 2, 2, 100),
            "evaluating [===============...............]  50%  1 of 2 questions"
            "  0.5/s  2.0s left");
  EXPECT_EQ(
      progress_text("evaluating", "question", 0, 1, 4, 100),
      "evaluating [..............................]   0%  0 of 1 question");
  EXPECT_EQ(progress_text("reading", "", 1 << 20, 4 << 20, 2, 80),
            "reading [=====................]  25%  1.0 MiB of 4.0 MiB"
            "  512.0 KiB/s  6.0s left");
  EXPECT_EQ(progress_text("reading", "", 1 << 20, 4 << 20, 2, 60),
            "reading [===...........]  25%  1.0 MiB of 4.0 MiB  6.0s left");
  EXPECT_EQ(progress_text("reading", "", 1 << 20, 4 << 20, 2, 40),
            "reading [===...........]  25%  6.0s left");
}

}  // namespace
}  // namespace remesh
