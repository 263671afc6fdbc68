// A rank's flight record as text and as a file.
#include "worker/agent/shell/flight_report.h"

#include <signal.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "proto/base/process.h"
#include "tests/testing/expect.h"
#include "tests/testing/temp_dir.h"
#include "worker/agent/shell/rank_logs.h"

namespace remesh::agent {
namespace {

using board::OpKind;
using Json = nlohmann::json;

constexpr int64_t kSecond = 1'000'000'000;

class FlightFile : public ::testing::Test {
 protected:
  board::FlightRecord& record() { return board_->flight(); }
  pb::RankStatus doing(int64_t now_ns) {
    pb::RankStatus s = board_->snapshot();
    fill_doing(*board_, now_ns, &s);
    return s;
  }
  std::unique_ptr<board::Board> board_ =
      std::move(board::Board::create(7, 3)).value();
};

TEST_F(FlightFile, DescribesWhatARankIsDoing) {
  EXPECT_EQ(doing(1).doing(), "starting");
  EXPECT_FALSE(doing(1).waits());
  EXPECT_FALSE(doing(1).has_at());
  board_->set_phase(pb::RankStatus::CONNECTING);
  EXPECT_EQ(doing(1).doing(), "connecting");
  EXPECT_TRUE(doing(1).waits());
  const int tp = record().add_group("tp", {2, 3});
  board_->set_phase(pb::RankStatus::COMPUTE);
  board_->set_step(12);
  const auto step = record().begin({.kind = OpKind::kStep}, kSecond);
  EXPECT_EQ(doing(3 * kSecond).doing(), "step 12, compute");
  board_->set_microbatch(4);
  const auto pass = record().begin({.kind = OpKind::kBackward}, kSecond);
  EXPECT_EQ(doing(kSecond + 2'500'000).doing(),
            "step 12, microbatch 4, backward");
  EXPECT_FALSE(doing(kSecond).waits());
  const auto sum = record().begin({.kind = OpKind::kCollective,
                                   .name = "all_reduce",
                                   .group = tp,
                                   .bytes = 8 << 20,
                                   .number = 41},
                                  2 * kSecond);
  const pb::RankStatus s = doing(2 * kSecond + kSecond / 5);
  EXPECT_EQ(s.doing(),
            "step 12, microbatch 4, backward, all_reduce of 8.0 MiB on tp "
            "(ranks 2 3)");
  EXPECT_TRUE(s.waits());
  EXPECT_EQ(s.operations(), 3U);
  EXPECT_EQ(s.at().name(), "all_reduce");
  EXPECT_EQ(s.at().group(), "tp");
  EXPECT_EQ(s.at().number(), 41);
  EXPECT_EQ(s.at().bytes(), 8 << 20);
  EXPECT_NEAR(s.at().seconds(), 0.2, 1e-9);
  ASSERT_EQ(s.at().ranks_size(), 2);
  EXPECT_EQ(s.at().ranks(1), 3);
  record().end(sum, 3 * kSecond);
  const int pp = record().add_group("pp", {1, 3});
  const auto recv = record().begin({.kind = OpKind::kBubble,
                                    .name = "wait recv",
                                    .group = pp,
                                    .peer = 1,
                                    .bytes = 2048},
                                   3 * kSecond);
  EXPECT_EQ(doing(4 * kSecond).doing(),
            "step 12, microbatch 4, backward, wait recv from rank 1 of 2.0 KiB "
            "on pp");
  EXPECT_EQ(doing(4 * kSecond).at().peer(), 1);
  record().end(recv, 4 * kSecond);
  const auto sends = record().begin({.kind = OpKind::kBubble,
                                     .name = "wait",
                                     .group = pp,
                                     .peer = 1,
                                     .sends = true},
                                    4 * kSecond);
  EXPECT_EQ(doing(4 * kSecond).doing(),
            "step 12, microbatch 4, backward, wait to rank 1 on pp");
  record().end(sends, 4 * kSecond);
  record().end(pass, 4 * kSecond);
  record().end(step, 4 * kSecond);
  board_->set_phase(pb::RankStatus::CHECKPOINT);
  EXPECT_EQ(doing(1).doing(), "step 12, checkpoint");
  EXPECT_FALSE(doing(1).waits());
}

TEST_F(FlightFile, ManyRanksAreCounted) {
  std::vector<int> many(20);
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<int>(i);
  const int group = record().add_group("world", many);
  record().begin({.kind = OpKind::kCollective,
                  .name = "barrier",
                  .group = group,
                  .bytes = 0},
                 kSecond);
  EXPECT_EQ(doing(2 * kSecond).doing(),
            "barrier on world (ranks 0 1 2 3 4 5 6 7 and 12 more)");
  EXPECT_EQ(doing(2 * kSecond).at().ranks_size(), 20);
}

TEST_F(FlightFile, HowItEnded) {
  EXPECT_EQ(exit_text(SIGKILL, 0), "signal 9 (SIGKILL)");
  EXPECT_EQ(exit_text(SIGSEGV, 0), "signal 11 (SIGSEGV)");
  EXPECT_EQ(exit_text(99, 0), "signal 99");
  EXPECT_EQ(exit_text(0, 65), "exit code 65");
}

// The operation in which the rank died is the last one, is unfinished and nests
// in the enclosing ones. Times are unix microseconds.
TEST_F(FlightFile, TheFileEndsWithTheLastOperation) {
  const int data = record().add_group("data", {1, 3});
  board_->set_step(5);
  record().begin({.kind = OpKind::kStep}, kSecond);
  board_->set_microbatch(2);
  const auto pass = record().begin({.kind = OpKind::kForward}, kSecond + 1000);
  record().end(pass, kSecond + 9000);
  record().begin({.kind = OpKind::kCollective,
                  .lane = board::Lane::kCommunication,
                  .name = "all_reduce",
                  .group = data,
                  .bytes = 64,
                  .number = 1},
                 kSecond + 9000);
  record().begin({.kind = OpKind::kWait,
                  .name = "wait all_reduce",
                  .group = data,
                  .bytes = 64,
                  .number = 1},
                 kSecond + 10'000);
  const FlightAbout about{.generation = 7,
                          .rank = 3,
                          .pid = 99,
                          .worker = "w\"1",
                          .host = "here",
                          .ended = "signal 9 (SIGKILL)",
                          .doing = "step 5",
                          .error = "",
                          .log_tail = {"one", "two \xff"}};
  const std::string text =
      flight_json(about, record().read(), 2 * kSecond, 50 * kSecond);
  const Json j = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(j.is_object()) << text;
  const Json& o = j["otherData"];
  EXPECT_EQ(o["generation"], 7);
  EXPECT_EQ(o["rank"], 3);
  EXPECT_EQ(o["pid"], 99);
  EXPECT_EQ(o["worker"], "w\"1");
  EXPECT_EQ(o["host"], "here");
  EXPECT_EQ(o["ended"], "signal 9 (SIGKILL)");
  EXPECT_EQ(o["doing"], "step 5");
  EXPECT_EQ(o["log_tail"].size(), 2U);
  EXPECT_EQ(o["operations"], 4);
  EXPECT_EQ(o["torn"], 0);
  EXPECT_EQ(o["groups"][0]["ranks"], (std::vector<int>{1, 3}));
  std::vector<Json> spans;
  for (const Json& e : j["traceEvents"])
    if (e["ph"] == "X") spans.push_back(e);
  ASSERT_EQ(spans.size(), 4U);
  EXPECT_EQ(spans[0]["name"], "step");
  EXPECT_EQ(spans[0]["ts"], 51'000'000);
  EXPECT_EQ(spans[0]["dur"], 1'000'000);
  EXPECT_EQ(spans[0]["args"]["unfinished"], 1);
  EXPECT_EQ(spans[1]["name"], "forward");
  EXPECT_EQ(spans[1]["args"]["microbatch"], 2);
  EXPECT_FALSE(spans[1]["args"].contains("unfinished"));
  EXPECT_EQ(spans[2]["tid"], 1);
  const Json& last = spans[3];
  EXPECT_EQ(last["name"], "wait all_reduce");
  EXPECT_EQ(last["tid"], 0);
  EXPECT_EQ(last["args"]["step"], 5);
  EXPECT_EQ(last["args"]["bytes"], 64);
  EXPECT_EQ(last["args"]["group"], "data");
  EXPECT_EQ(last["args"]["unfinished"], 1);
  EXPECT_EQ(last["ts"].get<int64_t>() + last["dur"].get<int64_t>(), 52'000'000);
}

TEST_F(FlightFile, FilesOfTheNewestGenerationsAreKept) {
  const TempDir dir;
  const std::string traces = dir / "traces";
  std::filesystem::create_directories(traces);
  for (const char* trace : {"/gen-1-rank-0.json", "/gen-30-rank-0.json"})
    std::ofstream(traces + trace) << "a trace";
  for (const int64_t g : {2, 9, 10, 1001, 30})
    for (int rank = 0; rank < 2; ++rank) {
      const FlightAbout about{.generation = g, .rank = rank};
      ASSERT_OK(write_flight(traces, about, "{}", 3));
    }
  std::set<std::string> names;
  for (const auto& e : std::filesystem::directory_iterator(traces))
    names.insert(e.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{
                       "gen-30-rank-0.json", "flight-g010-rank-0.json",
                       "flight-g010-rank-1.json", "flight-g030-rank-0.json",
                       "flight-g030-rank-1.json", "flight-g1001-rank-0.json",
                       "flight-g1001-rank-1.json"}));
  const Status s = write_flight(traces + "/gen-30-rank-0.json", {}, "{}", 3);
  EXPECT_EQ(s.code(), Code::kAlreadyExists);
  EXPECT_SAYS(s, "gen-30-rank-0.json");
}

TEST_F(FlightFile, TheLastLinesOfBothLogs) {
  const TempDir dir;
  const RankLogPaths paths{dir / "log", dir / "out"};
  EXPECT_TRUE(log_tail(paths, 4, 100).empty());
  std::ofstream(paths.log) << "a\nb\n\nc\n";
  EXPECT_EQ(log_tail(paths, 2, 100), (std::vector<std::string>{"b", "c"}));
  std::ofstream(paths.out) << "x\ny longer than it may be\n";
  std::filesystem::last_write_time(
      paths.out,
      std::filesystem::last_write_time(paths.log) + std::chrono::seconds(1));
  EXPECT_EQ(log_tail(paths, 4, 8),
            (std::vector<std::string>{"b", "c", "x", "y longer"}));
  EXPECT_EQ(log_tail(paths, 1, 8), (std::vector<std::string>{"y longer"}));
  std::filesystem::last_write_time(
      paths.log,
      std::filesystem::last_write_time(paths.out) + std::chrono::seconds(1));
  EXPECT_EQ(log_tail(paths, 4, 8),
            (std::vector<std::string>{"y longer", "a", "b", "c"}));
}

}  // namespace
}  // namespace remesh::agent
