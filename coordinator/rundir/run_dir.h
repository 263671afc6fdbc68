// A run directory: who owns it, and how to find one. Its layout is in
// proto/rundir/paths.h.
//
// Functions here touch the file system and nothing else. Errors name the path.
// What is written takes a FileSystem, so that tests can make it fail or crash.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "proto/rundir/paths.h"

namespace remesh::rundir {

// Makes the directory and logs/ in it.
Status create(const std::string& run);
// A text file; NotFound when it does not exist.
Result<std::string> read_file(const std::string& path);
// Absolute, without "." and ".."; links are left as they are.
std::string absolute(const std::string& path);

// Where a coordinator listens.
struct Endpoint {
  std::string address;  // tcp://host:port
  std::string host;     // its own name, as gethostname() says
  int pid = 0;
  std::string bound;  // as bound; differs from address when advertised so
  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};
std::string endpoint_text(const Endpoint& endpoint);
Result<Endpoint> parse_endpoint(const std::string& text);
Status write_endpoint(FileSystem& fs, const std::string& run,
                      const Endpoint& endpoint);
Result<Endpoint> read_endpoint(const std::string& run);
// Best effort: workers ignore an endpoint that does not answer.
void remove_endpoint(FileSystem& fs, const std::string& run);

// Of this host. A zombie counts as dead.
bool process_alive(int pid);

// Held by the one coordinator of a run directory, and by the kernel dropped
// with its process, however that ends.
class RunLock {
 public:
  // AlreadyExists, naming the pid of the holder, when it is held.
  static Result<std::unique_ptr<RunLock>> acquire(const std::string& run);
  // The pid of the holder, 0 when nobody holds it.
  static int holder(const std::string& run);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  explicit RunLock(int fd) : fd_(fd) {}
  int fd_;
};

// "<name>-20261121-161810" for a run begun at `unix_s` (local time).
std::string new_run_name(const std::string& job_name, double unix_s);
// Makes <dump_folder>/latest point to the run. Best effort: a file of that
// name which is no link stays.
void point_latest(const std::string& dump_folder, const std::string& run);
// The newest run below the folder of the job of that name (any job when the
// name is empty), by the time in its name. NotFound names the folder.
Result<std::string> newest_run(const std::string& dump_folder,
                               const std::string& job_name);
// Where a job runs: `given`; else, to resume, its newest run; else a new
// directory of its dump_folder. Absolute; not made yet.
Result<std::string> choose_run(const std::string& dump_folder,
                               const std::string& job_name,
                               const std::string& given, bool resume,
                               double unix_s);
bool is_run(const std::string& path);
// What a user named as RUN: a run directory; nothing: the newest below ./runs.
Result<std::string> find_run(const std::string& named);

}  // namespace remesh::rundir
