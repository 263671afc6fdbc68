#include "tests/testing/cluster.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/rng.h"
#include "tests/testing/leftovers.h"

namespace remesh::testing {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kListenMs = 20'000;
constexpr int64_t kEndMs = 5'000;

// Words drawn by a linear congruential generator: something to learn, and no
// file to ship.
std::string generated_text(int documents) {
  constexpr std::array kWords = {"the",  "whale", "sea",   "ship", "captain",
                                 "said", "and",   "of",    "a",    "to",
                                 "in",   "old",   "white", "boat", "men"};
  std::string out;
  uint64_t x = 1;
  for (int document = 0; document < documents; ++document) {
    for (int i = 0; i < 700; ++i) {
      x = x * 6364136223846793005ULL + 1442695040888963407ULL;
      out += kWords[(x >> 33) % kWords.size()];
      out += i % 12 == 11 ? ".\n" : " ";
    }
    out += "\n<|endoftext|>\n";
  }
  return out;
}

}  // namespace

std::string program(const std::string& name) {
  if (const char* bin = std::getenv("REMESH_BIN"); bin != nullptr)
    return std::string(bin) + "/" + name;
  std::error_code ignored;
  const fs::path self = fs::read_symlink("/proc/self/exe", ignored);
  return (self.parent_path() / name).string();
}

TinyData::TinyData(int documents) : path_(dir_.path() + "/data") {
  write_whole(dir_.path() + "/text.txt", generated_text(documents));
  const Finished f =
      run_program({program("remesh"), "data", "prepare", "--input",
                   dir_.path() + "/text.txt", "--out", path_});
  CHECK(f.exit.code == 0);
}

std::string tiny_job(const std::string& data_path, const Settings& more) {
  Settings all = {{"job.name", "\"tiny\""},
                  {"job.dump_folder", "\"runs\""},  // beside the job file
                  {"model.dim", "64"},
                  {"model.n_layers", "2"},
                  {"model.n_heads", "4"},
                  {"model.n_kv_heads", "2"},
                  {"model.hidden_dim", "128"},
                  {"data.path", "\"" + data_path + "\""},
                  {"train.steps", "60"},
                  {"train.seq_len", "64"},
                  {"train.global_batch_size", "30"},
                  {"train.local_batch_size", "2"},
                  {"train.dtype", "\"fp32\""},
                  {"train.threads", "1"},
                  {"train.eval_sequences", "0"},
                  {"schedule.total_steps", "1000"},
                  {"elastic.join_window_ms", "200"},
                  {"elastic.dead_after_ms", "12000"},
                  {"elastic.hang_after_s", "120"},
                  {"checkpoint.interval", "10"}};
  for (const auto& [key, value] : more) all[key] = value;
  std::string text;
  std::string section;
  for (const auto& [key, value] : all) {  // sorted, so sections are contiguous
    const size_t dot = key.find('.');
    if (key.substr(0, dot) != section) {
      section = key.substr(0, dot);
      text += "[" + section + "]\n";
    }
    text += key.substr(dot + 1) + " = " + value + "\n";
  }
  return text;
}

Cluster::Cluster(const std::string& data_path, const Settings& job)
    : metrics_(run_dir() + "/metrics.jsonl"),
      events_(run_dir() + "/events.jsonl") {
  fs::create_directory(dir_.path() + "/tmp");
  write_whole(job_file(), tiny_job(data_path, job));
}

Cluster::~Cluster() {
  run_.reset();
  workers_.clear();
  former_.clear();
  coordinator_.reset();
  for (const Seen& p : processes_with(dir_.path()))
    testing::send_signal(p.pid, SIGKILL);
  wait_until([&] { return processes_with(dir_.path()).empty(); }, kEndMs);
}

std::vector<std::pair<std::string, std::string>> Cluster::environment() const {
  return {{"TMPDIR", dir_.path() + "/tmp"},
          {"REMESH_SCRATCH", scratch()},
          {"XDG_STATE_HOME", dir_.path() + "/state"}};
}

Process& Cluster::start_run(int local_workers,
                            const std::vector<std::string>& more) {
  std::vector<std::string> argv = {program("remesh"), "run", job_file(),
                                   "--run-dir", run_dir()};
  if (local_workers > 0)
    argv.insert(argv.end(), {"--local", std::to_string(local_workers)});
  argv.insert(argv.end(), more.begin(), more.end());
  if (run_) former_.push_back(std::move(run_));
  run_ = std::make_unique<Process>(
      ProcessOptions{argv, folder() + "/run.out", environment()});
  return *run_;
}

Process& Cluster::start_coordinator(const std::vector<std::string>& more,
                                    const std::vector<std::string>& prefix,
                                    const std::string& program_name) {
  std::vector<std::string> argv = prefix;
  argv.insert(argv.end(),
              {program(program_name), job_file(), "--run-dir", run_dir()});
  argv.insert(argv.end(), more.begin(), more.end());
  if (no_keys_) argv.push_back("--no-auth");
  if (coordinator_) former_.push_back(std::move(coordinator_));
  coordinator_ = std::make_unique<Process>(
      ProcessOptions{argv, folder() + "/coordinator.out", environment()});
  const std::string mine = fmt::format("pid={}", coordinator_->pid());
  wait_until(
      [&] {
        return !coordinator_->running() ||
               read_whole(run_dir() + "/coordinator.addr").find(mine) !=
                   std::string::npos;
      },
      kListenMs);
  return *coordinator_;
}

Process& Cluster::start_worker(const WorkerStart& start) {
  std::vector<std::string> argv = start.prefix;
  argv.insert(argv.end(),
              {program(start.program), "--connect",
               start.connect.empty() ? run_dir() : start.connect, "--slots",
               std::to_string(start.slots), "--name", start.name});
  argv.insert(argv.end(), start.more.begin(), start.more.end());
  if (no_keys_) argv.push_back("--no-auth");
  std::unique_ptr<Process>& slot = workers_[start.name];
  if (slot) former_.push_back(std::move(slot));
  slot = std::make_unique<Process>(ProcessOptions{
      argv, folder() + "/worker-" + start.name + ".out", environment()});
  return *slot;
}

double Cluster::lose_host(const std::string& worker) {
  const std::vector<Rank> all = ranks();
  const double moment = unix_seconds();
  this->worker(worker).kill(SIGKILL);
  for (const Rank& r : all)
    if (r.worker == worker) testing::send_signal(r.pid, SIGKILL);
  this->worker(worker).wait_ms(kEndMs);
  std::error_code ignored;
  fs::remove_all(shared_folder(scratch() + "/" + worker), ignored);
  fs::remove_all(scratch() + "/" + worker, ignored);
  return moment;
}

std::string Cluster::state_folder(const std::string& worker) const {
  return shared_folder(scratch() + "/" + worker) + "/state";
}

Finished Cluster::remesh(const std::vector<std::string>& args,
                         int64_t timeout_ms) {
  // Not in the checkout, whose runs are those of other programs.
  std::vector<std::string> argv = command_prefix_;
  for (const std::string& word : {std::string("env"), std::string("-C"),
                                  folder() + "/tmp", program("remesh")})
    argv.push_back(word);
  argv.insert(argv.end(), args.begin(), args.end());
  return run_program(argv, timeout_ms, environment());
}

// ---------------------------------------------------------------- the files

std::vector<std::string> Cluster::metric_lines() const {
  return split_lines(read_whole(run_dir() + "/metrics.jsonl"));
}

int64_t Cluster::last_step() const {
  const auto& m = metrics();
  return m.empty() ? 0 : m.back().value("step", int64_t{0});
}

int64_t Cluster::generation() const {
  const auto& m = metrics();
  return m.empty() ? 0 : m.back().value("generation", int64_t{0});
}

std::vector<Json> Cluster::events_named(const std::string& name) const {
  std::vector<Json> out;
  for (const Json& e : events())
    if (e.value("event", "") == name) out.push_back(e);
  return out;
}

Json Cluster::status(int tries) {
  for (int i = 0; i < tries; ++i) {
    const Finished f = remesh({"status", run_dir(), "--json"});
    const Json j = Json::parse(f.output, nullptr, /*allow_exceptions=*/false);
    if (f.exit.code == 0 && j.is_object()) return j;
  }
  return nullptr;
}

// ------------------------------------------------------------------ waiting

bool Cluster::wait_for_step(int64_t step, int64_t timeout_ms) {
  return wait_until([&] { return last_step() >= step; }, timeout_ms);
}

bool Cluster::wait_for_event(const std::string& name, size_t count,
                             int64_t timeout_ms) {
  return wait_until([&] { return events_named(name).size() >= count; },
                    timeout_ms);
}

bool Cluster::wait_for_dp(int64_t dp, int64_t after, int64_t timeout_ms) {
  return wait_until(
      [&] {
        const auto& m = metrics();
        return !m.empty() && m.back().value("step", int64_t{0}) > after &&
               m.back()["mesh"].value("dp", int64_t{0}) == dp;
      },
      timeout_ms);
}

Json Cluster::wait_for_status(const std::function<bool(const Json&)>& holds,
                              int64_t timeout_ms) {
  Json found;
  wait_until(
      [&] {
        const Json s = status(1);
        if (s.is_object() && holds(s)) found = s;
        return !found.is_null();
      },
      timeout_ms);
  return found;
}

std::map<int, pid_t> Cluster::rank_pids(size_t ranks, int64_t timeout_ms) {
  std::map<int, pid_t> pids;
  wait_for_status(
      [&](const Json& s) {
        pids.clear();
        for (const Json& w : s["workers"])
          for (const Json& r : w["ranks"])
            if (!r.value("exited", false) && r.value("pid", 0) > 0)
              pids[r.value("rank", -1)] = r.value("pid", 0);
        return pids.size() == ranks && s.value("state", "") == "running";
      },
      timeout_ms);
  return pids;
}

std::vector<Cluster::Rank> Cluster::ranks() {
  std::vector<Rank> out;
  for (const Seen& p : processes_with(dir_.path())) {
    if (p.command.find("remesh-trainer") == std::string::npos) continue;
    for (const auto& [name, process] : workers_)
      if (process->pid() == p.parent) {
        const size_t folder = p.command.find("/g", p.command.find("--spec"));
        out.push_back({p.pid, name,
                       folder == std::string::npos
                           ? 0
                           : std::atoll(p.command.c_str() + folder + 2)});
      }
  }
  return out;
}

// ---------------------------------------------------------------- leftovers

std::vector<std::string> Cluster::worker_folders() const {
  std::set<std::string> names;
  std::error_code ignored;
  for (const auto& e : fs::directory_iterator(scratch(), ignored))
    names.insert(e.path().filename());
  // Local workers have folders named after the run
  // (coordinator/ctl/scratch_names.cc).
  const std::string run = fs::weakly_canonical(run_dir(), ignored);
  for (const Json& e : events_named("worker_joined")) {
    const std::string name = e.value("worker", "");
    names.insert(name);
    names.insert(fmt::format("{}-{:016x}", name, hash64(run)));
  }
  std::vector<std::string> out;
  for (const std::string& name : names) out.push_back(scratch() + "/" + name);
  return out;
}

std::vector<std::string> Cluster::leftovers() {
  std::vector<std::string> out;
  // Processes that are just exiting may need a moment.
  wait_until(
      [&] {
        out.clear();
        for (const Seen& p : processes_with(dir_.path()))
          out.push_back(fmt::format("process {}: {}", p.pid, p.command));
        for (std::string& s : worker_leftovers(worker_folders()))
          out.push_back(std::move(s));
        std::error_code ignored;
        for (const auto& e :
             fs::directory_iterator(dir_.path() + "/tmp", ignored))
          out.push_back(e.path().string());
        return out.empty();
      },
      15'000);
  return out;
}

std::string Cluster::describe() const {
  std::string out = "\n--- events\n";
  out += tail(read_whole(run_dir() + "/events.jsonl"), 25);
  out += "--- metrics\n" + tail(read_whole(run_dir() + "/metrics.jsonl"), 2);
  std::error_code ignored;
  for (const auto& e : fs::directory_iterator(folder(), ignored))
    if (e.path().extension() == ".out")
      out += "--- " + e.path().filename().string() + "\n" +
             tail(read_whole(e.path().string()), 6);
  for (const auto& e : fs::directory_iterator(run_dir() + "/logs", ignored))
    if (e.is_regular_file(ignored))
      out += "--- " + e.path().filename().string() + "\n" +
             tail(read_whole(e.path().string()), 6);
  return out;
}

std::string sequence_error(const std::vector<Json>& metrics) {
  int64_t expected = 1;
  for (const Json& m : metrics) {
    const int64_t step = m.value("step", int64_t{-1});
    if (step != expected)
      return fmt::format("found step {}, expected {}", step, expected);
    ++expected;
  }
  return "";
}

}  // namespace remesh::testing
