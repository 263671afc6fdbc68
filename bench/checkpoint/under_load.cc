#include "bench/checkpoint/under_load.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "bench/median.h"
#include "proto/base/clock.h"
#include "tests/testing/local_comm.h"
#include "worker/kernels/backend.h"
#include "worker/train/checkpointer.h"

namespace remesh::bench {
namespace {

double seconds_since(int64_t begin_ns) {
  return static_cast<double>(monotonic_ns() - begin_ns) * 1e-9;
}

// A fixed load of a few milliseconds of GEMMs per call.
class Load {
 public:
  explicit Load(int threads)
      : backend_(kernels::make_cpu_backend(threads)),
        weight_(backend_->make_weight(kernels::Dtype::kFp32, kSize, kSize)),
        x_(backend_->allocate(kBytes), Free{backend_.get()}),
        y_(backend_->allocate(kBytes), Free{backend_.get()}) {
    backend_->zero(x_.get(), kBytes);
    backend_->load_weight(*weight_, static_cast<const float*>(x_.get()));
    run();  // touches pages, starts threads
  }
  kernels::Backend& backend() { return *backend_; }
  void run() {
    for (int i = 0; i < 3; ++i)
      backend_->linear(*weight_, x_.get(), kSize, y_.get());
    backend_->synchronize();
  }
  // Mean seconds per run(), measured for about `seconds`.
  double alone(double seconds) {
    const int64_t begin = monotonic_ns();
    int n = 0;
    for (; n == 0 || seconds_since(begin) < seconds; ++n) run();
    return seconds_since(begin) / n;
  }

 private:
  static constexpr int64_t kSize = 1024;
  static constexpr size_t kBytes = kSize * kSize * sizeof(float);
  struct Free {
    kernels::Backend* backend;
    void operator()(void* p) const { backend->release(p); }
  };
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<kernels::Weight> weight_;
  std::unique_ptr<void, Free> x_, y_;
};

struct Window {
  double seconds = 0;  // of what was written
  double run_s = 0;    // mean per Load::run() in that time
};

class UnderLoad {
 public:
  UnderLoad(const UnderLoadOptions& options, const geometry::ParamTable& table)
      : options_(options), table_(table) {}

  Status prepare(std::span<const float> weights, std::span<const float> m,
                 std::span<const float> v) {
    ASSIGN_OR_RETURN(const auto bounds,
                     geometry::stage_bounds(table_.config(), 1, 16));
    ASSIGN_OR_RETURN(rank_, make_rank_shard(table_, {.bounds = bounds}, 0));
    ASSIGN_OR_RETURN(board_, board::Board::create(1, 0));
    state_.vectors = {weights, m, v};
    train::CheckpointerOptions o;
    o.folder = path_join(options_.dir, "saves");
    o.retention.keep_latest_k = 1;
    o.manifest.set_generation(1);
    *o.manifest.mutable_model() = manifest::model_info(table_.config());
    if (options_.compression != "none")
      o.manifest.set_compression(options_.compression);
    o.double_buffered = true;
    checkpointer_ = std::make_unique<train::Checkpointer>(
        o, *fs_, rank_, load_.backend(), *world_[0], *board_, log_);
    return ok_status();
  }

  Result<UnderLoadResult> run() {
    // The first save allocates buffers and builds the index for the next ones.
    RETURN_IF_ERROR(save().status());
    std::vector<double> save_s, plain_s, ratio, save_slows, plain_slows;
    for (int t = 0; t < options_.trials; ++t) {
      Window saved, plain;
      const double before = load_.alone(kAloneS);
      for (int i = 0; i < 2; ++i) {
        settle();
        if ((t + i) % 2 == 0) {
          ASSIGN_OR_RETURN(saved, save());
        } else {
          ASSIGN_OR_RETURN(plain, write_plain());
        }
      }
      const double alone = (before + load_.alone(kAloneS)) / 2;
      save_s.push_back(saved.seconds);
      plain_s.push_back(plain.seconds);
      ratio.push_back(plain.seconds / saved.seconds);
      save_slows.push_back(saved.run_s / alone - 1);
      plain_slows.push_back(plain.run_s / alone - 1);
    }
    return UnderLoadResult{.save_s = median(save_s),
                           .plain_s = median(plain_s),
                           .plain_over_save = median(ratio),
                           .save_slows = median(save_slows),
                           .plain_slows = median(plain_slows),
                           .copy_waits = checkpointer_->copy_waits()};
  }

 private:
  static constexpr double kAloneS = 0.7;
  // Time between updates, as for a model of this size.
  static constexpr double kStepS = 0.5;

  void settle() {
    const int fd = ::open(options_.dir.c_str(), O_RDONLY | O_DIRECTORY);
    ::syncfs(fd);
    ::close(fd);
  }

  // Computes until done(), polled after every run.
  Window compute_until(const std::function<bool()>& done) {
    const int64_t begin = monotonic_ns();
    int n = 0;
    do {
      load_.run();
      ++n;
    } while (!done());
    const double s = seconds_since(begin);
    return {.seconds = s, .run_s = s / n};
  }

  // One save: a step boundary whenever one of its flags changed, and updates in
  // between.
  Result<Window> save() {
    Status failed;
    ++request_;
    boundary();
    const int64_t saving = state_.step;
    const int64_t begin = monotonic_ns();
    int64_t updates = 0;
    const Window w = compute_until([&] {
      while (seconds_since(begin) > kStepS * static_cast<double>(updates + 1))
        checkpointer_->before_update(saving + ++updates);
      const engine::Facts f = checkpointer_->facts();
      if (f.shard_failed + f.gave_up > 0) failed = io_error("the save failed");
      const bool committed = f.committed > 0;
      if (f.shard_saved + f.committed + f.gave_up + f.shard_failed > 0)
        boundary();
      return committed || !failed.ok();
    });
    RETURN_IF_ERROR(failed);
    return w;
  }
  void boundary() {
    ++state_.step;
    engine::Facts f = checkpointer_->facts();
    f.checkpoint_request = request_;
    checkpointer_->on_step(f, false, state_);
  }

  Result<Window> write_plain() {
    const std::string path = path_join(options_.dir, "plain");
    std::atomic<bool> done{false};
    Status status;
    double seconds = 0;
    std::thread writer([&] {
      const int64_t begin = monotonic_ns();
      status = write_file(path);
      seconds = seconds_since(begin);
      done = true;
    });
    Window w = compute_until([&] { return done.load(); });
    writer.join();
    w.seconds = seconds;
    RETURN_IF_ERROR(status);
    RETURN_IF_ERROR(fs_->remove(path));
    return w;
  }
  Status write_file(const std::string& path) {
    ASSIGN_OR_RETURN(const auto file, fs_->create(path));
    uint64_t at = 0;
    for (size_t v = 0; v < geometry::kNumStateVectors; ++v) {
      const auto all = std::as_bytes(state_.vectors[v]);
      constexpr size_t kBlock = 1 << 20;
      for (size_t i = 0; i < all.size(); i += kBlock) {
        const auto part = all.subspan(i, std::min(kBlock, all.size() - i));
        RETURN_IF_ERROR(file->write_at(at, part));
        at += part.size();
      }
    }
    RETURN_IF_ERROR(file->sync());
    return file->close();
  }

  const UnderLoadOptions options_;
  const geometry::ParamTable& table_;
  const std::unique_ptr<FileSystem> fs_ = posix_file_system();
  Load load_{options_.threads};
  const std::vector<std::unique_ptr<comm::Comm>> world_ =
      comm::make_local_comms(1);
  train::TrainLog log_{Logger::null(), 1, 0};
  geometry::RankShard rank_;
  std::unique_ptr<board::Board> board_;
  train::RankState state_;
  double request_ = 0;
  std::unique_ptr<train::Checkpointer> checkpointer_;
};

}  // namespace

Result<UnderLoadResult> measure_under_load(const UnderLoadOptions& options,
                                           const geometry::ParamTable& table,
                                           std::span<const float> weights,
                                           std::span<const float> exp_avg,
                                           std::span<const float> exp_avg_sq) {
  UnderLoad bench(options, table);
  RETURN_IF_ERROR(bench.prepare(weights, exp_avg, exp_avg_sq));
  return bench.run();
}

}  // namespace remesh::bench
