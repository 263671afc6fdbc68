// Cluster: a tiny training job with real processes: the product's own binaries
// in the folder of the test program (or in REMESH_BIN).
//
// A cluster shares nothing with what else runs on the machine: its files, those
// of MPI and PMIx (TMPDIR) and the scratch folder of its workers are in one
// temporary folder. Its path is in the environment of every process, so that
// leftovers() finds what remains.
//
// Threads: one, the main one (see process.h).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/files.h"
#include "tests/testing/process.h"

namespace remesh::testing {

// Path of a program of the product.
std::string program(const std::string& name);

// A data set of generated English, of about 3 KiB in each document, for any
// number of clusters.
class TinyData {
 public:
  explicit TinyData(int documents = 60);  // runs `remesh data prepare`
  const std::string& path() const { return path_; }

 private:
  TempDir dir_;
  std::string path_;
};

// section.key -> value as written in TOML; overrides the tiny job's.
using Settings = std::map<std::string, std::string>;

// Text of a job file: about 100,000 parameters and 15 microbatches per step,
// which divide evenly among 1, 3 and 5 ranks only.
std::string tiny_job(const std::string& data_path, const Settings& more);

struct WorkerStart {
  std::string name;
  int slots = 1;
  std::vector<std::string> more;    // further arguments
  std::vector<std::string> prefix;  // before the program: ip netns exec ...
  std::string connect;              // "": the run directory
  std::string program = "remesh-worker";
};

class Cluster {
 public:
  Cluster(const std::string& data_path, const Settings& job);
  ~Cluster();  // kills all processes
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  // What every process of the cluster has in its environment.
  std::vector<std::pair<std::string, std::string>> environment() const;
  const std::string& folder() const { return dir_.path(); }
  std::string run_dir() const { return dir_.path() + "/run"; }
  std::string job_file() const { return dir_.path() + "/job.toml"; }
  const std::string& scratch() const { return scratch_; }
  // Workers started from now on are on the same host as those of the other
  // cluster, as far as they can tell.
  void use_scratch_of(const Cluster& other) { scratch_ = other.scratch_; }
  std::string checkpoints() const { return run_dir() + "/checkpoints"; }

  // Those started from now on run with --no-auth.
  void use_no_keys() { no_keys_ = true; }
  // Starts `remesh run` and returns at once.
  Process& start_run(int local_workers,
                     const std::vector<std::string>& more = {});
  // Starts remesh-coordinator and waits until it listens.
  Process& start_coordinator(
      const std::vector<std::string>& more = {},
      const std::vector<std::string>& prefix = {},
      const std::string& program_name = "remesh-coordinator");
  Process& start_worker(const WorkerStart& start);
  Process& worker(const std::string& name) { return *workers_.at(name); }
  Process& coordinator() { return *coordinator_; }
  Process& run() { return *run_; }
  // Simulates the loss of a host: kills the worker's daemon and ranks, and
  // removes their shared memory. Returns the time in unix seconds.
  double lose_host(const std::string& worker);
  // Folder of the worker's states in shared memory.
  std::string state_folder(const std::string& worker) const;
  // Arguments before `remesh`: ip netns exec ...
  void run_commands_with(std::vector<std::string> prefix) {
    command_prefix_ = std::move(prefix);
  }
  // `remesh ARGS...`, with this job's environment.
  Finished remesh(const std::vector<std::string>& args,
                  int64_t timeout_ms = 60'000);

  // ---- the run's files
  // A reference is valid until the next call for the same file.
  const std::vector<Json>& metrics() const { return metrics_.read(); }
  const std::vector<Json>& events() const { return events_.read(); }
  std::vector<std::string> metric_lines() const;
  int64_t last_step() const;
  int64_t generation() const;  // of the last step
  // The events of that name, in order.
  std::vector<Json> events_named(const std::string& name) const;
  // ---- the coordinator's status; null if it does not answer
  Json status(int tries = 5);

  // ---- waiting; false on timeout
  bool wait_for_step(int64_t step, int64_t timeout_ms = 60'000);
  bool wait_for_event(const std::string& name, size_t count = 1,
                      int64_t timeout_ms = 60'000);
  // A finished step with that data-parallel degree, after `after`.
  bool wait_for_dp(int64_t dp, int64_t after = 0, int64_t timeout_ms = 60'000);
  // Waits until `holds` is true of the status; returns that status, or null.
  Json wait_for_status(const std::function<bool(const Json&)>& holds,
                       int64_t timeout_ms = 60'000);
  // rank -> pid of the running generation, once all `ranks` are alive.
  std::map<int, pid_t> rank_pids(size_t ranks, int64_t timeout_ms = 60'000);

  // The ranks alive now, according to /proc.
  struct Rank {
    pid_t pid = 0;
    std::string worker;
    int64_t generation = 0;
  };
  std::vector<Rank> ranks();

  // What the processes of this cluster left behind, one text each: processes,
  // shared memory, scratch folders, files of MPI and PMIx.
  std::vector<std::string> leftovers();
  // The last events and log lines, for the message of a failed test.
  std::string describe() const;

 private:
  // The folders in scratch() of all workers that have joined, and of those
  // there now.
  std::vector<std::string> worker_folders() const;

  TempDir dir_;
  std::string scratch_ = dir_.path() + "/scratch";
  bool no_keys_ = false;
  mutable JsonLines metrics_;
  mutable JsonLines events_;
  std::vector<std::string> command_prefix_;
  std::map<std::string, std::unique_ptr<Process>> workers_;
  std::vector<std::unique_ptr<Process>> former_;
  std::unique_ptr<Process> coordinator_;
  std::unique_ptr<Process> run_;
};

// The first violation of the rule that each step from 1 to the last occurs once
// and in order; "" if there is none.
std::string sequence_error(const std::vector<Json>& metrics);

}  // namespace remesh::testing
