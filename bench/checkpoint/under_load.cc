#include "bench/checkpoint/under_load.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "bench/kept_state.h"
#include "bench/random_batch.h"
#include "proto/base/clock.h"
#include "proto/base/median.h"
#include "tests/testing/local_comm.h"
#include "worker/kernels/backend.h"
#include "worker/train/checkpointer.h"

namespace remesh::bench {
namespace {

struct Window {
  double seconds = 0;  // of what was written
  double step_s = 0;   // mean of the training steps in that time
};

class UnderLoad {
 public:
  // `plain` is what a plain write writes.
  UnderLoad(const UnderLoadOptions& options, const geometry::ParamTable& table,
            const geometry::ConstStateView& plain)
      : options_(options), table_(table), plain_(plain) {}

  Status prepare() {
    ASSIGN_OR_RETURN(mesh_, comm::Mesh::make(*world_[0], {}));
    ASSIGN_OR_RETURN(
        engine_, kept_.make_engine(
                     *mesh_,
                     {.dtype = backend_->supports_bf16() ? model::Dtype::kBf16
                                                         : model::Dtype::kFp32,
                      .max_batch = kBatch,
                      .max_seq = kSeq,
                      .optimizer = {.weight_decay = 0.01, .max_norm = 1}},
                     *backend_, /*seed=*/0));
    ASSIGN_OR_RETURN(board_, board::Board::create(1, 0));
    train::CheckpointerOptions o;
    o.folder = path_join(options_.dir, "saves");
    o.retention.keep_latest_k = 1;
    o.manifest.set_generation(1);
    *o.manifest.mutable_model() = manifest::model_info(table_.config());
    if (options_.compression != "none")
      o.manifest.set_compression(options_.compression);
    o.double_buffered = true;
    checkpointer_ = std::make_unique<train::Checkpointer>(
        o, *fs_, engine_->rank_shard(), *backend_, *world_[0], *board_, log_);
    return ok_status();
  }

  Result<UnderLoadResult> run() {
    // The first save allocates buffers and builds the index for the next ones.
    RETURN_IF_ERROR(save().status());
    std::vector<double> save_s, plain_s, ratio, save_slows, plain_slows;
    for (int t = 0; t < options_.trials; ++t) {
      Window saved, plain;
      ASSIGN_OR_RETURN(const double before, alone());
      for (int i = 0; i < 2; ++i) {
        settle_disk(options_.dir);
        if ((t + i) % 2 == 0) {
          ASSIGN_OR_RETURN(saved, save());
        } else {
          ASSIGN_OR_RETURN(plain, write_plain());
        }
      }
      ASSIGN_OR_RETURN(const double after, alone());
      const double alone = (before + after) / 2;
      save_s.push_back(saved.seconds);
      plain_s.push_back(plain.seconds);
      ratio.push_back(plain.seconds / saved.seconds);
      save_slows.push_back(saved.step_s / alone - 1);
      plain_slows.push_back(plain.step_s / alone - 1);
    }
    return UnderLoadResult{.save_s = median(save_s),
                           .plain_s = median(plain_s),
                           .plain_over_save = median(ratio),
                           .save_slows = median(save_slows),
                           .plain_slows = median(plain_slows),
                           .copy_waits = checkpointer_->copy_waits()};
  }

 private:
  static constexpr int kAloneSteps = 3;
  static constexpr int64_t kBatch = 2, kSeq = 256;

  // One step with its boundary, as train::Trainer makes it.
  Status step() {
    ASSIGN_OR_RETURN(
        const engine::StepResult r,
        engine_->run({.lr = 1e-4,
                      .microbatches = batch_.list(),
                      .global_tokens = kBatch * kSeq,
                      .votes = [this] {
                        checkpointer_->before_update(engine_->step() + 1);
                        engine::StepVotes f = checkpointer_->votes();
                        f.checkpoint_request = request_;
                        return f;
                      }}));
    checkpointer_->on_step(
        r.agreed, false,
        {.step = engine_->step(), .vectors = engine_->state()});
    return r.agreed.shard_failed + r.agreed.gave_up > 0
               ? io_error("the save failed")
               : ok_status();
  }

  // Trains until done(), asked after every step.
  Result<Window> train_until(const std::function<bool()>& done) {
    const int64_t begin = monotonic_ns();
    int n = 0;
    do {
      RETURN_IF_ERROR(step());
      ++n;
    } while (!done());
    const double s = seconds_since(begin);
    return Window{.seconds = s, .step_s = s / n};
  }

  Result<double> alone() {
    int n = 0;
    ASSIGN_OR_RETURN(const Window w,
                     train_until([&] { return ++n == kAloneSteps; }));
    return w.step_s;
  }

  // From the step at whose end it begins to that at which it is known to be
  // committed.
  Result<Window> save() {
    ++request_;
    RETURN_IF_ERROR(step());
    const int64_t saving = engine_->step();
    return train_until([&] { return checkpointer_->saved_step() >= saving; });
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
    auto trained = train_until([&] { return done.load(); });
    writer.join();
    ASSIGN_OR_RETURN(Window w, std::move(trained));
    w.seconds = seconds;
    RETURN_IF_ERROR(status);
    RETURN_IF_ERROR(fs_->remove(path));
    return w;
  }
  Status write_file(const std::string& path) {
    ASSIGN_OR_RETURN(const auto file, fs_->create(path));
    return write_vectors(*file, plain_);
  }

  const UnderLoadOptions options_;
  const geometry::ParamTable& table_;
  const geometry::ConstStateView plain_;
  const std::unique_ptr<FileSystem> fs_ = posix_file_system();
  const std::unique_ptr<kernels::Backend> backend_ =
      kernels::make_cpu_backend(options_.threads);
  const std::vector<std::unique_ptr<comm::Comm>> world_ =
      comm::make_local_comms(1);
  std::unique_ptr<comm::Mesh> mesh_;
  Kept kept_{table_, {}, 0, kBatch, kSeq};
  const RandomBatch batch_{0, 1, kBatch, kSeq, table_.config().vocab_size};
  std::unique_ptr<engine::Engine> engine_;
  train::TrainLog log_{Logger::null(), 1, 0};
  std::unique_ptr<board::Board> board_;
  double request_ = 0;
  std::unique_ptr<train::Checkpointer> checkpointer_;
};

}  // namespace

void settle_disk(const std::string& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY);
  ::syncfs(fd);
  ::close(fd);
}

Status write_vectors(File& file, const geometry::ConstStateView& vectors) {
  constexpr size_t kBlock = 1 << 20;
  uint64_t at = 0;
  for (size_t v = 0; v < geometry::kNumStateVectors; ++v) {
    const auto all = std::as_bytes(vectors[v]);
    for (size_t i = 0; i < all.size(); i += kBlock) {
      const auto part = all.subspan(i, std::min(kBlock, all.size() - i));
      RETURN_IF_ERROR(file.write_at(at, part));
      at += part.size();
    }
  }
  RETURN_IF_ERROR(file.sync());
  return file.close();
}

Result<UnderLoadResult> measure_under_load(
    const UnderLoadOptions& options, const geometry::ParamTable& table,
    const geometry::ConstStateView& plain) {
  UnderLoad bench(options, table, plain);
  RETURN_IF_ERROR(bench.prepare());
  return bench.run();
}

}  // namespace remesh::bench
