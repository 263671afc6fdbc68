// Two ranks that keep each other's state, and a message that arrives damaged.
#include "worker/train/replication.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <thread>
#include <vector>

#include "proto/base/check.h"
#include "tests/testing/expect.h"
#include "tests/testing/local_comm.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/exchange/wrapped_comm.h"

namespace remesh::train {
namespace {

// What a rank sends in its groups is damaged: once, in the first piece, or
// always.
class DamagingWorld final : public exchange::WrappedComm {
 public:
  explicit DamagingWorld(comm::Comm& inner, int number = 1)
      : ObservedComm(inner, {}), number_(number) {}
  std::unique_ptr<comm::Comm> split(int color, int key) override {
    group_ = inner().split(color, key);
    return std::make_unique<exchange::FlippingComm>(*group_, number_);
  }

 private:
  const int number_;
  std::unique_ptr<comm::Comm> group_;
};

struct Outcome {
  Status first, again, newest, lasting;
  int64_t done_step = -1;
};

class ReplicationTest : public ::testing::Test {
 protected:
  pb::RankSpec spec_of(int rank) const {
    pb::RankSpec s;
    pb::Assignment& a = *s.mutable_assignment();
    a.set_generation(1);
    a.mutable_job()->mutable_elastic()->set_replicate_every(4);
    a.mutable_job()->mutable_elastic()->set_replicas(1);
    for (int r = 0; r < 2; ++r) {
      const std::string worker(1, static_cast<char>('a' + r));
      std::filesystem::create_directories(dir_ / worker);
      if (r == rank) s.set_state_folder(dir_ / worker);
      a.add_workers(worker);
      a.add_hosts("host-" + worker);
      pb::RankPlace& p = *a.add_ranks();
      p.set_rank(r);
      p.set_worker(worker);
    }
    s.set_state_job(42);
    return s;
  }

  using Commit = std::function<void(int64_t step)>;
  // Calls `use` once the state of step 4 is committed.
  void run(int rank, comm::Comm& world,
           const std::function<void(Replication&, const Commit&)>& use) const {
    const pb::RankSpec spec = spec_of(rank);
    StateHome home(table_, spec, rank);
    const auto shard = geometry::make_rank_shard(table_, sharding_, rank);
    CHECK(home.reserve(sharding_, shard->zero.state_elements()).ok());
    const Commit commit = [&](int64_t step) {
      const geometry::StateView to = home.begin();
      for (size_t v = 0; v < geometry::kNumStateVectors; ++v)
        std::fill(to[v].begin(), to[v].end(), static_cast<float>(step));
      home.commit(step);
    };
    commit(4);
    const auto r = Replication::prepare(table_, spec, rank, home).value();
    CHECK(r != nullptr && r->connect(world).ok());
    use(*r, commit);
  }

  // Replicates step 4, and step 5 before it stops.
  Outcome run(int rank, comm::Comm& world) const {
    Outcome out;
    run(rank, world, [&](Replication& r, const Commit& commit) {
      r.start();
      out.first = r.finish([] {});
      out.again = r.finish([] {});
      commit(5);
      out.newest = r.finish_newest([] {});
      out.done_step = r.done_step();
      out.lasting = r.lasting_failure();
    });
    return out;
  }

  // Replicates four states. Returns what lasts after each of them.
  std::vector<Code> run_four(int rank, comm::Comm& world) const {
    std::vector<Code> out;
    run(rank, world, [&](Replication& r, const Commit& commit) {
      for (const int64_t step : {8, 12, 16, 20}) {
        commit(step);
        r.start();
        (void)r.finish([] {}).ok();
        out.push_back(r.lasting_failure().code());
      }
    });
    return out;
  }

  const ShmDir dir_;
  const geometry::ParamTable table_ =
      geometry::ParamTable::make({.dim = 8,
                                  .n_layers = 2,
                                  .n_heads = 2,
                                  .n_kv_heads = 1,
                                  .hidden_dim = 12,
                                  .vocab_size = 11});
  const geometry::Sharding sharding_ = {
      .layout = {.dp = 2},
      .bounds = geometry::stage_bounds(table_.config(), 1, 16).value(),
      .zero = {.stage = 1}};
};

TEST_F(ReplicationTest, ADamagedReplicaIsToldOnceAndTheNewestIsMade) {
  const auto comms = comm::make_local_comms(2);
  DamagingWorld damaging(*comms[0]);
  std::array<Outcome, 2> out;
  std::thread sender([&] { out[0] = run(0, damaging); });
  out[1] = run(1, *comms[1]);
  sender.join();
  EXPECT_OK(out[0].first);
  EXPECT_EQ(out[1].first.code(), Code::kCorrupt) << out[1].first.to_string();
  for (const Outcome& o : out) {
    EXPECT_OK(o.again);
    EXPECT_OK(o.newest);
    EXPECT_EQ(o.done_step, 5);
    EXPECT_OK(o.lasting);
  }
}

TEST_F(ReplicationTest, DamageThatDoesNotPassIsAnErrorOfTheRank) {
  const auto comms = comm::make_local_comms(2);
  DamagingWorld damaging(*comms[0], exchange::FlippingComm::kEvery);
  std::array<std::vector<Code>, 2> lasts;
  std::thread sender([&] { lasts[0] = run_four(0, damaging); });
  lasts[1] = run_four(1, *comms[1]);
  sender.join();
  const Code ok = Code::kOk, bad = Code::kCorrupt;
  EXPECT_EQ(lasts[0], (std::vector{ok, ok, ok, ok}));
  EXPECT_EQ(lasts[1], (std::vector{ok, ok, bad, bad}));
}

}  // namespace
}  // namespace remesh::train
