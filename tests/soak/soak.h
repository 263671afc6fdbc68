// Soak: a training run of real processes on this machine under random faults,
// one after the other and sometimes one during the recovery from another.
//
// The seed determines the faults and the delays between them, but not the state
// of the run that they hit: real processes vary in speed.
//
// Threads: one, the main one (tests/testing/process.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/testing/cluster.h"
#include "tests/testing/network.h"
#include "tests/testing/records.h"
#include "tests/testing/small_disk.h"

namespace remesh::soak {

// elastic.dead_after_ms: more than a busy machine keeps a process waiting.
inline constexpr int64_t kDeadAfterMs = 5'000;

struct Options {
  int faults = 500;
  uint64_t seed = 0;
  bool keep_mesh = false;  // only faults that keep the mesh
  int zero_stage = 1;
  // Hosts of one worker each, on a network of their own (tests/testing/
  // network.h), with faults of that network; 0: all on this machine.
  int hosts = 0;
};

enum class Kind {
  kRankKilled,
  kWorkerKilled,       // its daemon, which returns under its name
  kHostLost,           // daemon, ranks and memory
  kHostsLost,          // two at once, more than there are replicas
  kCoordinatorKilled,  // and restarted
  kRankStopped,        // SIGSTOP without SIGCONT
  kRankPaused,         // SIGSTOP, soon followed by SIGCONT
  kWorkerStopped,      // its daemon is silent, and returns
  kDrain,
  kJoin,
  kScale,
  kMesh,  // another one is requested
  kDiskFull,
  // With hosts only.
  kCutOff,         // a host, for a while
  kOneWay,         // a host does not hear the coordinator, or is not heard
  kPairCutOff,     // two hosts from each other
  kLossy,          // a host loses packets
  kSlow,           // a host's link is slow
  kRunFolderFull,  // the disk of the run directory, for a while
};
const char* name_of(Kind kind);

struct Fault {
  Kind kind = Kind::kRankKilled;
  double time = 0;         // unix seconds
  int64_t generation = 0;  // at the time of the fault
  bool alone = true;       // not during another recovery
  double settled = -1;    // mesh complete again; < 0: the next fault came first
  bool measured = false;  // waited for a later generation
  double recovery_s = -1;  // to the next finished step of a later generation
};

// Resources of one daemon process, after faults `first_fault` .. `last_fault`.
struct Resident {
  std::string name;
  int first_fault = 0, last_fault = 0;
  int64_t first_generation = 0, last_generation = 0;
  int64_t first = 0, last = 0, most = 0;    // resident memory, KiB
  int64_t first_files = 0, last_files = 0;  // open descriptors
};

// Slots of the mesh with keep_mesh; there is one spare more.
constexpr int kKeptSlots = 3;

// Settings of the job except train.steps. `disk`: folder of the checkpoints;
// "": the default.
testing::Settings job_settings(const Options& options, const std::string& disk);

class Soak {
 public:
  Soak(const std::string& data_path, const Options& options);

  // Trains through all the faults, stops, resumes from the checkpoint and
  // trains a few steps to the end of the job. False, with the reason on stderr,
  // if training does not continue.
  bool run();

  testing::Cluster& cluster() { return cluster_; }
  const std::vector<Fault>& faults() const { return faults_; }
  const std::vector<testing::Window>& windows() const { return windows_; }
  const std::map<int, Resident>& residents() const { return residents_; }
  // "" unless the network of hosts cannot be made.
  const std::string& no_network() const { return no_network_; }
  bool has_small_disk() const { return disk_.mounted(); }
  int64_t last_step() const { return last_step_; }

 private:
  // What to wait for after a fault.
  struct Waiting {
    enum class Change { kNone, kPerhaps, kSure };
    Change change = Change::kSure;  // of the generation
    int64_t generation = 0;         // the one before
    int64_t step = 0;
  };

  void write_job(const testing::Settings& more);
  bool start();
  bool one_fault(int number);
  bool finish();

  size_t least_workers() const;
  Kind pick(int number);
  bool possible(Kind kind, int number) const;
  // False if there is no target for this fault.
  bool inject(Kind kind, Waiting* wait);
  bool hit_rank(Kind kind, Waiting* wait);
  bool hit_worker(Kind kind, Waiting* wait);
  void lose_two_hosts();
  bool change_plan(Kind kind);

  // Of the network (hosts.cc).
  void start_coordinator(const std::vector<std::string>& more = {});
  bool hit_network(Kind kind, Waiting* wait);
  bool fill_run_folder();
  int host_of(const std::string& worker) const;
  int free_host() const;
  size_t most_workers() const;
  bool survives_a_host();
  void repair_network();

  bool settle(const Waiting& wait);
  bool whole_again();
  void refill();
  bool fail(const std::string& why);
  void note_resident(int number);
  void note_recoveries();

  uint64_t random(uint64_t below) { return random_() % below; }
  std::string some_worker();
  std::vector<testing::Cluster::Rank> newest_ranks();
  bool has_rank(const std::string& worker);
  void start_worker(const std::string& name);
  void lose_host(const std::string& name);
  std::string new_name() { return "w" + std::to_string(next_worker_++); }

  const Options options_;
  const std::string data_path_;
  testing::Cluster cluster_;
  testing::SmallDisk disk_;
  std::unique_ptr<testing::SmallDisk> run_disk_;
  std::unique_ptr<testing::Network> network_;
  std::string no_network_;
  std::map<std::string, int> hosts_;  // by worker; 0 is the coordinator's
  int network_bad_for_ = 0;           // number of further faults
  std::mt19937_64 random_;
  std::set<std::string> live_;     // workers, a slot each
  std::set<std::string> stopped_;  // subset stopped by SIGSTOP
  std::set<std::string> leaving_;  // asked to leave
  int next_worker_ = 1;
  int disk_full_for_ = 0;  // number of further faults
  int hosts_lost_ = 0;     // since the mesh was complete
  bool alone_ = true;      // the next fault hits a complete mesh
  std::vector<Fault> faults_;
  std::vector<testing::Window> windows_;
  std::map<int, Resident> residents_;  // by pid
  int64_t last_step_ = 0;
};

}  // namespace remesh::soak
