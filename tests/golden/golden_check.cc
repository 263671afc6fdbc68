// golden_check FILE.h5 [--dtype fp32|bf16] [--layout dpN]: trains the model of
// a golden file with the real step and compares everything with the file.
// Exit code 0: all errors within bounds; 1: one is past its bound; 2: the
// arguments or the file are no good.
//
// With dpN, N ranks run as N threads over local_comm; microbatches of one
// sequence are dealt to them, evenly or not.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "parallel/comm/local_comm.h"
#include "parallel/geometry/batch.h"
#include "parallel/geometry/layout.h"
#include "tests/golden/golden_file.h"
#include "worker/kernels/backend.h"
#include "worker/model/stage.h"
#include "worker/train/step.h"

namespace remesh::golden {
namespace {

struct Options {
  std::string path;
  std::string dtype = "fp32";
  std::string layout = "dp1";
  int64_t microbatch = 0;  // sequences; 0: all with one rank, else one
  bool verbose = false;
};

// What training gave; filled in by rank 0.
struct Run {
  Status status;
  model::Dtype products = model::Dtype::kFp32;  // what the stage computed in
  std::vector<float> first_grads, first_logits, weights_after;
  std::vector<double> loss, grad_norm, lr;
};

// The microbatches of one step that rank `index` of `dp` takes.
std::vector<model::MicroBatch> deal_step(const Golden& g, int64_t step,
                                         int64_t each, int dp, int index,
                                         std::vector<int32_t>& tokens,
                                         std::vector<int32_t>& targets) {
  const int64_t T = g.seq_len;
  const int64_t n = (g.sequences + each - 1) / each;
  const geometry::MicrobatchRange mine = geometry::deal(n, dp, index);
  tokens.clear();
  targets.clear();
  const int64_t begin = std::min(g.sequences, mine.begin * each);
  const int64_t end = std::min(g.sequences, mine.end * each);
  for (int64_t s = begin; s < end; ++s) {
    const auto* row = g.tokens.data() + (step * g.sequences + s) * (T + 1);
    tokens.insert(tokens.end(), row, row + T);
    targets.insert(targets.end(), row + 1, row + T + 1);
  }
  std::vector<model::MicroBatch> out;
  for (int64_t s = begin; s < end; s += each)
    out.push_back({.tokens_BT = tokens.data() + (s - begin) * T,
                   .targets_BT = targets.data() + (s - begin) * T,
                   .B = std::min(each, end - s),
                   .T = T});
  return out;
}

Status train_rank(const Golden& g, const Options& o, comm::Comm& comm,
                  int64_t each, Run& run) {
  const auto table = geometry::ParamTable::llama(g.config);
  const auto backend = kernels::make_cpu_backend(1);
  const bool bf16 = o.dtype == "bf16";
  if (bf16 && !backend->supports_bf16())
    return unavailable(
        "dtype bf16: this processor has no bf16 instructions; allowed: fp32");
  ASSIGN_OR_RETURN(
      const auto shard,
      geometry::ShardTable::make(table, {}, {}, {0, g.config.n_layers}));
  ASSIGN_OR_RETURN(const auto stage,
                   model::Stage::create(shard,
                                        {.dtype = bf16 ? model::Dtype::kBf16
                                                       : model::Dtype::kFp32,
                                         .max_batch = each,
                                         .max_seq = g.seq_len},
                                        *backend));
  ASSIGN_OR_RETURN(
      train::TrainState state,
      train::TrainState::make(*backend, table.num_elements(), comm.size()));
  std::copy(g.weights.begin(), g.weights.end(), state.weights.data());
  stage->load_weights(state.weights.span());
  train::StepOptions options = g.optimizer;
  options.bucket_elements = 5000;  // several buckets, cut anywhere
  train::Step step(shard, *stage, *backend, comm, comm, options, {});
  std::vector<int32_t> tokens, targets;
  const bool reports = comm.rank() == 0;
  for (int64_t s = 0; s < g.steps; ++s) {
    const auto mbs =
        deal_step(g, s, each, comm.size(), comm.rank(), tokens, targets);
    if (s == 0 && reports) {
      run.first_logits.resize(g.first_logits.size());
      model::ResidentHooks hooks(shard, {});
      stage->evaluate(mbs.front(), nullptr, hooks);
      stage->logits(0, g.seq_len, run.first_logits);
    }
    const double lr = train::learning_rate(g.schedule, s);
    ASSIGN_OR_RETURN(const train::StepResult r,
                     step.run({.lr = lr,
                               .microbatches = mbs,
                               .global_tokens = g.sequences * g.seq_len},
                              state));
    if (!reports) continue;
    if (s == 0)
      run.first_grads.assign(state.grads.data(),
                             state.grads.data() + table.num_elements());
    run.loss.push_back(r.loss);
    run.grad_norm.push_back(r.grad_norm);
    run.lr.push_back(lr);
  }
  if (reports) run.products = stage->dtype();
  if (reports)
    run.weights_after.assign(state.weights.data(),
                             state.weights.data() + table.num_elements());
  return ok_status();
}

Run train_all(const Golden& g, const Options& o, int dp) {
  auto comms = comm::make_local_comms(dp);
  const int64_t each =
      o.microbatch > 0 ? o.microbatch : (dp == 1 ? g.sequences : 1);
  Run run;
  std::vector<Status> status(static_cast<size_t>(dp));
  std::vector<std::thread> ranks;
  for (size_t r = 0; r < comms.size(); ++r)
    ranks.emplace_back(
        [&, r] { status[r] = train_rank(g, o, *comms[r], each, run); });
  for (std::thread& t : ranks) t.join();
  for (const Status& s : status)
    if (!s.ok()) run.status = s;
  return run;
}

// |a - b| / |b|, both as vectors.
double relative_l2(std::span<const float> a, std::span<const float> b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    difference += d * d;
    size += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  if (size == 0) return std::sqrt(difference);
  return std::sqrt(difference / size);
}

double relative(double a, double b) { return std::abs(a - b) / std::abs(b); }

class Verdict {
 public:
  explicit Verdict(bool verbose) : verbose_(verbose) {}
  // Not a number is past any bound.
  void add(const std::string& what, double error, double bound,
           bool detail = false) {
    const bool ok = error <= bound;
    if (!ok) failed_ = true;
    if (ok && detail && !verbose_) return;
    if (std::isinf(bound)) {
      fmt::print("{:<64} {:.3e}\n", what, error);
    } else {
      fmt::print("{:<64} {:.3e}  bound {:.0e}  {}\n", what, error, bound,
                 ok ? "ok" : "PAST THE BOUND");
    }
  }
  // Every parameter by itself; the largest error is always shown.
  void add_parameters(const std::string& what,
                      const geometry::ParamTable& table,
                      std::span<const float> got, std::span<const float> want,
                      double bound) {
    double worst = 0;
    size_t worst_i = 0;
    for (size_t i = 0; i < table.size(); ++i) {
      const auto at = static_cast<size_t>(table.offset(i));
      const auto n = static_cast<size_t>(table[i].numel());
      const double e = relative_l2(got.subspan(at, n), want.subspan(at, n));
      add(what + " " + table[i].name, e, bound, true);
      if (!(e <= worst)) {
        worst = e;
        worst_i = i;
      }
    }
    add(what + ", largest: " + table[worst_i].name, worst, bound);
  }
  bool failed() const { return failed_; }

 private:
  bool verbose_;
  bool failed_ = false;
};

bool compare(const Golden& g, const Run& run, const Options& o) {
  const bool bf16 = o.dtype == "bf16";
  const double loss_bound = bf16 ? 2e-2 : 1e-5;
  const double bound = bf16 ? 2e-2 : 1e-4;
  const auto table = geometry::ParamTable::llama(g.config);
  Verdict v(o.verbose);
  v.add("first loss", relative(run.loss[0], g.first_loss), loss_bound);
  v.add("first logits of sequence 0",
        relative_l2(run.first_logits, g.first_logits), bound);
  v.add_parameters("gradient", table, run.first_grads, g.first_grads, bound);
  for (size_t s = 0; s < g.loss.size(); ++s) {
    v.add(fmt::format("step {} loss", s + 1), relative(run.loss[s], g.loss[s]),
          bound);
    v.add(fmt::format("step {} gradient norm", s + 1),
          relative(run.grad_norm[s], g.grad_norm[s]), bound);
    v.add(fmt::format("step {} learning rate", s + 1),
          relative(run.lr[s], g.lr[s]), 1e-9);
  }
  // Adam moves an element whose gradient is all rounding by a whole lr, either
  // way; so the weights are bounded as one vector, and the worst parameter is
  // only shown.
  v.add("weights after", relative_l2(run.weights_after, g.weights_after),
        bound);
  v.add_parameters("weights after", table, run.weights_after, g.weights_after,
                   std::numeric_limits<double>::infinity());
  return !v.failed();
}

int check(const Options& o) {
  const auto layout = geometry::Layout::parse(o.layout);
  if (!layout.ok()) {
    fmt::print(stderr, "golden_check: {}\n", layout.status().to_string());
    return 2;
  }
  if (layout->world() != layout->dp || layout->dp > 64) {
    fmt::print(stderr,
               "golden_check: layout \"{}\": allowed are dp1 .. dp64; tensor, "
               "pipeline and context parallelism are not executed yet\n",
               o.layout);
    return 2;
  }
  const auto golden = read_golden(o.path);
  if (!golden.ok()) {
    fmt::print(stderr, "golden_check: {}\n", golden.status().to_string());
    return 2;
  }
  fmt::print("{}: {}, {}\n", o.path, o.dtype, layout->to_string());
  const Run run = train_all(*golden, o, layout->dp);
  if (!run.status.ok()) {
    fmt::print(stderr, "golden_check: {}\n", run.status.to_string());
    return 2;
  }
  if (o.dtype == "bf16" && run.products == model::Dtype::kFp32)
    fmt::print(
        "products in fp32: at dimension {} bf16 would not pay (see "
        "Backend::product_dtype)\n",
        golden->config.dim);
  const bool ok = compare(*golden, run, o);
  fmt::print("{}\n", ok ? "all within bounds" : "FAILED");
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace remesh::golden

int main(int argc, char** argv) {
  remesh::golden::Options o;
  CLI::App app(
      "Trains the model of a golden file and compares with what it holds.\n"
      "Exit codes: 0 within bounds, 1 past a bound, 2 bad arguments or file.\n"
      "Example: golden_check tests/golden/tiny_gqa.h5 --dtype bf16 --layout "
      "dp2");
  app.add_option("file", o.path, "golden file (HDF5)")->required();
  app.add_option("--dtype", o.dtype, "compute type: fp32 or bf16")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--layout", o.layout, "dpN: N data-parallel ranks");
  app.add_option("--microbatch", o.microbatch,
                 "sequences a microbatch; default: all with one rank, else 1")
      ->check(CLI::Range(1, 1 << 20));
  app.add_flag("--verbose", o.verbose, "every parameter's error");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  return remesh::golden::check(o);
}
