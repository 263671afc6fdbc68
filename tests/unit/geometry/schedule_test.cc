#include "parallel/geometry/schedule.h"

#include <algorithm>
#include <set>

#include "parallel/geometry/batch.h"
#include "tests/testing/expect.h"

namespace remesh::geometry {
namespace {

struct Case {
  ScheduleKind kind;
  int pp, m, v;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int pp : {1, 2, 3, 4, 7, 8})
    for (const int m : {1, 2, 3, 4, 8, 12, 21, 32}) {
      for (const auto kind :
           {ScheduleKind::kGpipe, ScheduleKind::k1F1B,
            ScheduleKind::kInterleaved1F1B, ScheduleKind::kZbH1})
        all.push_back({kind, pp, m, 1});
      for (const int v : {2, 3, 4})
        if (m % pp == 0)
          all.push_back({ScheduleKind::kInterleaved1F1B, pp, m, v});
    }
  return all;
}

constexpr PassCosts kEqual{};  // forward = backward = weight = 1

TEST(Schedule, EveryScheduleRunsEveryPassOnceWithoutDeadlock) {
  for (const Case& c : cases()) {
    ASSERT_OK_AND(const auto s, make_schedule(c.kind, c.pp, c.m, c.v));
    EXPECT_OK(simulate(s, {.transfer = 0.3}))
        << schedule_name(c.kind) << " pp " << c.pp << " m " << c.m << " v "
        << c.v;
  }
}

TEST(Schedule, BubblesAreAsPublished) {
  for (const Case& c : cases()) {
    const auto s = make_schedule(c.kind, c.pp, c.m, c.v);
    const PipeTiming t = *simulate(*s, kEqual);
    const double p1 = c.pp - 1;
    SCOPED_TRACE(testing::Message() << schedule_name(c.kind) << " pp " << c.pp
                                    << " m " << c.m << " v " << c.v);
    const double overhead =
        t.makespan / *std::max_element(t.busy.begin(), t.busy.end()) - 1;
    if (c.kind != ScheduleKind::kZbH1) {
      // (p - 1) / (v m) of the ideal time.
      EXPECT_NEAR(overhead, p1 / (c.v * c.m), 1e-9);
    } else if (c.m >= c.pp) {
      // (p - 1)(F + B - W): a third of 1F1B's when all are equal.
      EXPECT_NEAR(overhead, p1 / c.m / 3, 1e-9);
    } else {
      EXPECT_LE(overhead, p1 / c.m + 1e-9);
    }
    EXPECT_NEAR(t.bubble_share, 1 - 1 / (1 + overhead), 1e-9);
  }
}

// Most (microbatch, chunk) pairs whose activations a rank holds at once.
int peak_live(const Schedule& s, int rank) {
  int live = 0, peak = 0;
  for (const PipeOp& op : s.ranks[static_cast<size_t>(rank)]) {
    if (op.pass == Pass::kForward) peak = std::max(peak, ++live);
    if (op.pass == s.last_pass()) --live;
  }
  return peak;
}

TEST(Schedule, LiveMicrobatchesAreBounded) {
  for (const Case& c : cases()) {
    const auto s = make_schedule(c.kind, c.pp, c.m, c.v);
    for (int r = 0; r < c.pp; ++r) {
      const int live = peak_live(*s, r);
      if (c.v == 1) {
        EXPECT_EQ(slots_needed(*s, r)[0], live);
      }
      if (c.kind == ScheduleKind::kGpipe) {
        EXPECT_EQ(live, c.m);
      } else if (c.v == 1 && c.kind != ScheduleKind::kZbH1) {
        EXPECT_EQ(live, std::min(c.m, c.pp - r));
      } else if (c.kind == ScheduleKind::kZbH1) {
        EXPECT_LE(live, c.pp);
      } else {
        // Warm-up and the current one (Narayanan et al., SC'21).
        EXPECT_LE(live, 2 * (c.pp - 1 - r) + (c.v - 1) * c.pp + 1);
      }
    }
  }
}

TEST(Schedule, MatchesThePapers) {
  const auto s = make_schedule(ScheduleKind::k1F1B, 3, 4);
  EXPECT_EQ(s->to_string(0), "F0 F1 F2 B0 F3 B1 B2 B3");
  EXPECT_EQ(s->to_string(2), "F0 B0 F1 B1 F2 B2 F3 B3");
  const auto i = make_schedule(ScheduleKind::kInterleaved1F1B, 2, 2, 2);
  EXPECT_EQ(i->to_string(1), "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0");
  const auto z = make_schedule(ScheduleKind::kZbH1, 2, 3);
  EXPECT_EQ(z->to_string(1), "F0 B0 F1 B1 W0 F2 B2 W1 W2");
}

TEST(Schedule, SimulationRefusesInvalidLists) {
  const Schedule good = *make_schedule(ScheduleKind::k1F1B, 2, 2);
  Schedule s = good;
  s.ranks[1].pop_back();
  EXPECT_SAYS(simulate(s, {}), "rank 1: 3 ops, needs 4");
  s = good;
  s.ranks[0][1] = s.ranks[0][0];
  EXPECT_SAYS(simulate(s, {}), "rank 0: F0 twice");
  s = good;  // backward before its forward
  std::swap(s.ranks[1][0], s.ranks[1][1]);
  EXPECT_SAYS(simulate(s, {}), "deadlock: rank 0 waits forever at B0");
}

TEST(Schedule, RefusesInvalidArguments) {
  EXPECT_FALSE(make_schedule(ScheduleKind::k1F1B, 0, 1).ok());
  EXPECT_FALSE(make_schedule(ScheduleKind::k1F1B, 2, 4, 2).ok());
  EXPECT_SAYS(make_schedule(ScheduleKind::kInterleaved1F1B, 4, 6, 2),
              "multiple of the stages");
  for (const auto kind : {ScheduleKind::kGpipe, ScheduleKind::kZbH1})
    EXPECT_EQ(*parse_schedule(schedule_name(kind)), kind);
  EXPECT_SAYS(parse_schedule("zb"), "1f1b");
}

// All ways to place the bounds.
double least_largest_load(int64_t layers, int stages, double first,
                          double last) {
  if (stages == 1) return static_cast<double>(layers) + first + last;
  double best = 1e30;
  for (int64_t k = 1; k <= layers - (stages - 1); ++k)
    best = std::min(
        best, std::max(static_cast<double>(k) + first,
                       least_largest_load(layers - k, stages - 1, 0, last)));
  return best;
}

TEST(SplitLayers, MinimisesTheLargestLoad) {
  for (int64_t n = 1; n <= 9; ++n)
    for (int p = 1; p <= n && p <= 5; ++p)
      for (const double embedding : {0.0, 0.5, 2.0})
        for (const double head : {0.0, 1.5, 4.0}) {
          const auto b =
              *split_layers(n, p, {.embedding = embedding, .head = head});
          ASSERT_EQ(b.size(), static_cast<size_t>(p) + 1);
          EXPECT_EQ(b.front(), 0);
          EXPECT_EQ(b.back(), n);
          double largest = 0;
          for (size_t s = 0; s + 1 < b.size(); ++s) {
            ASSERT_LT(b[s], b[s + 1]);
            largest = std::max(largest, static_cast<double>(b[s + 1] - b[s]) +
                                            (s == 0 ? embedding : 0) +
                                            (s + 2 == b.size() ? head : 0));
          }
          EXPECT_DOUBLE_EQ(largest, least_largest_load(n, p, embedding, head));
        }
}

// The same by dynamic programming over all splits: the largest load first, then
// the sum of squares. Of equal ones, the largest last stage, and so on.
std::vector<int64_t> split_by_search(size_t n, size_t p,
                                     const LayerCosts& costs) {
  const auto load = [&](size_t stage, size_t layers) {
    return static_cast<double>(layers) + (stage == 0 ? costs.embedding : 0) +
           (stage + 1 == p ? costs.head : 0);
  };
  constexpr double kInf = 1e300;
  double limit = kInf;
  std::vector<std::vector<double>> best;
  std::vector<std::vector<size_t>> from;
  for (int pass = 0; pass < 2; ++pass) {
    best.assign(p + 1, std::vector<double>(n + 1, kInf));
    from.assign(p + 1, std::vector<size_t>(n + 1, 0));
    best[0][0] = 0;
    for (size_t s = 0; s < p; ++s)
      for (size_t k = s + 1; k + (p - s - 1) <= n; ++k)
        for (size_t j = s; j < k; ++j) {
          const double x = load(s, k - j);
          if (best[s][j] == kInf || x > limit) continue;
          const double y =
              pass == 0 ? std::max(best[s][j], x) : best[s][j] + x * x;
          if (y >= best[s + 1][k]) continue;
          best[s + 1][k] = y;
          from[s + 1][k] = j;
        }
    limit = pass == 0 ? best[p][n] : limit;
  }
  std::vector<int64_t> bounds(p + 1);
  for (size_t s = p + 1, k = n; s-- > 0; k = from[s][k])
    bounds[s] = static_cast<int64_t>(k);
  return bounds;
}

TEST(SplitLayers, IsWhatASearchOfAllSplitsFinds) {
  for (size_t n = 1; n <= 34; ++n)
    for (size_t p = 1; p <= n && p <= 17; ++p)
      for (const double embedding : {0.0, 0.5, 2.0})
        for (const double head : {0.0, 0.37, 1.5, 2.0, 6.1}) {
          const LayerCosts costs{.embedding = embedding, .head = head};
          EXPECT_EQ(*split_layers(static_cast<int64_t>(n), static_cast<int>(p),
                                  costs),
                    split_by_search(n, p, costs))
              << n << " layers, " << p << " stages, " << embedding << ", "
              << head;
        }
}

TEST(SplitLayers, IsEvenWithoutEndCostsAndRefusesTooManyStages) {
  for (int64_t n = 1; n <= 40; ++n)
    for (int p = 1; p <= n && p <= 9; ++p) {
      const auto b = *split_layers(n, p);
      for (size_t s = 0; s + 1 < b.size(); ++s) {
        EXPECT_GE(b[s + 1] - b[s], n / p);
        EXPECT_LE(b[s + 1] - b[s], (n + p - 1) / p);
      }
    }
  EXPECT_SAYS(split_layers(3, 4), "allowed: 1 to 3");
}

const ScheduleKind kKinds[] = {ScheduleKind::kGpipe, ScheduleKind::k1F1B,
                               ScheduleKind::kInterleaved1F1B,
                               ScheduleKind::kZbH1};

TEST(StepSchedule, HasAPassForEveryMicrobatchOfAnyRank) {
  for (const ScheduleKind kind : kKinds)
    for (int pp = 1; pp <= 4; ++pp)
      for (int chunks = 1; chunks <= 3; ++chunks)
        for (int64_t most = 1; most <= 9; ++most) {
          const auto schedule = step_schedule(kind, pp, chunks, most);
          if (chunks > 1 && kind != ScheduleKind::kInterleaved1F1B) {
            EXPECT_FALSE(schedule.ok());
            continue;
          }
          ASSERT_OK(schedule);
          EXPECT_GE(schedule->num_microbatches, most);
          EXPECT_LT(schedule->num_microbatches, most + (chunks > 1 ? pp : 1));
          EXPECT_OK(simulate(*schedule, {}));
        }
}

// The passes that are left when the last microbatches are skipped can still
// finish, on paper: whatever order they wait in, some rank can proceed.
TEST(StepSchedule, LeavingOutMicrobatchesDeadlocksNoSchedule) {
  for (const ScheduleKind kind : kKinds)
    for (const int pp : {2, 3, 4})
      for (const int chunks : {1, 2})
        for (int missing = 0; missing < 4; ++missing) {
          ASSERT_OK_AND(
              const auto schedule,
              step_schedule(kind, pp,
                            kind == ScheduleKind::kInterleaved1F1B ? chunks : 1,
                            2 * pp));
          const int v = schedule.chunks;
          auto left = schedule.ranks;
          for (auto& ops : left)
            std::erase_if(ops, [&](const PipeOp& op) {
              return op.microbatch >= 2 * pp - missing;
            });
          std::set<std::tuple<Pass, int, int>> done;  // pass, stage, microbatch
          std::vector<size_t> at(left.size(), 0);
          for (bool moved = true; moved;) {
            moved = false;
            for (int r = 0; r < pp; ++r) {
              auto& ops = left[static_cast<size_t>(r)];
              size_t& next = at[static_cast<size_t>(r)];
              if (next == ops.size()) continue;
              const PipeOp op = ops[next];
              const int s = op.chunk * pp + r;
              const bool can =
                  op.pass == Pass::kForward
                      ? s == 0 || done.contains({op.pass, s - 1, op.microbatch})
                  : op.pass == Pass::kBackward
                      ? s == pp * v - 1 ||
                            done.contains({op.pass, s + 1, op.microbatch})
                      : true;
              if (!can) continue;
              done.insert({op.pass, s, op.microbatch});
              ++next;
              moved = true;
            }
          }
          for (size_t r = 0; r < left.size(); ++r)
            EXPECT_EQ(at[r], left[r].size())
                << schedule_name(kind) << " pp " << pp << " missing " << missing
                << " rank " << r;
        }
}

// Together no more than the rank's peak each.
TEST(StepSchedule, EveryChunkHasSlotsOfItsOwn) {
  const auto schedule = step_schedule(ScheduleKind::kInterleaved1F1B, 2, 2, 8);
  EXPECT_EQ(slots_needed(*schedule, 0), (std::vector<int>{4, 2}));
}

// From three microbatches a stage on. By this the planner predicts memory.
TEST(StepSchedule, ALongOneNeedsNoMoreSlotsUnlessItIsGpipe) {
  for (const ScheduleKind kind :
       {ScheduleKind::k1F1B, ScheduleKind::kInterleaved1F1B,
        ScheduleKind::kZbH1})
    for (const int v : {1, 2, 3, 5}) {
      if (v > 1 && !traits_of(kind).interleaved) continue;
      for (int pp = 1; pp <= 6; ++pp) {
        const auto of_three = step_schedule(kind, pp, v, 3 * pp);
        for (int n = 3 * pp + 1; n <= 6 * pp; ++n) {
          const auto longer = step_schedule(kind, pp, v, n);
          for (int r = 0; r < pp; ++r)
            EXPECT_EQ(slots_needed(*longer, r), slots_needed(*of_three, r))
                << schedule_name(kind) << " pp " << pp << " v " << v << " n "
                << n << " rank " << r;
        }
      }
    }
}

TEST(StepSchedule, ForwardScheduleHasForwardPassesOnly) {
  for (const int chunks : {1, 2})
    for (const int64_t n : {0, 1, 3, 8}) {
      const Schedule schedule = forward_schedule(2, chunks, n);
      EXPECT_GE(schedule.num_microbatches, n);
      for (int r = 0; r < 2; ++r) {
        EXPECT_EQ(schedule.ranks[static_cast<size_t>(r)].size(),
                  static_cast<size_t>(schedule.num_microbatches * chunks));
        for (const PipeOp& op : schedule.ranks[static_cast<size_t>(r)])
          EXPECT_EQ(op.pass, Pass::kForward);
      }
    }
}

}  // namespace
}  // namespace remesh::geometry
