// Which state is begun with, against a twin that marks every element.
#include "coordinator/core/state_choice.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "parallel/geometry/schedule.h"
#include "tests/testing/expect.h"
#include "tests/testing/pieces.h"
#include "tests/testing/seed.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

using geometry::ParamTable;
using geometry::Sharding;

Sharding random_sharding(std::mt19937& random) {
  const int pp = 1 + static_cast<int>(random() % 2);
  Sharding s{.layout = {.dp = 1 + static_cast<int>(random() % 3),
                        .pp = pp,
                        .tp = 1 + static_cast<int>(random() % 2)},
             .zero = {.stage = static_cast<int>(random() % 3)}};
  s.bounds =
      pp == 1 ? geometry::StageBounds{0, 2} : geometry::StageBounds{0, 1, 2};
  return s;
}

// What each rank of a mesh holds, worked out once.
class Known {
 public:
  explicit Known(const ParamTable& table) : table(table) {}
  const ParamTable& table;

  struct Rank {
    int64_t elements = -1;    // -1: there is no such rank
    std::vector<bool> marks;  // of the model's elements, in the table's order
  };
  const Rank& rank(const Sharding& s, int rank) {
    auto [it, fresh] = ranks_.try_emplace(
        {s.layout.dp, s.layout.pp, s.layout.tp, s.zero.stage, rank});
    Rank& r = it->second;
    if (!fresh) return r;
    r.marks.assign(static_cast<size_t>(table.num_elements()), false);
    const auto shard = make_rank_shard(table, s, rank);
    if (!shard.ok()) return r;
    r.elements = shard->zero.state_elements();
    for_each_element(
        table, held_pieces(*shard), [&](int64_t, size_t param, int64_t e) {
          r.marks[static_cast<size_t>(table.offset(param) + e)] = true;
        });
    return r;
  }

 private:
  std::map<std::tuple<int, int, int, int, int>, Rank> ranks_;
};

Holding holding(Known& known, const Sharding& s, int rank, int64_t step,
                int64_t generation, const std::string& worker,
                bool replica = false) {
  pb::StateHolding h;
  h.set_worker(worker);
  h.set_host("host-" + worker);
  h.set_segment(worker + "/" + std::to_string(rank) + (replica ? "r" : "o"));
  h.set_step(step);
  h.set_generation(generation);
  h.set_rank(rank);
  h.set_model(model_id(known.table));
  h.set_elements(known.rank(s, rank).elements);
  h.set_tokens(step * 100);
  h.set_sequences(step * 10);
  h.set_replica(replica);
  return {h, s};
}

Inventory random_inventory(std::mt19937& random, Known& known) {
  Inventory in;
  const int generations = 1 + static_cast<int>(random() % 3);
  const auto worker = [&] { return std::string(1, "abcd"[random() % 4]); };
  for (int g = 1; g <= generations; ++g) {
    const Sharding s = random_sharding(random);
    const auto step = static_cast<int64_t>(random() % 6);
    for (int64_t k = step; k <= step + 1; ++k)
      for (int r = 0; r < s.layout.world(); ++r) {
        if (random() % 5 != 0)
          in.holdings.push_back(holding(known, s, r, k, g, worker()));
        if (random() % 3 == 0)
          in.holdings.push_back(holding(known, s, r, k, g, worker(), true));
      }
    if (random() % 2 == 0)
      in.first_steps.push_back({g, 1 + static_cast<int64_t>(random() % 6)});
    if (random() % 8 == 0)
      in.refused.emplace(g, static_cast<int64_t>(random() % 6));
  }
  for (Holding& h : in.holdings) {
    if (random() % 40 == 0) h.info.set_model(1);
    if (random() % 40 == 0) h.info.set_elements(h.info.elements() + 1);
    if (random() % 60 == 0) h.info.set_rank(99);
  }
  std::shuffle(in.holdings.begin(), in.holdings.end(), random);
  for (unsigned i = random() % 3; i > 0; --i)
    in.checkpoints.push_back({static_cast<int64_t>(random() % 7),
                              static_cast<int64_t>(random() % 4),
                              "ckpt-" + std::to_string(i)});
  if (random() % 3 == 0) in.hosts = {"host-a", "host-b", "host-c"};
  for (int g = 0; g <= generations; ++g)
    if (random() % 5 == 0)
      in.known_steps[g] = static_cast<int64_t>(random() % 7);
  return in;
}

bool too_new(const Inventory& in, int64_t generation, int64_t step) {
  for (const auto& [g, known] : in.known_steps)
    if (g == generation && step > known) return true;
  return false;
}

bool on_branch_left(const Inventory& in, int64_t generation, int64_t step) {
  bool left = false;
  for (const FirstStep& f : in.first_steps)
    left = left ||
           (generation != 0 && f.generation > generation && f.step <= step);
  return left;
}

bool usable(Known& known, const Inventory& in, const Holding& holding) {
  const pb::StateHolding& h = holding.info;
  return h.model() == model_id(known.table) &&
         known.rank(holding.sharding, h.rank()).elements == h.elements() &&
         h.elements() >= 0 && !too_new(in, h.generation(), h.step()) &&
         !in.refused.contains({h.generation(), h.step()}) &&
         !on_branch_left(in, h.generation(), h.step()) &&
         (in.hosts.empty() || in.hosts.contains(h.host()));
}

// Whether these holdings have every element.
bool whole(Known& known, const std::vector<const Holding*>& all) {
  std::vector<bool> held(static_cast<size_t>(known.table.num_elements()),
                         false);
  for (const Holding* h : all) {
    const std::vector<bool>& mine =
        known.rank(h->sharding, h->info.rank()).marks;
    for (size_t i = 0; i < held.size(); ++i) held[i] = held[i] || mine[i];
  }
  return std::find(held.begin(), held.end(), false) == held.end();
}

// The newest step that is whole in memory, and the oldest generation in which
// it is; (-1, -1): none.
std::pair<int64_t, int64_t> newest_in_memory(Known& known,
                                             const Inventory& in) {
  std::map<std::pair<int64_t, int64_t>, std::vector<const Holding*>> states;
  for (const Holding& h : in.holdings)
    if (usable(known, in, h))
      states[{h.info.step(), -h.info.generation()}].push_back(&h);
  for (auto it = states.rbegin(); it != states.rend(); ++it)
    if (whole(known, it->second)) return {it->first.first, -it->first.second};
  return {-1, -1};
}

int64_t newest_saved(const Inventory& in) {
  int64_t best = -1;
  for (const CheckpointInfo& c : in.checkpoints)
    if (!too_new(in, c.generation, c.step) &&
        !on_branch_left(in, c.generation, c.step))
      best = std::max(best, c.step);
  return best;
}

void check_sources(Known& known, const Inventory& in, const StateChoice& c) {
  std::vector<const Holding*> read;
  std::set<std::pair<int, std::string>> rank_and_host;
  const Holding& first = in.holdings[c.sources[0]];
  for (const size_t i : c.sources) {
    const pb::StateHolding& h = in.holdings[i].info;
    ASSERT_TRUE(usable(known, in, in.holdings[i]));
    ASSERT_EQ(h.step(), c.step);
    ASSERT_EQ(h.generation(), c.generation);
    ASSERT_EQ(in.holdings[i].sharding, first.sharding);
    ASSERT_EQ(h.tokens(), first.info.tokens());
    ASSERT_TRUE(rank_and_host.emplace(h.rank(), h.host()).second);
    if (!read.empty() && read.back()->info.rank() == h.rank()) {
      ASSERT_LE(read.back()->info.replica(), h.replica());
    }
    read.push_back(&in.holdings[i]);
    // A replica is taken only where the rank's own state is not.
    for (const Holding& other : in.holdings) {
      const pb::StateHolding& o = other.info;
      const bool same = usable(known, in, other) && o.step() == h.step() &&
                        o.generation() == h.generation() &&
                        o.rank() == h.rank() && o.host() == h.host();
      if (same && h.replica()) {
        ASSERT_TRUE(o.replica());
      }
    }
  }
  ASSERT_TRUE(whole(known, read));
}

TEST(StateChoice, TheNewestCompleteStateIsChosenAsByTheNaiveTwin) {
  std::mt19937 random(test_seed());
  const ParamTable table = small_model();
  Known known(table);
  std::map<pb::Source::Kind, int> kinds;
  for (int i = 0; i < 2000; ++i) {
    Inventory in = random_inventory(random, known);
    const StateChoice c = choose_state(&table, in);
    const auto [step, generation] = newest_in_memory(known, in);
    const int64_t saved = newest_saved(in);
    ++kinds[c.kind];
    ASSERT_FALSE(c.why.empty());
    if (step >= 0 && step >= saved) {
      ASSERT_EQ(c.kind, pb::Source::MEMORY) << c.why;
      ASSERT_EQ(c.step, step) << c.why;
      ASSERT_EQ(c.generation, generation) << c.why;
      check_sources(known, in, c);
      if (HasFatalFailure()) return;
    } else if (saved >= 0) {
      ASSERT_EQ(c.kind, pb::Source::CHECKPOINT) << c.why;
      ASSERT_EQ(c.step, saved);
      ASSERT_FALSE(c.path.empty());
    } else {
      ASSERT_EQ(c.kind, pb::Source::INIT) << c.why;
      ASSERT_EQ(c.step, 0);
    }
    // Order does not matter.
    std::vector<Holding> read;
    for (const size_t k : c.sources) read.push_back(in.holdings[k]);
    std::shuffle(in.holdings.begin(), in.holdings.end(), random);
    std::shuffle(in.checkpoints.begin(), in.checkpoints.end(), random);
    const StateChoice again = choose_state(&table, in);
    ASSERT_EQ(again.kind, c.kind);
    ASSERT_EQ(again.step, c.step);
    ASSERT_EQ(again.path, c.path);
    ASSERT_EQ(again.sources.size(), read.size());
    for (size_t k = 0; k < read.size(); ++k)
      ASSERT_EQ(in.holdings[again.sources[k]].info.rank(), read[k].info.rank());
  }
  for (const auto kind :
       {pb::Source::INIT, pb::Source::CHECKPOINT, pb::Source::MEMORY})
    EXPECT_GT(kinds[kind], 50) << static_cast<int>(kind);
}

// A rank of three was killed while it wrote step 8; the others had it.
TEST(StateChoice, AStepThatOneRankDidNotFinishIsNotChosen) {
  const ParamTable table = small_model();
  Known known(table);
  const Sharding s{.layout = {.dp = 3}, .bounds = {0, 2}, .zero = {.stage = 1}};
  Inventory in;
  for (int r = 0; r < 3; ++r) {
    const std::string worker(1, "abc"[r]);
    in.holdings.push_back(holding(known, s, r, 7, 1, worker));
    if (r != 1) in.holdings.push_back(holding(known, s, r, 8, 1, worker));
  }
  in.checkpoints = {{5, 1, "ckpt-5"}};
  StateChoice c = choose_state(&table, in);
  EXPECT_EQ(c.kind, pb::Source::MEMORY);
  EXPECT_EQ(c.step, 7);
  EXPECT_HAS(c.why, "step 8 of generation 1 (dp3) is incomplete");
  // Its host is gone with it, but b's buddy has a replica of step 7.
  std::erase_if(in.holdings,
                [](const Holding& h) { return h.info.worker() == "b"; });
  c = choose_state(&table, in);
  EXPECT_EQ(c.kind, pb::Source::CHECKPOINT);
  EXPECT_EQ(c.path, "ckpt-5");
  in.holdings.push_back(holding(known, s, 1, 7, 1, "c", true));
  c = choose_state(&table, in);
  EXPECT_EQ(c.kind, pb::Source::MEMORY);
  EXPECT_EQ(c.step, 7);
  EXPECT_HAS(c.why, "replicas of rank 1");
}

// A hostile worker lists thousands of states that nobody else has.
TEST(StateChoice, AWorkerWithManyStatesHidesNoOther) {
  const ParamTable table = small_model();
  Known known(table);
  const Sharding s{.layout = {.dp = 2}, .bounds = {0, 2}, .zero = {.stage = 1}};
  Inventory in;
  for (int64_t step = 0; step < 20'000; ++step)
    in.holdings.push_back(holding(known, s, 0, 100 + step, 9, "many"));
  for (int r = 0; r < 2; ++r)
    in.holdings.push_back(holding(known, s, r, 7, 1, std::string(1, "ab"[r])));
  const StateChoice c = choose_state(&table, in);
  EXPECT_EQ(c.kind, pb::Source::MEMORY);
  EXPECT_EQ(c.step, 7);
  EXPECT_HAS(c.why, "worker many: step 164 of rank 0: too many other states");
}

// Replicated data parallelism: who finished the step has all of it.
TEST(StateChoice, OneOfTheReplicasIsEnough) {
  const ParamTable table = small_model();
  Known known(table);
  const Sharding s{.layout = {.dp = 2}, .bounds = {0, 2}};
  Inventory in;
  in.holdings = {holding(known, s, 0, 7, 1, "a"),
                 holding(known, s, 1, 8, 1, "b")};
  const StateChoice c = choose_state(&table, in);
  EXPECT_EQ(c.step, 8);
  ASSERT_EQ(c.sources.size(), 1U);
  EXPECT_EQ(in.holdings[c.sources[0]].info.worker(), "b");
}

// Generation 2 began at the checkpoint without worker c, which comes back with
// a newer step of generation 1.
TEST(StateChoice, AnAbandonedBranchIsNotRestored) {
  const ParamTable table = small_model();
  Known known(table);
  const Sharding s{.layout = {.dp = 2}, .bounds = {0, 2}};
  Inventory in;
  in.holdings = {holding(known, s, 0, 12, 1, "c"),
                 holding(known, s, 0, 11, 2, "a")};
  EXPECT_EQ(choose_state(&table, in).step, 12);
  in.first_steps = {{1, 1}, {2, 11}};
  const StateChoice c = choose_state(&table, in);
  EXPECT_EQ(c.step, 11);
  EXPECT_EQ(c.generation, 2);
  EXPECT_HAS(c.why, "branch that generation 2 abandoned");
}

// Generation 2 restored step 12 of generation 1 on more workers, of which one
// fails before its first step, again and again.
TEST(StateChoice, AStepIsReadFromTheGenerationThatMadeIt) {
  const ParamTable table = small_model();
  Known known(table);
  const Sharding one{.bounds = {0, 2}};
  const Sharding two{
      .layout = {.dp = 2}, .bounds = {0, 2}, .zero = {.stage = 1}};
  Inventory in;
  in.holdings = {holding(known, two, 0, 12, 2, "a"),
                 holding(known, two, 1, 12, 2, "bad"),
                 holding(known, one, 0, 12, 1, "a")};
  in.first_steps = {{1, 1}};
  EXPECT_EQ(choose_state(&table, in).generation, 1);
  in.refused = {{1, 12}};
  EXPECT_EQ(choose_state(&table, in).generation, 2);
}

TEST(FewestHosts, HoldTheStateAndNoneOfThemIsLeftOver) {
  std::mt19937 random(test_seed());
  const ParamTable table = small_model();
  Known known(table);
  std::vector<std::string> order = {"host-a", "host-b", "host-c", "host-d"};
  int left_out = 0;
  for (int i = 0; i < 1000; ++i) {
    const Inventory in = random_inventory(random, known);
    const StateChoice c = choose_state(&table, in);
    std::shuffle(order.begin(), order.end(), random);
    const std::set<std::string> hosts = fewest_hosts(in, c, order);
    std::vector<const Holding*> held;
    std::map<int, std::set<std::string>> holders;  // by part
    for (const size_t k : c.sources) {
      const Holding& h = in.holdings[k];
      if (!hosts.contains(h.info.host())) {
        ++left_out;
        continue;
      }
      held.push_back(&h);
      holders[replica_group(h.sharding, h.info.rank())].insert(h.info.host());
    }
    ASSERT_EQ(whole(known, held), c.kind == pb::Source::MEMORY);
    std::set<std::string> needed;
    for (const auto& [part, its] : holders)
      if (its.size() == 1) needed.insert(*its.begin());
    ASSERT_EQ(needed, hosts);
  }
  EXPECT_GT(left_out, 100);
}

TEST(StateChoice, NamesTheLostStepsWhenNothingIsLeft) {
  const ParamTable table = small_model();
  Inventory in;
  EXPECT_EQ(choose_state(&table, in).why, "start of the job");
  in.last_finished = 9;
  EXPECT_HAS(choose_state(&table, in).why, "of the 9 finished steps");
}

}  // namespace
}  // namespace remesh::core
