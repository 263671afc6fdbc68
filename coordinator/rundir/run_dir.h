// Run directories: locking, finding and creating them, and the coordinator's
// endpoint. proto/rundir/paths.h has their layout.
//
// The functions access the file system and nothing else. Errors name the path.
// Functions that write take a FileSystem, so that tests can make it fail.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "proto/control.pb.h"
#include "proto/rundir/paths.h"

namespace remesh::rundir {

// Creates the directory, and logs/ in it.
Status create(const std::string& run);
// A text file; NotFound when it does not exist.
Result<std::string> read_file(const std::string& path);

// Where a coordinator listens.
struct Endpoint {
  std::string address;  // tcp://host:port
  std::string host;     // of the coordinator, from gethostname()
  int pid = 0;
  std::string bound;     // differs from `address` if another one is advertised
  bool no_auth = false;  // it runs without keys
  uint64_t host_id = 0;  // remesh::host_id() of the coordinator; 0: unknown
  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};
// Whether its host is this one.
bool is_here(const Endpoint& endpoint);
// Whether it is that of this process of this host: containers repeat pids.
bool is_of_process(const Endpoint& endpoint, int pid);
// Whether RunLock::holder() tells if its coordinator lives: that is here, or
// was before this host or container was started once more, which changes
// host_id. A loopback address counts as here; where locks do not reach other
// hosts, a coordinator of one of them then seems to be dead.
bool lock_tells(const Endpoint& endpoint);
std::string endpoint_text(const Endpoint& endpoint);
Result<Endpoint> parse_endpoint(const std::string& text);
// Needs no free space if there is an endpoint already.
Status write_endpoint(FileSystem& fs, const std::string& run,
                      const Endpoint& endpoint);
Result<Endpoint> read_endpoint(const std::string& run);
// Best effort: workers ignore an endpoint that does not answer.
void remove_endpoint(FileSystem& fs, const std::string& run);

// Removes a folder at the end of its scope if nothing has been put there.
struct RemovedIfEmpty {
  std::string folder;
  ~RemovedIfEmpty() { rmdir(folder.c_str()); }
};

// The lock of a run directory's only coordinator. The files of the run are
// written and removed by its holder and by the ranks and workers it directs,
// and by nobody else. The kernel releases it when the process ends, for
// whatever reason. Network file systems can lose locks, and people remove
// files: check() notices.
class RunLock {
 public:
  // Creates the directory first if it does not exist. AlreadyExists, naming the
  // pid and host of the holder, if the lock is held. InvalidArgument if workers
  // would refuse the path (limits::is_printable()). After any other error the
  // directory is removed if it is empty and was not there before.
  static Result<std::unique_ptr<RunLock>> acquire(const std::string& run);
  // Whether the directory was a run when the lock was acquired.
  bool was_run() const { return was_run_; }
  // Fails like check_unused() unless the directory was a run. Once it has
  // succeeded, what a coordinator writes there is this start's own.
  Status begin(FileSystem& fs);
  // After a start that failed: unless the directory was a run, removes what a
  // coordinator leaves in it if begin() had succeeded, else only the lock, and
  // the directory if nothing else is there and it was not there before.
  void remove_unstarted(FileSystem& fs) const;
  // Cancelled if the lock file is not the one that was locked any more, or if
  // another coordinator has written its name into it; NotFound while the run
  // directory does not exist; ok also where that cannot be found out. Notes
  // that the holder is there. Waits for the file system.
  Status check();
  // What check() found last; any thread.
  bool gone() const { return gone_; }
  // The pid of the holder; 0 if there is none.
  static int holder(const std::string& run);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  explicit RunLock(std::string run);
  Status take();
  void remove_empty(FileSystem& fs) const;

  std::string run_;
  std::string path_;
  bool was_there_ = false;  // the directory, before acquire()
  bool was_run_ = false;
  bool begun_ = false;
  std::atomic<bool> gone_ = false;
  int fd_ = -1;
  std::string text_;  // that this holder wrote
};

// InvalidArgument, naming a file, if a directory that is no run has files that
// are not the start of one either.
Status check_unused(FileSystem& fs, const std::string& run);
// A new number that tells this run from others. Not 0.
uint64_t new_run_id(const std::string& run);
// The contents of RUN/coordinator.secret, which is created, for this user
// alone, if it does not exist or has another size. A new secret, for this life
// of the coordinator alone, if the file can be neither read nor created.
std::string run_secret(FileSystem& fs, const std::string& run);

// Makes <dump_folder>/latest point to the run. Best effort: does not replace a
// file of that name that is not a link.
void point_latest(const std::string& dump_folder, const std::string& run);
// How a run ended, by its last event.
struct RunEnd {
  pb::JobStatus::State outcome = pb::JobStatus::DONE;  // or STOPPED, FAILED
  std::string cause;                                   // of a failure
  std::string detail;  // such as who was not reached
  int64_t step = 0;
  double time = 0;  // unix seconds
};
std::optional<RunEnd> end_of_run(const std::string& run);
// The detail of the event by which a run ended, and until when a state that is
// only in memory stays there.
std::string end_detail(const pb::EventRecord& event);
// "stopped at step 7, 2026-11-22 19:13:12 UTC; to continue: remesh resume RUN".
std::string end_text(const RunEnd& end, const std::string& run);
// "2026-11-22 19:13:12 UTC", and "19:13:12"; local time.
std::string date_text(double unix_s);
std::string time_of_day(double unix_s);
// The path relative to the working directory if that is shorter to type.
std::string short_path(const std::string& path);
// The same as a word of a command that is printed to be copied.
std::string typed_path(const std::string& path);
// The run in the folder (or that its link "latest" names) that was started,
// resumed or made last, of the job of that name (of any job if it is empty).
// NotFound names the folder.
Result<std::string> newest_run(const std::string& dump_folder,
                               const std::string& job_name);
// The run directory of a job: `given`; otherwise, with `resume`, its newest
// run; otherwise a new directory in its dump_folder, which is created, so that
// no two runs that start in one second share it. Absolute.
Result<std::string> choose_run(const std::string& dump_folder,
                               const std::string& job_name,
                               const std::string& given, bool resume,
                               double unix_s);
bool is_run(const std::string& path);
// The run directory that a user means by `named`. "": the known run that has a
// live coordinator (known_runs.h); InvalidArgument, listing them, if there are
// several; without one the newest in ./runs, or else the one used last.
Result<std::string> find_run(const std::string& named);

}  // namespace remesh::rundir
