// bench_sample: the speed at which a model continues a text (remesh sample),
// one sequence at a time.
//
// Each token reads all weights but the embedding once, so the memory bounds the
// speed. Prints tokens/s of the median token, and the share that its bytes,
// weights and keys and values, are of what the memory delivers in the same
// time. Bandwidth and tokens are measured in turns. Target: 70 %.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/dtype.h"
#include "bench/median.h"
#include "bench/models.h"
#include "bench/step/yardstick.h"
#include "bench/targets.h"
#include "parallel/geometry/shard_table.h"
#include "proto/base/clock.h"
#include "tests/testing/resident.h"
#include "worker/kernels/backend.h"
#include "worker/model/pool.h"
#include "worker/model/stage.h"

namespace remesh::bench {
namespace {

constexpr double kShare = 0.7;
constexpr int64_t kPrompt = 64;

struct Options {
  std::vector<std::string> sizes = {"42m", "110m"};
  int threads = 2;
  std::string dtype = default_dtype();
  int64_t tokens = 64;  // a round
  int rounds = 5;
  bool smoke = false;
};

// A model with random weights that continues a sequence.
class Sampled {
 public:
  static Result<std::unique_ptr<Sampled>> make(
      const geometry::ModelConfig& config, kernels::Dtype dtype,
      int64_t context, kernels::Backend& backend) {
    auto s = std::make_unique<Sampled>();
    s->table_ = geometry::ParamTable::make(config);
    ASSIGN_OR_RETURN(const auto bounds,
                     geometry::stage_bounds(config, 1, context));
    ASSIGN_OR_RETURN(auto shard,
                     geometry::ShardTable::make(s->table_, {}, {}, bounds));
    s->shard_ = std::make_unique<geometry::ShardTable>(std::move(shard));
    const auto elements = static_cast<size_t>(s->table_.num_elements());
    s->pool_ = std::make_unique<model::Pool>(backend);
    s->weights_ = {s->pool_->floats(s->table_.num_elements()), elements};
    RETURN_IF_ERROR(s->pool_->status());
    s->shard_->initial_values(/*seed=*/1, 0, s->weights_);
    ASSIGN_OR_RETURN(
        s->stage_,
        model::Stage::create(
            *s->shard_, {.dtype = dtype, .max_seq = kPrompt, .cache = context},
            backend));
    model::load_weights(*s->stage_, *s->shard_, s->weights_);
    s->logits_.resize(static_cast<size_t>(config.vocab_size));
    s->token_bytes_ = dtype == kernels::Dtype::kBf16 ? 2 : 4;
    return s;
  }

  // Seconds of each of `count` tokens after a prompt.
  std::vector<double> run(int64_t count) {
    model::ResidentHooks hooks(*shard_, {});
    const std::vector<int32_t> prompt(static_cast<size_t>(kPrompt), 1);
    stage_->truncate(0);
    stage_->extend(prompt, hooks);
    std::vector<double> out;
    int32_t token = 1;
    for (int64_t i = 0; i < count; ++i) {
      const double began = static_cast<double>(monotonic_ns());
      stage_->extend({&token, 1}, hooks);
      stage_->logits(0, 1, logits_);
      token = static_cast<int32_t>(
          std::max_element(logits_.begin(), logits_.end()) - logits_.begin());
      out.push_back((static_cast<double>(monotonic_ns()) - began) * 1e-9);
    }
    return out;
  }
  // That a token after that many reads.
  double bytes(int64_t length) const {
    const geometry::ModelConfig& c = table_.config();
    const int64_t read = table_.num_elements() -
                         (c.tie_embeddings ? 0 : c.vocab_size * c.dim) +
                         length * c.n_layers * 2 * c.kv_dim();
    return static_cast<double>(read * token_bytes_);
  }
  int64_t vocab() const { return table_.config().vocab_size; }

 private:
  geometry::ParamTable table_;
  std::unique_ptr<geometry::ShardTable> shard_;
  std::unique_ptr<model::Pool> pool_;
  std::span<float> weights_;
  std::vector<float> logits_;
  std::unique_ptr<model::Stage> stage_;
  int64_t token_bytes_ = 4;
};

Status measure(const std::string& size, const Options& o,
               kernels::Backend& backend, Targets* targets) {
  const auto dtype =
      o.dtype == "bf16" ? kernels::Dtype::kBf16 : kernels::Dtype::kFp32;
  ASSIGN_OR_RETURN(
      const auto model,
      Sampled::make(models().at(size), dtype, kPrompt + o.tokens, backend));
  std::vector<double> shares, seconds;
  double bandwidth = 0;
  for (int round = 0; round < o.rounds; ++round) {
    const double now = memory_bandwidth(o.threads, o.smoke ? 1 : 3);
    bandwidth = std::max(bandwidth, now);
    const double s = median(model->run(o.tokens));
    seconds.push_back(s);
    shares.push_back(model->bytes(kPrompt + o.tokens / 2) / s / now);
  }
  const double s = median(seconds);
  fmt::print("{:<6} {:<5} {:>10.1f} {:>10.1f} {:>9.1f} {:>8.2f}\n", size,
             o.dtype, 1 / s, model->bytes(kPrompt) / 1e6, bandwidth / 1e9,
             median(shares));
  targets->require(size + " makes tokens", s > 0);
  targets->at_least(size + ": share of the bandwidth", kShare, median(shares));
  return ok_status();
}

int main_of(int argc, char** argv) {
  Options o;
  CLI::App app{"The speed of remesh sample, one sequence at a time."};
  app.add_option("--size", o.sizes, "of bench/models.h")->capture_default_str();
  app.add_option("--threads", o.threads)->capture_default_str();
  app.add_option("--dtype", o.dtype)
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
  app.add_option("--tokens", o.tokens, "a round")->capture_default_str();
  app.add_option("--rounds", o.rounds)->capture_default_str();
  app.add_flag("--smoke", o.smoke, "small sizes; targets are not judged");
  CLI11_PARSE(app, argc, argv);
  if (o.smoke) o.sizes = {"tiny"}, o.tokens = 4, o.rounds = 1;
  const auto backend = kernels::make_cpu_backend(o.threads);
  fmt::print("{}\n{:<6} {:<5} {:>10} {:>10} {:>9} {:>8}\n",
             backend->description(), "model", "type", "tokens/s", "MB/token",
             "GB/s", "share");
  Targets targets(o.smoke);
  for (const std::string& size : o.sizes) {
    const Status s = measure(size, o, *backend, &targets);
    if (s.ok()) continue;
    fmt::print(stderr, "{}: {}\n", size, s.message());
    return kExitFailed;
  }
  return targets.report();
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) { return remesh::bench::main_of(argc, argv); }
