#include "worker/board/flight.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <thread>

#include "proto/base/clock.h"
#include "worker/board/board.h"

namespace remesh::board {
namespace {

// A record in private memory.
struct Own {
  std::unique_ptr<FlightMemory> memory = std::make_unique<FlightMemory>();
  std::atomic<int64_t> step{0}, microbatch{0};
  FlightRecord record{memory.get(), &step, &microbatch};
};

TEST(Flight, AnOperationIsKeptWithAllItsFields) {
  Own own;
  own.step = 12;
  own.microbatch = 3;
  const int group = own.record.add_group("data", {1, 5, 9});
  const FlightTicket t = own.record.begin({.kind = OpKind::kCollective,
                                           .name = "all_reduce",
                                           .group = group,
                                           .peer = 5,
                                           .sends = true,
                                           .bytes = int64_t{1} << 40,
                                           .number = 77},
                                          1000);
  own.step = 13;  // has no effect any more
  Flight f = own.record.read();
  ASSERT_EQ(f.ops.size(), 1U);
  EXPECT_EQ(f.ops[0].end_ns, 0);
  EXPECT_EQ(f.current, 1U);
  own.record.end(t, 1500);
  f = own.record.read();
  const FlightOp& op = f.ops[0];
  EXPECT_EQ(op.id, 1U);
  EXPECT_EQ(op.outer, 0U);
  EXPECT_EQ(op.kind, OpKind::kCollective);
  EXPECT_EQ(op.lane, Lane::kCompute);
  EXPECT_EQ(op.name, "all_reduce");
  EXPECT_EQ(op.group, group);
  EXPECT_EQ(op.peer, 5);
  EXPECT_TRUE(op.sends);
  EXPECT_EQ(op.bytes, int64_t{1} << 40);
  EXPECT_EQ(op.number, 77);
  EXPECT_EQ(op.begin_ns, 1000);
  EXPECT_EQ(op.end_ns, 1500);
  EXPECT_EQ(op.step, 12);
  EXPECT_EQ(op.microbatch, 3);
  EXPECT_EQ(f.begun, 1U);
  EXPECT_EQ(f.current, 0U);
  EXPECT_EQ(f.torn, 0U);
  ASSERT_EQ(f.groups.size(), 1U);
  EXPECT_EQ(f.groups[0].name, "data");
  EXPECT_EQ(f.groups[0].ranks, (std::vector<int>{1, 5, 9}));
}

TEST(Flight, MissingFieldsAreMinusOneAndTheNameIsTheKinds) {
  Own own;
  own.record.begin({.kind = OpKind::kOptimizer}, 1);
  const FlightOp op = own.record.read().ops.at(0);
  EXPECT_EQ(op.name, "optimizer");
  EXPECT_EQ(op.group, -1);
  EXPECT_EQ(op.peer, -1);
  EXPECT_EQ(op.bytes, -1);
  EXPECT_EQ(op.number, -1);
  own.record.begin({.name = "a name that is longer than there is room"}, 2);
  EXPECT_EQ(own.record.read().ops.at(1).name.size(), kFlightName);
}

TEST(Flight, TheRingKeepsTheLastOnes) {
  Own own;
  constexpr uint64_t kMany = 3 * kFlightOps + 17;
  for (uint64_t i = 1; i <= kMany; ++i) {
    const auto now = static_cast<int64_t>(10 * i);
    own.record.end(own.record.begin({.kind = OpKind::kData}, now), now + 1);
  }
  const Flight f = own.record.read();
  EXPECT_EQ(f.begun, kMany);
  EXPECT_EQ(f.torn, 0U);
  ASSERT_EQ(f.ops.size(), kFlightOps);
  for (size_t i = 0; i < f.ops.size(); ++i) {
    EXPECT_EQ(f.ops[i].id, kMany - kFlightOps + 1 + i);
    EXPECT_EQ(f.ops[i].end_ns, static_cast<int64_t>(10 * f.ops[i].id + 1));
  }
}

TEST(Flight, TheInnermostOperationComesFirst) {
  Own own;
  EXPECT_TRUE(own.record.under_way().empty());
  const auto step = own.record.begin({.kind = OpKind::kStep}, 1);
  const auto pass = own.record.begin({.kind = OpKind::kForward}, 2);
  // A message in flight is not an operation of the thread.
  const auto message = own.record.begin(
      {.kind = OpKind::kCollective, .lane = Lane::kCommunication}, 3);
  const auto wait = own.record.begin({.kind = OpKind::kWait}, 4);
  auto at = own.record.under_way();
  ASSERT_EQ(at.size(), 3U);
  EXPECT_EQ(at[0].kind, OpKind::kWait);
  EXPECT_EQ(at[1].kind, OpKind::kForward);
  EXPECT_EQ(at[2].kind, OpKind::kStep);
  own.record.end(wait, 5);
  own.record.end(message, 6);
  own.record.end(pass, 7);
  at = own.record.under_way();
  ASSERT_EQ(at.size(), 1U);
  EXPECT_EQ(at[0].kind, OpKind::kStep);
  own.record.end(step, 8);
  EXPECT_TRUE(own.record.under_way().empty());
}

TEST(Flight, AnOuterOperationMayBeOverwritten) {
  Own own;
  const auto step = own.record.begin({.kind = OpKind::kStep}, 1);
  for (size_t i = 0; i < kFlightOps + 5; ++i)
    own.record.end(own.record.begin({.kind = OpKind::kData}, 2), 3);
  EXPECT_TRUE(own.record.under_way().empty());
  const auto inner = own.record.begin({.kind = OpKind::kWait}, 4);
  ASSERT_EQ(own.record.under_way().size(), 1U);
  EXPECT_EQ(own.record.under_way()[0].kind, OpKind::kWait);
  own.record.end(inner, 5);
  own.record.end(step, 6);  // must not touch its successor
  const Flight f = own.record.read();
  EXPECT_EQ(f.current, 0U);
  for (const FlightOp& op : f.ops) EXPECT_NE(op.end_ns, 6) << op.id;
}

TEST(Flight, ATornEntryIsRecognised) {
  Own own;
  for (int i = 0; i < 5; ++i)
    own.record.end(own.record.begin({.kind = OpKind::kData}, 1), 2);
  // It died while it wrote the fourth.
  own.memory->entries[4].version = 2 * 4 - 1;
  const Flight f = own.record.read();
  EXPECT_EQ(f.torn, 1U);
  std::set<uint64_t> ids;
  for (const FlightOp& op : f.ops) ids.insert(op.id);
  EXPECT_EQ(ids, (std::set<uint64_t>{1, 2, 3, 5}));
  // Begun, but nothing written: the slot still has an older entry.
  own.memory->begun = 6;
  own.memory->current = 6;
  EXPECT_EQ(own.record.read().torn, 2U);
  EXPECT_TRUE(own.record.under_way().empty());
}

TEST(Flight, GroupsBeyondTheRoomAreNamed) {
  Own own;
  std::vector<int> many(kFlightGroupRanks + 10);
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<int>(i);
  EXPECT_EQ(own.record.add_group("a long name of a group", many), 0);
  const FlightGroup g = own.record.group(0);
  EXPECT_EQ(g.name, "a long name ");
  EXPECT_EQ(g.size, static_cast<int>(many.size()));
  EXPECT_EQ(g.ranks.size(), kFlightGroupRanks);
  for (size_t i = 1; i < kFlightGroups; ++i)
    EXPECT_EQ(own.record.add_group("x", {0}), static_cast<int>(i));
  EXPECT_EQ(own.record.add_group("x", {0}), -1);
  EXPECT_EQ(own.record.group(-1).size, 0);
  EXPECT_EQ(own.record.group(1000).size, 0);
}

// Entries read during writes are consistent.
TEST(Flight, AReaderBesideTheWriterSeesOnlyWholeEntries) {
  Own own;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int64_t i = 1; !stop; ++i) {
      own.step = i;
      const auto kind = static_cast<OpKind>(i % kNumOpKinds);
      const auto t =
          own.record.begin({.kind = kind, .bytes = 7 * i, .number = i}, 3 * i);
      own.record.end(t, 3 * i + 1);
    }
  });
  size_t seen = 0;
  for (int round = 0; round < 1000 || seen < 5000; ++round) {
    const Flight f = own.record.read();
    for (const FlightOp& op : f.ops) {
      const int64_t i = op.number;
      ASSERT_EQ(static_cast<int64_t>(op.id), i);
      ASSERT_EQ(op.step, i);
      ASSERT_EQ(op.bytes, 7 * i);
      ASSERT_EQ(op.begin_ns, 3 * i);
      ASSERT_TRUE(op.end_ns == 0 || op.end_ns == 3 * i + 1);
      ASSERT_EQ(op.name, op_kind_name(static_cast<OpKind>(i % kNumOpKinds)));
      ++seen;
    }
    for (const FlightOp& op : own.record.under_way()) ASSERT_EQ(op.end_ns, 0);
  }
  stop = true;
  writer.join();
}

TEST(Flight, ItSurvivesAKill) {
  auto daemon = std::move(Board::create(7, 3)).value();
  auto rank = std::move(Board::open(dup(daemon->fd()))).value();
  const pid_t child = fork();
  if (child == 0) {
    rank->set_step(9);
    const int group = rank->flight().add_group("dp", {0, 3});
    rank->flight().begin({.kind = OpKind::kStep}, monotonic_ns());
    rank->flight().begin({.kind = OpKind::kCollective,
                          .name = "all_reduce",
                          .group = group,
                          .bytes = 64},
                         monotonic_ns());
    kill(getpid(), SIGKILL);
  }
  waitpid(child, nullptr, 0);
  const auto at = daemon->flight().under_way();
  ASSERT_EQ(at.size(), 2U);
  EXPECT_EQ(at[0].name, "all_reduce");
  EXPECT_EQ(at[0].step, 9);
  EXPECT_EQ(daemon->flight().group(at[0].group).ranks,
            (std::vector<int>{0, 3}));
}

TEST(Flight, EveryKindHasAName) {
  std::set<std::string> names;
  for (int i = 0; i < kNumOpKinds; ++i)
    names.insert(op_kind_name(static_cast<OpKind>(i)));
  EXPECT_EQ(names.size(), static_cast<size_t>(kNumOpKinds));
  EXPECT_STREQ(op_kind_name(static_cast<OpKind>(99)), "unknown");
}

}  // namespace
}  // namespace remesh::board
