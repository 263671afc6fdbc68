#include "tests/soak/soak.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>

#include "proto/base/clock.h"

namespace remesh::soak {
namespace {

constexpr int64_t kPatienceMs = 60'000;
// How long the disk stays full while a worker is to leave.
constexpr int64_t kFullDiskMs = 10'000;
// How long to wait for a change of mesh that may not happen.
constexpr int64_t kPerhapsMs = 600;
constexpr int64_t kDiskBytes = 48 << 20;
constexpr int64_t kRunDiskBytes = int64_t{1} << 30;
constexpr int64_t kLastSteps = 20;  // after the stop
constexpr int kReportEvery = 25;    // faults
// Up to this many steps without a fault.
constexpr uint64_t kCalmSteps = 9;
// One in this many faults hits the recovery from the previous one.
constexpr uint64_t kPileUp = 6;
constexpr uint64_t kPileUpMs = 700;

int64_t resident_kib(int pid) {
  const std::string text =
      testing::read_whole(fmt::format("/proc/{}/status", pid));
  const size_t at = text.find("VmRSS:");
  return at == std::string::npos ? -1 : std::atoll(text.c_str() + at + 6);
}

int64_t open_files(int pid) {
  std::error_code ignored;
  return std::distance(std::filesystem::directory_iterator(
                           fmt::format("/proc/{}/fd", pid), ignored),
                       {});
}

}  // namespace

testing::Settings job_settings(const Options& o, const std::string& disk) {
  testing::Settings s = {
      {"train.steps", "100000000"},
      {"train.digest", "true"},
      {"train.eval_sequences", "64"},
      {"parallel.zero_stage", std::to_string(o.zero_stage)},
      {"elastic.dead_after_ms", std::to_string(kDeadAfterMs)},
      {"elastic.hang_after_s", "3"},
      {"elastic.max_same_failures", "1000"},
      {"elastic.max_failures_without_progress", "10000"},
      {"checkpoint.interval", "40"}};
  if (!disk.empty()) s["checkpoint.folder"] = "\"" + disk + "\"";
  if (!o.keep_mesh) return s;
  s["elastic.min_slots"] = std::to_string(kKeptSlots);
  s["elastic.max_slots"] = std::to_string(kKeptSlots);
  return s;
}

Soak::Soak(const std::string& data_path, const Options& options)
    : options_(options),
      data_path_(data_path),
      cluster_(data_path, {}),
      disk_(cluster_.folder() + "/disk", kDiskBytes),
      random_(options.seed) {
  if (options_.hosts > 0) {
    auto network = testing::Network::make(options_.hosts + 1);
    if (network.ok()) {
      network_ = std::move(*network);
      cluster_.run_commands_with(network_->on(0));
    } else {
      no_network_ = network.status().message();
    }
    std::filesystem::create_directories(cluster_.run_dir());
    run_disk_ =
        std::make_unique<testing::SmallDisk>(cluster_.run_dir(), kRunDiskBytes);
  }
  write_job({});
}

void Soak::write_job(const testing::Settings& more) {
  testing::Settings s =
      job_settings(options_, disk_.mounted() ? disk_.path() : "");
  for (const auto& [key, value] : more) s[key] = value;
  testing::write_whole(cluster_.job_file(), testing::tiny_job(data_path_, s));
}

bool Soak::fail(const std::string& why) {
  fmt::print(stderr, "soak, seed {}, after {} faults (the last: {}): {}\n{}\n",
             options_.seed, faults_.size(),
             faults_.empty() ? "none" : name_of(faults_.back().kind), why,
             cluster_.describe());
  return false;
}

bool Soak::run() {
  if (!start()) return false;
  const double begin = unix_seconds();
  for (int i = 1; i <= options_.faults; ++i) {
    if (!one_fault(i)) return false;
    if (i % kReportEvery != 0 && i != options_.faults) continue;
    fmt::print("{:>5} faults, {:>4.0f} s: step {}, generation {}\n", i,
               unix_seconds() - begin, cluster_.last_step(),
               cluster_.generation());
    std::fflush(stdout);
  }
  const bool ok = finish();
  note_recoveries();
  return ok;
}

bool Soak::start() {
  start_coordinator();
  while (live_.size() < std::min<size_t>(kKeptSlots + 1, most_workers()))
    start_worker(new_name());
  if (!cluster_.wait_for_step(5, kPatienceMs)) return fail("no step finished");
  return whole_again();
}

bool Soak::one_fault(int number) {
  Waiting wait{.generation = cluster_.generation(),
               .step = cluster_.last_step()};
  const double time = unix_seconds();
  Kind kind = pick(number);
  while (!inject(kind, &wait)) kind = pick(number);
  faults_.push_back({.kind = kind,
                     .time = time,
                     .generation = wait.generation,
                     .alone = alone_,
                     .measured = wait.change != Waiting::Change::kNone});
  const bool last = number == options_.faults;
  alone_ = last || random(kPileUp) != 0;
  if (!alone_) {
    testing::sleep_ms(static_cast<int64_t>(random(kPileUpMs)));
    return true;
  }
  if (!settle(wait)) return false;
  faults_.back().settled = unix_seconds();
  if (disk_full_for_ > 0 && --disk_full_for_ == 0) disk_.free();
  if (network_bad_for_ > 0 && --network_bad_for_ == 0) repair_network();
  note_resident(number);
  refill();
  const auto calm = static_cast<int64_t>(random(kCalmSteps));
  return cluster_.wait_for_step(cluster_.last_step() + calm, kPatienceMs) ||
         fail("no further step");
}

bool Soak::settle(const Waiting& wait) {
  const auto changed = [&] { return cluster_.generation() > wait.generation; };
  if (wait.change != Waiting::Change::kNone &&
      !testing::wait_until(changed, wait.change == Waiting::Change::kSure
                                        ? kPatienceMs
                                        : kPerhapsMs) &&
      wait.change == Waiting::Change::kSure)
    return fail("no step of a new generation");
  for (const std::string& name : stopped_) cluster_.worker(name).kill(SIGCONT);
  stopped_.clear();
  for (const std::string& name : leaving_) {
    // It stays as long as it alone holds a state that cannot be saved.
    if (disk_full_for_ > 0 && !cluster_.worker(name).wait_ms(kFullDiskMs)) {
      disk_.free();
      disk_full_for_ = 0;
    }
    if (!cluster_.worker(name).wait_ms(kPatienceMs))
      return fail("worker " + name + " did not leave");
    if (cluster_.worker(name).exit().code != 0)
      return fail("worker " + name + " left with an error");
    hosts_.erase(name);
  }
  leaving_.clear();
  if (!cluster_.wait_for_step(wait.step + 1, kPatienceMs))
    return fail("no further step");
  return whole_again();
}

// The coordinator answers, and the newest generation has finished some steps.
bool Soak::whole_again() {
  const testing::Json s = cluster_.wait_for_status(
      [&](const testing::Json& j) {
        return j.value("state", "") == "running" &&
               j.value("generation", int64_t{-1}) == cluster_.generation();
      },
      kPatienceMs);
  if (s.is_null()) return fail("the job is not running again");
  if (!cluster_.wait_for_step(cluster_.last_step() + 2, kPatienceMs))
    return fail("no further step");
  hosts_lost_ = 0;
  if (!windows_.empty() && windows_.back().to < 0)
    windows_.back().to = unix_seconds();
  return true;
}

// Starts as many workers as the next faults need.
void Soak::refill() {
  while (live_.size() < std::min<size_t>(kKeptSlots + 1, most_workers())) {
    if (!options_.keep_mesh && live_.size() >= least_workers() &&
        random(2) == 0)
      return;
    start_worker(new_name());
  }
}

// Stops the job, resumes it from its checkpoint and trains to its end.
bool Soak::finish() {
  disk_.free();
  repair_network();
  const auto stop = cluster_.remesh({"stop", cluster_.run_dir()}, kPatienceMs);
  if (stop.exit.code != 0) return fail("stop: " + stop.output);
  const auto ended = [&] {
    if (!cluster_.coordinator().wait_ms(kPatienceMs))
      return fail("the coordinator did not exit");
    if (cluster_.coordinator().exit().code != 0)
      return fail("the coordinator exited with an error");
    for (const std::string& name : live_)
      if (!cluster_.worker(name).wait_ms(kPatienceMs))
        return fail("worker " + name + " did not exit");
    live_.clear();
    return true;
  };
  if (!ended()) return false;
  last_step_ = cluster_.last_step() + kLastSteps;
  write_job({{"train.steps", std::to_string(last_step_)}});
  start_coordinator({"--resume"});
  hosts_.clear();
  for (int i = 0; i < kKeptSlots; ++i) start_worker(new_name());
  if (!ended()) return false;
  return cluster_.last_step() == last_step_ || fail("the last step is missing");
}

// ---------------------------------------------------------------- figures

void Soak::note_resident(int number) {
  const auto note = [&](const std::string& name, int pid) {
    const int64_t kib = resident_kib(pid);
    if (kib <= 0) return;
    Resident& r = residents_[pid];
    const int64_t files = open_files(pid);
    if (r.first == 0)
      r = {.name = name,
           .first_fault = number,
           .first_generation = cluster_.generation(),
           .first = kib,
           .first_files = files};
    r.last_files = files;
    r.last_fault = number;
    r.last_generation = cluster_.generation();
    r.last = kib;
    r.most = std::max(r.most, kib);
  };
  note("coordinator", cluster_.coordinator().pid());
  for (const std::string& name : live_) note(name, cluster_.worker(name).pid());
}

void Soak::note_recoveries() {
  const auto& metrics = cluster_.metrics();
  for (Fault& f : faults_) {
    if (!f.alone || !f.measured) continue;
    const auto it = std::partition_point(
        metrics.begin(), metrics.end(), [&](const testing::Json& m) {
          return m.value("generation", int64_t{0}) <= f.generation;
        });
    if (it == metrics.end()) continue;
    const double next = it->value("time", 0.0);
    if (next <= f.settled) f.recovery_s = next - f.time;
  }
}

}  // namespace remesh::soak
