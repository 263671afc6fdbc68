// Compares the planner's predictions with measured training runs.
//
//   bench_planner validate FILE.csv        errors; the last line is
//                                          "overall MAPE X % of N rows"
//   bench_planner rows FILE.csv            every row with its prediction
//   bench_planner fit FILE.csv ... [--write]   fits the clusters' constants
//   bench_planner search                   time of large searches, and how many
//                                          plans they simulate
//   bench_planner local, hosts, tune       choices on this machine (choices.h)
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>

#include "bench/options.h"
#include "bench/planner/choices.h"
#include "bench/planner/validation.h"
#include "parallel/jobfile/jobfile.h"
#include "parallel/planner/search.h"
#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/base/text.h"
#include "tests/testing/llama.h"

namespace remesh::bench {
namespace {

struct Options {
  std::string clusters = REMESH_DEPLOY "/clusters";
  std::vector<std::string> files;
  bool write = false;
};

using Key = std::function<std::string(const Scored&)>;

void print_errors(const char* title, const std::vector<Scored>& scored,
                  const Key& key) {
  fmt::print("\n{:<66} {:>5} {:>7} {:>7}\n", title, "rows", "MAPE", "worst");
  std::map<std::string, std::vector<Scored>> groups;
  for (const Scored& s : scored) groups[key(s)].push_back(s);
  for (const auto& [name, group] : groups) {
    double worst = 0;
    for (const Scored& s : group) worst = std::max(worst, s.error());
    fmt::print("  {:<64} {:>5} {:>5.1f} % {:>5.1f} %\n", name.substr(0, 64),
               group.size(), 100 * mape(group), 100 * worst);
  }
}

// Each source predicted by constants that were fitted without it.
std::vector<Scored> left_out(const std::vector<ClusterFile>& clusters,
                             const std::vector<Sample>& samples) {
  std::map<std::string, std::vector<Sample>> sources;
  for (const Sample& s : samples) sources[s.row->source].push_back(s);
  std::vector<Scored> out;
  for (const auto& entry : sources) {
    const std::string& source = entry.first;
    const std::vector<Sample>& mine = entry.second;
    std::vector<Sample> others;
    const auto touched = [&](const Sample& s) {
      return std::any_of(mine.begin(), mine.end(), [&](const Sample& m) {
        return same_chip(clusters[s.cluster].cluster,
                         clusters[m.cluster].cluster);
      });
    };
    for (const Sample& s : samples)
      if (s.row->source != source && touched(s)) others.push_back(s);
    for (Scored& s : score(fit(clusters, others), mine)) out.push_back(s);
  }
  return out;
}

void print_ranks(const std::vector<Scored>& scored) {
  fmt::print("\n{:<56} {:>8} {:>9} {:>8}\n", "layouts of a model", "layouts",
             "Spearman", "regret");
  double spearman = 0, regret = 0;
  const std::vector<Ranking> all = rankings(scored);
  for (const Ranking& r : all) {
    spearman += r.spearman / static_cast<double>(all.size());
    regret += r.regret / static_cast<double>(all.size());
    fmt::print("  {:<54} {:>8} {:>9.3f} {:>6.1f} %\n", r.model, r.layouts,
               r.spearman, 100 * r.regret);
  }
  if (!all.empty())
    fmt::print("  {:<54} {:>8} {:>9.3f} {:>6.1f} %\n", "mean", "", spearman,
               100 * regret);
}

struct Loaded {
  std::vector<ClusterFile> clusters;
  std::vector<Row> rows;
  std::vector<Sample> samples;
};
Status load(const Options& o, Loaded* out) {
  ASSIGN_OR_RETURN(out->clusters, read_clusters(o.clusters));
  Skipped skipped;
  for (const std::string& file : o.files) {
    ASSIGN_OR_RETURN(const std::vector<Row> rows, read_rows(file, &skipped));
    RETURN_IF_ERROR(
        samples_of(out->clusters, rows).status().with_context(file));
    out->rows.insert(out->rows.end(), rows.begin(), rows.end());
  }
  ASSIGN_OR_RETURN(out->samples,
                   samples_of(out->clusters, out->rows, &skipped));
  for (const auto& [what, rows] : skipped)
    fmt::print("skipped {} with {}, which is not known\n", plural(rows, "row"),
               what);
  return ok_status();
}

Status validate(const Options& o) {
  Loaded in;
  RETURN_IF_ERROR(load(o, &in));
  const std::vector<Scored> scored = score(in.clusters, in.samples);
  const auto device = [](const Scored& s) {
    return s.row->device + (s.row->memory_gb > 0
                                ? fmt::format(" {:g} GB", s.row->memory_gb)
                                : "");
  };
  const auto source = [](const Scored& s) { return s.row->source; };
  print_errors("device", scored, device);
  print_errors("source", scored, source);
  const auto part = [&](const char* name, bool Row::*member) {
    std::vector<Scored> rows;
    for (const Scored& s : scored)
      if (s.row->*member) rows.push_back(s);
    if (!rows.empty())
      fmt::print("\n{}: MAPE {:.1f} % of {} rows\n", name, 100 * mape(rows),
                 rows.size());
  };
  part("vTrain multi-node", &Row::multi_node_vtrain);
  part("vTrain single-node", &Row::single_node_vtrain);
  print_ranks(scored);
  std::fflush(stdout);  // the fits take minutes
  const std::vector<Scored> others = left_out(in.clusters, in.samples);
  print_errors("source, left out of the fit", others, source);
  fmt::print("\nleft out overall MAPE {:.1f} % of {} rows\n",
             100 * mape(others), others.size());
  fmt::print("overall MAPE {:.1f} % of {} rows\n", 100 * mape(scored),
             scored.size());
  return ok_status();
}

Status print_rows(const Options& o) {
  Loaded in;
  RETURN_IF_ERROR(load(o, &in));
  for (const Sample& s : in.samples) {
    const Row& r = *s.row;
    const planner::StepCost c =
        predict(planner::machine_of(in.clusters[s.cluster].cluster), r);
    const planner::Terms& t = c.terms;
    const auto share = [&](double x) { return 100 * x / c.total_s; };
    fmt::print(
        "{:>4} {:+6.1f} % {:<16} {:<9} x{:<5} {:<16} B{:<3} z{} r{} {} | gemm "
        "{:.0f} att {:.0f} elem {:.0f} launch {:.0f} tp {:.0f} cp {:.0f} data "
        "{:.0f} send {:.0f} bubble {:.0f} opt {:.0f} str {:.0f}\n",
        r.line, 100 * (c.tokens_per_s / r.tokens_per_s - 1), r.model,
        in.clusters[s.cluster].name, r.world, r.layout.to_string(), r.shape.B,
        r.shape.zero_stage, static_cast<int>(r.shape.recompute),
        r.run.precision == planner::Precision::kFp8 ? "fp8" : "16",
        share(t.gemm), share(t.attention), share(t.elementwise),
        share(t.launch), share(t.tensor), share(t.context), share(t.data),
        share(t.transfer), share(t.bubble), share(t.optimizer),
        share(t.straggle));
  }
  return ok_status();
}

Status fit_clusters(const Options& o) {
  Loaded in;
  RETURN_IF_ERROR(load(o, &in));
  const double before = mape(score(in.clusters, in.samples));
  // What nobody measured stays as it is.
  const std::vector<ClusterFile> fitted = fit(in.clusters, in.samples);
  for (size_t i = 0; i < fitted.size(); ++i)
    if (is_measured(fitted[i], in.clusters, in.samples))
      in.clusters[i] = fitted[i];
  set_errors(in.samples, &in.clusters);
  for (const ClusterFile& c : in.clusters) {
    const std::string text = jobfile::description_text(c.cluster);
    fmt::print("# {}\n{}\n", c.name, text);
    const std::string path = fmt::format("{}/{}.toml", o.clusters, c.name);
    if (o.write && !(std::ofstream(path) << text << std::flush))
      return io_error(path + ": cannot be written");
  }
  fmt::print("MAPE {:.1f} % before, {:.1f} % after\n", 100 * before,
             100 * mape(score(in.clusters, in.samples)));
  return ok_status();
}

// The coordinator's choice for a 70B-like model on hosts whose memory rules
// most meshes out, in processor time, because the machine may be busy.
Status time_placement() {
  constexpr int kHosts = 128, kSlots = 8, kRounds = 20;
  const struct {
    const char* hosts;
    std::function<int(int)> gib;
  } kCases[] = {{"128 GiB each", [](int) { return 128; }},
                {"8 with 16 GiB", [](int i) { return i < 8 ? 16 : 128; }},
                {"24 GiB each: too little", [](int) { return 24; }},
                {"16 to 270 GiB", [](int i) { return 16 + 2 * i; }}};
  fmt::print("\nmesh for {} slots of {} hosts\n", kHosts * kSlots, kHosts);
  for (const auto& c : kCases) {
    planner::PlacementRequest q{.microbatches = 1024};
    planner::JobShape s;
    s.model = geometry::llama(8192, 80, 64, 8, 28672, 128256);
    s.T = 2048;
    s.microbatches = q.microbatches;
    s.zero_stage = 1;
    q.shape = s;
    for (int i = 0; i < kHosts; ++i)
      q.workers.push_back(
          {.worker = fmt::format("host{}", i),
           .host = fmt::format("host{}", i),
           .slots = kSlots,
           .cores = kSlots,
           .memory_bytes = static_cast<uint64_t>(c.gib(i)) << 30});
    std::string mesh;
    const std::clock_t start = std::clock();
    for (int i = 0; i < kRounds; ++i) {
      const auto p = planner::place_mesh(q);
      mesh = p.ok() ? p->layout.to_string() : "none";
    }
    fmt::print("{:<24} {:>6.1f} ms  {}\n", c.hosts,
               1e3 * static_cast<double>(std::clock() - start) /
                   CLOCKS_PER_SEC / kRounds,
               mesh);
  }
  return ok_status();
}

Status time_searches(const Options& o) {
  constexpr struct {
    const char *model, *cluster;
    int64_t devices, global_batch;
  } kCases[] = {{"llama3-405b", "h100", 512, 512},
                {"llama3-405b", "h100", 16384, 2048},
                {"megatron-1t", "a100-80", 3072, 3072},
                {"frontier-1t", "frontier", 3072, 1536}};
  fmt::print("{:<12} {:<9} {:>7} {:>8} {:>7} {:>8} {:>8} {:>10} {:>11}\n",
             "model", "cluster", "devices", "time", "meshes", "plans", "fit",
             "simulated", "of plans");
  for (const auto& c : kCases) {
    pb::Cluster cluster;
    RETURN_IF_ERROR(jobfile::load_description(
        fmt::format("{}/{}.toml", o.clusters, c.cluster), &cluster));
    pb::ModelFile file;
    RETURN_IF_ERROR(jobfile::load_description(
        fmt::format("{}/models/{}.toml", REMESH_DEPLOY, c.model), &file));
    planner::SearchRequest q;
    q.machine = planner::machine_of(cluster);
    ASSIGN_OR_RETURN(q.model, planner::model_of(file));
    q.T = file.model().seq_len();
    q.global_batch = c.global_batch;
    q.devices = c.devices;
    q.run = {.overlap_tensor = true, .overlap_pipeline = true};
    const int64_t start = monotonic_ms();
    ASSIGN_OR_RETURN(const planner::SearchResult r, search_layouts(q));
    const double seconds = static_cast<double>(monotonic_ms() - start) / 1e3;
    fmt::print(
        "{:<12} {:<9} {:>7} {:>6.2f} s {:>7} {:>8} {:>8} {:>10} {:>9.3f} %  "
        "{}\n",
        c.model, c.cluster, c.devices, seconds, r.meshes, r.considered,
        r.fitting, r.simulated,
        100.0 * static_cast<double>(r.simulated) /
            static_cast<double>(r.considered),
        r.plans[0].settings());
  }
  return time_placement();
}

void add_choice_verbs(CLI::App* app, ChoiceOptions* o,
                      std::function<int()>* action) {
  const auto verb = [&](const char* name, const char* help,
                        int (*f)(const ChoiceOptions&)) {
    CLI::App* sub = app->add_subcommand(name, help);
    sub->add_option("--model", o->model, "15m, 42m or 110m")
        ->capture_default_str()
        ->check(CLI::IsMember({"15m", "42m", "110m"}));
    add_number(*sub, "--ranks", o->ranks, "Ranks at most", 2, 64);
    add_number(*sub, "--batch", o->batch, "Sequences of a step", 2, 65536);
    add_number(*sub, "--seq", o->seq, "Tokens of a sequence", 1, 1 << 20);
    add_number(*sub, "--steps", o->steps,
               "Steps of a run, the first two of which do not count", 4, 10000);
    add_number(*sub, "--rounds", o->rounds, "Runs of a setting", 1, 1000);
    sub->add_flag("--smoke", o->smoke, "Everything tiny; no target is judged");
    sub->callback([=] { *action = [=] { return f(*o); }; });
    return sub;
  };
  CLI::App* local =
      verb("local", "random settings on this machine, predicted and measured",
           compare_layouts);
  add_number(*local, "--layouts", o->layouts, "Settings to draw", 1, 1000);
  local->add_option("--seed", o->seed, "Of the draw")->capture_default_str();
  verb("hosts",
       "the choice for one host and for two with a slow link, measured on both",
       compare_hosts);
  verb("tune", "`remesh tune` against a sweep of all settings", compare_tuner)
      ->add_option("--fix", o->fixed, "Knobs that do not vary")
      ->delimiter(',')
      ->capture_default_str();
}

int run(int argc, char** argv) {
  Options o;
  CLI::App app("The planner's predictions beside measured training runs.");
  app.add_option("--clusters", o.clusters, "folder of cluster descriptions");
  app.require_subcommand(1);
  std::function<int()> action;
  const auto verb = [&](const char* name, const char* help,
                        Status (*f)(const Options&), bool files = true) {
    CLI::App* sub = app.add_subcommand(name, help);
    if (files) sub->add_option("files", o.files, "CSV files")->required();
    sub->callback([&, f] {
      action = [&, f] {
        const Status s = f(o);
        if (!s.ok()) fmt::print(stderr, "{}\n", s.message());
        return exit_code_of(s);
      };
    });
    return sub;
  };
  verb("validate", "errors by device and source", validate);
  verb("rows", "each row with its prediction", print_rows);
  verb("fit", "fits the constants of the clusters", fit_clusters)
      ->add_flag("--write", o.write, "write them into the descriptions");
  verb("search", "time of large searches", time_searches, /*files=*/false);
  ChoiceOptions choice;
  add_choice_verbs(&app, &choice, &action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  return action();
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) { return remesh::bench::run(argc, argv); }
