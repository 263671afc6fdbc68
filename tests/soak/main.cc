// soak: hundreds of random faults over one training run, and checks of what
// must hold after them. See soak.h.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "proto/base/clock.h"
#include "proto/base/median.h"
#include "tests/soak/soak.h"

namespace remesh::soak {
namespace {

constexpr double kMostLossDifference = 0.01;
constexpr int kReferenceSlots = 2;
// 18 MiB. Where a run repeats its data more than a hundred times it learns the
// words by heart, which are random, and its validation loss says little: 3.5 %
// between two runs of 128,000 steps over 180 KiB.
constexpr int kDocuments = 6000;
constexpr int64_t kStepMs = 200;  // upper bound of a step
constexpr int64_t kStartMs = 60'000;
// Of a daemon that lived through this many faults or more...
constexpr int kFewestFaults = 10;
// ... the resident memory may have grown this much.
constexpr double kMostGrowth = 0.15;
constexpr int64_t kMostGrowthKib = 2048;
// ... and that of a worker of one slot this much with each generation: libpmix
// 4.2.2 keeps 5 to 6 KiB of every rank (most of it what it knows of the
// connection) until the worker ends.
constexpr int64_t kMostGrowthKibByGeneration = 8;
// Ranks and generations open and close some.
constexpr int64_t kMostMoreFiles = 24;

double median_or_none(std::vector<double> v) {
  return v.empty() ? -1 : median(std::move(v));
}

void print_faults(const std::vector<Fault>& faults) {
  fmt::print("\n{:<28} {:>6} {:>9} {:>9} {:>9}   seconds to the next step\n",
             "fault", "number", "measured", "median", "worst");
  for (int k = 0; k <= static_cast<int>(Kind::kRunFolderFull); ++k) {
    int number = 0;
    std::vector<double> seconds;
    for (const Fault& f : faults) {
      if (static_cast<int>(f.kind) != k) continue;
      ++number;
      if (f.recovery_s >= 0) seconds.push_back(f.recovery_s);
    }
    fmt::print("{:<28} {:>6} {:>9}", name_of(static_cast<Kind>(k)), number,
               seconds.size());
    if (!seconds.empty())
      fmt::print(" {:>9.3f} {:>9.3f}", median_or_none(seconds),
                 *std::max_element(seconds.begin(), seconds.end()));
    fmt::print("\n");
  }
}

// Returns the problems found.
std::vector<std::string> print_residents(
    const std::map<int, Resident>& residents) {
  std::vector<std::string> errors;
  const Resident* longest[2] = {nullptr, nullptr};  // coordinator, worker
  for (const auto& [pid, r] : residents) {
    const int faults = r.last_fault - r.first_fault;
    if (faults < kFewestFaults) continue;
    const Resident*& l = longest[r.name == "coordinator" ? 0 : 1];
    if (l == nullptr || faults > l->last_fault - l->first_fault) l = &r;
    const int64_t generations = r.last_generation - r.first_generation;
    const auto most =
        static_cast<int64_t>(static_cast<double>(r.first) * (1 + kMostGrowth)) +
        kMostGrowthKib +
        (r.name == "coordinator" ? 0
                                 : kMostGrowthKibByGeneration * generations);
    if (r.last > most)
      errors.push_back(
          fmt::format("resident memory of {} grew from {} to {} KiB over {} "
                      "faults and {} generations",
                      r.name, r.first, r.last, faults, generations));
    if (r.last_files > r.first_files + kMostMoreFiles)
      errors.push_back(fmt::format("{} had {} files open, then {}", r.name,
                                   r.first_files, r.last_files));
  }
  for (const Resident* r : longest)
    if (r != nullptr)
      fmt::print(
          "resident memory of {} over {} faults and {} generations: {} KiB at "
          "first, {} at last, {} at most; open files: {} and {}\n",
          r->name, r->last_fault - r->first_fault,
          r->last_generation - r->first_generation, r->first, r->last, r->most,
          r->first_files, r->last_files);
  return errors;
}

// Trains the same steps without faults. Returns what differs too much.
std::vector<std::string> compare(const Options& o, const std::string& data_path,
                                 testing::Cluster& disturbed, int64_t steps) {
  testing::Settings s = job_settings(o, "");
  s["train.steps"] = std::to_string(steps);
  s["checkpoint.interval"] = "0";
  testing::Cluster calm(data_path, s);
  const double begin = unix_seconds();
  calm.start_run(1,
                 {"--slots-per-worker",
                  std::to_string(o.keep_mesh ? kKeptSlots : kReferenceSlots)});
  if (!calm.run().wait_ms(kStartMs + steps * kStepMs) ||
      calm.run().exit().code != 0)
    return {"the run without faults did not end: " + calm.describe()};
  fmt::print("the same {} steps without a fault: {:.0f} s\n", steps,
             unix_seconds() - begin);
  std::vector<std::string> errors;
  const double a = disturbed.metrics().back().value("val_loss", NAN);
  const double b = calm.metrics().back().value("val_loss", NAN);
  fmt::print(
      "final validation loss: {:.6f} with faults, {:.6f} without: "
      "difference {:.4f} %\n",
      a, b, 100 * std::abs(a / b - 1));
  if (!(std::abs(a / b - 1) <= kMostLossDifference))
    errors.push_back("the final validation losses differ");
  if (o.keep_mesh) {
    const int64_t at = testing::first_difference(disturbed.metric_lines(),
                                                 calm.metric_lines());
    if (at == 0)
      fmt::print("all losses of the {} steps are bit-identical\n", steps);
    else
      errors.push_back(fmt::format("the losses differ from step {}", at));
  }
  for (const std::string& left : calm.leftovers())
    errors.push_back("left behind: " + left);
  return errors;
}

int report(const std::vector<std::string>& errors, const Options& o,
           double seconds) {
  constexpr size_t kShown = 20;
  for (size_t i = 0; i < std::min(kShown, errors.size()); ++i)
    fmt::print("WRONG: {}\n", errors[i]);
  if (errors.size() > kShown)
    fmt::print("WRONG: {} more\n", errors.size() - kShown);
  fmt::print("soak: {} faults, seed {}{}, {:.0f} s: {}\n", o.faults, o.seed,
             o.keep_mesh ? ", --keep-mesh" : "", seconds,
             errors.empty() ? "passed" : "FAILED");
  return errors.empty() ? EXIT_SUCCESS : EXIT_FAILURE;
}

int run(const Options& o) {
  const double begin = unix_seconds();
  const testing::TinyData data(kDocuments);
  fmt::print("soak: seed {}, {} faults, {} ZeRO-{}\n", o.seed, o.faults,
             o.keep_mesh ? "that keep the mesh," : "that change the mesh,",
             o.zero_stage);
  Soak soak(data.path(), o);
  if (!soak.no_network().empty()) return report({soak.no_network()}, o, 0);
  if (!soak.has_small_disk())
    fmt::print("no permission to mount a tmpfs: no full disks\n");
  std::fflush(stdout);
  if (!soak.run()) return report({"training did not continue"}, o, 0);
  testing::Cluster& c = soak.cluster();
  const testing::Findings found =
      testing::check_records(c.metrics(), c.events(), soak.windows());
  std::vector<std::string> errors = found.errors;
  print_faults(soak.faults());
  fmt::print(
      "\n{} steps, each once and in order; {} generations, {} from memory, {} "
      "from a\ncheckpoint; {} finished steps lost, {} of them otherwise than "
      "with two hosts at once\n{} restored states have the digest of their "
      "step\n",
      found.steps, found.generations, found.from_memory, found.from_checkpoint,
      found.lost_steps, found.lost_outside, found.digests);
  for (std::string& e : print_residents(soak.residents()))
    errors.push_back(std::move(e));
  for (const std::string& left : c.leftovers())
    errors.push_back("left behind: " + left);
  std::fflush(stdout);
  for (std::string& e : compare(o, data.path(), c, soak.last_step()))
    errors.push_back(std::move(e));
  return report(errors, o, unix_seconds() - begin);
}

}  // namespace
}  // namespace remesh::soak

int main(int argc, char** argv) {
  CLI::App app("Random faults over a training run of real processes.");
  remesh::soak::Options o;
  o.seed = std::random_device{}();
  app.add_option("--faults", o.faults, "Number of faults")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  app.add_option("--seed", o.seed, "Seed of the faults. Default: random");
  app.add_flag("--keep-mesh", o.keep_mesh,
               "Only faults that keep the mesh; the losses must be "
               "bit-identical to those of a run without faults");
  app.add_option("--zero-stage", o.zero_stage, "parallel.zero_stage")
      ->check(CLI::Range(0, 3))
      ->capture_default_str();
  app.add_option("--hosts", o.hosts,
                 "Run a worker on each of this many hosts, which are network "
                 "namespaces, and let their network fail, too (needs root)")
      ->check(CLI::Range(3, 16));
  CLI11_PARSE(app, argc, argv);
  return remesh::soak::run(o);
}
