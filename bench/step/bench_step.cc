// bench_step: the speed of one training step of one rank: forward, backward,
// clipping and AdamW on a Llama of a named size, without communication.
//
// Prints tokens/s of the best step after warm-up; where the time went and what
// bounds each part (report.h), by the rate of plain GEMMs of the widest layer's
// shape and the memory bandwidth, both measured in the same run; and, with
// --peer, the same step of another program for comparison. Everything
// alternates in rounds, because machines are shared.
#include <fmt/format.h>
#include <sys/wait.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <regex>

#include "bench/models.h"
#include "bench/step/profiling_backend.h"
#include "bench/step/report.h"
#include "bench/step/yardstick.h"
#include "bench/targets.h"
#include "parallel/geometry/model_work.h"
#include "proto/base/clock.h"
#include "proto/base/rng.h"
#include "tests/testing/resident.h"
#include "worker/kernels/backend.h"
#include "worker/model/stage.h"

namespace remesh::bench {
namespace {

using geometry::ModelConfig;
using geometry::ParamTable;
using kernels::Dtype;

struct Options {
  std::string size = "42m";
  int64_t batch = 8;
  int64_t seq = 256;
  int threads = 2;
  std::string dtype = "bf16";
  int steps = 4;
  int rounds = 1;
  bool recompute = false;
  bool json = false;
  bool smoke = false;
  std::string peer;
  // 0: the same as here, except in fp32, where a PyTorch without BLAS takes
  // minutes: two steps of one sequence.
  int peer_steps = 0;
  int64_t peer_batch = 0;
};

double seconds_since(int64_t start_ns) {
  return static_cast<double>(monotonic_ns() - start_ns) * 1e-9;
}

// A flat fp32 vector from the backend's memory.
class Flat {
 public:
  Flat(kernels::Backend& backend, int64_t n)
      : backend_(backend),
        data_(static_cast<float*>(
            backend.allocate(static_cast<size_t>(n) * sizeof(float)))),
        size_(static_cast<size_t>(n)) {
    CHECK_MSG(data_ != nullptr, "no memory for the model's state");
  }
  ~Flat() { backend_.release(data_); }
  Flat(const Flat&) = delete;
  Flat& operator=(const Flat&) = delete;
  float* data() { return data_; }
  std::span<float> span() { return {data_, size_}; }

 private:
  kernels::Backend& backend_;
  float* data_;
  size_t size_;
};

// Parameters and moments; the optimizer reads one set and writes the other,
// as training does.
struct State {
  State(kernels::Backend& b, int64_t n) : p(b, n), m(b, n), v(b, n) {}
  Flat p, m, v;
};

class Trainer {
 public:
  Trainer(const ModelConfig& config, const Options& o,
          ProfilingBackend& backend)
      : o_(o),
        table_(ParamTable::make(config)),
        shard_(geometry::ShardTable::make(table_, {}, {}, {0, config.n_layers})
                   .value()),
        backend_(backend),
        a_(backend, table_.num_elements()),
        b_(backend, table_.num_elements()),
        grads_(backend, table_.num_elements()) {
    for (size_t i = 0; i < table_.size(); ++i)
      for (int64_t e = 0; e < table_[i].numel(); ++e)
        a_.p.data()[table_.offset(i) + e] = table_.initial_value(0, i, e);
    auto made = model::Stage::create(
        shard_,
        {.dtype = o.dtype == "bf16" ? Dtype::kBf16 : Dtype::kFp32,
         .recompute = {static_cast<size_t>(config.n_layers),
                       o.recompute ? model::Recompute::kFull
                                   : model::Recompute::kNone},
         .max_batch = o.batch,
         .max_seq = o.seq},
        backend);
    if (!made.ok()) {
      fmt::print(stderr, "bench_step: {}\n", made.status().message());
      std::exit(3);
    }
    stage_ = std::move(made).value();
    model::load_weights(*stage_, shard_, now().p.span());
  }

  // Runs one step on random tokens; returns its seconds and sets phases().
  double step(int64_t number) {
    make_tokens(number);
    const auto tokens = static_cast<double>(o_.batch * o_.seq);
    backend_.reset();
    phases_.clear();
    const int64_t start = monotonic_ns();
    model::ResidentHooks hooks(shard_, grads_.span());
    phase("forward", [&] {
      loss_ = stage_->forward(
          0, {inputs_.data(), targets_.data(), o_.batch, o_.seq}, nullptr,
          hooks);
    });
    phase("backward",
          [&] { stage_->backward(0, 1.0 / tokens, nullptr, hooks); });
    double norm = 0;
    phase("clip", [&] {
      norm = std::sqrt(
          backend_.sum_of_squares(table_.num_elements(), grads_.data()));
    });
    phase("adamw", [&] { update(number, std::min(1.0, 1.0 / (norm + 1e-6))); });
    phase("load",
          [&] { model::load_weights(*stage_, shard_, now().p.span()); });
    loss_ /= tokens;
    return seconds_since(start);
  }

  const ParamTable& table() const { return table_; }
  const std::map<std::string, double>& phases() const { return phases_; }
  double loss() const { return loss_; }
  uint64_t bytes() const {
    const auto m = stage_->memory();
    return m.weights + m.activations + m.buffers;
  }

 private:
  State& now() { return flipped_ ? b_ : a_; }
  State& next() { return flipped_ ? a_ : b_; }

  void update(int64_t number, double grad_scale) {
    kernels::AdamWOptions adamw{.lr = 1e-4,
                                .step = number + 1,
                                .grad_scale = grad_scale,
                                .clear_grad = true};
    for (size_t i = 0; i < table_.size(); ++i) {
      adamw.weight_decay = table_[i].decay ? 0.01 : 0.0;
      const int64_t at = table_.offset(i);
      backend_.adamw(adamw, table_[i].numel(), grads_.data() + at,
                     now().p.data() + at, now().m.data() + at,
                     now().v.data() + at, next().p.data() + at,
                     next().m.data() + at, next().v.data() + at);
    }
    flipped_ = !flipped_;
  }

  void make_tokens(int64_t number) {
    const int64_t vocab = table_.config().vocab_size;
    inputs_.clear();
    targets_.clear();
    for (int64_t b = 0; b < o_.batch; ++b)
      for (int64_t t = 0; t < o_.seq; ++t) {
        const auto token = [&](int64_t at) {
          return static_cast<int32_t>(
              random_u64(1, static_cast<uint64_t>(number * o_.batch + b),
                         static_cast<uint64_t>(at)) %
              static_cast<uint64_t>(vocab));
        };
        inputs_.push_back(token(t));
        targets_.push_back(token(t + 1));
      }
  }

  template <typename F>
  void phase(const char* name, const F& f) {
    const int64_t start = monotonic_ns();
    f();
    phases_[name] += seconds_since(start);
  }

  Options o_;
  ParamTable table_;
  geometry::ShardTable shard_;
  ProfilingBackend& backend_;
  State a_, b_;
  Flat grads_;
  bool flipped_ = false;
  std::unique_ptr<model::Stage> stage_;
  std::vector<int32_t> inputs_, targets_;
  std::map<std::string, double> phases_;
  double loss_ = 0;
};

// tokens/s of the peer program, or 0 if it failed.
double run_peer(const Options& o) {
  const std::string command = fmt::format(
      "/usr/bin/python3 '{}' --size {} --batch {} --seq {} "
      "--threads {} --steps {}{}",
      o.peer, o.size, o.peer_batch, o.seq, o.threads, o.peer_steps,
      o.dtype == "bf16" ? " --bf16" : "");
  std::FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return 0;
  std::string text;
  char buffer[512];
  while (std::fgets(buffer, sizeof(buffer), pipe) != nullptr) text += buffer;
  const int status = ::pclose(pipe);
  std::smatch match;
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 ||
      !std::regex_search(text, match, std::regex("tokens/s=([0-9.]+)")))
    return 0;
  return std::stod(match[1]);
}

int run(const Options& o) {
  const ModelConfig& config = models().at(o.size);
  const Dtype d = o.dtype == "bf16" ? Dtype::kBf16 : Dtype::kFp32;
  const auto backend = kernels::make_cpu_backend(o.threads);
  const auto profiler = make_profiling_backend(*backend);
  Trainer trainer(config, o, *profiler);
  const auto tokens = static_cast<double>(o.batch * o.seq);
  Report report{
      .size = o.size,
      .dtype = o.dtype,
      .backend = backend->description(),
      .batch = o.batch,
      .seq = o.seq,
      .threads = o.threads,
      .parameters = trainer.table().num_elements(),
      .tokens = tokens,
      .flops = tokens * geometry::flops_per_token(trainer.table(), o.seq)};
  int64_t number = 0;
  for (int round = 0; round < o.rounds; ++round) {
    // The very first step compiles GEMMs and touches memory.
    for (int i = 0; i < (round == 0 ? o.steps : o.steps - 1); ++i) {
      const double s = trainer.step(number++);
      if (number == 1 || s >= report.step_s) continue;
      report.step_s = s;
      report.phases_s = trainer.phases();
      report.operations = profiler->costs();
    }
    report.gemm_rate = std::max(
        report.gemm_rate,
        kernels::plain_gemm_rate(o.threads, d, o.batch * o.seq,
                                 2 * config.hidden_dim, config.dim, 5));
    report.bandwidth =
        std::max(report.bandwidth, kernels::memory_bandwidth(o.threads, 3));
    if (!o.peer.empty()) report.peer = std::max(report.peer, run_peer(o));
  }
  report.loss = trainer.loss();
  report.stage_bytes = trainer.bytes();
  report.has_peer = !o.peer.empty();
  report.peer_batch = o.peer_batch;
  if (o.json)
    print_json(report);
  else
    print_text(report);
  if (report.has_peer && report.peer == 0) {
    fmt::print(stderr, "bench_step: the peer program {} failed\n", o.peer);
    return kExitFailed;
  }
  Targets targets(o.smoke);
  targets.require("the loss is a number", std::isfinite(report.loss));
  return targets.report(stderr);
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) {
  remesh::bench::Options o;
  CLI::App app{
      "Speed of one training step of one rank.\n\nExample:\n  bench_step "
      "--size 42m --batch 8 --seq 256 --threads 2 --dtype bf16\n"};
  std::vector<std::string> names;
  for (const auto& [name, config] : remesh::bench::models())
    names.push_back(name);
  app.add_option("--size", o.size, "Model")
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  app.add_option("--batch", o.batch, "Sequences per step")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  app.add_option("--seq", o.seq, "Tokens per sequence")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--threads", o.threads, "CPU threads")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--dtype", o.dtype, "Type of the GEMMs")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
  app.add_option("--steps", o.steps, "Steps per round; the first is warm-up")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  app.add_option("--rounds", o.rounds, "Rounds; the peer runs once per round")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_flag("--recompute", o.recompute, "Recompute activations");
  app.add_flag("--json", o.json, "One JSON object on one line");
  app.add_option(
         "--peer", o.peer,
         "PyTorch program to run for comparison, with the same arguments")
      ->check(CLI::ExistingFile);
  app.add_option("--peer-steps", o.peer_steps,
                 "Steps of the peer per round; 0: as --steps, but 2 in fp32, "
                 "where a PyTorch without BLAS takes minutes")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--peer-batch", o.peer_batch,
                 "Sequences per step of the peer; 0: as --batch, but 1 in fp32")
      ->check(CLI::Range(0, 65536))
      ->capture_default_str();
  app.add_flag("--smoke", o.smoke, "Everything tiny; no target is judged");
  CLI11_PARSE(app, argc, argv);
  if (o.smoke) {
    o.size = "tiny";
    o.batch = 2;
    o.seq = 32;
    o.steps = 2;
  }
  const bool slow_peer = o.dtype == "fp32";
  if (o.peer_steps == 0) o.peer_steps = slow_peer ? 2 : o.steps;
  if (o.peer_batch == 0) o.peer_batch = slow_peer ? 1 : o.batch;
  return remesh::bench::run(o);
}
