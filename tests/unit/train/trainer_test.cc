#include "worker/train/trainer.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "checkpoint/manifest/scan.h"
#include "proto/base/exit_code.h"
#include "tests/testing/expect.h"
#include "tests/testing/text_message.h"
#include "tests/unit/train/trainer_fixture.h"

namespace remesh::train {
namespace {

using board::Board;

// For ranks that the test ends: no pause of the test lets one reach its end.
const std::string kEndless = "train.steps=1000000000";

TEST_F(TrainerTest, TrainsToTheEndValidatesAndSaves) {
  const Ended e = run(spec());
  ASSERT_EQ(e.code, 0) << output();
  ASSERT_EQ(e.steps.size(), 12U);
  for (size_t i = 0; i < e.steps.size(); ++i) {
    const board::StepRecord& s = e.steps[i];
    EXPECT_EQ(s.step, static_cast<int64_t>(i) + 1);
    EXPECT_EQ(s.tokens, s.step * 6 * 32);
    EXPECT_EQ(std::isnan(s.val_loss), s.step % 5 != 0 && s.step != 12);
    EXPECT_GT(s.grad_norm, 0);
    EXPECT_GT(s.time, 1.7e9);
  }
  EXPECT_LT(e.steps.back().loss, e.steps.front().loss - 0.3);
  EXPECT_LT(e.steps.back().val_loss, e.steps[4].val_loss);
  EXPECT_EQ(e.board.committed_step(), 12);
  EXPECT_EQ(e.board.checkpoint_step(), 12);
  EXPECT_EQ(e.board.phase(), pb::RankStatus::ENDED);
  EXPECT_EQ(e.board.error(), "");
  EXPECT_TRUE(std::filesystem::exists(checkpoint(12)));
}

TEST_F(TrainerTest, AKillAndARestartGiveTheSameBits) {
  const std::vector<std::string> longer = {"train.steps=60",
                                           "train.eval_every=0"};
  const Ended whole = run(spec(longer));
  ASSERT_EQ(whole.code, 0) << output();
  // Killed at any point after its first checkpoint and before its end.
  pb::RankSpec s = spec(longer);
  Ended killed;
  do {
    std::filesystem::remove_all(dir_ + "/checkpoints");
    killed = run(s, [](const pb::RankStatus& now, Board&, RankProcess& rank) {
      if (now.checkpoint_step() > 0) rank.kill_it();
    });
  } while (killed.code == 0);
  ASSERT_EQ(killed.code, -9) << output();
  const int64_t from = killed.board.checkpoint_step();
  from_checkpoint(s, checkpoint(from), from);
  const Ended rest = run(s);
  ASSERT_EQ(rest.code, 0) << output();
  ASSERT_EQ(rest.steps.front().step, from + 1);
  const auto want = losses(whole);
  for (const auto& [step, loss] : losses(killed))
    EXPECT_EQ(loss, want.at(step)) << step;
  for (const auto& [step, loss] : losses(rest))
    EXPECT_EQ(loss, want.at(step)) << step;
  EXPECT_EQ(rest.steps.back().val_loss, whole.steps.back().val_loss);
  EXPECT_EQ(rest.steps.back().tokens, whole.steps.back().tokens);
}

TEST_F(TrainerTest, StopsAtABoundaryWithEverythingSaved) {
  pb::RankSpec s = spec({kEndless, "checkpoint.interval=0"});
  const Ended e =
      run(s, [](const pb::RankStatus& now, Board& board, RankProcess&) {
        if (now.committed_step() >= 3) board.set_request(kRequestStop);
      });
  ASSERT_EQ(e.code, 0) << output();
  const int64_t at = e.board.committed_step();
  EXPECT_EQ(e.board.checkpoint_step(), at);
  // The manifest has every step, up to 1,000, so that none is lost with the
  // rank.
  const auto kept = recent_losses(checkpoint(at));
  EXPECT_EQ(static_cast<int64_t>(kept.size()), std::min<int64_t>(at, 1000));
  EXPECT_EQ(kept.rbegin()->first, at);
  const auto seen = losses(e);
  for (const auto& [step, loss] : kept)
    EXPECT_TRUE(!seen.contains(step) || seen.at(step) == loss) << step;
}

TEST_F(TrainerTest, SavesWhenAskedAndInTheBackground) {
  pb::RankSpec s = spec({kEndless, "checkpoint.interval=0"});
  int64_t first = -1;
  const Ended e =
      run(s, [&](const pb::RankStatus& now, Board& board, RankProcess&) {
        if (now.committed_step() >= 2) board.set_checkpoint_request(1);
        if (first < 0 && now.checkpoint_step() > 0)
          first = now.checkpoint_step();
        if (first > 0 && now.committed_step() > first + 3)
          board.set_request(kRequestStop);
      });
  ASSERT_EQ(e.code, 0) << output();
  EXPECT_GE(first, 3);
  EXPECT_TRUE(std::filesystem::exists(checkpoint(first)));
  // Every step after the first checkpoint is in the second, which lists the
  // last 1,000 steps.
  const int64_t last = e.board.committed_step();
  const auto kept = recent_losses(checkpoint(last));
  for (int64_t step = std::max(first + 1, last - 999); step <= last; ++step)
    EXPECT_TRUE(kept.contains(step)) << step;
}

TEST_F(TrainerTest, AStopThatCannotSaveIsDeclinedUnlessMandatory) {
  pb::RankSpec s =
      spec({kEndless, "checkpoint.interval=0", "checkpoint.folder=blocked"});
  std::ofstream(dir_ + "/blocked") << "a file where the folder should be";
  int64_t declined_at = -1;
  const Ended e =
      run(s, [&](const pb::RankStatus& now, Board& board, RankProcess&) {
        if (now.committed_step() == 0) return;
        if (declined_at < 0) board.set_request(kRequestStop);
        if (now.declined_stops() == 0) return;
        if (declined_at < 0) declined_at = now.committed_step();
        if (now.committed_step() > declined_at + 5)
          board.set_request(kRequestStop | kRequestForce);
      });
  EXPECT_EQ(e.code, kExitSaveFailed) << output();
  EXPECT_EQ(e.board.declined_stops(), 1);
  EXPECT_HAS(e.board.checkpoint_error(), "blocked");
  EXPECT_HAS(e.board.error(), "could not be saved");
}

TEST_F(TrainerTest, AFailedBackgroundSaveDoesNotStopTraining) {
  pb::RankSpec s = spec({kEndless, "checkpoint.folder=later"});
  std::ofstream(dir_ + "/later") << "a file where the folder should be";
  bool mended = false;
  const Ended e =
      run(s, [&](const pb::RankStatus& now, Board& board, RankProcess&) {
        if (!mended && !now.checkpoint_error().empty()) {
          std::filesystem::remove(dir_ + "/later");
          mended = true;
        }
        if (now.checkpoint_step() > 0) board.set_request(kRequestStop);
      });
  EXPECT_TRUE(mended);
  EXPECT_EQ(e.code, 0) << output();
  EXPECT_EQ(e.board.checkpoint_error(), "");
  EXPECT_EQ(recent_losses(dir_ + "/later/" +
                          manifest::step_name(e.board.checkpoint_step()))
                .rbegin()
                ->first,
            e.board.committed_step());
}

TEST_F(TrainerTest, ABadSourceIsNamed) {
  pb::RankSpec s = spec({"train.steps=2"});
  ASSERT_EQ(run(s).code, 0) << output();
  pb::RankSpec other = spec({"train.steps=2", "train.seed=9"});
  from_checkpoint(other, checkpoint(2), 2);
  Ended e = run(other);
  EXPECT_EQ(e.code, kExitFailed);
  EXPECT_HAS(e.board.error(), "seed");

  from_checkpoint(s, checkpoint(1), 1);
  e = run(s);
  EXPECT_EQ(e.code, kExitUnreadable);
  EXPECT_HAS(e.board.error(), "step-00000001");

  const std::string shard = checkpoint(2) + "/shard-00000.h5";
  std::fstream f(shard, std::ios::in | std::ios::out | std::ios::binary);
  f.seekp(20000);
  f.put('\x5a');
  f.close();
  from_checkpoint(s, checkpoint(2), 2);
  e = run(s);
  EXPECT_EQ(e.code, kExitBadSource);
  EXPECT_HAS(e.board.error(), "shard-00000.h5");
}

// In a job that has made steps with them, inputs that are not there may return.
TEST_F(TrainerTest, InputsThatCannotBeReadAreNoErrorInTheJob) {
  pb::RankSpec s = spec({"train.steps=2"});
  ASSERT_EQ(run(s).code, 0) << output();
  pb::RankSpec gone = spec({"train.steps=4"});
  gone.mutable_assignment()->mutable_job()->mutable_data()->set_path(dir_ +
                                                                     "/gone");
  EXPECT_EQ(run(gone).code, kExitInternal);
  from_checkpoint(gone, checkpoint(2), 2);
  const Ended e = run(gone);
  EXPECT_EQ(e.code, kExitUnreadable);
  EXPECT_HAS(e.board.error(), "/gone");
}

// Whoever else says so is taken for a host that cannot load it, too.
TEST_F(TrainerTest, OnlyARankThatCannotLoadSaysSo) {
  pb::RankSpec s = spec({"train.steps=2"}, 2);
  ASSERT_EQ(run_mpi(s, 2), 0) << output();
  from_checkpoint(s, checkpoint(2), 2);
  pb::RankSpec other = s;
  other.mutable_assignment()->mutable_job()->mutable_train()->set_seed(9);
  EXPECT_EQ(run_mpi({s, other}), kExitFailed) << output();
  EXPECT_LACKS(output(), "another rank");
  std::ifstream log(dir_ + "/rank-1.log");
  const std::string text((std::istreambuf_iterator<char>(log)), {});
  EXPECT_HAS(text, "train.seed");
}

TEST_F(TrainerTest, RefusesAWorldThatIsNotItsMesh) {
  pb::RankSpec s = spec({}, 2);
  s.set_rank(0);
  Ended e = run(s);
  EXPECT_EQ(e.code, kExitWorld);
  EXPECT_HAS(e.board.error(), "world");
  s = spec();
  s.set_rank(0);
  s.mutable_assignment()->mutable_mesh()->set_tp(3);
  e = run(s);
  EXPECT_EQ(e.code, kExitFailed);
  EXPECT_HAS(e.board.error(), "allowed: 1, 2, 4");
}

TEST_F(TrainerTest, RefusesADataSetWithMoreTokensThanTheModel) {
  pb::RankSpec s = spec();
  s.mutable_assignment()->mutable_job()->mutable_model()->set_vocab_size(100);
  const Ended e = run(s);
  EXPECT_EQ(e.code, kExitFailed);
  EXPECT_HAS(e.board.error(), "model.vocab_size: 100");
}

// The coordinator did not see the model, so the job has no fingerprint of it.
TEST_F(TrainerTest, RanksWithDifferentFrozenModelsDoNotTrain) {
  std::vector<pb::RankSpec> ranks;
  for (const std::string& seed : std::vector<std::string>{"1", "2"}) {
    ASSERT_EQ(run(spec({"train.steps=2", "train.seed=" + seed,
                        "checkpoint.folder=model" + seed}))
                  .code,
              0)
        << output();
    ranks.push_back(
        spec({"train.steps=2", "lora.rank=2",
              "model.init_from=" + dir_ + "/model" + seed + "/step-00000002"},
             2));
  }
  EXPECT_EQ(run_mpi({ranks[0], ranks[0]}), 0) << output();
  std::filesystem::remove_all(dir_ + "/checkpoints");
  EXPECT_NE(run_mpi(ranks), 0) << output();
  std::ifstream log(dir_ + "/rank-1.log");
  const std::string text{std::istreambuf_iterator<char>(log), {}};
  EXPECT_HAS(text, "on this host has the weights");
}

TEST_F(TrainerTest, ManyRanksTrainAsOneDoes) {
  const std::vector<std::string> more = {"train.steps=10",
                                         "checkpoint.keep_latest_k=9"};
  const Ended one = run(spec(more));
  ASSERT_EQ(one.code, 0) << output();
  std::filesystem::rename(dir_ + "/checkpoints", dir_ + "/one");
  ASSERT_EQ(run_mpi(spec(more, 4), 4), 0) << output();
  const auto fs = posix_file_system();
  ASSERT_OK_AND(const auto m, manifest::read_checkpoint(*fs, checkpoint(10)));
  EXPECT_EQ(m.shards_size(), 4);
  const auto want = losses(one);
  for (const auto& [step, loss] : recent_losses(checkpoint(10)))
    EXPECT_NEAR(loss / want.at(step), 1, 1e-5);
  // One rank continues from a checkpoint of four.
  pb::RankSpec s = spec({"train.steps=12"});
  from_checkpoint(s, checkpoint(10), 10);
  EXPECT_EQ(run(s).code, 0) << output();
  // Three ranks continue from a checkpoint of one.
  s = spec({"train.steps=12"}, 3);
  from_checkpoint(s, dir_ + "/one/step-00000010", 10);
  EXPECT_EQ(run_mpi(s, 3), 0) << output();
}

// A run moves from mesh to mesh through its checkpoints; its losses are those
// of a single rank.
TEST_F(TrainerTest, AnyMeshResumesTheCheckpointOfAnother) {
  const auto keep = std::string("checkpoint.keep_latest_k=99");
  const Ended one = run(spec({"train.steps=12", keep}));
  ASSERT_EQ(one.code, 0) << output();
  const auto want = losses(one);
  std::filesystem::rename(dir_ + "/checkpoints", dir_ + "/one");
  struct Leg {
    const char* mesh;
    std::vector<std::string> more;
  };
  const std::vector<Leg> legs = {
      {"dp: 2", {"parallel.zero_stage=3"}},
      {"tp: 2", {}},
      {"pp: 2", {"parallel.pipeline_schedule=\"zb-h1\""}},
      {"cp: 2", {"train.recompute=\"selective\""}},
      {"tp: 4", {"train.recompute=\"full\""}},
      {"dp: 2 pp: 2", {"parallel.zero_stage=1"}}};
  for (size_t i = 0; i < legs.size(); ++i) {
    const Leg& leg = legs[i];
    std::vector<std::string> more = leg.more;
    const int64_t from = 2 * static_cast<int64_t>(i);
    more.push_back("train.steps=" + std::to_string(from + 2));
    more.push_back("schedule.total_steps=12");
    more.push_back(keep);
    const auto mesh = text_message<pb::Mesh>(leg.mesh);
    const int ranks = mesh.dp() * mesh.pp() * mesh.tp() * mesh.cp();
    pb::RankSpec s = spec(more, ranks);
    *s.mutable_assignment()->mutable_mesh() = mesh;
    if (from > 0) from_checkpoint(s, checkpoint(from), from);
    ASSERT_EQ(run_mpi(s, ranks), 0) << "leg " << i << "\n" << output();
    for (const auto& [step, loss] : recent_losses(checkpoint(from + 2)))
      EXPECT_NEAR(loss / want.at(step), 1, 1e-5) << "leg " << i;
  }
}

}  // namespace
}  // namespace remesh::train
