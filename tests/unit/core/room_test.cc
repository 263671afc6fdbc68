// Whether the states of a mesh fit into shared memory, and what is given up
// when they do not.
#include "coordinator/core/room.h"

#include "checkpoint/manifest/conversions.h"
#include "checkpoint/memory/segment.h"
#include "coordinator/core/job_shape.h"
#include "coordinator/core/survival.h"
#include "parallel/jobfile/jobfile.h"
#include "tests/testing/expect.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

// A model of 3.3 M parameters on workers a, b, c, one rank and one host each.
class RoomTest : public ::testing::Test {
 protected:
  RoomTest()
      : job_(make_job()),
        table_(geometry::ParamTable::make(jobfile::model_config(job_))) {}

  static pb::Job make_job() {
    return text_message<pb::Job>(R"(
        model {
          n_layers: 4 n_heads: 4 n_kv_heads: 4 hidden_dim: 704 vocab_size: 257
        }
        train { seq_len: 64 }
        parallel { zero_stage: 1 }
        elastic { replicas: 1 replicate_every: 1 })");
  }

  pb::Assignment mesh_of(const std::vector<std::string>& workers) const {
    pb::Assignment a;
    *a.mutable_job() = job_;
    a.mutable_mesh()->set_dp(static_cast<int>(workers.size()));
    for (const std::string& w : workers) {
      a.add_workers(w);
      a.add_hosts("host-" + w);
      pb::RankPlace* p = a.add_ranks();
      p->set_rank(a.ranks_size() - 1);
      p->set_worker(w);
    }
    return a;
  }

  int64_t elements(const pb::Assignment& a, int rank) const {
    const auto s = full_sharding_of(a);
    const auto shard = geometry::make_rank_shard(table_, *s, rank);
    return shard->zero.state_elements();
  }

  // What the mesh leaves on that host's worker: its own state, and a replica.
  void add_states(const pb::Assignment& a, int rank, const std::string& worker,
                  bool replica, pb::Source* source) const {
    pb::StateHolding* h = source->add_states();
    source->set_kind(pb::Source::MEMORY);
    h->set_rank(rank);
    *h->mutable_sharding() = manifest::sharding_info(*full_sharding_of(a));
    h->set_elements(elements(a, rank));
    h->set_worker(worker);
    h->set_host("host-" + worker);
    h->set_replica(replica);
    h->set_segment(worker + std::to_string(rank));
  }

  // Every worker reports this room.
  Roster all_have(double bytes_per_parameter) const {
    Roster roster;
    for (const char* w : {"a", "b", "c"}) {
      pb::Report r = report(w, 0);
      r.set_host(std::string("host-") + w);
      r.set_seq(1);
      r.set_state_room(static_cast<uint64_t>(
          bytes_per_parameter * static_cast<double>(parameters())));
      roster.on_report(r, {}, kSilentMs, 0);
    }
    return roster;
  }

  int64_t parameters() const { return elements(mesh_of({"a"}), 0); }

  const pb::Job job_;
  const geometry::ParamTable table_;
};

// 24 bytes a parameter over three ranks, twice with replicas, and 4 MiB for
// MPI, which are 1.3 bytes a parameter here.
TEST_F(RoomTest, TheFirstMeshNeedsItsStatesAndReplicas) {
  const pb::Assignment a = mesh_of({"a", "b", "c"});
  EXPECT_TRUE(find_shortages(a, table_, all_have(20)).empty());
  const Shortages s = find_shortages(a, table_, all_have(15));
  ASSERT_EQ(s.size(), 3U);
  EXPECT_GT(s.at("host-a").needed, s.at("host-a").available);
  EXPECT_HAS(to_text(s), "host host-b needs");
}

TEST_F(RoomTest, WithoutRoomForReplicasNoneAreKept) {
  pb::Assignment a = mesh_of({"a", "b", "c"});
  std::string given_up;
  EXPECT_TRUE(fit_room(table_, all_have(12), true, &a, &given_up).empty());
  EXPECT_EQ(a.job().elastic().replicas(), 0);
  EXPECT_HAS(given_up, "no replicas");
  pb::Assignment enough = mesh_of({"a", "b", "c"});
  EXPECT_TRUE(fit_room(table_, all_have(20), true, &enough, &given_up).empty());
  EXPECT_EQ(enough.job().elastic().replicas(), 1);
  EXPECT_EQ(given_up, "");
  EXPECT_FALSE(fit_room(table_, all_have(5), true, &a, &given_up).empty());
}

// Three ranks, of which c is lost. The two that remain read one buffer of each
// state and write one of their own; then both of their own buffers remain.
TEST_F(RoomTest, ASmallerMeshIsRestoredBesideTheOldStates) {
  const pb::Assignment before = mesh_of({"a", "b", "c"});
  const auto after = [&] {
    pb::Assignment a = mesh_of({"a", "b"});
    for (const auto& [rank, worker, replica] :
         std::vector<std::tuple<int, const char*, bool>>{
             {0, "a", false}, {0, "b", true}, {1, "b", false}, {2, "a", true}})
      add_states(before, rank, worker, replica, a.mutable_source());
    return a;
  };
  std::string given_up;
  pb::Assignment a = after();
  EXPECT_TRUE(fit_room(table_, all_have(28), true, &a, &given_up).empty());
  EXPECT_EQ(a.source().states_size(), 4);
  EXPECT_EQ(a.job().elastic().replicas(), 1);
  a = after();
  EXPECT_TRUE(fit_room(table_, all_have(17), true, &a, &given_up).empty());
  EXPECT_EQ(a.source().states_size(), 3) << "each is read once";
  EXPECT_EQ(a.job().elastic().replicas(), 0);
  a = after();
  EXPECT_FALSE(fit_room(table_, all_have(10), true, &a, &given_up).empty());
}

TEST_F(RoomTest, AStateReusedInPlaceNeedsNoMoreRoom) {
  pb::Assignment a = mesh_of({"a", "b", "c"});
  a.mutable_job()->mutable_elastic()->set_replicas(0);
  for (const auto& [rank, worker] :
       std::vector<std::pair<int, const char*>>{{0, "a"}, {1, "b"}, {2, "c"}})
    add_states(a, rank, worker, false, a.mutable_source());
  EXPECT_TRUE(find_shortages(a, table_, all_have(10)).empty());
  // The same states in other places are copied first.
  for (int i = 0; i < 3; ++i)
    a.mutable_ranks(i)->set_worker(a.workers((i + 1) % 3));
  EXPECT_TRUE(find_shortages(a, table_, all_have(11)).empty())
      << "half of the old one and half of the own one";
  EXPECT_FALSE(find_shortages(a, table_, all_have(8)).empty());
}

// While they run, workers do not say what they hold.
TEST_F(RoomTest, WorkersOfAHostShareItsRoomWhileTheyRun) {
  pb::Assignment a = mesh_of({"a", "b"});
  a.mutable_job()->mutable_elastic()->set_replicas(0);
  for (std::string& host : *a.mutable_hosts()) host = "host-a";
  const uint64_t own = memory::segment_bytes(elements(a, 0));
  const auto with_free = [&](uint64_t bytes) {
    Roster roster;
    for (const char* w : {"a", "b"}) {
      pb::Report r = report(w, 1);
      r.set_host("host-a");
      r.set_state_room(bytes + own);
      roster.on_report(r, {}, kSilentMs, 0);
    }
    return roster;
  };
  pb::Assignment next = a;
  start_from(a, table_, &next);
  EXPECT_EQ(next.source().states_size(), 2);
  constexpr uint64_t kBeside = uint64_t{8} << 20;
  EXPECT_TRUE(find_shortages(next, table_, with_free(kBeside), &a).empty());
  EXPECT_EQ(find_shortages(next, table_, with_free(kBeside - 1), &a).size(),
            1U);
  EXPECT_EQ(find_shortages(next, table_, with_free(kBeside)).size(), 1U)
      << "what they hold is not known";
}

TEST_F(RoomTest, TheNextMeshStartsFromWhatItsRanksCanRead) {
  const pb::Assignment running = mesh_of({"a", "b", "c"});
  pb::Assignment next = mesh_of({"a", "b"});
  start_from(running, table_, &next);
  ASSERT_EQ(next.source().states_size(), 2);
  EXPECT_EQ(next.source().kind(), pb::Source::MEMORY);
  EXPECT_EQ(next.source().states(1).host(), "host-b");
  EXPECT_EQ(next.source().states(1).elements(), elements(running, 1));
}

TEST(Shortages, AreOfTheSameHostsWhateverTheBytes) {
  const Shortages s = {{"a", {5, 1}}, {"b", {5, 2}}};
  EXPECT_TRUE(same_hosts(s, {{"a", {6, 2}}, {"b", {5, 3}}}));
  EXPECT_FALSE(same_hosts(s, {{"a", {5, 1}}}));
  EXPECT_FALSE(same_hosts(s, {{"a", {5, 1}}, {"c", {5, 2}}}));
}

TEST_F(RoomTest, AHostThatReportsNoLimitHasEnough) {
  Roster roster;
  pb::Report r = report("a", 0);
  r.set_seq(1);
  roster.on_report(r, {}, kSilentMs, 0);
  EXPECT_TRUE(find_shortages(mesh_of({"a"}), table_, roster).empty());
}

}  // namespace
}  // namespace remesh::core
