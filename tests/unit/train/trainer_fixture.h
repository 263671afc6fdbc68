// TrainerTest: runs remesh-trainer as a worker does: a process, a board and a
// run directory. Everything is in a temporary folder, which is removed
// afterwards.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "proto/control.pb.h"
#include "tests/testing/temp_dir.h"
#include "worker/board/board.h"

namespace remesh::train {

// A rank under test; killed if it still lives at the end.
class RankProcess {
 public:
  // Starts `argv`, which inherits the descriptor of `board` if there is one.
  RankProcess(std::vector<std::string> argv, board::Board* board,
              const std::string& output);
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;
  void kill_it();
  // Exit code, or -signal. Fails the test after five minutes.
  int wait();
  bool ended();

 private:
  int pid_ = -1;
  bool reaped_ = false;
  int code_ = 0;
};

struct Ended {
  int code = 0;
  pb::RankStatus board;
  std::vector<board::StepRecord> steps;
};

class TrainerTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  // The job, with `overrides` ("train.steps=5").
  pb::RankSpec spec(const std::vector<std::string>& overrides = {}, int dp = 1);
  static void from_checkpoint(pb::RankSpec& spec, const std::string& path,
                              int64_t step);
  std::string checkpoint(int64_t step) const;
  std::string write_spec(const pb::RankSpec& spec);
  std::unique_ptr<board::Board> make_board(const pb::RankSpec& spec);
  std::unique_ptr<RankProcess> start(const pb::RankSpec& spec,
                                     board::Board& board);
  // Starts a rank and polls it: `watch` gets each snapshot and may act. Returns
  // the steps popped.
  Ended run(const pb::RankSpec& spec,
            const std::function<void(const pb::RankStatus&, board::Board&,
                                     RankProcess&)>& watch = {});
  // Runs `n` ranks under mpirun without boards; returns the exit code.
  int run_mpi(const pb::RankSpec& spec, int n);
  // Runs one rank per specification under one mpirun; log and output of rank 0.
  int run_mpi(const std::vector<pb::RankSpec>& specs);
  std::string output() const;  // of the last process

  // --- states in shared memory. Each worker is a folder. All workers are on
  // one host, or each on a host of its own.
  bool one_host_ = true;
  std::string host_of(const std::string& worker) const {
    return one_host_ ? "here" : worker;
  }
  std::string worker_folder(const std::string& worker);
  // The specification of each rank: rank i on workers[i].
  std::vector<pb::RankSpec> on_workers(const pb::RankSpec& spec,
                                       const std::vector<std::string>& workers);
  // The states in the memory of those workers.
  std::vector<pb::StateHolding> holdings(
      const std::vector<std::string>& workers);
  // The newest step of `spec`'s model of which they have the complete state.
  void from_memory(pb::RankSpec& spec, const std::vector<std::string>& workers);

  const TempDir temp_;
  const std::string dir_ = temp_.path();
  const ShmDir shm_;  // folder of the workers' folders
  std::string old_tmpdir_;
  int number_ = 0;
};

// Losses by step, of a run and of a checkpoint's manifest.
std::map<int64_t, double> losses(const Ended& run);
std::map<int64_t, double> recent_losses(const std::string& checkpoint);

}  // namespace remesh::train
