// golden_check FILE.h5 [--dtype fp32|bf16] [--layout dp2,pp2,tp2] ...: trains
// the model of a golden file with the real engine and compares everything with
// the file. Exit code 0: all errors are within their bounds; 1: one is not; 2:
// invalid arguments or file, or the model does not admit the layout; 3: this
// machine does not admit the dtype. With --refused TEXT: 0 if the file or
// layout is refused with a message that contains TEXT, else 1.
//
// The ranks of the layout run as threads over local_comm. With several ranks a
// microbatch is one sequence, and ranks may have different numbers of them.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <limits>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "parallel/geometry/batch.h"
#include "parallel/geometry/layout.h"
#include "tests/golden/compare.h"
#include "tests/golden/golden_file.h"
#include "tests/testing/engine.h"
#include "tests/testing/local_comm.h"
#include "tests/unit/engine/whole_vector.h"
#include "worker/engine/engine.h"
#include "worker/kernels/backend.h"

namespace remesh::golden {
namespace {

struct Options {
  std::string path;
  std::string dtype = "fp32";
  std::string backend = "cpu";
  std::string layout = "dp1";
  int64_t microbatch = 0;  // sequences; 0: all with one rank, else one
  int zero = 0;
  std::string schedule = "1f1b";
  int chunks = 1;
  std::string recompute = "none";
  bool verbose = false;
  std::string refused;
};

// Exit code of a refusal.
int refuse(const Options& o, const Status& why) {
  fmt::print(stderr, "golden_check: {}\n", why.to_string());
  if (o.refused.empty()) return 2;
  return why.message().find(o.refused) == std::string::npos ? 1 : 0;
}

// The results of training, gathered from all ranks.
struct Run {
  explicit Run(const geometry::ParamTable& table)
      : first_grads(table), weights_after(table) {}
  std::mutex mutex;
  Status status;
  engine::WholeVector first_grads, weights_after;
  std::vector<float> first_logits;
  std::vector<double> loss, grad_norm, lr;

  Outcome outcome() const {
    return {.first_logits = first_logits,
            .first_grads = first_grads.values(),
            .weights_after = weights_after.values(),
            .loss = loss,
            .grad_norm = grad_norm,
            .lr = lr};
  }
};

// The microbatches of one step for rank `index` of `dp`.
std::vector<model::MicroBatch> deal_step(const Golden& g, int64_t step,
                                         int64_t each, int dp, int index,
                                         std::vector<int32_t>& tokens,
                                         std::vector<int32_t>& targets) {
  const int64_t T = g.seq_len;
  const int64_t n = (g.sequences + each - 1) / each;
  const geometry::MicrobatchRange mine = geometry::even_share(n, dp, index);
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

engine::EngineOptions engine_options(const Golden& g, const Options& o,
                                     int64_t each) {
  return {
      .zero = {.stage = o.zero},
      .schedule = geometry::parse_schedule(o.schedule).value(),
      .chunks = o.chunks,
      .recompute = *geometry::parse_recompute(o.recompute),
      .dtype = o.dtype == "bf16" ? model::Dtype::kBf16 : model::Dtype::kFp32,
      .num_microbatches = (g.sequences + each - 1) / each,
      .max_batch = each,
      .max_seq = g.seq_len,
      .optimizer = g.optimizer,
      .bucket_elements = 5000};  // several buckets with arbitrary bounds
}

// Logits of sequence 0: each rank that holds part of the head has some of the
// positions and of the vocabulary.
Status first_logits(const Golden& g, comm::Mesh& mesh,
                    std::span<const model::MicroBatch> microbatches,
                    engine::Engine& engine, Run& run) {
  const bool mine = mesh.coord().dp == 0;
  RETURN_IF_ERROR(
      engine.evaluate(mine ? microbatches.first(1) : microbatches.first(0))
          .status());
  const geometry::ShardTable& shard = engine.shard();
  const int chunk = shard.chunks() - 1;
  if (!mine || !shard.has_head(chunk)) return ok_status();
  const auto role = g.config.tie_embeddings ? geometry::Role::kEmbedding
                                            : geometry::Role::kHead;
  const geometry::Rect& rect =
      shard[static_cast<size_t>(shard.find(role))].rect;
  const int cp = mesh.layout().cp;
  const int64_t rows = g.seq_len / cp;
  std::vector<float> part(static_cast<size_t>(rows * rect.rows));
  engine.stage(chunk).logits(0, rows, part);
  std::vector<int32_t> positions(static_cast<size_t>(rows));
  for (int64_t i = 0; i < rows; ++i)
    positions[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  if (cp > 1)
    positions = model::context_positions(g.seq_len, cp, mesh.coord().cp);
  const std::lock_guard lock(run.mutex);
  for (size_t i = 0; i < positions.size(); ++i)
    std::copy_n(part.begin() + static_cast<int64_t>(i) * rect.rows, rect.rows,
                run.first_logits.begin() + positions[i] * g.config.vocab_size +
                    rect.row);
  return ok_status();
}

void load_golden(const std::vector<float>& whole, engine::Engine& engine) {
  const geometry::ShardTable& shard = engine.shard();
  const engine::StateView state = engine.begin_state();
  for (size_t u = 0; u < shard.units().size(); ++u) {
    const geometry::FlatRange r = engine.zero().update_range(u);
    float* to = state.weights.data() + engine.zero().state_offset(u);
    engine::for_each_element(
        shard, r.begin, r.size(),
        [&](size_t from, size_t i) { to[i] = whole[from]; });
  }
  engine.commit_state(0);
  engine.state_loaded();
}

// Adds a rank's part of every unit.
void collect(engine::Engine& engine, bool grads, Run& run) {
  const std::lock_guard lock(run.mutex);
  for (size_t u = 0; u < engine.shard().units().size(); ++u) {
    const geometry::FlatRange r = engine.zero().update_range(u);
    if (grads)
      run.first_grads.add(engine.shard(), r.begin, engine.gradient(u));
    else
      run.weights_after.add(
          engine.shard(), r.begin,
          engine.weights().subspan(
              static_cast<size_t>(engine.zero().state_offset(u)),
              static_cast<size_t>(r.size())));
  }
}

Status train_rank(const Golden& g, const Options& o,
                  const geometry::ParamTable& table,
                  const geometry::Layout& layout, comm::Comm& comm,
                  int64_t each, Run& run) {
  const auto backend = kernels::make_backend(o.backend, 1).value();
  ASSIGN_OR_RETURN(const auto mesh, comm::Mesh::make(comm, layout));
  ASSIGN_OR_RETURN(const auto engine,
                   engine::make_engine(table, *mesh, engine_options(g, o, each),
                                       *backend, {}));
  load_golden(g.weights, *engine);
  std::vector<int32_t> tokens, targets;
  const bool reports = comm.rank() == 0;
  for (int64_t s = 0; s < g.steps; ++s) {
    const auto mbs =
        deal_step(g, s, each, layout.dp, mesh->coord().dp, tokens, targets);
    if (s == 0) RETURN_IF_ERROR(first_logits(g, *mesh, mbs, *engine, run));
    const double lr = jobfile::learning_rate(g.schedule, s);
    ASSIGN_OR_RETURN(const engine::StepResult r,
                     engine->run({.lr = lr,
                                  .microbatches = mbs,
                                  .global_tokens = g.sequences * g.seq_len}));
    if (s == 0) collect(*engine, /*grads=*/true, run);
    if (!reports) continue;
    run.loss.push_back(r.loss);
    run.grad_norm.push_back(r.grad_norm);
    run.lr.push_back(lr);
  }
  collect(*engine, /*grads=*/false, run);
  return ok_status();
}

// Whether every rank of the layout can be created. Checked first, because a
// rank that cannot would leave the others waiting.
Status admit(const Golden& g, const Options& o,
             const geometry::ParamTable& table, const geometry::Layout& layout,
             int64_t each) {
  const auto backend = kernels::make_backend(o.backend, 1).value();
  for (int rank = 0; rank < layout.world(); ++rank)
    RETURN_IF_ERROR(engine::Engine::prepare(table, layout, rank,
                                            engine_options(g, o, each),
                                            *backend, {})
                        .status());
  return ok_status();
}

void train_all(const Golden& g, const Options& o,
               const geometry::ParamTable& table,
               const geometry::Layout& layout, int64_t each, Run& run) {
  run.first_logits.assign(g.first_logits.size(),
                          std::numeric_limits<float>::quiet_NaN());
  std::vector<Status> status(static_cast<size_t>(layout.world()));
  comm::on_ranks(layout.world(), [&](comm::Comm& comm) {
    status[static_cast<size_t>(comm.rank())] =
        train_rank(g, o, table, layout, comm, each, run);
  });
  for (const Status& s : status)
    if (!s.ok()) run.status = s;
  for (const engine::WholeVector* v : {&run.first_grads, &run.weights_after})
    if (run.status.ok() && !v->trouble().empty())
      run.status = internal("the ranks: " + v->trouble());
}

Result<Bounds> find_bf16_bounds(const Golden& g,
                                const geometry::ParamTable& table) {
  if (g.autocast) return bf16_bounds(g, {});
  Golden one_step = g;
  one_step.steps = 1;
  Run run(table);
  train_all(one_step, {.dtype = "bf16", .backend = "reference"}, table, {},
            g.sequences, run);
  RETURN_IF_ERROR(run.status);
  return bf16_bounds(g, first_step_errors(g, run.outcome()));
}

int check(const Options& o) {
  const auto layout = geometry::Layout::parse(o.layout);
  if (!layout.ok()) {
    fmt::print(stderr, "golden_check: {}\n", layout.status().to_string());
    return 2;
  }
  if (layout->world() > 64) {
    fmt::print(stderr,
               "golden_check: layout \"{}\": {} ranks; allowed: up to 64\n",
               o.layout, layout->world());
    return 2;
  }
  const auto golden = read_golden(o.path);
  if (!golden.ok()) return refuse(o, golden.status());
  fmt::print("{}: {}, {}, ZeRO {}, {}{}, recompute {}\n", o.path, o.dtype,
             layout->to_string(), o.zero, o.schedule,
             o.chunks > 1 ? fmt::format(" of {} chunks", o.chunks) : "",
             o.recompute);
  const auto table = geometry::ParamTable::make(golden->config);
  const int64_t each = o.microbatch > 0       ? o.microbatch
                       : layout->world() == 1 ? golden->sequences
                                              : 1;
  if (o.dtype == "bf16" &&
      !kernels::make_backend(o.backend, 1).value()->supports_bf16()) {
    fmt::print("needs bf16\n");
    return 3;
  }
  if (const Status s = admit(*golden, o, table, *layout, each); !s.ok())
    return refuse(o, s);
  if (!o.refused.empty()) {
    fmt::print("the layout is not refused\n");
    return 1;
  }
  Run run(table);
  train_all(*golden, o, table, *layout, each, run);
  const auto bounds = o.dtype == "bf16" ? find_bf16_bounds(*golden, table)
                                        : Result<Bounds>(fp32_bounds(*golden));
  for (const Status& s : {run.status, bounds.status()})
    if (!s.ok()) {
      fmt::print(stderr, "golden_check: {}\n", s.to_string());
      return 2;
    }
  const bool ok = compare(*golden, run.outcome(), *bounds, o.verbose);
  fmt::print("{}\n", ok ? "all within bounds" : "FAILED");
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace remesh::golden

int main(int argc, char** argv) {
  remesh::golden::Options o;
  CLI::App app(
      "Trains the model of a golden file and compares with what it holds.\n"
      "Exit codes: 0 within bounds, 1 past a bound, 2 bad arguments, file or "
      "layout, 3\nthe machine does not admit the dtype.\n"
      "Example: golden_check tests/golden/tiny_gqa.h5 --dtype bf16 --layout "
      "dp2,tp2 --zero 3");
  app.add_option("file", o.path, "golden file (HDF5)")->required();
  app.add_option("--dtype", o.dtype, "compute type: fp32 or bf16")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--backend", o.backend, "cpu or reference")
      ->check(CLI::IsMember({"cpu", "reference"}));
  app.add_option("--layout", o.layout,
                 "axes dp, pp, tp, cp with degrees, like dp2,pp2,tp2");
  app.add_option("--zero", o.zero, "ZeRO stage")->check(CLI::Range(0, 3));
  app.add_option("--schedule", o.schedule,
                 "pipeline schedule: gpipe, 1f1b, interleaved or zb-h1")
      ->check(CLI::IsMember({"gpipe", "1f1b", "interleaved", "zb-h1"}));
  app.add_option("--chunks", o.chunks, "model chunks a pipeline rank")
      ->check(CLI::Range(1, 64));
  app.add_option("--recompute", o.recompute, "none, selective or full")
      ->check(CLI::IsMember({"none", "selective", "full"}));
  app.add_option("--microbatch", o.microbatch,
                 "sequences a microbatch; default: all with one rank, else 1")
      ->check(CLI::Range(1, 1 << 20));
  app.add_flag("--verbose", o.verbose, "every parameter's error");
  app.add_option("--refused", o.refused,
                 "expect that the file or layout is refused with this text");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  return remesh::golden::check(o);
}
