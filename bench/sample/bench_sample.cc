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
#include <span>
#include <string>
#include <vector>

#include "bench/options.h"
#include "bench/step/yardstick.h"
#include "bench/targets.h"
#include "parallel/geometry/shard_table.h"
#include "proto/base/clock.h"
#include "proto/base/median.h"
#include "worker/kernels/backend.h"
#include "worker/sample/choice.h"
#include "worker/sample/generator.h"

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

sample::Weights random_weights(const geometry::ModelConfig& config) {
  return {.model = config,
          .load = [](const geometry::ParamTable& table,
                     std::span<float> out) -> Status {
            ASSIGN_OR_RETURN(
                const auto bounds,
                geometry::stage_bounds(table.config(), 1, kPrompt));
            ASSIGN_OR_RETURN(const auto shard,
                             geometry::ShardTable::make(table, {}, {}, bounds));
            shard.initial_values(/*seed=*/1, 0, out);
            return ok_status();
          }};
}

// Seconds of each of `count` tokens after a prompt.
std::vector<double> run(sample::Generator& model, int64_t count) {
  model.truncate(0);
  (void)model.extend(std::vector<int32_t>(kPrompt, 1));
  std::vector<double> out;
  int32_t token = 1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t began_ns = monotonic_ns();
    const std::span<const float> logits = model.extend({&token, 1});
    token = sample::choose(logits, {.temperature = 0.8, .top_p = 0.95}, 0.5);
    out.push_back(seconds_since(began_ns));
  }
  return out;
}

// That a token after that many reads.
double bytes(const geometry::ModelConfig& c, kernels::Dtype dtype,
             int64_t length) {
  const int64_t read = geometry::ParamTable::make(c).num_elements() -
                       (c.tie_embeddings ? 0 : c.vocab_size * c.dim) +
                       length * c.n_layers * 2 * c.kv_dim();
  return static_cast<double>(read * (dtype == kernels::Dtype::kBf16 ? 2 : 4));
}

Status measure(const std::string& size, const Options& o,
               kernels::Backend& backend, Targets* targets) {
  const kernels::Dtype dtype = dtype_of(o.dtype);
  const geometry::ModelConfig& config = models().at(size);
  ASSIGN_OR_RETURN(const auto model,
                   sample::Generator::load(random_weights(config), dtype,
                                           kPrompt + o.tokens, backend));
  std::vector<double> shares, seconds;
  double bandwidth = 0;
  for (int round = 0; round < o.rounds; ++round) {
    const double now = memory_bandwidth(o.threads, o.smoke ? 1 : 3);
    bandwidth = std::max(bandwidth, now);
    const double s = median(run(*model, o.tokens));
    seconds.push_back(s);
    shares.push_back(bytes(config, dtype, kPrompt + o.tokens / 2) / s / now);
  }
  const double s = median(seconds);
  fmt::print("{:<6} {:<5} {:>10.1f} {:>10.1f} {:>9.1f} {:>8.2f}\n", size,
             o.dtype, 1 / s, bytes(config, dtype, kPrompt) / 1e6,
             bandwidth / 1e9, median(shares));
  targets->require(size + " makes tokens", s > 0);
  targets->at_least(size + ": share of the bandwidth", kShare, median(shares));
  return ok_status();
}

int main_of(int argc, char** argv) {
  Options o;
  CLI::App app{"The speed of remesh sample, one sequence at a time."};
  app.add_option("--size", o.sizes, "of bench/options.h")
      ->check(CLI::IsMember(models()))
      ->capture_default_str();
  add_number(app, "--threads", o.threads, "", 1, 1024);
  app.add_option("--dtype", o.dtype)
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
  add_number(app, "--tokens", o.tokens, "a round", 1, 1 << 20);
  add_number(app, "--rounds", o.rounds, "", 1, 1000);
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
    if (!s.ok()) return failed(size, s.message());
  }
  return targets.report();
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) { return remesh::bench::main_of(argc, argv); }
