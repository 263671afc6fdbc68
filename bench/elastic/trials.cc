#include "bench/elastic/trials.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <regex>

#include "bench/job_settings.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/median.h"
#include "proto/rundir/paths.h"

namespace remesh::bench {

using testing::Json;

namespace {

constexpr int64_t kPatienceMs = 300'000;
// The mesh runs undisturbed this long and for so many steps between faults.
constexpr int64_t kCalmMs = 300;
constexpr int64_t kCalmSteps = 5;
constexpr double kWindowS = 2.0;  // around a coordinator's death
constexpr const char* kLate = "late";

double time_of(const Json& j) { return j.value("time", 0.0); }

// Gaps between successive steps of which the later one finished in [from, to).
std::vector<double> gaps(const std::vector<Json>& metrics, double from,
                         double to) {
  std::vector<double> out;
  for (size_t i = 1; i < metrics.size(); ++i)
    if (time_of(metrics[i]) >= from && time_of(metrics[i]) < to)
      out.push_back(time_of(metrics[i]) - time_of(metrics[i - 1]));
  return out;
}

double largest(const std::vector<double>& v) {
  return v.empty() ? std::nan("") : *std::max_element(v.begin(), v.end());
}

double median_or_none(std::vector<double> v) {
  return v.empty() ? std::nan("") : median(std::move(v));
}

testing::Settings settings_of(const BenchOptions& o) {
  testing::Settings s = {
      {"train.steps", "100000000"},
      {"checkpoint.interval", std::to_string(o.interval)},
      {"parallel.zero_stage", std::to_string(o.zero_stage)},
      {"elastic.hang_after_s", fmt::format("{}", o.hang_after_s)},
      {"elastic.dead_after_ms", std::to_string(o.dead_after_ms)}};
  if (o.model.empty()) return s;
  set_model(o.model, s);
  // Steps that are short for the size: its state is what matters.
  s["train.dtype"] = "\"bf16\"";
  s["train.global_batch_size"] =
      std::to_string(2 * (o.workers + 1));  // a microbatch for each
  return s;
}

}  // namespace

Bench::Bench(const std::string& data_path, const BenchOptions& o)
    : cluster_(data_path, settings_of(o)), workers_(o.workers) {
  if (o.no_auth) cluster_.use_no_keys();
  cluster_.start_coordinator();
  for (int i = 0; i < workers_; ++i) cluster_.start_worker({name_of(i)});
  CHECK_MSG(settle(), "the cluster does not train");
}

Bench::~Bench() {
  (void)cluster_.remesh({"stop", cluster_.run_dir()});
  cluster_.coordinator().wait_ms(10'000);
  for (int i = 0; i < workers_; ++i)
    cluster_.worker(name_of(i)).wait_ms(10'000);
  for (const std::string& left : cluster_.leftovers())
    fmt::print(stderr, "left behind: {}\n", left);
}

std::string Bench::name_of(int index) const {
  return fmt::format("w{}", index % workers_ + 1);
}

// Waits until the full mesh has trained for a while.
bool Bench::settle() {
  const bool ok =
      cluster_.wait_for_dp(workers_, cluster_.last_step(), kPatienceMs) &&
      cluster_.wait_for_step(cluster_.last_step() + kCalmSteps, kPatienceMs);
  testing::sleep_ms(kCalmMs);
  if (!ok || cluster_.metrics().back()["mesh"]["dp"] != workers_) {
    fmt::print(stderr, "the mesh did not recover\n{}\n", cluster_.describe());
    return false;
  }
  return true;
}

// Waits for the first step of a later generation than `generation`.
bool Bench::measure(double fault_time, int64_t generation, Trial* out) {
  size_t at = 0;
  const bool found = testing::wait_until(
      [&] {
        const auto& metrics = cluster_.metrics();
        at = metrics.size();
        while (at > 0 && metrics[at - 1]["generation"] > generation) --at;
        return at < metrics.size();
      },
      kPatienceMs);
  if (!found || at == 0) {
    fmt::print(stderr, "no step after the fault\n{}\n", cluster_.describe());
    return false;
  }
  const auto& metrics = cluster_.metrics();
  const double next = time_of(metrics[at]);
  out->recovery_s = next - fault_time;
  out->pause_s = next - time_of(metrics[at - 1]);
  // Logs are written behind the steps, so that no step waits for them.
  int64_t first = -1;
  if (!testing::wait_until(
          [&] {
            first = first_step_of(metrics[at].value("generation", int64_t{0}));
            return first >= 0;
          },
          kPatienceMs)) {
    fmt::print(stderr, "rank 0 has not logged its first step\n{}\n",
               cluster_.describe());
    return false;
  }
  out->lost_steps = std::max<int64_t>(
      0, metrics[at - 1].value("step", int64_t{0}) + 1 - first);
  double ended = -1;
  for (const Json& e : cluster_.events()) {
    const std::string name = e.value("event", "");
    if (e.value("generation", int64_t{0}) == generation &&
        (name == "failure" || name == "generation_ended"))
      ended = time_of(e);
    if (name == "mesh" && e["generation"] > generation && ended > 0 &&
        out->planned_s < 0) {
      out->noticed_s = ended - fault_time;
      out->planned_s = time_of(e) - ended;
      out->first_step_s = next - time_of(e);
    }
  }
  return true;
}

std::string Bench::log_of_rank_0(int64_t generation) const {
  return testing::read_whole(
      rundir::rank_logs_path(cluster_.run_dir(), generation) + "/rank-0.log");
}

int64_t Bench::first_step_of(int64_t generation) const {
  static const std::regex kStep(
      "trainer: step generation=\\d+ rank=0 step=(\\d+)");
  const std::string log = log_of_rank_0(generation);
  std::smatch match;
  return std::regex_search(log, match, kStep) ? std::stoll(match[1]) : -1;
}

pid_t Bench::some_rank(int trial) {
  std::vector<testing::Cluster::Rank> ranks;
  testing::wait_until(
      [&] {
        ranks = cluster_.ranks();
        return ranks.size() == static_cast<size_t>(workers_);
      },
      kPatienceMs);
  return ranks.empty() ? -1
                       : ranks[static_cast<size_t>(trial) % ranks.size()].pid;
}

std::vector<Fault> Bench::faults() {
  testing::Cluster* const c = &cluster_;
  const auto nothing = [](const Victim&) {};
  const auto command = [=](const char* verb, const std::string& what) {
    (void)c->remesh({verb, what, c->run_dir()});
  };
  const auto restart = [=](const Victim& v) {
    c->worker(v.worker).wait_ms(kPatienceMs);
    c->start_worker({v.worker});
  };
  return {
      {"rank", "rank killed",
       [](Victim& v) { testing::send_signal(v.rank, SIGKILL); }, nothing},
      // Restarted at once, as a service manager does.
      {"worker", "worker killed, back",
       [=](Victim& v) {
         c->worker(v.worker).kill(SIGKILL);
         restart(v);
       },
       nothing},
      {"host", "worker, memory lost",
       [=](Victim& v) { v.time = c->lose_host(v.worker); }, restart},
      {"stopped", "rank SIGSTOPped",
       [](Victim& v) { testing::send_signal(v.rank, SIGSTOP); }, nothing},
      {"silent", "worker SIGSTOPped",
       [=](Victim& v) { c->worker(v.worker).kill(SIGSTOP); },
       [=](const Victim& v) { c->worker(v.worker).kill(SIGCONT); }},
      {"join", "join", [=](Victim&) { c->start_worker({kLate}); },
       [=](const Victim&) {
         c->worker(kLate).kill(SIGTERM);
         c->worker(kLate).wait_ms(kPatienceMs);
       }},
      {"drain", "drain", [=](Victim& v) { command("drain", v.worker); },
       restart},
      // By one slot.
      {"scale", "scale",
       [=, this](Victim&) { command("scale", std::to_string(workers_ - 1)); },
       [=](const Victim&) { command("scale", "all"); }}};
}

bool Bench::run(const Fault& fault, int trial, Trial* out) {
  Victim victim{.worker = name_of(trial), .rank = some_rank(trial)};
  if (victim.rank <= 0) return false;
  const int64_t g = cluster_.generation();
  victim.time = unix_seconds();
  fault.inject(victim);
  const bool ok = measure(victim.time, g, out);
  fault.undo(victim);
  return ok && settle();
}

// Killed and restarted at once, as `remesh run` and systemd do.
bool Bench::coordinator_killed(GapTrial* out) {
  testing::sleep_ms(static_cast<int64_t>(kWindowS * 1000));
  const int64_t g = cluster_.generation();
  const double t = unix_seconds();
  cluster_.coordinator().kill(SIGKILL);
  cluster_.coordinator().wait_ms(kPatienceMs);
  cluster_.start_coordinator();
  testing::sleep_ms(static_cast<int64_t>(kWindowS * 1000));
  const bool heard = testing::wait_until(
      [&] {
        const auto& m = cluster_.metrics();
        return time_of(m.back()) > t + kWindowS;
      },
      kPatienceMs);
  if (!heard || cluster_.generation() != g) {
    fmt::print(stderr, "the coordinator did not adopt the ranks\n{}\n",
               cluster_.describe());
    return false;
  }
  const auto& m = cluster_.metrics();
  out->longest_s = largest(gaps(m, t, t + kWindowS));
  out->longest_before_s = largest(gaps(m, t - kWindowS, t));
  out->median_s = median_or_none(gaps(m, t - kWindowS, t + kWindowS));
  return true;
}

std::string Bench::sequence_error() const {
  return testing::sequence_error(cluster_.metrics());
}

double Bench::median_step_s(double since) const {
  std::vector<double> steps;
  for (const Json& m : cluster_.metrics())
    if (time_of(m) >= since) steps.push_back(m.value("step_s", 0.0));
  return median_or_none(std::move(steps));
}

std::string Bench::start_parts() const {
  const std::string log = log_of_rank_0(cluster_.generation());
  const size_t at = log.find("trainer: started");
  if (at == std::string::npos) return "";
  const size_t begin = log.find("exec_ms", at);
  return begin == std::string::npos
             ? ""
             : log.substr(begin, log.find('\n', begin) - begin);
}

}  // namespace remesh::bench
