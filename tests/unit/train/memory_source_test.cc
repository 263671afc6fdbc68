// States in shared memory, with the real program: what a killed rank leaves,
// and how a generation on the same or another mesh restores it.
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <random>
#include <thread>

#include "checkpoint/manifest/manifest.h"
#include "checkpoint/manifest/scan.h"
#include "checkpoint/memory/segment.h"
#include "checkpoint/memory/segment_directory.h"
#include "proto/base/exit_code.h"
#include "tests/testing/expect.h"
#include "tests/testing/seed.h"
#include "tests/testing/small_disk.h"
#include "tests/testing/text_message.h"
#include "tests/unit/train/trainer_fixture.h"
#include "worker/data/dataset.h"

namespace remesh::train {
namespace {

using board::Board;

constexpr uint64_t kStateJob = 42;

class MemoryTest : public TrainerTest {
 protected:
  // One rank on worker "a".
  pb::RankSpec alone(const std::vector<std::string>& overrides) {
    return on_workers(spec(overrides), {"a"}).front();
  }
  size_t segments(const std::string& worker) {
    return memory::list_segments(worker_folder(worker), kStateJob).size();
  }
  // Sharded, of eight steps of which it makes the first ones.
  static std::vector<std::string> job(
      int64_t steps, const std::vector<std::string>& more = {}) {
    std::vector<std::string> out = {
        "train.steps=" + std::to_string(steps), "schedule.total_steps=8",
        "parallel.zero_stage=3", "checkpoint.interval=0"};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  // The metrics in the checkpoint for the state of its last step.
  uint64_t saved_digest(int64_t step) {
    const auto fs = posix_file_system();
    const auto m = manifest::read_checkpoint(*fs, checkpoint(step));
    EXPECT_OK(m);
    for (const auto& r : m->recent())
      if (r.step() == step) return r.digest();
    ADD_FAILURE() << "no step " << step;
    return 0;
  }
};

TEST_F(MemoryTest, AKillAnywhereResumesFromTheCommittedState) {
  const std::vector<std::string> long_run = {
      "train.steps=400", "train.eval_every=0", "train.eval_sequences=0",
      "checkpoint.interval=0"};
  const Ended whole = run(spec(long_run));
  ASSERT_EQ(whole.code, 0) << output();
  std::filesystem::remove_all(dir_ + "/checkpoints");
  const auto want = losses(whole);
  const unsigned seed = test_seed();
  fmt::print("seed {}\n", seed);
  std::mt19937 random(seed);
  pb::RankSpec s = alone(long_run);
  int64_t before = 0;
  for (int life = 0; life < 4; ++life) {
    const int64_t at = before + 1 + static_cast<int64_t>(random() % 40);
    const int us = static_cast<int>(random() % 3000);
    const Ended e =
        run(s, [&](const pb::RankStatus& now, Board&, RankProcess& rank) {
          if (now.committed_step() < at) return;
          std::this_thread::sleep_for(std::chrono::microseconds(us));
          rank.kill_it();
        });
    ASSERT_EQ(e.code, -9) << output();
    EXPECT_EQ(segments("a"), 1U);
    for (const auto& [step, loss] : losses(e))
      EXPECT_EQ(loss, want.at(step)) << step;
    from_memory(s, {"a"});
    const int64_t held = s.assignment().source().step();
    // The last reported step is there, or the one after it.
    EXPECT_GE(held, e.board.committed_step());
    EXPECT_LE(held, e.board.committed_step() + 1);
    before = held;
  }
  const Ended rest = run(s);
  ASSERT_EQ(rest.code, 0) << output();
  EXPECT_EQ(rest.steps.front().step, before + 1);
  for (const auto& [step, loss] : losses(rest))
    EXPECT_EQ(loss, want.at(step)) << step;
  EXPECT_EQ(rest.steps.back().tokens, whole.steps.back().tokens);
}

TEST_F(MemoryTest, AHandoffKeepsTheStateAndSavesNothing) {
  pb::RankSpec s = alone({"train.steps=5000", "checkpoint.interval=0"});
  const auto handoff = [](const pb::RankStatus& now, Board& board,
                          RankProcess&) {
    if (now.committed_step() >= 3)
      board.set_request(kRequestStop | kRequestHandoff);
  };
  const Ended e = run(s, handoff);
  ASSERT_EQ(e.code, 0) << output();
  const int64_t at = e.board.committed_step();
  EXPECT_EQ(e.steps.back().step, at);
  EXPECT_EQ(e.board.checkpoint_step(), -1);
  EXPECT_FALSE(std::filesystem::exists(checkpoint(at)));
  from_memory(s, {"a"});
  EXPECT_EQ(s.assignment().source().step(), at);
  // A rank with its state in private memory saves even for a handoff.
  pb::RankSpec own = spec({"train.steps=5000", "checkpoint.interval=0"});
  const Ended saved = run(own, handoff);
  ASSERT_EQ(saved.code, 0) << output();
  EXPECT_EQ(saved.board.checkpoint_step(), saved.board.committed_step());
}

constexpr uint32_t kHandoff = kRequestStop | kRequestHandoff;

auto stop_at(int64_t step, uint32_t request) {
  return [=](const pb::RankStatus& now, Board& board, RankProcess&) {
    if (now.committed_step() >= step) board.set_request(request);
  };
}

// The data set is gone from the only host that has the state.
TEST_F(MemoryTest, ARescueSavesTheStateWithoutTheData) {
  pb::RankSpec s = alone({"train.steps=5000", "checkpoint.interval=0"});
  ASSERT_EQ(run(s, stop_at(3, kHandoff)).code, 0) << output();
  from_memory(s, {"a"});
  const int64_t at = s.assignment().source().step();
  ASSERT_OK_AND(const auto dataset, data::Dataset::open(dir_ + "/data"));
  s.mutable_assignment()->set_data_id(dataset.data_id());
  std::filesystem::remove_all(dir_ + "/data");
  EXPECT_NE(run(s).code, 0) << "to train, it needs them";

  s.mutable_assignment()->set_rescue(true);
  Ended e = run(s, stop_at(at, kHandoff));
  ASSERT_EQ(e.code, 0) << output();
  EXPECT_FALSE(std::filesystem::exists(checkpoint(at)));
  from_memory(s, {"a"});
  EXPECT_EQ(s.assignment().source().step(), at);
  e = run(s, stop_at(at, kRequestStop));
  ASSERT_EQ(e.code, 0) << output();
  EXPECT_TRUE(e.steps.empty());
  EXPECT_EQ(e.board.committed_step(), at);
  EXPECT_EQ(e.board.checkpoint_step(), at);
  const auto m =
      manifest::read_checkpoint(*posix_file_system(), checkpoint(at));
  ASSERT_TRUE(m.ok()) << m.status().to_string();
  EXPECT_EQ(m->data_id(), dataset.data_id());
}

// The state is that of the adapters.
TEST_F(MemoryTest, ARescueSavesTheStateWithoutTheFrozenWeights) {
  ASSERT_EQ(run(spec({"train.steps=2", "checkpoint.folder=base"})).code, 0)
      << output();
  const std::string base = dir_ + "/base/" + manifest::step_name(2);
  pb::RankSpec s = alone({"train.steps=5000", "checkpoint.interval=0",
                          "lora.rank=2", "model.init_from=" + base});
  ASSERT_EQ(run(s, stop_at(3, kRequestStop)).code, 0) << output();
  from_memory(s, {"a"});
  const int64_t at = s.assignment().source().step();
  ASSERT_OK_AND(const auto saved, manifest::read_checkpoint(
                                      *posix_file_system(), checkpoint(at)));
  ASSERT_NE(saved.base_fingerprint(), "");
  std::filesystem::remove_all(dir_ + "/checkpoints");
  std::filesystem::remove_all(dir_ + "/base");
  s.mutable_assignment()->mutable_job()->mutable_lora()->set_base_fingerprint(
      saved.base_fingerprint());
  EXPECT_NE(run(s).code, 0) << "to train, it needs them";
  s.mutable_assignment()->set_rescue(true);
  const Ended e = run(s, stop_at(at, kRequestStop));
  ASSERT_EQ(e.code, 0) << output();
  EXPECT_TRUE(e.steps.empty());
  ASSERT_OK_AND(const auto again, manifest::read_checkpoint(
                                      *posix_file_system(), checkpoint(at)));
  EXPECT_EQ(again.base_fingerprint(), saved.base_fingerprint());
}

TEST_F(MemoryTest, ABadSourceInMemoryIsNamed) {
  pb::RankSpec s = alone({"train.steps=3", "checkpoint.interval=0"});
  ASSERT_EQ(run(s).code, 0) << output();
  from_memory(s, {"a"});
  s.mutable_assignment()->mutable_job()->mutable_train()->set_steps(6);
  const std::string path = s.assignment().source().states(0).segment();

  pb::RankSpec other = s;
  other.mutable_assignment()->mutable_source()->set_step(2);
  Ended e = run(other);
  EXPECT_EQ(e.code, 0) << output();  // the previous step is there, too
  other.mutable_assignment()->mutable_source()->set_step(1);
  e = run(other);
  EXPECT_EQ(e.code, kExitBadSource);
  EXPECT_HAS(e.board.error(), "has no state of this model for step 1");
}

TEST_F(MemoryTest, ADamagedOrMissingSourceIsRefused) {
  pb::RankSpec s = alone({"train.steps=3", "checkpoint.interval=0"});
  ASSERT_EQ(run(s).code, 0) << output();
  from_memory(s, {"a"});
  s.mutable_assignment()->mutable_job()->mutable_train()->set_steps(6);
  const std::string path = s.assignment().source().states(0).segment();
  {
    ASSERT_OK_AND(auto segment,
                  memory::StateSegment::open(
                      path, kStateJob, memory::StateSegment::Mode::kWrite));
    const auto c = segment->contents().states.front();
    memory::StateInfo info = c.info;
    info.content =
        memory::content_hash(segment->read(c.buffer, c.info.elements));
    segment->redescribe(c, info);
    float& x = segment->write(c.buffer, c.info.elements).exp_avg[7];
    x = std::nextafter(x, 1.0F);
  }
  Ended e = run(s);
  EXPECT_EQ(e.code, kExitBadSource);
  EXPECT_HAS(e.board.error(), "checksum of the first moment");
  std::filesystem::remove(path);
  e = run(s);
  EXPECT_EQ(e.code, kExitBadSource);
  EXPECT_HAS(e.board.error(), path);
}

TEST_F(MemoryTest, TooLittleSharedMemoryIsRefusedWithWhatIsNeeded) {
  const testing::SmallDisk small(worker_folder("a"), 128 << 10);
  if (!small.mounted()) GTEST_SKIP() << "needs mount";
  const Ended e = run(alone({"train.steps=3", "checkpoint.interval=0"}));
  EXPECT_EQ(e.code, kExitNoRoom);
  for (const char* part :
       {"of shared memory", " are free", "elastic.keep_state = false"})
    EXPECT_HAS(e.board.error(), part);
  EXPECT_EQ(segments("a"), 0U);
}

// The state moves from mesh to mesh in memory only; workers join and leave, and
// one is lost with its memory.
TEST_F(MemoryTest, AnyMeshResumesTheStateOfAnother) {
  const auto keep = std::string("checkpoint.keep_latest_k=99");
  const Ended one = run(spec({"train.steps=12", keep}));
  ASSERT_EQ(one.code, 0) << output();
  const auto want = losses(one);
  std::filesystem::rename(dir_ + "/checkpoints", dir_ + "/one");
  struct Leg {
    const char* mesh;
    std::vector<std::string> workers;  // by rank
    std::vector<std::string> more;
    std::vector<std::string> lost;           // before this mesh
    std::map<std::string, size_t> segments;  // after it, by worker
  };
  const std::string zero_3 = "parallel.zero_stage=3";
  const std::vector<Leg> legs = {
      // Parts on two workers: each keeps the other's.
      {"dp: 2", {"a", "b"}, {zero_3}, {}, {{"a", 2}, {"b", 2}}},
      // The same mesh again, from its own state.
      {"dp: 2", {"a", "b"}, {zero_3}, {}, {{"a", 2}, {"b", 2}}},
      // One is lost; the other continues with its replica. No replicas remain.
      {"dp: 1", {"b"}, {}, {"a"}, {{"b", 1}}},
      // Four ranks on three workers, every second step replicated.
      {"pp: 2 tp: 2",
       {"a", "b", "b", "c"},
       {"elastic.replicate_every=2"},
       {},
       {}},
      // Copies of each other need no replicas.
      {"dp: 2", {"c", "d"}, {}, {"b"}, {{"c", 1}, {"d", 1}}},
      {"tp: 2", {"c", "d"}, {}, {}, {{"c", 2}, {"d", 2}}}};
  const std::vector<std::string> all = {"a", "b", "c", "d"};
  int64_t generation = 0;
  for (size_t i = 0; i < legs.size(); ++i) {
    SCOPED_TRACE(fmt::format("leg {}", i));
    const Leg& leg = legs[i];
    for (const std::string& w : leg.lost)
      std::filesystem::remove_all(worker_folder(w));
    std::vector<std::string> more = leg.more;
    const int64_t from = 2 * static_cast<int64_t>(i);
    more.push_back("train.steps=" + std::to_string(from + 2));
    more.push_back("schedule.total_steps=12");
    more.push_back("train.digest=true");
    more.push_back(keep);
    const auto mesh = text_message<pb::Mesh>(leg.mesh);
    pb::RankSpec s = spec(more, mesh.dp() * mesh.pp() * mesh.tp());
    *s.mutable_assignment()->mutable_mesh() = mesh;
    s.mutable_assignment()->set_generation(generation);
    if (from == 0) s.mutable_assignment()->set_generation(1);
    if (from > 0) from_memory(s, all);
    generation = s.assignment().generation();
    if (from > 0) {
      EXPECT_EQ(s.assignment().source().step(), from);
    }
    ASSERT_EQ(run_mpi(on_workers(s, leg.workers)), 0) << output();
    for (const auto& [step, loss] : recent_losses(checkpoint(from + 2)))
      EXPECT_NEAR(loss / want.at(step), 1, 1e-5) << step;
    if (from > 0) {
      EXPECT_HAS(output(), fmt::format("digest={:016x}", saved_digest(from)));
    }
    for (const auto& [worker, n] : leg.segments)
      EXPECT_EQ(segments(worker), n) << worker;
    // Workers without ranks end, and their states with them.
    for (const std::string& w : all)
      if (std::find(leg.workers.begin(), leg.workers.end(), w) ==
          leg.workers.end())
        std::filesystem::remove_all(worker_folder(w));
  }
}

// A smaller mesh is restored in the room that the larger one took: of the old
// states only the buffers that are read are kept, and the new one gets its
// second buffer when they are gone.
TEST_F(MemoryTest, ASmallerMeshNeedsNoRoomForTheOldStatesBesideItsOwn) {
  one_host_ = false;
  ASSERT_EQ(run_mpi(on_workers(spec(job(8), 2), {"a", "b"})), 0) << output();
  const auto want = recent_losses(checkpoint(8));
  uint64_t taken = 0;
  for (const auto& f : memory::list_segments(worker_folder("b"), kStateJob))
    taken += f.bytes;
  std::filesystem::remove_all(dir_ + "/checkpoints");
  std::filesystem::remove_all(shm_.path());
  const testing::SmallDisk small(worker_folder("b"),
                                 static_cast<int64_t>(taken + taken / 8));
  if (!small.mounted()) GTEST_SKIP() << "needs mount";
  const pb::RankSpec s = spec(job(3), 2);
  ASSERT_EQ(run_mpi(on_workers(s, {"a", "b"})), 0) << output();
  std::filesystem::remove_all(worker_folder("a"));
  pb::RankSpec next = spec(job(8), 1);
  next.mutable_assignment()->set_generation(s.assignment().generation());
  from_memory(next, {"b"});
  EXPECT_EQ(next.assignment().source().step(), 3);
  const Ended e = run(on_workers(next, {"b"}).front());
  ASSERT_EQ(e.code, 0) << output();
  for (const auto& [step, loss] : losses(e))
    EXPECT_NEAR(loss / want.at(step), 1, 1e-5) << step;
  EXPECT_EQ(e.steps.size(), 5U);
}

// Ranks of one host share the room: the first one takes no more than another.
// The state moves from data to tensor parallel ranks, in the room that it took.
TEST_F(MemoryTest, TheRanksOfAHostShareTheRoomForANewMesh) {
  const std::vector<std::string> both = {"a", "a"};
  ASSERT_EQ(run_mpi(on_workers(spec(job(8), 2), both)), 0) << output();
  const auto want = recent_losses(checkpoint(8));
  uint64_t taken = 0;
  for (const auto& f : memory::list_segments(worker_folder("a"), kStateJob))
    taken += f.bytes;
  std::filesystem::remove_all(dir_ + "/checkpoints");
  std::filesystem::remove_all(shm_.path());
  const testing::SmallDisk small(worker_folder("a"),
                                 static_cast<int64_t>(taken + taken / 8));
  if (!small.mounted()) GTEST_SKIP() << "needs mount";
  const pb::RankSpec s = spec(job(3), 2);
  ASSERT_EQ(run_mpi(on_workers(s, both)), 0) << output();
  pb::RankSpec next = spec(job(8), 2);
  next.mutable_assignment()->mutable_mesh()->set_dp(1);
  next.mutable_assignment()->mutable_mesh()->set_tp(2);
  next.mutable_assignment()->set_generation(s.assignment().generation());
  from_memory(next, {"a"});
  EXPECT_EQ(next.assignment().source().step(), 3);
  ASSERT_EQ(run_mpi(on_workers(next, both)), 0) << output();
  const auto losses = recent_losses(checkpoint(8));
  EXPECT_EQ(losses.size(), 5U);
  for (const auto& [step, loss] : losses)
    EXPECT_NEAR(loss / want.at(step), 1, 1e-5) << step;
}

// What a drained worker on the host still has makes way for it as well.
TEST_F(MemoryTest, AStateInTheFolderOfAnotherWorkerMakesWay) {
  // Both folders are on one small disk.
  const std::string shared = parent_path(worker_folder("a"));
  const testing::SmallDisk small(shared, 64 << 20);
  if (!small.mounted()) GTEST_SKIP() << "needs mount";
  pb::RankSpec s = spec(job(3, {"elastic.replicas=0"}), 2);
  ASSERT_EQ(run_mpi(on_workers(s, {"a", "b"})), 0) << output();
  // As much room as the states take, and a little.
  uint64_t taken = 0;
  for (const char* w : {"a", "b"})
    for (const auto& f : memory::list_segments(worker_folder(w), kStateJob))
      taken += f.bytes;
  small.fill(static_cast<int64_t>(taken / 8));
  pb::RankSpec next = spec(job(8, {"elastic.replicas=0"}), 1);
  next.mutable_assignment()->set_generation(s.assignment().generation());
  from_memory(next, {"a", "b"});
  const Ended e = run(on_workers(next, {"a"}).front());
  ASSERT_EQ(e.code, 0) << output();
  EXPECT_EQ(e.steps.size(), 5U);
}

// Two workers on different hosts, so that all replicas go by messages. The same
// mesh before and after: no bit changes.
TEST_F(MemoryTest, OnTheSameMeshLossesAreBitIdentical) {
  one_host_ = false;
  const auto job = [&](int64_t steps) {
    return std::vector<std::string>{
        "train.steps=" + std::to_string(steps), "schedule.total_steps=8",
        "parallel.zero_stage=1", "checkpoint.interval=0"};
  };
  ASSERT_EQ(run_mpi(on_workers(spec(job(8), 2), {"a", "b"})), 0) << output();
  const auto want = recent_losses(checkpoint(8));
  ASSERT_EQ(want.size(), 8U);
  std::filesystem::remove_all(dir_ + "/checkpoints");
  std::filesystem::remove_all(shm_.path());
  pb::RankSpec s = spec(job(3), 2);
  ASSERT_EQ(run_mpi(on_workers(s, {"a", "b"})), 0) << output();
  // With the worker's own state, and with the replica of a lost worker.
  for (const int64_t steps : {5, 8}) {
    if (steps == 8) std::filesystem::remove_all(worker_folder("a"));
    pb::RankSpec next = spec(job(steps), 2);
    next.mutable_assignment()->set_generation(s.assignment().generation());
    from_memory(next, {"a", "b"});
    s = next;
    ASSERT_EQ(run_mpi(on_workers(next, {"a", "b"})), 0) << output();
    EXPECT_HAS(output(), "kept_here=1 copied_on_this_host=0");
    for (const auto& [step, loss] : recent_losses(checkpoint(steps)))
      EXPECT_EQ(loss, want.at(step)) << step;
  }
}

}  // namespace
}  // namespace remesh::train
