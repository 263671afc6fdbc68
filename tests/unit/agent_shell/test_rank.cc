// A rank with the command line and board of remesh-trainer that does not train:
// every "step" is a checked all-reduce.
//
// The description of the job controls it, with any of
//   steps=N        end after N steps (default: on a stop request)
//   step_ms=N      length of a step
//   exit=RANK@STEP:CODE  that rank exits with CODE in that step
//   abort=RANK@STEP      calls MPI_Abort
// With a state folder it commits each step to a segment there.
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "checkpoint/memory/segment.h"
#include "checkpoint/memory/segment_directory.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/base/socket_guard.h"
#include "proto/control.pb.h"
#include "worker/board/board.h"

namespace remesh {
namespace {

std::string word(const std::string& text, const std::string& key) {
  std::istringstream in(text);
  for (std::string w; in >> w;)
    if (w.rfind(key + "=", 0) == 0) return w.substr(key.size() + 1);
  return "";
}

bool here(const std::string& at, int rank, int64_t step) {
  const size_t cut = at.find('@');
  return cut != std::string::npos && std::stoi(at) == rank &&
         std::stoll(at.substr(cut + 1)) == step;
}

void maybe_die(const std::string& script, int rank, int64_t step) {
  const std::string exit_at = word(script, "exit");
  if (here(exit_at, rank, step)) {
    std::printf("rank %d leaves as told\n", rank);
    std::fflush(stdout);
    _exit(std::stoi(exit_at.substr(exit_at.find(':') + 1)));
  }
  if (here(word(script, "abort"), rank, step)) MPI_Abort(MPI_COMM_WORLD, 9);
}

void push(board::Board& board, int64_t step, double loss) {
  board::StepRecord r;
  r.step = step;
  r.loss = loss;
  r.time = unix_seconds();
  r.val_loss = std::nan("");
  board.push_step(r);
}

// Its segment, with vectors of 8 elements; null without a state folder.
class State {
 public:
  explicit State(const pb::RankSpec& spec) : spec_(spec) {
    if (spec.state_folder().empty()) return;
    const std::string path = memory::segment_path(
        spec.state_folder(), spec.state_job(), spec.rank());
    auto s = memory::StateSegment::create(path, spec.state_job(), 8);
    if (!s.ok())
      s = memory::StateSegment::open(path, spec.state_job(),
                                     memory::StateSegment::Mode::kWrite);
    CHECK_MSG(s.ok(), s.status().message().c_str());
    segment_ = std::move(s).value();
  }
  void commit(int64_t step) {
    if (!segment_) return;
    memory::StateInfo info;
    info.step = step;
    info.generation = spec_.assignment().generation();
    info.rank = spec_.rank();
    info.sharding = {.layout = {.dp = spec_.assignment().ranks_size()},
                     .bounds = {0, 2},
                     .zero = {.stage = 1}};
    info.model = 77;
    info.elements = 5;
    info.tokens = step * 1000;
    info.sequences = step * 10;
    segment_->begin(static_cast<int>(step % 2));
    segment_->commit(info);
  }

 private:
  const pb::RankSpec& spec_;
  std::unique_ptr<memory::StateSegment> segment_;
};

int train(board::Board& board, const pb::RankSpec& spec) {
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size != spec.assignment().ranks_size() || rank != spec.rank())
    return kExitWorld;
  const std::string script = spec.assignment().job().job().description();
  const std::string steps_text = word(script, "steps");
  const int64_t steps = steps_text.empty() ? 1 << 30 : std::stoll(steps_text);
  const std::string ms = word(script, "step_ms");
  State state(spec);
  board.set_phase(pb::RankStatus::COMPUTE);
  for (int64_t step = 1; step <= steps; ++step) {
    board.set_step(step);
    maybe_die(script, rank, step);
    if (!ms.empty())
      std::this_thread::sleep_for(std::chrono::milliseconds(std::stoi(ms)));
    double both[2] = {rank + 1.0,
                      (board.request() & kRequestStop) != 0 ? 1. : 0.};
    MPI_Allreduce(MPI_IN_PLACE, both, 2, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    CHECK(both[0] == size * (size + 1) / 2.0);
    state.commit(step);
    board.commit_step(step);
    if (rank == 0) push(board, step, both[0]);
    if (both[1] > 0) break;
  }
  board.set_phase(pb::RankStatus::STOPPING);
  return kExitOk;
}

int rank_main(int argc, char** argv) {
  if (argc != 5 || std::strcmp(argv[1], "--spec") != 0 ||
      std::strcmp(argv[3], "--board-fd") != 0)
    return kExitUsage;
  pb::RankSpec spec;
  std::ifstream in(argv[2], std::ios::binary);
  if (!spec.ParseFromIstream(&in)) return kExitUsage;
  auto board = board::Board::open(std::atoi(argv[4]));
  if (!board.ok()) return kExitUsage;
  std::ofstream(spec.log_path()) << "rank " << spec.rank() << " starts\n";
  (*board)->set_phase(pb::RankStatus::CONNECTING);
  const int64_t start = monotonic_ns();
  int provided = 0;
  guard_sockets();
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  (*board)->set_checkpoint_step((monotonic_ns() - start) / 1000);  // init, us
  const int code = train(**board, spec);
  MPI_Finalize();
  (*board)->set_phase(pb::RankStatus::ENDED);
  return code;
}

}  // namespace
}  // namespace remesh

int main(int argc, char** argv) { return remesh::rank_main(argc, argv); }
