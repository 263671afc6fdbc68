// Resharding through memory: the state of any mesh moves to any other,
// bit-exact, from any sufficient set of sources, by messages and shared memory.
#include "checkpoint/exchange/exchange.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <set>

#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/testing/local_comm.h"
#include "tests/testing/seed.h"
#include "tests/unit/exchange/states.h"
#include "tests/unit/exchange/wrapped_comm.h"

namespace remesh::exchange {
namespace {

using geometry::ParamTable;
using geometry::Sharding;

// A change of mesh, with the places of sources and processes.
struct Change {
  Sharding from, to;
  std::vector<OldState> sources;
  std::vector<Process> processes;
};

Change random_change(std::mt19937& random, const ParamTable& table) {
  Change c;
  c.from = geometry::random_sharding(random, table.config(), 8);
  c.to = geometry::random_sharding(random, table.config(), 8);
  const int workers = 1 + static_cast<int>(random() % 5);
  const int hosts = 1 + static_cast<int>(random() % 4);
  const int lost_of = 1 + static_cast<int>(random() % 12);
  const auto worker = [&] { return static_cast<int>(random()) % workers; };
  for (int r = 0; r < c.from.layout.world(); ++r) {
    const int copies = random() % 3 == 0 ? 2 : 1;
    for (int k = 0; k < copies; ++k) {
      const int w = std::abs(worker());
      if (lost_of < 8 && random() % static_cast<unsigned>(lost_of * 3) == 0)
        continue;
      c.sources.push_back({.rank = r, .host = w % hosts, .worker = w});
    }
  }
  const int extra = static_cast<int>(random() % 3);
  for (int i = 0; i < c.to.layout.world() + extra; ++i) {
    const int w = std::abs(worker());
    c.processes.push_back({.host = w % hosts, .worker = w});
  }
  return c;
}

// Twin: whether every element is in a source on a host that has a process.
bool whole(const ParamTable& table, const Change& c) {
  std::set<int> hosts;
  for (const Process& p : c.processes) hosts.insert(p.host);
  std::set<std::pair<size_t, int64_t>> held;
  for (const OldState& s : c.sources) {
    if (!hosts.contains(s.host)) continue;
    const auto shard = make_rank_shard(table, c.from, s.rank);
    for_each_element(
        table, held_pieces(*shard),
        [&](int64_t, size_t param, int64_t e) { held.emplace(param, e); });
  }
  return static_cast<int64_t>(held.size()) == table.num_elements();
}

// Each element of a rank is filled once, from a source that is reachable.
void check_plan(const ParamTable& table, const Change& c, int me,
                const Plan& plan) {
  const bool has_rank = me < c.to.layout.world();
  std::vector<int> filled(static_cast<size_t>(plan.elements), 0);
  const auto fill = [&](const Copy& copy) {
    for (int64_t r = 0; r < copy.rows; ++r)
      for (int64_t k = 0; k < copy.cols; ++k)
        ++filled[static_cast<size_t>(copy.to_at + r * copy.to_stride + k)];
  };
  for (const Copy& copy : plan.local) {
    fill(copy);
    EXPECT_EQ(c.sources[static_cast<size_t>(copy.source)].host,
              c.processes[static_cast<size_t>(me)].host);
  }
  for (const Stream& s : plan.receive)
    for (const Copy& copy : s.copies) {
      fill(copy);
      EXPECT_EQ(c.sources[static_cast<size_t>(copy.source)].host,
                c.processes[static_cast<size_t>(s.peer)].host);
      EXPECT_NE(c.sources[static_cast<size_t>(copy.source)].host,
                c.processes[static_cast<size_t>(me)].host);
    }
  EXPECT_EQ(
      plan.elements,
      has_rank ? make_rank_shard(table, c.to, me)->zero.state_elements() : 0);
  const int times = plan.reuse >= 0 ? 0 : 1;
  EXPECT_TRUE(std::all_of(filled.begin(), filled.end(),
                          [&](int n) { return n == times; }));
}

void exchange_once(std::mt19937& random, int* unreachable, int* reused,
                   int64_t* received) {
  const ParamTable table = ParamTable::make(geometry::random_config(random));
  const Change c = random_change(random, table);
  SCOPED_TRACE(c.from.layout.to_string() + " to " + c.to.layout.to_string());
  const size_t n = c.processes.size();
  const uint64_t salt = random();
  const bool possible = whole(table, c);
  std::vector<Plan> plans(n);
  for (size_t p = 0; p < n; ++p) {
    auto plan = plan_exchange(table, c.from, c.sources, c.to, c.processes,
                              static_cast<int>(p));
    if (!possible && !plan.ok()) {
      ASSERT_EQ(plan.status().code(), Code::kUnavailable);
      ++*unreachable;
      return;
    }
    ASSERT_OK(plan);
    plans[p] = std::move(*plan);
    ASSERT_EQ(plans[p].digest, plans[0].digest);
    check_plan(table, c, static_cast<int>(p), plans[p]);
  }
  // Even if all ranks reuse, their sources are complete, since the ranks
  // together need every element.
  ASSERT_TRUE(possible);
  std::vector<State> sources;
  for (const OldState& s : c.sources)
    sources.push_back(state_of(table, c.from, s.rank, salt));
  const std::vector<State> before = sources;
  std::vector<State> targets;
  for (const Plan& plan : plans) targets.emplace_back(plan.elements);
  std::vector<Status> done(n);
  const int64_t staging = 300 + static_cast<int64_t>(random() % 20000);
  comm::on_ranks(static_cast<int>(n), [&](comm::Comm& comm) {
    const auto i = static_cast<size_t>(comm.rank());
    // Only the sources that this process can map.
    std::vector<geometry::ConstStateView> views;
    for (size_t s = 0; s < sources.size(); ++s)
      views.push_back(c.sources[s].host == c.processes[i].host
                          ? sources[s].view()
                          : geometry::ConstStateView{});
    done[i] = run_exchange(comm, plans[i], views, targets[i].mut(), ok_status(),
                           {.staging_bytes = staging});
  });
  std::set<int> taken;
  for (size_t i = 0; i < n; ++i) {
    ASSERT_OK(done[i]);
    *received += static_cast<int64_t>(plans[i].receive.size());
    if (static_cast<int>(i) >= c.to.layout.world()) continue;
    const State want = state_of(table, c.to, static_cast<int>(i), salt);
    if (plans[i].reuse >= 0) {
      ++*reused;
      const auto s = static_cast<size_t>(plans[i].reuse);
      ASSERT_TRUE(taken.insert(plans[i].reuse).second);
      ASSERT_EQ(c.sources[s].worker, c.processes[i].worker);
      ASSERT_TRUE(same_bits(sources[s], want));
    } else {
      ASSERT_TRUE(same_bits(targets[i], want)) << "rank " << i;
    }
  }
  for (size_t s = 0; s < sources.size(); ++s)
    ASSERT_TRUE(same_bits(sources[s], before[s]));
}

TEST(Exchange, AnyMeshToAnyOtherIsBitExact) {
  const int cases = test_cases(1500);
  const uint32_t seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  int unreachable = 0, reused = 0;
  int64_t received = 0;
  for (int i = 0; i < cases && !HasFatalFailure(); ++i)
    exchange_once(random, &unreachable, &reused, &received);
  EXPECT_GT(unreachable, 0);
  EXPECT_LT(unreachable, cases / 2);
  EXPECT_GT(reused, 0);
  EXPECT_GT(received, 0);
}

ParamTable small_model() {
  return ParamTable::make(geometry::llama(16, 2, 4, 2, 24, 64));
}

// One of four ranks was killed: the others keep what they have.
TEST(Exchange, RanksThatReuseMoveNothing) {
  const ParamTable table = small_model();
  const Sharding from{.layout = {.dp = 4}, .bounds = {0, 2}};
  const Sharding to{.layout = {.dp = 3}, .bounds = {0, 2}};
  const std::vector<OldState> sources = {{0, 0, 0}, {1, 1, 1}, {3, 3, 3}};
  const std::vector<Process> processes = {{0, 0}, {1, 1}, {3, 3}};
  for (int me = 0; me < 3; ++me) {
    const auto plan = plan_exchange(table, from, sources, to, processes, me);
    ASSERT_OK(plan);
    EXPECT_EQ(plan->reuse, me);
    EXPECT_TRUE(plan->local.empty() && plan->receive.empty() &&
                plan->send.empty());
  }
}

// Holders of the same state take turns in sending it.
TEST(Exchange, HoldersOfOneStateShareTheSending) {
  const ParamTable table = small_model();
  const Sharding from{.layout = {.dp = 2}, .bounds = {0, 2}};
  const Sharding to{.layout = {.dp = 6}, .bounds = {0, 2}};
  const std::vector<OldState> sources = {{0, 0, 0}, {1, 1, 1}};
  std::vector<Process> processes;
  for (int w = 0; w < 6; ++w) processes.push_back({w, w});
  for (int me = 0; me < 2; ++me) {
    ASSERT_OK_AND(const auto plan,
                  plan_exchange(table, from, sources, to, processes, me));
    EXPECT_EQ(plan.send.size(), 2U);
  }
}

struct Outcome {
  std::vector<Status> status;
  int ticks = 0;  // of process 0
  bool all(Code code) const {
    return std::all_of(status.begin(), status.end(),
                       [&](const Status& s) { return s.code() == code; });
  }
  // The others learn that it failed, and not why.
  bool only(size_t process, Code code) const {
    for (size_t p = 0; p < status.size(); ++p)
      if (status[p].code() != (p == process ? code : Code::kCancelled))
        return false;
    return true;
  }
};

// dp3 to tp2 over three hosts; rank 0 sends through `wrap`.
Outcome run_small(
    const std::function<std::unique_ptr<comm::Comm>(comm::Comm&)>& wrap,
    const Status& ready_of_1, uint64_t digest_of_1) {
  const ParamTable table = small_model();
  const Sharding from{
      .layout = {.dp = 3}, .bounds = {0, 2}, .zero = {.stage = 3}};
  const Sharding to{.layout = {.tp = 2}, .bounds = {0, 2}};
  const std::vector<OldState> sources = {{0, 0, 0}, {1, 1, 1}, {2, 2, 2}};
  const std::vector<Process> processes = {{0, 0}, {1, 1}, {2, 2}};
  Outcome out;
  out.status.resize(3);
  comm::on_ranks(3, [&](comm::Comm& comm) {
    const int p = comm.rank();
    auto plan = plan_exchange(table, from, sources, to, processes, p);
    CHECK(plan.ok());
    if (p == 1) plan->digest ^= digest_of_1;
    const State mine = state_of(table, from, p, 1);
    std::vector<geometry::ConstStateView> views(3);
    views[static_cast<size_t>(p)] = mine.view();
    State target(plan->elements);
    const auto wrapped = p == 0 ? wrap(comm) : nullptr;
    out.status[static_cast<size_t>(p)] =
        run_exchange(wrapped ? *wrapped : comm, *plan, views, target.mut(),
                     p == 1 ? ready_of_1 : ok_status(),
                     {.staging_bytes = 4000, .tick = [&out, p] {
                        if (p == 0) ++out.ticks;
                      }});
  });
  return out;
}

TEST(Exchange, AFailureFailsAllProcessesAndItsOwnHasTheReason) {
  const auto plain = [](comm::Comm&) { return nullptr; };
  EXPECT_TRUE(run_small(plain, ok_status(), 0).all(Code::kOk));
  const Outcome o = run_small(plain, not_found("no segment"), 0);
  EXPECT_TRUE(o.only(1, Code::kNotFound));
  EXPECT_EQ(o.status[1].message(), "no segment");
  EXPECT_TRUE(run_small(plain, ok_status(), 1).all(Code::kInvalidArgument));
}

TEST(Exchange, AFlippedBitIsFound) {
  for (int number = 0; number < 6; ++number)
    EXPECT_TRUE(run_small(
                    [&](comm::Comm& inner) {
                      return std::make_unique<FlippingComm>(inner, number);
                    },
                    ok_status(), 0)
                    .only(1, Code::kCorrupt))
        << number;
}

// Otherwise a dead link would look like progress, without end.
TEST(Exchange, TicksOnProgressOnly) {
  constexpr int kLooks = 10'000;
  int messages = 0;
  const Outcome o = run_small(
      [&](comm::Comm& inner) {
        return std::make_unique<DeadLinkComm>(inner, kLooks, &messages);
      },
      ok_status(), 0);
  EXPECT_TRUE(o.all(Code::kOk));
  EXPECT_GT(o.ticks, 0);
  // Each begins and ends; and what is copied here.
  EXPECT_LE(o.ticks, 2 * messages + 1);
  EXPECT_LT(2 * messages + 1, kLooks / 4);
}

TEST(Exchange, InvalidPlansAreRefusedWithTheReason) {
  const ParamTable table = small_model();
  const Sharding one{.layout = {}, .bounds = {0, 2}};
  const Sharding two{.layout = {.tp = 2}, .bounds = {0, 2}};
  const auto code = [&](const std::vector<OldState>& sources,
                        const Sharding& to,
                        const std::vector<Process>& processes) {
    return plan_exchange(table, two, sources, to, processes, 0).status().code();
  };
  EXPECT_EQ(code({{0, 0, 0}, {1, 0, 0}}, one, {{0, 0}}), Code::kOk);
  EXPECT_EQ(code({{0, 0, 0}}, one, {{0, 0}}), Code::kUnavailable);
  EXPECT_EQ(code({{0, 0, 0}, {1, 1, 1}}, one, {{0, 0}}), Code::kUnavailable);
  EXPECT_EQ(code({{0, 0, 0}, {1, 1, 1}}, one, {{0, 0}, {1, 1}}), Code::kOk);
  EXPECT_EQ(code({{2, 0, 0}}, one, {{0, 0}}), Code::kInvalidArgument);
  EXPECT_EQ(code({{0, 0, 0}, {1, 0, 0}}, two, {{0, 0}}),
            Code::kInvalidArgument);
  Sharding wrong = one;
  wrong.bounds = {0, 3};
  EXPECT_EQ(code({{0, 0, 0}, {1, 0, 0}}, wrong, {{0, 0}}),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace remesh::exchange
