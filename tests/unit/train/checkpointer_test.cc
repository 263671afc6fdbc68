// Saves that overlap updates: a save has the state at its begin, however slow
// the disk; an abandoned save leaves no valid checkpoint and is done later.
#include "worker/train/checkpointer.h"

#include <chrono>
#include <cstring>
#include <future>
#include <limits>
#include <random>
#include <thread>

#include "checkpoint/manifest/scan.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/testing/llama.h"
#include "tests/testing/local_comm.h"
#include "worker/train/watched_fs.h"

namespace remesh::train {
namespace {

using namespace std::chrono_literals;

// File operations that change something wait until it is opened.
class Gate {
 public:
  void open(bool yes) {
    {
      const std::lock_guard lock(mutex_);
      open_ = yes;
      visits_left_ = 0;
    }
    changed_.notify_all();
  }
  // The operation number `visit` from now on waits, and all that follow.
  void close_at(int64_t visit) {
    const std::lock_guard lock(mutex_);
    visits_left_ = visit;
  }
  void pass() {
    std::unique_lock lock(mutex_);
    if (visits_left_ > 0 && --visits_left_ == 0) open_ = false;
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    --waiting_;
  }
  void wait_for_a_visitor() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return waiting_ > 0; });
  }
  bool has_visitor() {
    const std::lock_guard lock(mutex_);
    return !open_ && waiting_ > 0;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int64_t visits_left_ = 0;
  int waiting_ = 0;
};

class CheckpointerTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const auto bounds = geometry::stage_bounds(table_.config(), 1, 16);
    rank_ = make_rank_shard(table_, {.bounds = *bounds}, 0).value();
    board_ = board::Board::create(1, 0).value();
    std::mt19937 random(7);
    for (auto& v : state_) {
      v.resize(static_cast<size_t>(rank_.zero.state_elements()));
      for (float& x : v) x = static_cast<float>(random());
    }
  }

  std::unique_ptr<Checkpointer> make(int64_t generation, int64_t first_step,
                                     uint64_t run_id = 0) {
    CheckpointerOptions o;
    o.manifest.set_run_id(run_id);
    o.folder = dir_.path() + "/checkpoints";
    o.interval = 10;
    o.manifest.set_generation(generation);
    *o.manifest.mutable_model() = manifest::model_info(table_.config());
    o.manifest.set_compression(GetParam());
    o.first_step = first_step;
    o.first_generation = generation - 1;
    o.double_buffered = true;
    return std::make_unique<Checkpointer>(o, *fs_, rank_, *backend_, *world_[0],
                                          *board_, log_);
  }
  RankState at(int64_t step) {
    return {.step = step, .vectors = {state_[0], state_[1], state_[2]}};
  }
  void boundary(Checkpointer& c, int64_t step) {
    c.on_step(c.votes(), false, at(step));
  }
  // Passes boundaries, without training, until `step` is saved.
  bool finish(Checkpointer& c, int64_t step) {
    for (int i = 0; i < 100'000 && c.saved_step() != step; ++i) {
      boundary(c, step + 1);
      std::this_thread::sleep_for(1ms);
    }
    return c.saved_step() == step;
  }
  using Vectors = std::array<std::vector<float>, 3>;
  Vectors load(int64_t step) {
    const std::string path =
        dir_.path() + "/checkpoints/" + manifest::step_name(step);
    const auto m = manifest::read_checkpoint(*fs_, path);
    EXPECT_OK(m);
    Vectors v;
    for (auto& x : v) x.resize(state_[0].size());
    if (!m.ok()) return v;
    EXPECT_OK(store::load(*fs_, path, *m, table_,
                          geometry::pieces_to_load(rank_), {v[0], v[1], v[2]}));
    return v;
  }

  const testing::TempDir dir_;
  const geometry::ParamTable table_ =
      geometry::ParamTable::make(geometry::llama(8, 2, 2, 1, 12, 11));
  geometry::RankShard rank_;
  Vectors state_;
  Gate gate_;
  const std::unique_ptr<FileSystem> disk_ = posix_file_system();
  const std::unique_ptr<FileSystem> fs_ =
      watched_file_system(*disk_, [this] { gate_.pass(); });
  const std::unique_ptr<kernels::Backend> backend_ =
      kernels::make_cpu_backend(1);
  const std::vector<std::unique_ptr<comm::Comm>> world_ =
      comm::make_local_comms(1);
  std::unique_ptr<board::Board> board_;
  TrainLog log_{Logger::null(), 1, 0};
};

TEST_P(CheckpointerTest, AnUpdateDoesNotWaitForAFileThatDoesNotOpen) {
  const auto c = make(1, 0);
  const Vectors saved = state_;
  gate_.open(false);
  boundary(*c, 10);
  gate_.wait_for_a_visitor();
  c->before_update(11);  // writes the other buffer
  EXPECT_EQ(c->copy_waits(), 0);
  c->before_update(12);  // returns although the disk is stuck
  // With compression the job copies before it opens a file.
  EXPECT_EQ(c->copy_waits(), std::string(GetParam()).empty() ? 1 : 0);
  for (auto& v : state_) std::fill(v.begin(), v.end(), 1.0F);
  gate_.open(true);
  ASSERT_TRUE(finish(*c, 10));
  EXPECT_TRUE(load(10) == saved);
}

// Wherever the disk stops: an update waits for a copy that has begun.
TEST_P(CheckpointerTest, ASaveHasTheStateOfItsStep) {
  const auto c = make(1, 0);
  const Vectors saved = state_;
  // With compression the job copies before it opens a file, and is slow where
  // others use the processor.
  const bool copies_first = !std::string(GetParam()).empty();
  const int64_t most = copies_first ? 4 : std::numeric_limits<int64_t>::max();
  bool stopped = true;
  for (int64_t n = 1; stopped && n <= most; ++n) {
    SCOPED_TRACE(n);
    state_ = saved;
    gate_.close_at(n);
    boundary(*c, 10 * n);
    while (!(stopped = gate_.has_visitor()) && c->votes().shard_saved == 0)
      std::this_thread::sleep_for(1ms);
    const int64_t waits = c->copy_waits();
    auto update = std::async(std::launch::async, [&] {
      c->before_update(10 * n + 2);
      for (auto& v : state_) std::fill(v.begin(), v.end(), 1.0F);
    });
    while (c->copy_waits() == waits &&
           update.wait_for(1ms) == std::future_status::timeout) {
    }
    gate_.open(true);
    update.get();
    ASSERT_TRUE(finish(*c, 10 * n));
    EXPECT_TRUE(load(10 * n) == saved);
  }
  if (copies_first) {
    EXPECT_EQ(c->copy_waits(), 0);
  } else {
    EXPECT_GT(c->copy_waits(), 3);  // the first operations, and the copy
  }
}

TEST_P(CheckpointerTest, AnAbandonedSaveLeavesNothingAndIsMadeUp) {
  {
    const auto c = make(1, 0);
    boundary(*c, 10);
    ASSERT_TRUE(finish(*c, 10));
    gate_.open(false);
    for (int64_t step = 12; step <= 20; ++step) boundary(*c, step);
    gate_.wait_for_a_visitor();
    c->abandon_for_handoff();  // returns although the disk is stuck
    gate_.open(true);
  }
  const std::string folder = dir_.path() + "/checkpoints";
  EXPECT_EQ(manifest::scan(*disk_, folder)->size(), 1U);
  // The shard is incomplete.
  EXPECT_FALSE(disk_->exists(folder + "/" +
                             manifest::tmp_name({.step = 20, .generation = 1}) +
                             "/" + manifest::sidecar_name(0)));
  const auto next = make(2, 24);
  EXPECT_EQ(next->saved_step(), 10);
  boundary(*next, 25);
  ASSERT_TRUE(finish(*next, 25));
  EXPECT_TRUE(load(25) == state_);
  // The remains of the first one are removed.
  EXPECT_EQ(*disk_->list(folder),
            (std::vector<std::string>{".claim-g2", "step-00000010",
                                      "step-00000025"}));
}

// The generation was cut off, and the job continued without it.
TEST_P(CheckpointerTest, SavesNothingOnceANewerGenerationRuns) {
  const auto old = make(1, 0);
  boundary(*old, 10);
  ASSERT_TRUE(finish(*old, 10));
  boundary(*old, 20);
  ASSERT_TRUE(finish(*old, 20));
  const auto next = make(2, 15);
  EXPECT_EQ(next->saved_step(), 10);
  EXPECT_FALSE(old->save_and_wait(at(30)).ok());
  EXPECT_HAS(board_->snapshot().checkpoint_error(), "generation 2 has claimed");
  // Its step 20 is not that of the next generation, which has its own.
  state_[0][0] += 1;
  ASSERT_OK(next->save_and_wait(at(20)));
  EXPECT_TRUE(load(20) == state_);
  EXPECT_EQ(manifest::scan(*disk_, dir_.path() + "/checkpoints")->size(), 2U);
}

TEST_P(CheckpointerTest, ACheckpointOfAnotherRunIsNoSaveOfThisOne) {
  ASSERT_OK(make(1, 0, /*run_id=*/7)->save_and_wait(at(10)));
  EXPECT_EQ(make(2, 24, 7)->saved_step(), 10);
  EXPECT_EQ(make(3, 24, 8)->saved_step(), -1);
}

INSTANTIATE_TEST_SUITE_P(Of, CheckpointerTest, ::testing::Values("", "zlib"),
                         [](const auto& info) {
                           return std::string(info.param).empty()
                                      ? "Plain"
                                      : "Compressed";
                         });

}  // namespace
}  // namespace remesh::train
