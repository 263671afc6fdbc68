// Cluster: a tiny training job with real processes: the product's own
// binaries, found beside the test program (REMESH_BIN names another folder).
//
// Everything of a cluster lies below one temporary folder, whose path every
// process has in its environment; so what is left of it can be found
// afterwards (leftovers()).
//
// Threads: one, the main one (see process.h).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/testing/files.h"
#include "tests/testing/process.h"

namespace remesh::testing {

// Path of a program of the product.
std::string program(const std::string& name);

// A data set of some 180 KiB of made-up English, for any number of clusters.
class TinyData {
 public:
  TinyData();  // runs `remesh data prepare`
  const std::string& path() const { return path_; }

 private:
  TempDir dir_;
  std::string path_;
};

// section.key -> value as written in TOML; wins over the tiny job's.
using Settings = std::map<std::string, std::string>;

// Text of a job file: about 100,000 parameters, 15 microbatches a step, which
// 1, 3 and 5 ranks share evenly and others do not.
std::string tiny_job(const std::string& data_path, const Settings& more);

struct WorkerStart {
  std::string name;
  int slots = 1;
  std::vector<std::string> more;    // further arguments
  std::vector<std::string> prefix;  // before the program: ip netns exec ...
  std::string connect;              // "": the run directory
};

class Cluster {
 public:
  Cluster(const std::string& data_path, const Settings& job);
  ~Cluster();  // kills what is left
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  const std::string& folder() const { return dir_.path(); }
  std::string run_dir() const { return dir_.path() + "/run"; }
  std::string job_file() const { return dir_.path() + "/job.toml"; }
  std::string scratch() const { return dir_.path() + "/scratch"; }
  std::string checkpoints() const { return run_dir() + "/checkpoints"; }

  // Starts `remesh run` (not waited for).
  Process& start_run(int local_workers,
                     const std::vector<std::string>& more = {});
  // Starts remesh-coordinator and waits until it listens.
  Process& start_coordinator(const std::vector<std::string>& more = {},
                             const std::vector<std::string>& prefix = {});
  Process& start_worker(const WorkerStart& start);
  Process& worker(const std::string& name) { return *workers_.at(name); }
  Process& coordinator() { return *coordinator_; }
  Process& run() { return *run_; }
  // A host as it is lost: the worker's daemon, its ranks, their memory. Returns
  // the moment, in unix seconds.
  double lose_host(const std::string& worker);
  // Folder of the worker's states in shared memory.
  std::string state_folder(const std::string& worker) const;
  // `remesh ARGS...`, with this job's environment.
  Finished remesh(const std::vector<std::string>& args,
                  int64_t timeout_ms = 30'000);

  // ---- what the run's files say
  // The references stand until the next look at the same file.
  const std::vector<Json>& metrics() const { return metrics_.read(); }
  const std::vector<Json>& events() const { return events_.read(); }
  std::vector<std::string> metric_lines() const;
  int64_t last_step() const;
  // The events of that name, in order.
  std::vector<Json> events_named(const std::string& name) const;
  // ---- what the coordinator says; null when it does not answer
  Json status();

  // ---- waiting; false when the time is over
  bool wait_for_step(int64_t step, int64_t timeout_ms = 30'000);
  bool wait_for_event(const std::string& name, size_t count = 1,
                      int64_t timeout_ms = 30'000);
  // A finished step with that data-parallel degree, after `after`.
  bool wait_for_dp(int64_t dp, int64_t after = 0, int64_t timeout_ms = 30'000);
  // Until the status holds; the status that did, or null.
  Json wait_for_status(const std::function<bool(const Json&)>& holds,
                       int64_t timeout_ms = 20'000);
  // rank -> pid of the running generation, once all `ranks` are alive.
  std::map<int, pid_t> rank_pids(size_t ranks, int64_t timeout_ms = 20'000);

  // The ranks alive now, as the system shows them.
  struct Rank {
    pid_t pid = 0;
    std::string worker;
  };
  std::vector<Rank> ranks();

  // What the processes of this cluster left behind, one text each: processes,
  // shared memory, scratch folders, MPI's and PMIx's files, the port.
  std::vector<std::string> leftovers();
  // The last events and log lines, for the message of a failed test.
  std::string describe() const;

 private:
  std::vector<std::pair<std::string, std::string>> environment() const;
  void note_port();

  TempDir dir_;
  mutable JsonLines metrics_;
  mutable JsonLines events_;
  std::vector<std::string> before_;  // of /tmp and /dev/shm
  std::vector<int> ports_;
  std::map<std::string, std::unique_ptr<Process>> workers_;
  std::vector<std::unique_ptr<Process>> former_;
  std::unique_ptr<Process> coordinator_;
  std::unique_ptr<Process> run_;
};

// Breaks of the rule that each step from 1 to the last is there once and in
// order; "" when it holds.
std::string sequence_error(const std::vector<Json>& metrics);

}  // namespace remesh::testing
