#include "tests/unit/train/trainer_fixture.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "checkpoint/manifest/conversions.h"
#include "checkpoint/manifest/manifest.h"
#include "checkpoint/manifest/scan.h"
#include "checkpoint/memory/segment.h"
#include "checkpoint/memory/segment_directory.h"
#include "parallel/jobfile/jobfile.h"
#include "proto/base/clock.h"
#include "proto/base/rng.h"
#include "tests/testing/expect.h"
#include "worker/data/dataset.h"
#include "worker/data/prepare.h"

namespace remesh::train {
namespace {

constexpr char kJob[] = R"(
[job]
name = "trainer-test"
[model]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
hidden_dim = 64
[data]
path = "data"
[train]
steps = 12
seq_len = 32
global_batch_size = 6
local_batch_size = 1
dtype = "fp32"
eval_every = 5
eval_sequences = 5
[optimizer]
lr = 0.005
[schedule]
warmup_steps = 2
[parallel]
bucket_mb = 1
[checkpoint]
interval = 4
)";

constexpr uint64_t kStateJob = 42;
constexpr int64_t kLimitMs = 300'000;  // of a process that hangs

void sleep_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

std::string text_of(int64_t sentences) {
  const char* const words[] = {"the ", "sea ",  "was ",    "calm ", "and ",
                               "old ", "ship ", "sailed ", "on.\n"};
  std::string text;
  for (int64_t i = 0; i < sentences * 9; ++i)
    text += words[(i + static_cast<int64_t>(
                           random_u64(1, 2, static_cast<uint64_t>(i)) % 3)) %
                  9];
  return text;
}

}  // namespace

RankProcess::RankProcess(std::vector<std::string> argv, board::Board* board,
                         const std::string& output) {
  std::vector<char*> args;
  for (std::string& a : argv) args.push_back(a.data());
  args.push_back(nullptr);
  const int board_fd = board == nullptr ? -1 : board->fd();
  pid_ = fork();
  if (pid_ != 0) return;
  setpgid(0, 0);
  const int out = open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  dup2(out, 1);
  dup2(out, 2);
  if (board_fd >= 0) fcntl(board_fd, F_SETFD, 0);
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  setenv("OMPI_MCA_btl", "self,vader", 1);
  setenv("OMPI_MCA_rmaps_base_oversubscribe", "1", 1);
  setenv("OMPI_MCA_mpi_yield_when_idle", "1", 1);
  setenv("OMPI_MCA_hwloc_base_binding_policy", "none", 1);
  execvp(args[0], args.data());
  _exit(127);
}

RankProcess::~RankProcess() {
  if (reaped_) return;
  kill_it();
  waitpid(pid_, nullptr, 0);
}

void RankProcess::kill_it() { kill(-pid_, SIGKILL); }

bool RankProcess::ended() {
  if (reaped_) return true;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return false;
  reaped_ = true;
  code_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return true;
}

int RankProcess::wait() {
  const int64_t until = monotonic_ms() + kLimitMs;
  while (!ended()) {
    if (code_ == 0 && monotonic_ms() > until) {
      code_ = -1;  // report it once
      ADD_FAILURE() << "the trainer did not end within five minutes";
      kill_it();
    }
    sleep_ms(2);
  }
  return code_;
}

void TrainerTest::SetUp() {
  // Open MPI puts its files where the test cleans up.
  const char* tmpdir = std::getenv("TMPDIR");
  old_tmpdir_ = tmpdir != nullptr ? tmpdir : "";
  setenv("TMPDIR", dir_.c_str(), 1);
  setenv("OMPI_MCA_btl_vader_backing_directory", dir_.c_str(), 1);
  std::ofstream(dir_ + "/text.txt") << text_of(500);
  ASSERT_OK(data::prepare({.inputs = {dir_ + "/text.txt"},
                           .out_dir = dir_ + "/data",
                           .val_fraction = 0.1,
                           .val_block_bytes = 256},
                          *posix_file_system()));
}

void TrainerTest::TearDown() {
  old_tmpdir_.empty() ? unsetenv("TMPDIR")
                      : setenv("TMPDIR", old_tmpdir_.c_str(), 1);
  unsetenv("OMPI_MCA_btl_vader_backing_directory");
  // The helper process of a standalone rank also cleans up there, a bit later.
  std::error_code error;
  for (int tries = 0; tries < 1000; ++tries) {
    std::filesystem::remove_all(dir_, error);
    if (!error && !std::filesystem::exists(dir_, error)) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ADD_FAILURE() << dir_ << ": " << error.message();
}

pb::RankSpec TrainerTest::spec(const std::vector<std::string>& overrides,
                               int dp) {
  const auto job = jobfile::parse_job(
      kJob, {.name = "job.toml", .base_dir = dir_}, overrides, dir_);
  EXPECT_OK(job);
  const auto dataset = data::Dataset::open(dir_ + "/data");
  EXPECT_OK(dataset);
  const auto resolved =
      jobfile::resolve(*job, {.vocab_size = dataset->vocab_size()});
  EXPECT_OK(resolved);
  pb::RankSpec s;
  pb::Assignment& a = *s.mutable_assignment();
  a.set_generation(1);
  a.mutable_mesh()->set_dp(dp);
  a.mutable_source()->set_kind(pb::Source::INIT);
  *a.mutable_job() = *resolved;
  a.set_run_dir(dir_);
  s.set_threads(1);
  s.set_log_path(dir_ + "/rank.log");
  if (dp == 1) s.set_rank(0);
  return s;
}

void TrainerTest::from_checkpoint(pb::RankSpec& spec, const std::string& path,
                                  int64_t step) {
  pb::Assignment& a = *spec.mutable_assignment();
  a.set_generation(a.generation() + 1);
  a.mutable_source()->set_kind(pb::Source::CHECKPOINT);
  a.mutable_source()->set_path(path);
  a.mutable_source()->set_step(step);
}

std::string TrainerTest::checkpoint(int64_t step) const {
  return dir_ + "/checkpoints/" + manifest::step_name(step);
}

std::string TrainerTest::write_spec(const pb::RankSpec& spec) {
  std::string path = dir_ + "/spec-" + std::to_string(++number_);
  std::ofstream out(path, std::ios::binary);
  spec.SerializeToOstream(&out);
  return path;
}

std::unique_ptr<board::Board> TrainerTest::make_board(
    const pb::RankSpec& spec) {
  auto b = board::Board::create(spec.assignment().generation(), spec.rank());
  EXPECT_OK(b);
  return std::move(b).value();
}

std::unique_ptr<RankProcess> TrainerTest::start(const pb::RankSpec& spec,
                                                board::Board& board) {
  return std::make_unique<RankProcess>(
      std::vector<std::string>{REMESH_TRAINER, "--spec", write_spec(spec),
                               "--board-fd", std::to_string(board.fd())},
      &board, dir_ + "/output");
}

Ended TrainerTest::run(
    const pb::RankSpec& spec,
    const std::function<void(const pb::RankStatus&, board::Board&,
                             RankProcess&)>& watch) {
  const auto board = make_board(spec);
  const auto rank = start(spec, *board);
  Ended e;
  const auto collect = [&] {
    for (const auto& r : board->pop_steps()) e.steps.push_back(r);
  };
  const int64_t until = monotonic_ms() + kLimitMs;
  while (!rank->ended() && monotonic_ms() < until) {
    collect();
    if (watch) watch(board->snapshot(), *board, *rank);
    sleep_ms(1);
  }
  if (!rank->ended() && monotonic_ms() >= until) {
    ADD_FAILURE() << "the trainer did not end within five minutes";
    rank->kill_it();
  }
  e.code = rank->wait();
  collect();
  e.board = board->snapshot();
  return e;
}

int TrainerTest::run_mpi(const pb::RankSpec& spec, int n) {
  RankProcess p({"mpirun", "-n", std::to_string(n), REMESH_TRAINER, "--spec",
                 write_spec(spec)},
                nullptr, dir_ + "/output");
  return p.wait();
}

int TrainerTest::run_mpi(const std::vector<pb::RankSpec>& specs) {
  std::vector<std::string> argv = {"mpirun"};
  for (size_t i = 0; i < specs.size(); ++i) {
    pb::RankSpec s = specs[i];
    if (i > 0) s.set_log_path(dir_ + "/rank-" + std::to_string(i) + ".log");
    if (i > 0) argv.push_back(":");
    for (const std::string& a :
         {std::string("-n"), std::string("1"), std::string(REMESH_TRAINER),
          std::string("--spec"), write_spec(s)})
      argv.push_back(a);
  }
  RankProcess p(argv, nullptr, dir_ + "/output");
  return p.wait();
}

std::string TrainerTest::worker_folder(const std::string& worker) {
  std::string folder = shm_ / worker;
  std::filesystem::create_directories(folder);
  return folder;
}

std::vector<pb::RankSpec> TrainerTest::on_workers(
    const pb::RankSpec& spec, const std::vector<std::string>& workers) {
  pb::RankSpec all = spec;
  pb::Assignment& a = *all.mutable_assignment();
  std::map<std::string, int> slots;
  for (size_t i = 0; i < workers.size(); ++i) {
    pb::RankPlace& p = *a.add_ranks();
    p.set_rank(static_cast<int>(i));
    p.set_worker(workers[i]);
    p.set_local_slot(slots[workers[i]]++);
  }
  for (const auto& [worker, n] : slots) {
    a.add_workers(worker);
    a.add_hosts(host_of(worker));
  }
  std::vector<pb::RankSpec> out;
  for (size_t i = 0; i < workers.size(); ++i) {
    pb::RankSpec s = all;
    s.set_rank(static_cast<int>(i));
    s.set_state_folder(worker_folder(workers[i]));
    s.set_state_job(kStateJob);
    out.push_back(s);
  }
  return out;
}

std::vector<pb::StateHolding> TrainerTest::holdings(
    const std::vector<std::string>& workers) {
  std::vector<pb::StateHolding> out;
  for (const std::string& worker : workers)
    for (const auto& f :
         memory::list_segments(worker_folder(worker), kStateJob)) {
      const auto s = memory::StateSegment::open(
          f.path, kStateJob, memory::StateSegment::Mode::kRead);
      EXPECT_OK(s);
      if (!s.ok()) continue;
      EXPECT_TRUE((*s)->contents().damaged.empty());
      for (const auto& c : (*s)->contents().states) {
        EXPECT_OK((*s)->verify_content(c));
        out.push_back(manifest::holding_of(c.info, f.path));
        out.back().set_worker(worker);
        out.back().set_host(host_of(worker));
      }
    }
  return out;
}

void TrainerTest::from_memory(pb::RankSpec& spec,
                              const std::vector<std::string>& workers) {
  pb::Assignment& a = *spec.mutable_assignment();
  const auto table = geometry::ParamTable::make(jobfile::model_config(a.job()));
  std::map<std::pair<int64_t, int64_t>, std::map<int, pb::StateHolding>> states;
  for (const pb::StateHolding& h : holdings(workers)) {
    auto& of = states[{h.step(), h.generation()}];
    // Prefer a rank's own state to a replica.
    if (!of.contains(h.rank()) || !h.replica()) of[h.rank()] = h;
  }
  a.set_generation(a.generation() + 1);
  pb::Source& source = *a.mutable_source();
  source.Clear();
  source.set_kind(pb::Source::MEMORY);
  for (auto it = states.rbegin(); it != states.rend(); ++it) {
    std::vector<int> ranks;
    for (const auto& [rank, h] : it->second) ranks.push_back(rank);
    ASSERT_OK_AND(
        const auto sharding,
        manifest::parse_sharding(it->second.begin()->second.sharding()));
    if (!geometry::check_complete(table, sharding, ranks).ok()) continue;
    source.set_step(it->first.first);
    for (const auto& [rank, h] : it->second) *source.add_states() = h;
    return;
  }
  ADD_FAILURE() << "no whole state in memory";
}

std::string TrainerTest::output() const {
  std::string all;
  for (const char* name : {"/output", "/rank.log"}) {
    std::ifstream in(dir_ + name);
    all.append(std::istreambuf_iterator<char>(in), {});
  }
  return all;
}

std::map<int64_t, double> losses(const Ended& run) {
  std::map<int64_t, double> out;
  for (const auto& s : run.steps) out[s.step] = s.loss;
  return out;
}

std::map<int64_t, double> recent_losses(const std::string& checkpoint) {
  const auto fs = posix_file_system();
  const auto m = manifest::read_checkpoint(*fs, checkpoint);
  EXPECT_OK(m);
  std::map<int64_t, double> out;
  if (m.ok())
    for (const auto& r : m->recent()) out[r.step()] = r.loss();
  return out;
}

}  // namespace remesh::train
