#include "bench/planner/choices.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <utility>

#include "bench/job_settings.h"
#include "bench/targets.h"
#include "coordinator/core/job_shape.h"
#include "coordinator/rundir/job_files.h"
#include "parallel/planner/local.h"
#include "parallel/tune/space.h"
#include "proto/base/machine.h"
#include "proto/base/median.h"
#include "tests/testing/network.h"

namespace remesh::bench {
namespace {

using geometry::Layout;
using geometry::ScheduleKind;
using planner::PlacementRequest;
using testing::Cluster;
using testing::Json;
using testing::Network;
using Strings = std::vector<std::string>;

constexpr double kLinkGbPerS = 0.125;  // of emulated hosts
constexpr const char* kTinyModel = "tiny";

testing::Settings job_of(const ChoiceOptions& o,
                         const testing::Settings& more) {
  testing::Settings s = {{"train.steps", "1000000"},
                         {"train.seq_len", std::to_string(o.seq)},
                         {"train.local_batch_size", "2"},
                         {"train.global_batch_size", std::to_string(o.batch)},
                         {"train.dtype", "\"bf16\""},
                         {"checkpoint.interval", "0"}};
  if (o.model != kTinyModel) set_model(o.model, s);
  for (const auto& [key, value] : more) s[key] = value;
  return s;
}

struct Run {
  std::string name;
  std::function<Result<double>()> step_s;
};
struct Measured {
  double step_s = 0;  // median of the rounds
  double spread = 0;  // between the extremes, as a share
};

// Short runs of one job with different settings, each on a cluster of its own.
class Runs {
 public:
  explicit Runs(const ChoiceOptions& o, const testing::Settings& more = {})
      : options_(o), job_(job_of(o, more)), home_(data_.path(), job_) {}

  // `remesh ARGS --json` on this machine as it was measured.
  Result<Json> remesh(Strings args) {
    constexpr int64_t kPatienceMs = 24 * 3'600'000;
    args.emplace_back("--json");
    const testing::Finished f = home_.remesh(args, kPatienceMs);
    Json json = Json::parse(f.output, nullptr, /*allow_exceptions=*/false);
    if (f.exit.code == 0 && json.is_object()) return json;
    return internal(fmt::format("remesh {}: {}", args.front(), f.output));
  }
  std::string job_file() const { return home_.job_file(); }
  std::string folder() const { return home_.folder(); }

  // What the coordinator would ask of the planner for so many hosts that divide
  // the ranks and the cores of this machine, which is measured first.
  Result<PlacementRequest> request(int hosts) {
    const Strings measure = {"plan", "measure", "--network",
                             fmt::format("{}", kLinkGbPerS)};
    if (file_.empty()) {
      ASSIGN_OR_RETURN(const Json measured, remesh(measure));
      file_ = measured.value("file", "");
    }
    pb::Cluster cluster;
    RETURN_IF_ERROR(jobfile::load_description(file_, &cluster));
    ASSIGN_OR_RETURN(const pb::Job job,
                     rundir::load_resolved({.file = job_file(), .set = {}}));
    PlacementRequest q = core::placement_request(job, core::shape_of(job));
    if (!q.shape) return internal("the job has no model");
    q.shape->bf16 = q.shape->bf16 && processor_has_bf16();
    q.core = planner::machine_of(cluster);
    for (int h = 0; h < hosts; ++h)
      q.workers.push_back(
          {.worker = fmt::format("w{}", h),
           .host = fmt::format("host{}", h),
           .slots = options_.ranks / hosts,
           .cores = usable_cores() / hosts,
           .memory_bytes = usable_memory() / static_cast<uint64_t>(hosts)});
    planner::match_hosts(&q);
    return q;
  }

  // With overrides like "train.recompute=full", which give all degrees. The
  // ranks are workers of this machine.
  Run here(const std::string& name, const Strings& set) const {
    int ranks = 1;
    for (const std::string& s : set)
      if (s.find("_parallel_degree=") != s.npos)
        ranks *= std::stoi(s.substr(s.find('=') + 1));
    return {name, [=, this]() -> Result<double> {
              Cluster c(data_.path(), with(set));
              return step_s(c, c.start_run(ranks));
            }};
  }

  // On hosts that divide the ranks and the cores of this machine.
  Run on_hosts(const Layout& l, const Strings& set, int hosts) const {
    return {fmt::format("{} on {}", l.to_string(), hosts),
            [=, this]() -> Result<double> {
              // Host 0 has the coordinator.
              ASSIGN_OR_RETURN(const auto network, Network::make(hosts + 1));
              Cluster c(data_.path(), with(set));
              c.use_no_keys();
              c.start_coordinator({"--bind", "tcp://0.0.0.0:5710",
                                   "--advertise", Network::address(0)},
                                  network->on(0));
              for (int h = 1; h <= hosts; ++h)
                RETURN_IF_ERROR(start_worker(c, *network, h, hosts));
              return step_s(c, c.coordinator());
            }};
  }

  // In each round every run has its turn. Reports each on stderr.
  Result<std::vector<Measured>> measure(const std::vector<Run>& runs) const {
    std::vector<std::vector<double>> samples(runs.size());
    for (int round = 1; round <= options_.rounds; ++round)
      for (size_t i = 0; i < runs.size(); ++i) {
        const auto s = runs[i].step_s();
        if (!s.ok()) return s.status().with_context(runs[i].name);
        fmt::print(stderr, "round {} of {}: {}: {:.3f} s\n", round,
                   options_.rounds, runs[i].name, *s);
        samples[i].push_back(*s);
      }
    std::vector<Measured> out;
    for (const std::vector<double>& s : samples)
      out.push_back({median(s), (median(s, 1) - median(s, 0)) / median(s)});
    return out;
  }

 private:
  testing::Settings with(const Strings& set) const {
    testing::Settings out = job_;
    for (const std::string& s : set) {
      const std::string value = s.substr(s.find('=') + 1);
      const bool is_name = value.find_first_not_of("0123456789[]") != s.npos;
      out[s.substr(0, s.find('='))] = is_name ? "\"" + value + "\"" : value;
    }
    return out;
  }

  Status start_worker(Cluster& c, Network& network, int host, int hosts) const {
    RETURN_IF_ERROR(
        network.set_rate(host, static_cast<int64_t>(kLinkGbPerS * 8e9)));
    const std::vector<int> cpus = allowed_cpus();
    const auto share = static_cast<std::ptrdiff_t>(cpus.size()) / hosts;
    const auto first = cpus.begin() + share * (host - 1);
    Strings prefix = network.on(host);
    prefix.insert(prefix.end(),
                  {"taskset", "--cpu-list",
                   fmt::format("{}", fmt::join(first, first + share, ","))});
    c.start_worker({.name = fmt::format("w{}", host),
                    .slots = options_.ranks / hosts,
                    .more = {"--interface", "10.77.0.0/24", "--host-name",
                             fmt::format("host{}", host)},
                    .prefix = std::move(prefix),
                    .connect = "tcp://" + Network::address(0) + ":5710"});
    return ok_status();
  }

  // The median step; the cluster ends with it.
  Result<double> step_s(Cluster& c, testing::Process& run) const {
    constexpr int64_t kPatienceMs = 300'000;
    constexpr int kUncounted = 2;  // they allocate memory
    testing::wait_until(
        [&] { return c.last_step() >= options_.steps || !run.running(); },
        kPatienceMs);
    std::vector<double> steps;
    for (const Json& m : c.metrics())
      if (m.value("step", 0) > kUncounted)
        steps.push_back(m.value("step_s", 0.0));
    if (c.last_step() >= options_.steps) return median(std::move(steps));
    return unavailable(
        fmt::format("did not make {} steps\n{}", options_.steps, c.describe()));
  }

  const ChoiceOptions options_;
  const testing::TinyData data_;
  const testing::Settings job_;
  Cluster home_;      // of what is no run
  std::string file_;  // describes this machine
};

struct Choice {
  tune::Setting setting;
  ScheduleKind schedule = ScheduleKind::k1F1B;
  double predicted_s = 0;

  std::string text() const {
    return setting.layout.pp == 1
               ? setting.text()
               : setting.text() + ", " + geometry::schedule_name(schedule);
  }
};

// All that the job admits, with one thread for each rank.
Result<std::vector<Choice>> all_choices(const PlacementRequest& place) {
  std::vector<Choice> out;
  for (const ScheduleKind kind :
       {ScheduleKind::k1F1B, ScheduleKind::kGpipe,
        ScheduleKind::kInterleaved1F1B, ScheduleKind::kZbH1}) {
    tune::SpaceRequest request{.place = place,
                               .threads = 1,
                               .fixed = {"threads"},
                               .most = std::numeric_limits<size_t>::max()};
    request.place.shape->schedule = kind;
    request.place.shape->chunks = geometry::traits_of(kind).interleaved ? 2 : 1;
    ASSIGN_OR_RETURN(const tune::Space space, make_space(request));
    for (size_t i = 0; i < space.settings.size(); ++i)
      if (space.settings[i].layout.pp > 1 || kind == ScheduleKind::k1F1B)
        out.push_back(
            {space.settings[i], kind, space.candidates[i].predicted_s});
  }
  return out;
}

// So many, of different meshes as far as there are some. Which ones does not
// depend on their predictions.
std::vector<Choice> draw(std::vector<Choice> all, int n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::ranges::sort(all, {}, &Choice::text);
  std::shuffle(all.begin(), all.end(), random);
  std::map<std::string, int> drawn;
  std::multimap<int, Choice> by_turn;
  for (const Choice& c : all)
    by_turn.emplace(drawn[c.setting.layout.to_string()]++, c);
  std::vector<Choice> out;
  for (const auto& [turn, c] : by_turn)
    if (static_cast<int>(out.size()) < n) out.push_back(c);
  return out;
}

Result<int> layouts(const ChoiceOptions& o) {
  Runs runs(o);
  ASSIGN_OR_RETURN(const PlacementRequest place, runs.request(1));
  ASSIGN_OR_RETURN(const std::vector<Choice> all, all_choices(place));
  std::vector<Choice> rows = draw(all, o.layouts, o.seed);
  const size_t n = rows.size();
  rows.push_back(*std::min_element(all.begin(), all.end(),
                                   [](const Choice& a, const Choice& b) {
                                     return a.predicted_s < b.predicted_s;
                                   }));
  std::vector<Run> each;
  for (const Choice& c : rows) {
    const auto& traits = geometry::traits_of(c.schedule);
    Strings set = c.setting.overrides();
    set.push_back(fmt::format("parallel.pipeline_schedule={}", traits.name));
    set.push_back(
        fmt::format("parallel.pipeline_chunks={}", traits.interleaved ? 2 : 1));
    each.push_back(runs.here(c.text(), set));
  }
  ASSIGN_OR_RETURN(const auto measured, runs.measure(each));

  fmt::print("\n{}: {} of {} settings, drawn with seed {}, on {} cores\n",
             o.model, n, all.size(), o.seed, usable_cores());
  if (o.ranks > usable_cores())
    fmt::print(
        "note: up to {} ranks share them; for the predictions each has an "
        "equal share of a core, busy or not\n",
        o.ranks);
  fmt::print("{:>9} {:>9} {:>7} {:>7}\n", "predicted", "measured", "error",
             "spread");
  double errors = 0, best_s = INFINITY;
  for (size_t i = 0; i < rows.size(); ++i) {
    const double error = rows[i].predicted_s / measured[i].step_s - 1;
    if (i < n) errors += std::abs(error) / static_cast<double>(n);
    best_s = std::min(best_s, measured[i].step_s);
    fmt::print("{:>7.3f} s {:>7.3f} s {:>+5.1f} % {:>5.1f} %  {}{}\n",
               rows[i].predicted_s, measured[i].step_s, 100 * error,
               100 * measured[i].spread, i < n ? "" : "choice: ", each[i].name);
  }
  const double slower = measured[n].step_s / best_s - 1;
  Targets targets(o.smoke);
  targets.at_most("MAPE of the predictions", 0.15, errors);
  targets.at_most("choice: slower than the best measured, share", 0.05, slower);
  const int code = targets.report();
  fmt::print("\nMAPE {:.1f} % of {} layouts\n", 100 * errors, n);
  fmt::print("choice within {:.1f} % of the best measured\n", 100 * slower);
  return code;
}

// A stage has no copy on the other host, where a data-parallel rank is one:
// replicas of it would cost more on this link than what is compared.
Result<int> hosts(const ChoiceOptions& o) {
  const Status made = Network::make(1).status();
  if (!made.ok() || usable_cores() < 2) {
    fmt::print("hosts: skipped: {}\n",
               made.ok() ? "needs two cores" : made.message());
    return o.smoke ? 0 : kExitFailed;
  }
  if (o.ranks % 2 != 0) return invalid_argument("--ranks must be even");
  testing::Settings job = {{"elastic.replicate_every", "0"},
                           {"elastic.min_slots", std::to_string(o.ranks)}};
  for (const char* axis : {"data", "tensor", "pipeline", "context"})
    job[fmt::format("parallel.{}_parallel_degree", axis)] = "-1";
  Runs runs(o, job);
  std::vector<PlacementRequest> places;  // on one host, on two
  std::vector<Layout> chosen;
  for (const int n : {1, 2}) {
    ASSIGN_OR_RETURN(places.emplace_back(), runs.request(n));
    ASSIGN_OR_RETURN(const planner::Placement p, place_mesh(places.back()));
    chosen.push_back(p.layout);
  }
  std::vector<Run> each;
  for (const int n : {1, 2})
    for (const Layout& l : chosen) {
      const tune::Setting s{.layout = l, .B = places[0].shape->B};
      each.push_back(runs.on_hosts(l, s.overrides(), n));
    }
  ASSIGN_OR_RETURN(const auto measured, runs.measure(each));

  fmt::print("\n{}: {} ranks on {} cores\n{:>9} {:>9} {:>7}\n", o.model,
             o.ranks, usable_cores(), "predicted", "measured", "spread");
  for (size_t i = 0; i < each.size(); ++i) {
    const size_t n = i / 2, mesh = i % 2;
    fmt::print("{:>7.3f} s {:>7.3f} s {:>5.1f} %  {}{}\n",
               planner::predict_step(places[n], chosen[mesh]).total_s,
               measured[i].step_s, 100 * measured[i].spread, each[i].name,
               n == mesh ? ": choice" : "");
  }
  const bool changes = chosen[0] != chosen[1];
  // The time of a choice over that of the other one.
  const double one = measured[0].step_s / measured[1].step_s;
  const double two = measured[3].step_s / measured[2].step_s;
  Targets targets(o.smoke);
  targets.at_least("meshes that are chosen", 2, changes ? 2 : 1);
  targets.at_most("one host: time of its choice over the other's", 1, one);
  targets.at_most("two hosts: time of their choice over the other's", 1, two);
  const int code = targets.report();
  fmt::print("\nthe choice {}; measured, it is {} on one host and {} on two\n",
             changes ? fmt::format("changes from {} to {}",
                                   chosen[0].to_string(), chosen[1].to_string())
                     : "does not change: " + chosen[0].to_string(),
             one < 1 ? "better" : "worse", two < 1 ? "better" : "worse");
  return code;
}

// The trials of `remesh tune`, the fastest first; those that failed last.
Result<std::vector<Json>> tune(const ChoiceOptions& o, Runs& runs,
                               const std::string& name, const Strings& more) {
  Strings args = {"tune",    runs.job_file(),
                  "--local", std::to_string(o.ranks),
                  "--steps", std::to_string(o.steps),
                  "--out",   runs.folder() + "/" + name};
  for (const std::string& knob : o.fixed)
    args.insert(args.end(), {"--fix", knob});
  args.insert(args.end(), more.begin(), more.end());
  fmt::print(stderr, "{} ...\n", name);
  ASSIGN_OR_RETURN(const Json tuned, runs.remesh(std::move(args)));
  auto trials = tuned["trials"].get<std::vector<Json>>();
  const auto step_s = [](const Json& t) {
    return t.value("step_s", double{INFINITY});
  };
  std::sort(trials.begin(), trials.end(), [&](const Json& a, const Json& b) {
    return step_s(a) < step_s(b);
  });
  return trials;
}

// The tuner learns nothing from the sweep. What each found is measured again:
// of the sweep several, because the fastest of many was in part the luckiest.
Result<int> tuner(const ChoiceOptions& o) {
  constexpr size_t kAgain = 3, kShare = 4;
  Runs runs(o);
  RETURN_IF_ERROR(runs.request(1).status());  // measures the machine
  ASSIGN_OR_RETURN(const auto sweep, tune(o, runs, "sweep", {"--every"}));
  const size_t most = std::max<size_t>(1, sweep.size() / kShare);
  ASSIGN_OR_RETURN(const auto tuned,
                   tune(o, runs, "tuner", {"--trials", std::to_string(most)}));
  std::vector<Json> found = {tuned[0]};
  for (size_t i = 0; i < std::min(kAgain, sweep.size()); ++i)
    if (sweep[i].contains("step_s")) found.push_back(sweep[i]);
  std::vector<Run> each;
  for (const Json& t : found)
    each.push_back(
        runs.here(t.value("setting", ""), t.value("set", Strings())));
  ASSIGN_OR_RETURN(const auto measured, runs.measure(each));

  fmt::print("\n{}: up to {} ranks on {} cores\n{:>9} {:>9} {:>7}\n", o.model,
             o.ranks, usable_cores(), "trial", "again", "spread");
  double best_s = INFINITY;
  for (size_t i = 0; i < found.size(); ++i) {
    if (i > 0) best_s = std::min(best_s, measured[i].step_s);
    fmt::print("{:>7.3f} s {:>7.3f} s {:>5.1f} %  {}: {}\n",
               found[i].value("step_s", 0.0), measured[i].step_s,
               100 * measured[i].spread, i == 0 ? "tuner" : "sweep",
               each[i].name);
  }
  const double slower = measured[0].step_s / best_s - 1;
  Targets targets(o.smoke);
  targets.require("the tuner makes no more trials than it may",
                  tuned.size() <= most);
  targets.at_most("tuner: slower than the best of the sweep, share", 0.03,
                  slower);
  const int code = targets.report();
  fmt::print(
      "\ntuner within {:.1f} % of the best of a sweep, with {} of its {} "
      "trials\n",
      100 * slower, tuned.size(), sweep.size());
  return code;
}

int finish(const char* verb, Result<int> (*compare)(const ChoiceOptions&),
           ChoiceOptions o) {
  if (o.smoke)  // what CTest runs
    o = {.model = kTinyModel,
         .seq = 32,
         .ranks = 2,
         .steps = 4,
         .rounds = 1,
         .layouts = 3,
         .fixed = {"threads", "cp", "recompute", "zero", "micro-batch"},
         .smoke = true};
  const Result<int> code = compare(o);
  return code.ok() ? *code : failed(verb, code.status().message());
}

}  // namespace

int compare_layouts(const ChoiceOptions& o) {
  return finish("local", layouts, o);
}
int compare_hosts(const ChoiceOptions& o) { return finish("hosts", hosts, o); }
int compare_tuner(const ChoiceOptions& o) { return finish("tune", tuner, o); }

}  // namespace remesh::bench
